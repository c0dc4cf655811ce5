"""What proves an install: digests of what the engine's parameters hold, where its loader puts it.

A tensor that went somewhere whole must have there the digest that the manifest says. Of one that is
cut up, the expectation is made of the imported memory, which is compared with the manifest again.
"""

from collections.abc import Mapping

import torch

from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.vllm.evidence import digests_of
from rl_bridge.installers.vllm.routes import Fill, LoadPlan, Route
from rl_bridge.installers.vllm.skeleton import Target
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["LiveEvidence", "live_parameter"]


def live_parameter(target: Target) -> torch.Tensor:
    """The parameter that the engine computes with.

    Raises:
        ProofFailed: modules that share it hold different ones, or it has another shape now.

    """
    found = [user.module._parameters.get(user.leaf) for user in target.users]  # noqa: SLF001 - torch has no other way in
    live = found[0]
    if live is None or any(other is not live for other in found):
        msg = (
            f"parameter {target.name!r}: {[user.name for user in target.users]} no longer share "
            "one tensor. Start a fresh engine."
        )
        raise ProofFailed(msg)
    if live.shape != target.meta.shape or live.dtype != target.meta.dtype:
        msg = (
            f"parameter {target.name!r} is {list(live.shape)} {live.dtype} now, expected "
            f"{list(target.meta.shape)} {target.meta.dtype}. Start a fresh engine."
        )
        raise ProofFailed(msg)
    return live


class LiveEvidence:
    """What must be found in an engine that holds one update."""

    def __init__(
        self,
        manifest: WeightUpdateManifest,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        *,
        num_threads: int | None,
    ) -> None:
        """Note what is expected; nothing of the engine is read.

        Args:
            manifest: the update's.
            plan: where its tensors go.
            tensors: the imported update; empty where only its manifest is here.
            num_threads: threads that digest.

        Raises:
            IncompatibleUpdate: a tensor is cut up, and its bytes are not here.

        """
        self._manifest = manifest
        self._plan = plan
        self._tensors = tensors
        self._num_threads = num_threads
        cut = sorted({route.source for route in plan.routes() if not route.is_whole})
        if cut and not tensors:
            msg = (
                f"tensor {cut[0]!r} is cut up by the engine's loader, so only its bytes tell what "
                "each part must hold. Use route='import'."
            )
            raise IncompatibleUpdate(msg)
        self._cut = cut

    def check(self) -> InstallProof:
        """Read all parameters that the update writes.

        Raises:
            ProofFailed: one holds something else.

        """
        self._check_sources()
        rows: dict[int, bytes] = {}
        nbytes = 0
        for index, steps in self._plan.steps.items():
            target = self._plan.targets[index]
            live = live_parameter(target)
            routes = [step for step in steps if isinstance(step, Route)]
            parts = [route.target_view.of(live) for route in routes]
            found = digests_of(parts, num_threads=self._num_threads)
            for route, digest in zip(routes, found, strict=True):
                self._compare(target, route, digest)
                rows[self._manifest.table.rows[route.source]] = self._digest(route.source)
            for step in steps:
                if isinstance(step, Fill):
                    _check_padding(target, step, live)
            nbytes += sum(part.numel() * part.element_size() for part in parts)
        every = range(len(self._manifest.table.names))
        root = self._manifest.table.root_plan.root(
            b"".join(rows.get(row, b"\0" * DIGEST_NBYTES) for row in every)
        )
        return InstallProof(
            method="digest", root=root.hex(), digested_nbytes=nbytes, tensors=len(rows)
        )

    def _compare(self, target: Target, route: Route, found: bytes) -> None:
        expected = self._digest(route.source)
        if not route.is_whole:
            piece = route.source_view.of(self._tensors[route.source])
            (expected,) = digests_of([piece], num_threads=self._num_threads)
        if found != expected:
            msg = (
                f"parameter {target.name!r} of the engine does not hold tensor {route.source!r} of "
                f"version {self._manifest.weight_version}: digest {found.hex()}, expected "
                f"{expected.hex()}. Install the update again; if that fails too, something else "
                "writes to the engine."
            )
            raise ProofFailed(msg)

    def _check_sources(self) -> None:
        found = digests_of([self._tensors[n] for n in self._cut], num_threads=self._num_threads)
        for name, digest in zip(self._cut, found, strict=True):
            if digest != self._digest(name):
                msg = (
                    f"tensor {name!r} went bad after it was imported: digest {digest.hex()}, "
                    f"expected {self._digest(name).hex()}. Publish again."
                )
                raise ProofFailed(msg)

    def _digest(self, name: str) -> bytes:
        start = self._manifest.table.rows[name] * DIGEST_NBYTES
        return self._manifest.digests[start : start + DIGEST_NBYTES]


def _check_padding(target: Target, step: Fill, live: torch.Tensor) -> None:
    if not (step.target_view.of(live) == step.value).all():
        msg = (
            f"parameter {target.name!r}: its padding is not {step.value}. Install the update "
            "again; if that fails too, something else writes to the engine."
        )
        raise ProofFailed(msg)

"""What proves an install: digests of what the engine's parameters hold, where its loader puts it.

A tensor that went somewhere whole must have there the digest that the manifest says. What a part of
one must be was made of its verified bytes: see `rl_bridge.engines.sglang.cuts`.
"""

from collections.abc import Iterator, Sequence

import torch

from rl_bridge.engines.evidence import digests_of
from rl_bridge.engines.load_plan import Fill, LoadPlan, Route
from rl_bridge.engines.sglang.cuts import cut_routes, digest_of
from rl_bridge.engines.skeleton import Target
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "LiveEvidence",
    "live_parameter",
]

_COPIED_NBYTES = 64 << 20


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
        self, manifest: WeightUpdateManifest, plan: LoadPlan, *, num_threads: int | None
    ) -> None:
        """Note what is expected; nothing of the engine is read.

        Args:
            manifest: the update's.
            plan: where its tensors go.
            num_threads: threads that digest.

        """
        self._manifest = manifest
        self._plan = plan
        self._num_threads = num_threads
        self._cut = cut_routes(plan)
        self._parts: dict[Route, bytes] | None = None

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note what the parts of tensors must hold, in the order of `cut_routes`.

        Raises:
            ProofFailed: these are more or fewer.

        """
        if len(parts) != len(self._cut):
            msg = (
                f"{len(parts)} digests of parts came, expected {len(self._cut)}. Install the same "
                "version of rl_bridge in the engine's environment and in the executor's."
            )
            raise ProofFailed(msg)
        self._parts = dict(zip(self._cut, parts, strict=True))

    def check(self) -> InstallProof:
        """Read all parameters that the update writes.

        Raises:
            ProofFailed: one holds something else.

        """
        if self._parts is None:
            self.expect(())  # which is right where nothing is cut up
        rows: dict[int, bytes] = {}
        nbytes = 0
        for batch in self._batches():
            parts = [part for _, part in batch]
            found = digests_of(parts, num_threads=self._num_threads)
            for (route, _), digest in zip(batch, found, strict=True):
                self._compare(self._plan.targets[route.target], route, digest)
                rows[self._manifest.table.rows[route.source]] = digest_of(
                    self._manifest, route.source
                )
            nbytes += sum(part.numel() * part.element_size() for part in parts)
        every = range(len(self._manifest.table.names))
        root = self._manifest.table.root_plan.root(
            b"".join(rows.get(row, b"\0" * DIGEST_NBYTES) for row in every)
        )
        return InstallProof(
            method="digest", root=root.hex(), digested_nbytes=nbytes, tensors=len(rows)
        )

    def _batches(self) -> Iterator[list[tuple[Route, torch.Tensor]]]:
        """All parts that the update writes, many at a time, so that one pass reads them.

        What must be copied to be read (a slice, a device's memory) is, in small amounts.
        """
        batch: list[tuple[Route, torch.Tensor]] = []
        copied = 0
        for index, steps in self._plan.steps.items():
            target = self._plan.targets[index]
            live = live_parameter(target)
            for step in steps:
                if isinstance(step, Fill):
                    _check_padding(target, step, live)
                    continue
                part = step.target_view.of(live)
                batch.append((step, part))
                if not (part.is_cpu and part.is_contiguous()):
                    copied += part.numel() * part.element_size()
            if copied > _COPIED_NBYTES:
                yield batch
                batch, copied = [], 0
        yield batch

    def _compare(self, target: Target, route: Route, found: bytes) -> None:
        assert self._parts is not None
        whole = digest_of(self._manifest, route.source)
        expected = whole if route.is_whole else self._parts[route]
        if found != expected:
            msg = (
                f"parameter {target.name!r} of the engine does not hold tensor {route.source!r} of "
                f"version {self._manifest.weight_version}: digest {found.hex()}, expected "
                f"{expected.hex()}. Install the update again; if that fails too, something else "
                "writes to the engine."
            )
            raise ProofFailed(msg)


def _check_padding(target: Target, step: Fill, live: torch.Tensor) -> None:
    if not (step.target_view.of(live) == step.value).all():
        msg = (
            f"parameter {target.name!r}: its padding is not {step.value}. Install the update "
            "again; if that fails too, something else writes to the engine."
        )
        raise ProofFailed(msg)

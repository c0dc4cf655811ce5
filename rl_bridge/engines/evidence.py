"""What proves an installed version: digests of what the engine holds, in its own layout.

Each part of a parameter must have the digest of what went there: of whole tensors the manifest
says it, of slices and casts it is made of the verified bytes. Packed products have canaries. What
no update writes must not have changed meanwhile.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rl_bridge.engines.load_checks import doubles
from rl_bridge.engines.load_plan import Fill, LoadPlan, Route
from rl_bridge.engines.staging import Assembled, Staged, TensorChange
from rl_bridge.engines.vllm.compat import RELOAD
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import BytePlan

__all__ = [
    "Evidence",
    "Untouched",
    "digests_of",
]


def digests_of(parts: Sequence[torch.Tensor], *, num_threads: int | None) -> list[bytes]:
    """X3T-128K digests of tensors' logical bytes, wherever they lie."""
    plain = [part.detach().cpu().contiguous() for part in parts]
    sizes = np.array([part.nbytes for part in plain], np.uint64)
    addresses = np.array([part.data_ptr() for part in plain], np.uint64)
    found = BytePlan(sizes).digest(addresses, num_threads=num_threads)
    return [found[i : i + DIGEST_NBYTES] for i in range(0, len(found), DIGEST_NBYTES)]


class _Part(NamedTuple):
    """Part of a parameter, the step that wrote it, and the digest that it must have."""

    name: str
    step: Route
    tensor: torch.Tensor
    expected: bytes


class Evidence:
    """What must be found in the engine when one staged version is installed."""

    def __init__(
        self,
        manifest: WeightUpdateManifest,
        tensors: Mapping[str, torch.Tensor],
        plan: LoadPlan,
        *,
        num_threads: int | None,
    ) -> None:
        """Begin with nothing found."""
        self._manifest = manifest
        self._tensors = tensors
        self._plan = plan
        self._num_threads = num_threads
        self._rows: dict[int, bytes] = {}
        self._packed_nbytes = self._borrowed_nbytes = 0
        self._borrowed: set[int] = set()
        # What processing made of parameters: it has no digest in any manifest.
        self._processed: list[tuple[TensorChange, bytes]] = []
        self._derived: dict[str, bytes] = {}

    def add(self, assembled: Assembled) -> None:
        """Look at a parameter that is packed away next: later it cannot be read.

        Raises:
            ProofFailed: it is not what the update says.

        """
        if not (self._plan.targets[assembled.index].is_consumed or assembled.replaced):
            return
        if assembled.borrowed:
            self._borrowed_nbytes += assembled.tensor.nbytes
            self._borrowed.add(assembled.index)
            for step in self._routes(assembled.index):
                self._rows[self._row(step)] = self._digest(step)
            return
        self._packed_nbytes += self._compare(self._parts(assembled.index, assembled.tensor))

    def seal(self, staged: Staged) -> None:
        """Note what processing made of parameters, as it was staged.

        Raises:
            ProofFailed: bytes of the update went bad since it was imported, or a parameter is not
                among what was staged.

        """
        self._check_complete(staged)
        self._check_sources()
        changes = [change for change in staged.tensors if change.index is None]
        digests = digests_of([c.fresh for c in changes], num_threads=self._num_threads)
        self._processed = list(zip(changes, digests, strict=True))
        self._derived = self._derived_digests(staged)

    def check(self, staged: Staged) -> InstallProof:
        """Read what the engine holds.

        Raises:
            ProofFailed: something else.

        """
        parts = [
            part
            for change in staged.tensors
            if change.index is not None
            for part in self._parts(change.index, change.live)
        ]
        nbytes = self._compare(parts)
        self._check_complete(staged)
        for change in staged.tensors:
            if change.index is not None:
                self._check_padding(change.index, change)
        found = digests_of([c.live for c, _ in self._processed], num_threads=self._num_threads)
        for (change, expected), digest in zip(self._processed, found, strict=True):
            nbytes += change.live.nbytes
            if digest != expected:
                raise ProofFailed(_text(change.name, "what was staged", digest, expected))
        for attribute in staged.attributes:
            if vars(attribute.module).get(attribute.key) is not attribute.value:
                msg = (
                    f"layer {attribute.path!r}: its {attribute.key} is not the one that was made "
                    "for this version. Install the update again."
                )
                raise ProofFailed(msg)
        for name, digest in self._derived_digests(staged).items():
            if digest != self._derived[name]:
                raise ProofFailed(_text(name, "what was staged", digest, self._derived[name]))
        answered: set[tuple[int, int]] = set()
        for canary in staged.canaries:
            canary.check(answered)
        return InstallProof(
            method="digest+canary" if staged.canaries else "digest",
            root=self._root(),
            digested_nbytes=nbytes + self._packed_nbytes,
            identical_nbytes=self._borrowed_nbytes,
            tensors=len(self._tensors),
        )

    # ---- inside ---------------------------------------------------------------------------------

    def _derived_digests(self, staged: Staged) -> dict[str, bytes]:
        """Digests of the tensors that layers compute with beside their parameters, by name."""
        tensors = {
            f"{attribute.path}.{attribute.key}": attribute.value
            for attribute in staged.attributes
            if isinstance(attribute.value, torch.Tensor)
        }
        found = digests_of(list(tensors.values()), num_threads=self._num_threads)
        return dict(zip(tensors, found, strict=True))

    def _check_complete(self, staged: Staged) -> None:
        """Each layer that an update writes to gets other memory, or a pack that answers for it."""
        changed = {id(change.live) for change in staged.tensors}
        asked = {id(canary.module) for canary in staged.canaries} | {*map(id, staged.compared)}
        for index in self._plan.steps:
            target = self._plan.targets[index]
            for user in target.users:
                live = user.module._parameters.get(user.leaf)  # noqa: SLF001 - torch has no other way in
                if id(live) in changed or (target.is_consumed and id(user.module) in asked):
                    continue
                if live is not None and not live.numel() and not target.meta.numel():
                    continue
                msg = (
                    f"parameter {user.name!r}: vLLM's processing left no trace of this version in "
                    f"its layer. Install it by {RELOAD}."
                )
                raise ProofFailed(msg)

    def _check_sources(self) -> None:
        """Read tensors again whose bytes elsewhere are not compared with the manifest's digest.

        Of slices and casts the expectation was made of the imported memory, and weights that were
        packed straight from it were read by nobody else.
        """
        names = {
            step.source: None
            for index in self._plan.steps
            for step in self._routes(index)
            if not step.is_whole
            or self._tensors[step.source].dtype != self._plan.targets[index].meta.dtype
            or index in self._borrowed
        }
        found = digests_of([self._tensors[n] for n in names], num_threads=self._num_threads)
        for name, digest in zip(names, found, strict=True):
            start = self._manifest.table.rows[name] * DIGEST_NBYTES
            expected = self._manifest.digests[start : start + DIGEST_NBYTES]
            if digest != expected:
                msg = (
                    f"tensor {name!r} went bad after it was imported: digest {digest.hex()}, "
                    f"expected {expected.hex()}. The engine was not touched; publish again."
                )
                raise ProofFailed(msg)

    def _routes(self, index: int) -> list[Route]:
        return [step for step in self._plan.steps[index] if isinstance(step, Route)]

    def _row(self, step: Route) -> int:
        return self._manifest.table.rows[step.source]

    def _digest(self, step: Route) -> bytes:
        start = self._row(step) * DIGEST_NBYTES
        return self._manifest.digests[start : start + DIGEST_NBYTES]

    def _parts(self, index: int, memory: torch.Tensor) -> list[_Part]:
        name = self._plan.targets[index].name
        parts = []
        for step in self._routes(index):
            source = self._tensors[step.source]
            if step.is_whole and source.dtype == memory.dtype:
                expected = self._digest(step)
            else:
                loaded = step.source_view.of(source).to(self._plan.targets[index].meta.dtype)
                piece = loaded.to(memory.dtype)
                (expected,) = digests_of([piece], num_threads=self._num_threads)
            parts.append(_Part(name, step, step.target_view.of(memory), expected))
        return parts

    def _compare(self, parts: Sequence[_Part]) -> int:
        found = digests_of([part.tensor for part in parts], num_threads=self._num_threads)
        for part, digest in zip(parts, found, strict=True):
            if digest != part.expected:
                what = f"tensor {part.step.source!r}"
                raise ProofFailed(_text(part.name, what, digest, part.expected))
            # Of a slice, its own digest proved that it is the slice of this verified tensor.
            self._rows[self._row(part.step)] = self._digest(part.step)
        return sum(part.tensor.numel() * part.tensor.element_size() for part in parts)

    def _check_padding(self, index: int, change: TensorChange) -> None:
        for step in self._plan.steps[index]:
            if (
                isinstance(step, Fill)
                and not (step.target_view.of(change.live) == step.value).all()
            ):
                msg = (
                    f"parameter {change.name!r}: its padding is not {step.value}. Install the "
                    "update again; if that fails too, something else writes to the engine."
                )
                raise ProofFailed(msg)

    def _root(self) -> str:
        for row, other in doubles(self._plan, self._manifest).items():
            if other in self._rows:
                self._rows[row] = self._rows[other]
        digests = [self._rows.get(row, b"\0" * DIGEST_NBYTES) for row in self._stored()]
        return self._manifest.table.root_plan.root(b"".join(digests)).hex()

    def _stored(self) -> range:
        return range(len(self._manifest.table.names))


class Untouched:
    """The parameters and buffers that no update writes: they must stay as they are."""

    def __init__(
        self, model: torch.nn.Module, written: Iterable[torch.Tensor], *, num_threads: int | None
    ) -> None:
        """Digest them as they are now."""
        # By storage: where a parameter is written in place, its views change with it.
        storages = {_storage(tensor) for tensor in written}
        self._num_threads = num_threads
        self._tensors = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.numel() and not tensor.is_meta and _storage(tensor) not in storages
        }
        self._digests = self._read()

    def _read(self) -> list[bytes]:
        return digests_of(list(self._tensors.values()), num_threads=self._num_threads)

    def check(self) -> None:
        """Look again.

        Raises:
            ProofFailed: one changed.

        """
        for name, before, now in zip(self._tensors, self._digests, self._read(), strict=True):
            if before != now:
                raise ProofFailed(_text(name, "what it was before the install", now, before))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _text(name: str, what: str, found: bytes, expected: bytes) -> str:
    return (
        f"parameter {name!r} of the engine does not hold {what}: digest {found.hex()}, expected "
        f"{expected.hex()}. Install the update again; if that fails too, something else writes to "
        "the engine."
    )

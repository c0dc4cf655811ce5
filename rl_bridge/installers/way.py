"""A way to install into memory of this process: what the ways have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.installers.base import InstallProof
from rl_bridge.installers.engine_memory import Binding, EngineMemory
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import vm
from rl_bridge.memory.imported import ImportedTensors
from rl_bridge.memory.packing import dtype_name
from rl_bridge.memory.passes import Addresses

__all__ = ["Rebinding", "Way", "prove_identity", "require_imported"]


class Way(ABC):
    """One way to install. The adapter calls prepare, install, prove, then commit or undo."""

    rebinds: ClassVar[bool] = False
    """Whether the engine's tensors get other storages, instead of other bytes in theirs."""

    def __init__(self, memory: EngineMemory, *, strict: bool, num_threads: int | None) -> None:
        """Work on an engine's memory."""
        self.memory = memory
        self.strict = strict
        self.num_threads = num_threads
        # The engine as it was matched before the first install since the last commit or undo.
        self._origin: Binding | None = None

    def begin(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> Binding:
        """Match names, shapes and dtypes, and remember what `put_back` goes back to.

        Raises:
            IncompatibleUpdate: they do not fit, lie on another device, or names that the engine
                ties differ.

        """
        bound = self.memory.bind_update(manifest, strict=self.strict, rebinds=self.rebinds)
        here, there = bound.place.device, tensors.pin.place.device
        if here != there and len(bound.tensors):
            msg = (
                f"the update lies on {there} and the engine on {here}. Use a transport that ends "
                "where the engine is: cuda-vmm or cuda-ipc for a GPU, shared-memory for the CPU."
            )
            raise IncompatibleUpdate(msg)
        if self._origin is None:
            self._origin = bound
        return bound

    def put_back(self) -> None:
        """Bring names, tensor objects and views back to what they were.

        Raises:
            TornEngine: they cannot be brought back.

        """
        if self._origin is not None:
            self.memory.put_back(self._origin)

    def end(self) -> None:
        """Nothing is under way any more."""
        self._origin = None

    @abstractmethod
    def is_prepared(self, manifest: WeightUpdateManifest) -> bool:
        """Whether `prepare` was called for this update."""

    @abstractmethod
    def prepare(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Refuse, or remember what `install` shall do and what `undo` needs."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget what was prepared: it will not be installed, and nothing else is under way."""

    @abstractmethod
    def install(self) -> None:
        """Do what was prepared."""

    @abstractmethod
    def prove(self) -> InstallProof:
        """Read what the engine holds."""

    @abstractmethod
    def undo(self) -> None:
        """Take back what `install` did, complete or not."""

    @abstractmethod
    def commit(self) -> None:
        """Forget what `undo` would need."""

    @abstractmethod
    def release(self, update_id: str) -> None:
        """Let go of what is kept for an update."""


class Rebinding:
    """Points an engine's tensor objects at other memory, and back."""

    def __init__(self) -> None:
        """Begin with nothing pointed elsewhere."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_pointed(self) -> bool:
        """Whether anything was pointed elsewhere since the last `back` or `forget`."""
        return bool(self._before)

    def point(self, owners: Sequence[torch.Tensor], counterparts: Sequence[torch.Tensor]) -> None:
        """Give each engine tensor the storage of its counterpart; undone by `back`."""
        # Views made in inference mode would make inference tensors of the engine's: for good.
        with torch.inference_mode(mode=False):
            for owner, tensor in zip(owners, counterparts, strict=True):
                # Remembered first: a failure in the middle must find everything that was changed.
                self._before.append((owner, owner.detach()))
                owner.data = tensor

    def back(self) -> None:
        """Point everything back, the last change first."""
        with torch.inference_mode(mode=False):
            while self._before:
                owner, data = self._before[-1]
                owner.data = data
                self._before.pop()

    def forget(self) -> None:
        """Let go of the old storages."""
        self._before.clear()


def prove_identity(
    way: Way,
    manifest: WeightUpdateManifest,
    bound: Binding,
    expected: Addresses,
    *,
    base: int,
    is_verified: bool,
) -> InstallProof:
    """Show that the engine's tensors are the pages that were verified; digest them where not.

    Args:
        way: whose engine.
        manifest: what was installed.
        bound: the engine's tensors, as they were matched with the layout.
        expected: where each of the layout's rows must be, uint64.
        base: first byte of the arena that they lie in.
        is_verified: whether `base` shows the very mapping that import verified.

    Raises:
        ProofFailed: a tensor is elsewhere, or differs.

    """
    table = manifest.table
    _require_views(way, manifest, bound, expected)
    extent = vm.round_up(max(table.arena_nbytes, 1))
    own = bound.place.private_ranges(base, extent) if is_verified else None
    if own == []:
        return InstallProof(
            method="identity",
            root=manifest.root,
            identical_nbytes=table.total_nbytes,
            tensors=len(table.rows),
        )
    # Somebody wrote here (or the kernel cannot tell): what was written decides.
    found = bound.place.plan(table.nbytes_column).digest(expected, num_threads=way.num_threads)
    if found != manifest.digests:
        have = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_NBYTES)
        want = np.frombuffer(manifest.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        row = int(np.flatnonzero((have != want).any(axis=1))[0])
        msg = (
            f"the engine does not hold version {manifest.weight_version}: tensor "
            f"{table.names[row]!r} is {have[row].tobytes().hex()}, expected "
            f"{want[row].tobytes().hex()}. Nothing else may write to the engine during an update: "
            "see quiesce=."
        )
        raise ProofFailed(msg)
    return InstallProof(
        method="digest",
        root=manifest.root,
        digested_nbytes=table.total_nbytes,
        tensors=len(table.rows),
    )


def _require_views(
    way: Way, manifest: WeightUpdateManifest, bound: Binding, expected: Addresses
) -> None:
    """Every tensor of the engine lies where its row is expected, whole and contiguous."""
    lost: str | None = None
    if not bound.holds_objects(way.memory.tensors()):
        lost = "one of its tensor objects was replaced"
    elif bound.is_at(expected) and bound.is_as_matched():
        return
    elif not bound.reads_as_stored():
        lost = "one of its tensors is a lazy conjugate or negative"
    else:
        name = _first_elsewhere(manifest.table, bound, expected)
        lost = None if name is None else f"tensor {name!r} is no view of the verified memory"
    if lost is not None:
        msg = (
            f"the engine does not hold version {manifest.weight_version}: {lost}. Nothing else may "
            "change the engine's tensors during an update: see quiesce=."
        )
        raise ProofFailed(msg)


def _first_elsewhere(table: TensorTable, bound: Binding, expected: Addresses) -> str | None:
    tensors = bound.every_tensor
    found = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
    rows = bound.every_row
    elsewhere = (found != expected[rows]) & (table.nbytes_column[rows] > 0)
    for index, (tensor, row) in enumerate(zip(tensors, rows.tolist(), strict=True)):
        if (
            elsewhere[index]
            or tensor.shape != table.shapes[row]
            or dtype_name(tensor) != table.dtypes[row]
            or not tensor.is_contiguous()
        ):
            return bound.every_name[index]
    return None


def require_imported(tensors: object) -> ImportedTensors:
    """The mapping that a bridge imported, or a refusal.

    Raises:
        IncompatibleUpdate: another mapping: its memory is unknown.

    """
    if isinstance(tensors, ImportedTensors):
        return tensors
    msg = (
        f"this adapter installs what bridge.import_update returned, got a {type(tensors).__name__}."
    )
    raise IncompatibleUpdate(msg)

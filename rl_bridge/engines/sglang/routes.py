"""The ways by which an update's bytes get into the engine, each as SGLang has it.

``import``: the engine's process imports and verifies the update itself, by the trainer's transport.
``tensor``: ``update_weights_from_tensor`` with one flattened bucket in shared memory.
``distributed``: ``update_weights_from_distributed`` with one flattened bucket over a process group.
``disk``: ``update_weights_from_disk`` with a checkpoint in a folder that the engine can read.
"""

import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from rl_bridge.engines.rank_bridges import TransportOptions, checked_transports
from rl_bridge.engines.sglang.compat import require
from rl_bridge.engines.sglang.handles import EngineHandle
from rl_bridge.engines.sglang.plugin import SENDER, sender
from rl_bridge.engines.sglang.update_group import UpdateGroup
from rl_bridge.errors import WeightBridgeUnavailableError, WeightUpdateRejectedError
from rl_bridge.installers.base import check_finite
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "ROUTES",
    "Route",
    "RouteName",
    "options_for",
    "route_of",
]

RouteName = Literal["import", "tensor", "distributed", "disk"]
ROUTES: tuple[RouteName, ...] = ("import", "tensor", "distributed", "disk")

_ALIGNED = 64
# torch's sharing strategy is one for the whole process.
_SHARING = threading.Lock()


class Route(ABC):
    """How bytes get into the engine. Called between the pause and the proof."""

    imports = False
    """Whether the engine's process imports the update itself."""

    def __init__(self, handle: EngineHandle) -> None:
        """Use `handle`; nothing is called."""
        self._handle = handle
        self._may_be_in_session = False

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse what can be refused before the engine is asked."""
        del manifest
        check_finite(tensors, tensors)

    @abstractmethod
    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the engine load.

        Raises:
            WeightUpdateRejectedError: it refused, or its loader failed.

        """

    def end_session(self) -> None:
        """End SGLang's session where it may be open still: no other one would be let in, ever."""
        if self._may_be_in_session:
            self._handle.ask("end_weight_update")  # whatever it says: an engine has only one
            self._may_be_in_session = False

    def ended(self, *, installed: bool) -> None:
        """The update is committed, or undone: what the other version needed may go."""
        del installed
        self._may_be_in_session = False  # else whoever took the update back has ended it

    def close(self) -> None:  # noqa: B027 - as above
        """Let go of what is kept from update to update."""

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's own, without which it takes no weights. Where its end is lost, an undo asks."""
        self._may_be_in_session = True  # noted before it is: the answer may be lost
        succeeded, said = self._handle.ask("begin_weight_update", selector="target")
        if not succeeded:
            self._may_be_in_session = False  # the one that is open is somebody else's
            msg = f"SGLang refused begin_weight_update ({said}). See the engine's log."
            raise WeightUpdateRejectedError(msg)
        try:
            yield
        except BaseException:
            self.end_session()
            raise
        self._handle.do("end_weight_update")
        self._may_be_in_session = False


class ImportRoute(Route):
    """Nothing to bring: our half in the engine does it all."""

    imports = True

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Leave it to the engine's half."""

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """It was loaded by the call that began the install."""


class TensorRoute(Route):
    """One bucket in memory that the engine's process maps; it is used again for each update."""

    def __init__(self, handle: EngineHandle) -> None:
        """Use `handle`; needs sglang in this process, too.

        Raises:
            WeightBridgeUnavailableError: it is not.

        """
        super().__init__(handle)
        self._serializer = require("sglang.srt.utils").MultiprocessingSerializer
        self._metadata = require("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorMetadata
        self._bucket = torch.empty(0, dtype=torch.uint8, device="cpu")

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Open a session, load the bucket, close the session."""
        del manifest
        with self._session():
            self._handle.do(
                "update_weights_from_tensor",
                serialized_named_tensors=[
                    self._handle.payload(serialized) for serialized in self._serialized(tensors)
                ],
                load_format="flattened_bucket",
                flush_cache=False,
                selector="target",
            )

    def _serialized(self, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
        """One for each rank: what torch shares may be taken once."""
        places, end = _places(tensors, _ALIGNED)
        if self._bucket.nbytes != end:
            self._bucket = torch.empty(end, dtype=torch.uint8, device="cpu")
        _fill(self._bucket, places, tensors)
        metadata = [
            self._metadata(
                name, tensors[name].shape, tensors[name].dtype, start, stop, stop - start
            )
            for name, start, stop in places
        ]
        content = {
            "flattened_tensor": self._bucket,
            "metadata": metadata,
            SENDER: sender(self._handle.name),
        }
        with _SHARING, _strategy(self._handle.sharing):
            try:
                return [self._serializer.serialize(content) for _ in range(self._handle.num_ranks)]
            except RuntimeError as error:
                msg = (
                    f"torch cannot share memory from this process any more ({error}). SGLang's "
                    "Engine.shutdown ends all children of its process, torch's memory manager "
                    "too: use route='import', or update servers from a process without engines."
                )
                raise WeightBridgeUnavailableError(msg) from error


class DistributedRoute(Route):
    """One bucket, broadcast to all ranks; group and bucket are used again for each update."""

    def __init__(self, handle: EngineHandle, address: str) -> None:
        """Use `handle`; needs sglang in this process, too.

        Raises:
            WeightBridgeUnavailableError: it is not.

        """
        super().__init__(handle)
        self._group = UpdateGroup(handle, address)
        self._bucket = torch.empty(0, dtype=torch.uint8, device="cpu")

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Meet the ranks, open a session, send the bucket, close the session."""
        del manifest
        on_cpu = self._handle.device == "cpu"
        self._group.join("gloo" if on_cpu else "nccl")
        # SGLang lays them out without a gap: the widest first, all of them are aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
        places, end = _places(ordered, 1)
        if self._bucket.nbytes != end:
            device = "cpu" if on_cpu else self._handle.device
            self._bucket = torch.empty(end, dtype=torch.uint8, device=device)
        _fill(self._bucket, places, ordered)
        with self._session():
            work = self._group.send(self._bucket)
            try:
                self._handle.do(
                    "update_weights_from_distributed",
                    names=list(ordered),
                    dtypes=[str(item.dtype).removeprefix("torch.") for item in ordered.values()],
                    shapes=[list(item.shape) for item in ordered.values()],
                    group_name=self._group.name,
                    load_format="flattened_bucket",
                    flush_cache=False,
                    selector="target",
                )
            except BaseException:
                self._group.leave()  # it may not have carried what was sent
                raise
            self._group.end(work)

    def close(self) -> None:
        """Leave the group."""
        self._group.leave()


_Place = tuple[str, int, int]


def _places(tensors: Mapping[str, torch.Tensor], alignment: int) -> tuple[list[_Place], int]:
    """Where each tensor lies in a bucket, and how large that is."""
    places, end = [], 0
    for name, tensor in tensors.items():
        start = -(-end // alignment) * alignment
        end = start + tensor.nbytes
        places.append((name, start, end))
    return places, end


def _fill(
    bucket: torch.Tensor, places: Iterable[_Place], tensors: Mapping[str, torch.Tensor]
) -> None:
    for name, start, stop in places:
        tensor = tensors[name]
        bucket[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@contextmanager
def _strategy(name: str) -> Iterator[None]:
    sharing: Any = torch.multiprocessing  # which has no types
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy(name)
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)


class DiskRoute(Route):
    """A checkpoint for each version, in a folder that the engine can read."""

    def __init__(self, handle: EngineHandle, directory: Path) -> None:
        """Write below `directory`, which must outlive the engine: it names the folder it took.

        Raises:
            WeightBridgeUnavailableError: safetensors is missing.

        """
        super().__init__(handle)
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            msg = "versions are written as safetensors. Install it: pip install 'rl-bridge[bench]'."
            raise WeightBridgeUnavailableError(msg) from error
        self._save = save_file
        self._home = directory
        self._initial: Path | None = None
        self._active: Path | None = None
        self._next: Path | None = None
        self._undone: set[Path] = set()

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the version, and let the engine load it."""
        if self._initial is None:
            self._initial = Path(self._handle.model_path())
        said = sender(self._handle.name)
        folder = self._home / f"v{manifest.weight_version}-{manifest.update_id}-{said}"
        folder.mkdir(parents=True, exist_ok=True)  # what was undone may come again
        self._undone.discard(folder)
        self._next = folder
        for extra in self._initial.glob("*.json"):
            if not extra.name.endswith(".index.json"):
                shutil.copy(extra, folder)
        content = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        self._save(content, folder / "model.safetensors", metadata={"format": "pt"})
        self._handle.do(
            "update_weights_from_disk",
            model_path=str(folder),
            load_format="safetensors",
            flush_cache=False,
        )

    def ended(self, *, installed: bool) -> None:
        """With a commit the folders go that the engine names no more; it names what was undone."""
        super().ended(installed=installed)
        folder, self._next = self._next, None
        if folder is None:
            return
        if not installed:
            self._undone.add(folder)
            return
        gone, self._undone = self._undone, set()
        if self._active is not None:
            gone.add(self._active)
        self._active = folder
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)


def route_of(
    name: str, handle: EngineHandle, directory: str | Path | None, address: str | None
) -> Route:
    """The route of that name.

    Raises:
        ValueError: no such route, or a folder or an address that does not belong to it.
        WeightBridgeUnavailableError: what it needs is missing here.

    """
    if name not in ROUTES:
        raise ValueError(f"route={name!r}: expected one of {', '.join(map(repr, ROUTES))}.")
    if (directory is not None) != (name == "disk"):
        raise ValueError(f"route={name!r} with directory={directory!r}: 'disk' needs one.")
    if address is not None and name != "distributed":
        raise ValueError(f"route={name!r} with address={address!r}: 'distributed' takes one.")
    if name == "disk":
        assert directory is not None
        return DiskRoute(handle, Path(directory))
    if name == "distributed":
        return DistributedRoute(handle, address or "127.0.0.1")
    return ImportRoute(handle) if name == "import" else TensorRoute(handle)


def options_for(
    name: str, transports: TransportOptions | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """What the engine's ranks are told of transports: nothing, unless they import by themselves.

    Raises:
        ValueError: `transports` for another route; a value that a transport cannot have.
        TypeError: an option that a transport does not have, or that is no JSON.
        WeightBridgeUnavailableError: no transport has that name.

    """
    if not transports:
        return {}
    if name != "import":
        raise ValueError(
            f"route={name!r} with transports={sorted(transports)}: expected 'import'; by other "
            "routes the executor's own bridge imports. Give them to make_weight_bridge."
        )
    return {"transports": checked_transports(transports)}

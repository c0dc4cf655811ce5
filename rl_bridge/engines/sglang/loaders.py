"""The ways by which an update's bytes get into an SGLang engine, each as SGLang has it.

``import``: the engine's ranks import and verify the update themselves, by the trainer's transport.
``tensor``: ``update_weights_from_tensor`` with one flattened bucket in shared memory.
``distributed``: ``update_weights_from_distributed`` with one flattened bucket over a process group.
``disk``: ``update_weights_from_disk`` with a checkpoint in a folder that the engine can read.

What the ranks hold after any of them is proven by their driver: see `EngineDriver`.
"""

import datetime as dt
import importlib
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rl_bridge.engines.driver import Loader
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.engines.rpc import in_thread
from rl_bridge.engines.sglang import require
from rl_bridge.engines.sglang.client import SGLangClient
from rl_bridge.engines.sglang.plugin import SENDER, sender
from rl_bridge.errors import (
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.trainers.chunks import BufferPlan

RouteName = Literal["import", "tensor", "distributed", "disk"]
ROUTES: tuple[RouteName, ...] = ("import", "tensor", "distributed", "disk")

# torch's sharing strategy is one for the whole process.
_SHARING = threading.Lock()
# How long a broadcast that the engine has answered for may still take to be told here.
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class DistributedRoute:
    """The route ``distributed``.

    Attributes:
        address: this machine's, as the engine reaches it.

    """

    address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DiskRoute:
    """The route ``disk``.

    Attributes:
        directory: where versions are written; it must outlive the engine.

    """

    directory: str | Path


class SGLangLoader(Loader):
    """``import``, where the ranks do it all; what all routes have in common; SGLang's session."""

    def __init__(self, client: SGLangClient, *, drops: bool) -> None:
        """Use `client`; nothing is called."""
        self._client = client
        self._drops = drops
        self._may_be_in_session = False

    def prepare(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> Mapping[str, Any]:
        """Refuse what can be refused before the ranks are asked."""
        del manifest
        if not self.imports:
            check_finite(tensors, tensors)
        return {"drops": self._drops}

    def abort(self, *, of_other_driver: bool) -> None:
        """End SGLang's session if it may be open: it would let no other one in, ever."""
        if of_other_driver or self._may_be_in_session:
            self._client.control("end_weight_update")  # whatever it says: an engine has only one
            self._may_be_in_session = False

    def ended(self, *, installed: bool) -> None:
        """The update is committed, or undone."""
        del installed
        self._may_be_in_session = False

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's own, without which it takes no weights. If its end is lost, an undo asks."""
        self._may_be_in_session = True  # before the call: its answer may be lost
        succeeded, said = self._client.control("begin_weight_update", selector="target")
        if not succeeded:
            self._may_be_in_session = False  # the one that is open is somebody else's
            raise WeightUpdateRejectedError(
                f"SGLang refused begin_weight_update ({said}). See the engine's log."
            )
        try:
            yield
        except BaseException:
            self.abort(of_other_driver=False)
            raise
        self._client.do("end_weight_update")
        self._may_be_in_session = False


class _Bucket:
    """Tensors of an update in one flat buffer, which is used again for the next one."""

    def __init__(self) -> None:
        self._kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def fill(
        self, tensors: Mapping[str, torch.Tensor], device: str
    ) -> tuple[torch.Tensor, list[tuple[str, int]]]:
        """The buffer, and at which byte each tensor begins, in the order in which they lie."""
        kinds = [(one.dtype, tuple(one.shape)) for one in tensors.values()]
        if kinds != self._kinds:
            self._plan, self._kinds = BufferPlan(kinds), []  # for want of memory it is asked again
            self._buffer, self._views = self._plan.allocate(torch.device(device))
            self._kinds = kinds
        for view, tensor in zip(self._views, tensors.values(), strict=True):
            view.copy_(tensor)
        places = zip(tensors, self._plan.offsets, strict=True)
        return self._buffer, sorted(places, key=lambda place: place[1])


class TensorLoader(SGLangLoader):
    """One bucket in memory that the engine's process maps; it is used again for each update."""

    imports = False

    def __init__(self, client: SGLangClient, *, drops: bool) -> None:
        """Use `client`; needs sglang in this process, too."""
        super().__init__(client, drops=drops)
        self._serializer = require("sglang.srt.utils").MultiprocessingSerializer
        self._metadata = require("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorMetadata
        self._bucket = _Bucket()

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Open a session, load the bucket, close the session."""
        del manifest
        with self._session():
            self._client.do(
                "update_weights_from_tensor",
                serialized_named_tensors=[
                    self._client.payload(serialized) for serialized in self._serialized(tensors)
                ],
                load_format="flattened_bucket",
                flush_cache=False,
                selector="target",
            )

    def _serialized(self, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
        """One for each rank: what torch shares may be taken once."""
        buffer, places = self._bucket.fill(tensors, "cpu")
        metadata = [
            self._metadata(name, one.shape, one.dtype, start, start + one.nbytes, one.nbytes)
            for name, start, one in ((name, start, tensors[name]) for name, start in places)
        ]
        content = {
            "flattened_tensor": buffer,
            "metadata": metadata,
            SENDER: sender(self._client.driver),
        }
        with _SHARING, _strategy(self._client.sharing):
            try:
                return [self._serializer.serialize(content) for _ in range(self._client.num_ranks)]
            except RuntimeError as error:
                raise WeightBridgeUnavailableError(
                    f"torch cannot share memory from this process any more ({error}). SGLang's "
                    "Engine.shutdown ends all children of its process, torch's memory manager "
                    "too: use route='import', or update servers from a process without engines."
                ) from error


class DistributedLoader(SGLangLoader):
    """One bucket, broadcast to all ranks; group and bucket are used again for each update.

    SGLang meets this process, rank 0 of the group, at a store of torch's, whose port has no key:
    whoever reaches it could take part. So it is opened on the one address that the engine is to
    reach, and the group's name is its own.
    """

    imports = False

    def __init__(self, client: SGLangClient, address: str, *, drops: bool) -> None:
        """Use `client`, at an `address` of this machine; needs sglang in this process, too."""
        super().__init__(client, drops=drops)
        self._address = address
        self._make_group = require("sglang.srt.utils").init_custom_process_group
        self._torch: Any = importlib.import_module("torch.distributed")  # it has few types
        self._bucket = _Bucket()
        self._group: Any = None
        self._store: Any = None
        self._ranks = 0
        self._name = ""  # what SGLang knows the group by; empty where there is none

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Meet the ranks, open a session, send the bucket, close the session."""
        del manifest
        on_cpu = self._client.device == "cpu"
        self._join("gloo" if on_cpu else "nccl")
        buffer, places = self._bucket.fill(tensors, self._client.device)
        ordered = {name: tensors[name] for name, _ in places}  # SGLang takes them without a gap
        with self._session():
            work = self._torch.broadcast(buffer, group=self._group, group_src=0, async_op=True)
            try:
                self._client.do(
                    "update_weights_from_distributed",
                    names=list(ordered),
                    dtypes=[str(item.dtype).removeprefix("torch.") for item in ordered.values()],
                    shapes=[list(item.shape) for item in ordered.values()],
                    group_name=self._name,
                    load_format="flattened_bucket",
                    flush_cache=False,
                    selector="target",
                )
            except BaseException:
                self.close()  # it may not have carried what was sent
                raise
            try:
                work.wait(dt.timedelta(seconds=_SETTLE_S))
            except RuntimeError:
                self.close()  # the engine has it, this group did not say so: it is given up

    def close(self) -> None:
        """End the group, here and in the engine. The next update makes another one."""
        name, self._name = self._name, ""
        group, self._group, self._store = self._group, None, None
        if not name:
            return
        with suppress(WeightBridgeError):  # an engine that is gone has no group either
            self._client.control("destroy_weights_update_group", group_name=name)
        if group is not None:
            with suppress(RuntimeError):
                self._torch.destroy_process_group(group)

    def _join(self, backend: str) -> None:
        """Meet the engine's ranks, if that was not done."""
        if self._name and self._ranks == self._client.num_ranks:
            return
        self.close()
        self._ranks = self._client.num_ranks
        self._name = f"{sender(self._client.driver)}-{uuid.uuid4().hex}"
        try:
            self._group = self._met(backend, self._open())
        except BaseException:
            self.close()
            raise

    def _met(self, backend: str, port: int) -> Any:
        world_size, name = 1 + self._ranks, self._name
        store = self._torch.PrefixStore(name, self._store)
        # The two meet each other, so one of them needs a thread.
        meeting = in_thread(
            lambda: self._make_group(
                backend=backend,
                store=store,
                world_size=world_size,
                rank=0,
                group_name=name,
                timeout=dt.timedelta(seconds=self._client.timeout_s),
            )
        )
        succeeded, said = self._client.control(
            "init_weights_update_group",
            master_address=self._address,
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=name,
            backend=backend,
        )
        if succeeded:
            try:
                return meeting.result(self._client.timeout_s)
            except TimeoutError:
                said = "it takes too long"
            except Exception as error:  # noqa: BLE001 - told below
                said = str(error)
        raise WeightUpdateRejectedError(
            f"no group with the engine came about at {self._address}:{port} ({said}). See that the "
            "engine reaches this address, or use route='import'."
        )

    def _open(self) -> int:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            with socket.socket(family) as listening:
                listening.bind((self._address, 0))
                listening.listen()
                port = int(listening.getsockname()[1])
                self._store = self._torch.TCPStore(
                    self._address,
                    port,
                    None,
                    is_master=True,
                    timeout=dt.timedelta(seconds=self._client.timeout_s),
                    wait_for_workers=False,
                    master_listen_fd=listening.fileno(),
                )
                listening.detach()  # the store's from now on
        except (OSError, RuntimeError) as error:
            raise WeightBridgeUnavailableError(
                f"nothing can be opened at {self._address} ({error}). Pass an address of this "
                "machine that the engine reaches."
            ) from error
        return port


@contextmanager
def _strategy(name: str) -> Iterator[None]:
    sharing: Any = torch.multiprocessing  # which has no types
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy(name)
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)


class DiskLoader(SGLangLoader):
    """A checkpoint for each version, in a folder that the engine can read."""

    imports = False

    def __init__(self, client: SGLangClient, directory: Path, *, drops: bool) -> None:
        """Write below `directory`, which must outlive the engine: it names the folder it took."""
        super().__init__(client, drops=drops)
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise WeightBridgeUnavailableError(
                "versions are written as safetensors. Install it: pip install 'rl-bridge[bench]'."
            ) from error
        self._save = save_file
        self._home = directory
        self._initial: Path | None = None
        self._active: Path | None = None
        self._next: Path | None = None
        self._undone: set[Path] = set()

    def load(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the version, and let the engine load it."""
        if self._initial is None:
            self._initial = Path(self._client.model_path())
        said = sender(self._client.driver)
        folder = self._home / f"v{manifest.weight_version}-{manifest.update_id}-{said}"
        folder.mkdir(parents=True, exist_ok=True)  # what was undone may come again
        self._undone.discard(folder)
        self._next = folder
        for extra in self._initial.glob("*.json"):
            if not extra.name.endswith(".index.json"):
                shutil.copy(extra, folder)
        content = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        self._save(content, folder / "model.safetensors", metadata={"format": "pt"})
        self._client.do(
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


def loader_for(
    route: RouteName | DistributedRoute | DiskRoute, client: SGLangClient, *, drops: bool
) -> SGLangLoader:
    """The loader of a route.

    Raises:
        ValueError: no such route, or ``disk`` without a folder.
        WeightBridgeUnavailableError: what it needs is missing here.

    """
    if isinstance(route, DiskRoute):
        return DiskLoader(client, Path(route.directory), drops=drops)
    if isinstance(route, DistributedRoute):
        return DistributedLoader(client, route.address, drops=drops)
    if route == "import":
        return SGLangLoader(client, drops=drops)
    if route == "tensor":
        return TensorLoader(client, drops=drops)
    if route == "distributed":
        return DistributedLoader(client, DistributedRoute().address, drops=drops)
    if route == "disk":
        raise ValueError(
            "route='disk': expected a folder for the versions, too. Pass DiskRoute(directory)."
        )
    raise ValueError(f"route={route!r}: expected one of {', '.join(map(repr, ROUTES))}.")

"""An engine copied aside, byte for byte: the undo where no retained version could be one."""

import numpy as np
import torch

from rl_bridge.errors import IncompatibleUpdate, TornEngine
from rl_bridge.installers.base import Engine
from rl_bridge.installers.engine_memory import named_engine_tensors, put_back, take_out
from rl_bridge.memory import vm
from rl_bridge.memory.packing import raw_elements
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.tensors import not_plain, tensor_key
from rl_bridge.memory.views import Pin, anonymous_pin
from rl_bridge.memory.vm import huge_pages, spare_pages


def every_engine_tensor(engine: Engine) -> dict[str, torch.Tensor]:
    """Name -> live tensor: the state dict, and the buffers that it leaves out."""
    found = named_engine_tensors(engine)
    if isinstance(engine, torch.nn.Module):
        found |= engine.named_parameters(remove_duplicate=False)
        found |= engine.named_buffers(remove_duplicate=False)
    return found


class Snapshot:
    """An engine's weights, byte for byte, with the tensor object and storage under each name."""

    def __init__(
        self,
        engine: Engine,
        *,
        num_threads: int | None = None,
        room: Pin | None = None,
        is_on_host: bool = False,
    ) -> None:
        """Copy every tensor, on whatever device. Costs the engine's weights once more in memory.

        Args:
            engine: what is copied.
            num_threads: threads that copy; None takes the usable cores, at most 8.
            room: memory of an earlier one, as `give_room` gave it; it is used if it has the size.
            is_on_host: whether copies of a device's tensors are on the host; else on the device.

        Raises:
            IncompatibleUpdate: a tensor that cannot be copied aside.

        """
        self._engine = engine
        self._num_threads = num_threads
        self._owners = every_engine_tensor(engine)
        self._persistent = set(named_engine_tensors(engine))
        # Detached views keep the old storages alive, whatever the adapter assigns meanwhile.
        self._data = {name: tensor.detach() for name, tensor in self._owners.items()}
        # What is plain and contiguous is copied in one pass over its bytes, the rest by torch.
        self._others: dict[str, torch.Tensor] = {}
        dense = []
        seen = set()
        for name, data in self._data.items():
            owner = id(self._owners[name])
            if data.is_meta or owner in seen:
                continue  # it has no bytes, or they are another name's
            seen.add(owner)
            if data.is_cpu and not_plain(data) is None and data.is_contiguous():
                dense.append(data)
            else:
                self._others[name] = _cloned(name, data, is_on_host=is_on_host)
        sizes = np.array([data.numel() * data.element_size() for data in dense], np.uint64)
        ends = np.cumsum(sizes, dtype=np.uint64)
        self._plan = BytePlan(sizes)
        self._homes = np.array([data.data_ptr() for data in dense], np.uint64)
        self._pin = _room(self._plan.total_nbytes, room)
        self._copies = ends - sizes + np.uint64(self._pin.address)
        self._plan.copy(self._homes, self._copies, num_threads=num_threads)

    def give_room(self) -> Pin:
        """Give up the copy. Its memory may be written again; the kernel takes it when it is short.

        Pages that were touched before cost a fraction of fresh ones.
        """
        spare_pages(self._pin.address, self._pin.nbytes)
        return self._pin

    def restore(self) -> None:
        """Put objects, storages and bytes back, and check that they are.

        Raises:
            TornEngine: a byte or an object does not come back.

        """
        now = every_engine_tensor(self._engine)
        for name, owner in self._owners.items():
            if now.get(name) is not owner:
                put_back(self._engine, name, owner, persistent=name in self._persistent)
            if not _same_view(owner, self._data[name]):
                owner.data = self._data[name]
        for name in now.keys() - self._owners.keys():
            take_out(self._engine, name)
        self._plan.copy(self._copies, self._homes, num_threads=self._num_threads)
        with torch.no_grad():
            for name, copy in self._others.items():
                _each_once(raw_elements(self._data[name])).copy_(copy)
        self._check()

    def _check(self) -> None:
        now = every_engine_tensor(self._engine)
        lost = [
            name
            for name, owner in self._owners.items()
            if now.get(name) is not owner
            or not _same_view(owner, self._data[name])
            or (
                name in self._others
                and not _is_equal(_each_once(raw_elements(owner)), self._others[name])
            )
        ]
        lost += now.keys() - self._owners.keys()
        threads = self._num_threads
        same = self._plan.digest(self._homes, num_threads=threads) == self._plan.digest(
            self._copies, num_threads=threads
        )
        if lost or not same:
            what = f"tensor {lost[0]!r} does" if lost else "weights do"
            raise TornEngine(
                f"undo failed: the engine's {what} not take back what was there before."
            )


def _room(nbytes: int, offered: Pin | None) -> Pin:
    if offered is not None and offered.nbytes == vm.round_up(max(nbytes, 1)):
        return offered
    made = anonymous_pin(nbytes)
    huge_pages(made.address, made.nbytes)
    return made


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory, read in the same way."""
    return (
        tensor_key(one) == tensor_key(other)
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _is_equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    return torch.equal(tensor.to(copy.device), copy)


def _cloned(name: str, data: torch.Tensor, *, is_on_host: bool) -> torch.Tensor:
    reason = not_plain(data)
    is_elsewhere = data.layout is torch.strided and not data.is_cpu and type(data) is torch.Tensor
    if reason is not None and not is_elsewhere and not (data.is_conj() or data.is_neg()):
        raise IncompatibleUpdate(
            f"tensor {name!r} of the engine {reason}; it cannot be copied aside for an undo."
        )
    once = _each_once(raw_elements(data))
    return once.to("cpu", copy=True) if is_on_host else once.clone()


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Each element of an expanded tensor once: torch refuses to write to the whole."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor

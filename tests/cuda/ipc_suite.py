"""What legacy IPC promises: asked of host memory, and of CUDA over a stand-in for libcuda."""

import ctypes
import gc
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

from rl_bridge.cuda import ipc as ipc_module
from rl_bridge.cuda.driver import INVALID_VALUE
from rl_bridge.cuda.ipc import (
    IPC_HANDLE_NBYTES,
    IPC_UNIT,
    IPCDriver,
    Opening,
    PlainMemory,
)
from rl_bridge.cuda.owners import settle_late
from rl_bridge.errors import DriverError, SegmentError
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment, SegmentRef, open_segment
from rl_bridge.testing.processes import Child, until
from tests.helpers import forked, forking, open_fds

__all__ = ["Exporter", "IPCSuite", "Importer"]

TRAINED = b"trained"


class Exporter:
    """Holds plain memory for others, in a process of its own."""

    def __init__(self) -> None:
        self.segment = OwnedSegment.make("rlb-test", vm.PAGE)
        self.memory = PlainMemory(self.make(), IPC_UNIT, self.segment.fd)
        vm.store(self.memory.address, TRAINED)

    def make(self) -> IPCDriver:
        raise NotImplementedError

    def where(self) -> dict[str, Any]:
        """What travels: the segment and the handle."""
        return {"segment": self.segment.ref.model_dump(), "handle": self.memory.handle.hex()}

    def give_up(self) -> bool:
        """As a slot is closed; whether the memory was freed."""
        self.segment.close()
        self.memory.close()
        return self.is_freed()

    def is_freed(self) -> bool:
        """Whether it is by now; every new owner tries that again."""
        settle_late()
        return self.memory.address == 0


class Importer:
    """Opens, in a process of its own."""

    def __init__(self, segment: dict[str, Any], handle: str) -> None:
        ref = SegmentRef.model_validate(segment)
        self.opening = Opening(self.make(), bytes.fromhex(handle), ref)

    def make(self) -> IPCDriver:
        raise NotImplementedError

    def look(self) -> str:
        return ctypes.string_at(self.opening.address, len(TRAINED)).decode("latin-1")

    def close(self) -> None:
        self.opening.close()


def opened(driver: IPCDriver, where: dict[str, Any]) -> Opening:
    ref = SegmentRef.model_validate(where["segment"])
    return Opening(driver, bytes.fromhex(where["handle"]), ref)


class IPCSuite(ABC):
    """Give a driver, and the children that use one of the same kind."""

    exporter: type[Exporter]
    importer: type[Importer]

    @abstractmethod
    def make(self) -> IPCDriver:
        """A driver in this process."""

    @pytest.fixture
    def ipc(self) -> IPCDriver:
        return self.make()

    @pytest.fixture
    def owner(self) -> Iterator[Child]:
        with Child(self.exporter) as child:
            yield child.ready()

    # ---- the driver's rules ---------------------------------------------------------------------

    def test_a_handle_opens_in_another_process_at_one_address_and_counts(
        self, ipc: IPCDriver, owner: Child
    ) -> None:
        raw = bytes.fromhex(owner.call("where")["handle"])
        assert len(raw) == IPC_HANDLE_NBYTES
        at = ipc.open_ipc(raw)
        assert ipc.open_ipc(raw) == at
        ipc.close_ipc(at)
        assert ctypes.string_at(at, len(TRAINED)) == TRAINED
        ipc.close_ipc(at)
        with pytest.raises(DriverError):
            ipc.close_ipc(at)

    def test_a_handle_does_not_open_where_it_was_made(self, ipc: IPCDriver) -> None:
        at = ipc.alloc(IPC_UNIT)
        with pytest.raises(DriverError, match="use its pointer there"):
            ipc.open_ipc(ipc.ipc_handle(at))
        ipc.dealloc(at)

    @pytest.mark.parametrize("nbytes", [0, 63, 65, 66])
    def test_a_handle_has_64_bytes(self, ipc: IPCDriver, nbytes: int) -> None:
        with pytest.raises(DriverError, match=f"a handle of {nbytes} bytes, expected 64") as caught:
            ipc.open_ipc(bytes(nbytes))
        assert caught.value.code == INVALID_VALUE

    def test_a_handle_whose_owner_freed_it_or_died_is_invalid(
        self, ipc: IPCDriver, owner: Child
    ) -> None:
        raw = bytes.fromhex(owner.call("where")["handle"])
        assert owner.call("give_up")
        for _ in range(2):
            with pytest.raises(DriverError, match="publish again") as caught:
                ipc.open_ipc(raw)
            assert caught.value.code == "CUDA_ERROR_INVALID_HANDLE"
            owner.kill()

    def test_an_address_that_is_no_allocation_has_no_handle(self, ipc: IPCDriver) -> None:
        at = ipc.alloc(IPC_UNIT)
        ipc.dealloc(at)
        for act in (ipc.ipc_handle, ipc.dealloc, ipc.close_ipc):
            with pytest.raises(DriverError) as caught:
                act(at)
            assert caught.value.code == INVALID_VALUE

    def test_sizes_are_reported(self, ipc: IPCDriver, owner: Child) -> None:
        at = ipc.alloc(2 * IPC_UNIT)
        assert (ipc.size_at(at), ipc.size_at(at + 256)) == (2 * IPC_UNIT, None)
        ipc.dealloc(at)
        assert ipc.size_at(at) is None
        there = ipc.open_ipc(bytes.fromhex(owner.call("where")["handle"]))
        assert ipc.size_at(there) == IPC_UNIT
        ipc.close_ipc(there)

    def test_a_probe_leaves_nothing(self, ipc: IPCDriver) -> None:
        before = open_fds()
        ipc.probe_ipc()
        assert open_fds() == before

    # ---- owners ---------------------------------------------------------------------------------

    def test_memory_is_kept_until_every_importer_closed_it(
        self, ipc: IPCDriver, owner: Child
    ) -> None:
        before = open_fds()
        opening = opened(ipc, owner.call("where"))
        assert not opening.is_pointer
        assert owner.call("give_up") is False
        assert ctypes.string_at(opening.address, len(TRAINED)) == TRAINED
        opening.close()
        opening.close()
        assert owner.call("is_freed") is True
        assert open_fds() == before

    def test_an_importer_that_is_killed_keeps_nothing(self, owner: Child) -> None:
        with Child(self.importer, **owner.call("where")) as victim:
            assert victim.call("look") == TRAINED.decode()
            assert owner.call("give_up") is False
            victim.kill()
        until(lambda: owner.call("is_freed"), what="the kernel drops the victim's lock")

    def test_an_opening_that_dies_is_closed(self, ipc: IPCDriver, owner: Child) -> None:
        opening = opened(ipc, owner.call("where"))
        owner.call("give_up")
        del opening
        gc.collect()
        assert owner.call("is_freed") is True

    def test_an_opening_that_was_given_up_is_not_made(self, ipc: IPCDriver, owner: Child) -> None:
        before, where = open_fds(), owner.call("where")
        assert owner.call("give_up") is True
        with pytest.raises(SegmentError):
            opened(ipc, where)
        assert open_fds() == before

    def test_memory_that_waits_to_be_freed_is_not_opened_anew(
        self, ipc: IPCDriver, owner: Child
    ) -> None:
        where = owner.call("where")
        opening = opened(ipc, where)
        assert owner.call("give_up") is False
        with pytest.raises(SegmentError):
            opened(ipc, where)
        opening.close()
        assert owner.call("is_freed") is True

    def test_an_opening_that_is_given_up_half_way_opens_nothing(
        self, ipc: IPCDriver, owner: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        where, before = owner.call("where"), open_fds()
        real = open_segment

        def and_given_up(*args: Any, **kwargs: Any) -> int:
            fd = real(*args, **kwargs)
            assert owner.call("give_up") is True
            return fd

        monkeypatch.setattr(ipc_module, "open_segment", and_given_up)
        with pytest.raises(SegmentError, match="the publisher freed the memory"):
            opened(ipc, where)
        assert open_fds() == before

    def test_a_pointer_is_taken_with_its_own_segment_only(self, ipc: IPCDriver) -> None:
        mine, other = (OwnedSegment.make("rlb-test", vm.PAGE) for _ in range(2))
        memory = PlainMemory(ipc, IPC_UNIT, mine.fd)
        with pytest.raises(DriverError, match="use its pointer there"):
            Opening(ipc, memory.handle, other.ref)
        for one in (mine, other, memory):
            one.close()
        assert memory.address == 0

    def test_a_refused_handle_holds_nothing(self, ipc: IPCDriver, owner: Child) -> None:
        before, where = open_fds(), owner.call("where")
        with pytest.raises(DriverError) as kept:
            opened(ipc, {**where, "handle": "00" * IPC_HANDLE_NBYTES})
        assert open_fds() == before, f"although {kept.value!r} is kept"
        assert owner.call("give_up") is True

    def test_the_owners_own_process_uses_the_pointer(self, ipc: IPCDriver) -> None:
        segment = OwnedSegment.make("rlb-test", vm.PAGE)
        memory = PlainMemory(ipc, IPC_UNIT, segment.fd)
        ref = segment.ref
        opening = Opening(ipc, memory.handle, ref)
        assert (opening.address, opening.is_pointer) == (memory.address, True)
        segment.close()
        memory.close()
        assert memory.address, "somebody looks at it"
        with pytest.raises(SegmentError):
            Opening(ipc, memory.handle, ref)
        opening.close()
        settle_late()
        assert memory.address == 0

    def test_memory_that_is_lost_is_freed(self, ipc: IPCDriver) -> None:
        before = open_fds()
        segment = OwnedSegment.make("rlb-test", vm.PAGE)
        at = PlainMemory(ipc, IPC_UNIT, segment.fd).address
        gc.collect()
        segment.close()
        assert ipc.size_at(at) is None
        assert open_fds() == before

    @forking
    def test_a_forked_child_frees_and_closes_nothing(self, ipc: IPCDriver, owner: Child) -> None:
        segment = OwnedSegment.make("rlb-test", vm.PAGE)
        memory = PlainMemory(ipc, IPC_UNIT, segment.fd)
        vm.store(memory.address, TRAINED)
        opening = opened(ipc, owner.call("where"))

        def in_child() -> bool:
            memory.close()
            opening.close()
            return not memory.lies_behind(segment.ref)

        assert forked(in_child)
        for address in (memory.address, opening.address):
            assert ctypes.string_at(address, len(TRAINED)) == TRAINED
        assert owner.call("give_up") is False
        opening.close()
        assert owner.call("is_freed") is True
        memory.close()
        segment.close()

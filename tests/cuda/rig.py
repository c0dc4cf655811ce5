"""A host driver that notes its calls and fails where it is told, and ways to read and write."""

import ctypes
from collections.abc import Callable

from rl_bridge.cuda.driver import driver_error
from rl_bridge.cuda.host import HostDriver, Live
from rl_bridge.cuda.owners import AddressRange, Allocation
from rl_bridge.memory import vm

__all__ = ["NBYTES", "NOTHING", "SMALL", "Scripted", "filled", "peek", "poke"]

SMALL = 4 * vm.PAGE
"""The granularity of the drivers in these tests."""
NBYTES = 2 * SMALL
"""The size of what they allocate."""
NOTHING = Live(0, 0, 0)


class Scripted(HostDriver):
    """Notes each call by its name; raises before chosen ones."""

    def __init__(self) -> None:
        super().__init__(granularity=SMALL)
        self.calls: list[str] = []
        # What is asked before each call, with its name and number since `calls` was cleared.
        self.before: Callable[[str, int], None] = lambda name, number: None

    def fail(self, *names: str, code: str = "CUDA_ERROR_OUT_OF_MEMORY") -> None:
        """Refuse the next calls of these names, in this order."""
        waiting = list(names)

        def refuse(name: str, _: int) -> None:
            if waiting and waiting[0] == name:
                waiting.pop(0)
                raise driver_error(name, code, "as the test wants it")

        self.before = refuse

    def interrupt(self, number: int) -> None:
        """Raise KeyboardInterrupt before this call, counted from now."""
        self.calls.clear()

        def strike(_: str, at: int) -> None:
            if at == number:
                raise KeyboardInterrupt

        self.before = strike

    def calm(self) -> None:
        """Raise nothing any longer."""
        self.before = lambda *_: None

    def _step(self, name: str) -> None:
        self.calls.append(name)
        self.before(name, len(self.calls))

    def create(self, nbytes: int) -> int:
        self._step("create")
        return super().create(nbytes)

    def release(self, handle: int) -> None:
        self._step("release")
        super().release(handle)

    def reserve(self, nbytes: int) -> int:
        self._step("reserve")
        return super().reserve(nbytes)

    def free(self, address: int, nbytes: int) -> None:
        self._step("free")
        super().free(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._step("map")
        super().map(address, nbytes, handle)

    def set_access(self, address: int, nbytes: int, *, writable: bool) -> None:
        self._step("set_access")
        super().set_access(address, nbytes, writable=writable)

    def unmap(self, address: int, nbytes: int) -> None:
        self._step("unmap")
        super().unmap(address, nbytes)

    def fence(self) -> None:
        self._step("fence")
        super().fence()


def poke(address: int, byte: int, nbytes: int = NBYTES) -> None:
    """Fill host memory."""
    ctypes.memset(address, byte, nbytes)


def peek(address: int, nbytes: int = NBYTES) -> set[int]:
    """Which bytes lie in host memory."""
    return set(ctypes.string_at(address, nbytes))


def filled(driver: HostDriver, byte: int, nbytes: int = NBYTES) -> Allocation:
    """Memory full of one byte, mapped nowhere."""
    allocation = Allocation.create(driver, nbytes)
    window = AddressRange(driver, nbytes)
    window.map(allocation, writable=True)
    poke(window.address, byte, nbytes)
    window.close()
    return allocation

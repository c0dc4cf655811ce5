"""Interrupts while slots come and go leave nothing in the process that serves them."""

from contextlib import suppress
from pathlib import Path

from rl_bridge.memory import vm
from rl_bridge.transports.nixl.arenas import RegisteredArenas
from rl_bridge.transports.nixl.serving_process import ServingProcess
from rl_bridge.transports.nixl.shelf import SlotShelf
from rl_bridge.transports.wire.arenas import CPUArenas
from tests.helpers import tracing
from tests.interrupts import InterruptBefore


def test_an_interrupt_before_any_line_leaves_no_slot_mapped_in_the_serving_process() -> None:
    host = ServingProcess(backend="UCX", params={})
    shelf = SlotShelf(RegisteredArenas(CPUArenas(), host), host, "rlb-cut-off", 2)

    def mapped() -> int:
        return Path(f"/proc/{host.pid}/maps").read_text("ascii").count("memfd:rlb-cut-off")

    try:
        shelf.ring.acquire(16 * vm.PAGE)
        number, struck = 0, True
        while struck:
            # Neither what is there has room for, nor the other way round: each time one slot goes
            # and another one comes.
            tracer = InterruptBefore(number)
            with suppress(KeyboardInterrupt), tracing(tracer):
                shelf.ring.acquire(vm.PAGE)
            struck = tracer.struck
            epoch, was_lost = host.epoch, host.is_lost
            shelf.ring.acquire((16 if number % 2 else 64) * vm.PAGE)
            assert (mapped(), host.num_registered) == (1, 1), f"before line number {number}"
            assert len(shelf.entries()) == 1
            assert host.epoch == epoch + was_lost, f"before line number {number}"
            number += 3
        assert number > 100
    finally:
        shelf.close()
        host.close()

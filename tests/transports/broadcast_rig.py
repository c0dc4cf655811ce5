"""Processes for the tests of ``broadcast`` that break off in the middle of a transfer."""

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rl_bridge.testing.faults import die
from rl_bridge.testing.peer import Peer
from rl_bridge.transports.broadcast import receiver, sender
from rl_bridge.transports.broadcast.group import Group, send_slices
from rl_bridge.transports.broadcast.transport import Broadcast

__all__ = ["ROWS", "BreakingPeer", "at_transfer", "big_weights", "is_at_port"]

ROWS = 600_000
"""Of the largest tensor, 58 MB: four slices, far more than sockets hold."""


def stop() -> None:
    """Stand still: SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


_ACTIONS: dict[str, Callable[[], None]] = {"die": die, "stop": stop}


def big_weights(seed: int) -> dict[str, torch.Tensor]:
    """The same bytes in every process."""
    from rl_bridge.testing.peer import sample_weights

    return sample_weights(seed, rows=ROWS)


@contextmanager
def at_transfer(module: Any, number: int, act: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Do something in the middle of this process's `number`-th transfer, behind its first slice.

    Args:
        module: `receiver` for a receiver's side, `sender` for the publisher's.
        number: which transfer, from 1.
        act: what; it is given the arena.

    """
    count = 0

    def breaking(
        group: Group,
        arena: torch.Tensor,
        slice_nbytes: int,
        *,
        meanwhile: Callable[[int], None] | None = None,
    ) -> None:
        nonlocal count
        count += 1
        mine = count == number
        has_acted = False

        def then(watermark: int) -> None:
            nonlocal has_acted
            if mine and not has_acted:
                has_acted = True
                act(arena)
            if meanwhile is not None:
                meanwhile(watermark)

        send_slices(group, arena, slice_nbytes, meanwhile=then)

    before, module.send_slices = module.send_slices, breaking
    try:
        yield
    finally:
        module.send_slices = before


class BreakingPeer(Peer):
    """A peer of the suites that dies, or stands still, in the middle of a transfer."""

    def __init__(
        self, *, breaks: str = "", side: str = "receiver", number: int = 1, **options: Any
    ) -> None:
        options.setdefault("transport_kwargs", {})
        super().__init__(transport_class=Broadcast, **options)
        if breaks:
            action = _ACTIONS[breaks]
            module = receiver if side == "receiver" else sender
            # For as long as this object lives.
            self._breaking = at_transfer(module, number, lambda _: action())
            self._breaking.__enter__()

    def publish_big(self, seed: int, weight_version: int) -> str:
        return self.publish(seed, weight_version, rows=ROWS)

    def join(self) -> None:
        """Join the group that init_info= names."""
        assert self._bridge.consumer

    def own_world(self) -> int:
        """Set up this process's default group: a world of one."""
        store = Path(tempfile.mkdtemp()) / "store"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
        return self.world_size()

    def world_size(self) -> int:
        """Use the default group."""
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        assert torch.distributed.get_rank() == 0
        return int(ones.item()) * torch.distributed.get_world_size()


def is_at_port(fd: int, ports: set[int]) -> bool:
    """Whether a descriptor is a socket of the publisher's port, on either end."""
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            names = [found.getsockname()]
            with suppress(OSError):
                names.append(found.getpeername())
            return any(isinstance(name, tuple) and name[1] in ports for name in names)
    except OSError:
        return False

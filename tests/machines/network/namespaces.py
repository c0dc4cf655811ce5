"""Network namespaces on this machine: two, joined by one cable that can be pulled, or three.

Processes in them reach each other over that cable only, so what its counters say has crossed it.
They see the same processes and files: UCX would read another's memory directly unless it is told
``UCX_TLS=tcp``.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Machine", "Traffic", "enter", "machines", "three_machines", "why_not"]

_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC = 1 << 14
_MS_SLAVE = 1 << 19
_MNT_DETACH = 2
_COMMAND_S = 20.0
_NAME = re.compile(r"rlb-([0-9a-f]+)-[abc]")
_NETWORK, _FAR_NETWORK = "10.77.31", "10.77.32"


class Traffic(NamedTuple):
    """Bytes that an interface received and sent."""

    received: int
    sent: int


@dataclass(frozen=True)
class Machine:
    """One of them.

    Attributes:
        namespace: its name, for `enter`.
        interface: its end of the cable.
        address: where the other one reaches it.

    """

    namespace: str
    interface: str
    address: str

    def plug(self, *, is_in: bool) -> None:
        """Pull the cable at this end, or put it in again."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up" if is_in else "down")

    def traffic(self, pid: int) -> Traffic:
        """What crossed the cable, as a process in this namespace sees it."""
        for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == self.interface:
                numbers = [int(word) for word in columns.split()]
                return Traffic(received=numbers[0], sent=numbers[8])
        raise LookupError(f"process {pid} has no interface {self.interface}")


def enter(namespace: str) -> None:
    """Take this thread, and those that it starts from now on, into a namespace.

    UCX looks for interfaces in ``/sys``, which is mounted anew for it: as `ip netns exec` does it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        _check(libc.setns(file.fileno(), _CLONE_NEWNET), f"enter the namespace {namespace}")
    _check(libc.unshare(_CLONE_NEWNS), "have mounts of its own")
    _check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None), "keep mounts to itself")
    libc.umount2(b"/sys", _MNT_DETACH)
    _check(libc.mount(b"rlb", b"/sys", b"sysfs", 0, None), "mount /sys")


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"cannot {what}")


@cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command: install iproute2"
    try:
        with machines():
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"network namespaces are not permitted here: {said.strip()}"


@contextmanager
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Make the two, joined; they are gone in the end, whatever happens."""
    _sweep()
    key = _key()
    left, right = (
        Machine(f"rlb-{key}-{side}", f"rlb{key}{side}", f"{_NETWORK}.{number}")
        for number, side in enumerate("ab", 1)
    )
    with ExitStack() as stack:
        for machine in (left, right):
            _ip("netns", "add", machine.namespace)
            # Its end of the cable goes with it, and with that the other end.
            stack.callback(_ip, "netns", "del", machine.namespace)
        _join(left, right)
        yield left, right


@contextmanager
def three_machines() -> Iterator[tuple[Machine, Machine, Machine]]:
    """Make three: the first one reaches the others, which reach nobody but the first."""
    with machines() as (middle, left), ExitStack() as stack:
        end = Machine(middle.namespace, f"rlb{_key()}d", f"{_FAR_NETWORK}.1")
        right = Machine(f"rlb-{_key()}-c", f"rlb{_key()}c", f"{_FAR_NETWORK}.2")
        _ip("netns", "add", right.namespace)
        stack.callback(_ip, "netns", "del", right.namespace)
        _join(end, right)
        # The middle answers by one address on both cables.
        _ip("-n", right.namespace, "route", "add", middle.address, "dev", right.interface)
        yield middle, left, right


def _key() -> str:
    return f"{os.getpid():x}"


def _join(left: Machine, right: Machine) -> None:
    """Lay the cable between two of them, and plug it in."""
    _ip("-n", left.namespace, "link", "add", left.interface, "type", "veth", "peer", "name",
        right.interface, "netns", right.namespace)  # fmt: skip  # one command
    for machine in (left, right):
        _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev",
            machine.interface)  # fmt: skip
        _ip("-n", machine.namespace, "link", "set", "lo", "up")
        machine.plug(is_in=True)


def _sweep() -> None:
    """Remove what a run that was killed left behind."""
    folder = Path("/run/netns")
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _NAME.fullmatch(path.name)
        if found and not Path(f"/proc/{int(found[1], 16)}").exists():
            _ip("netns", "del", path.name)


def _ip(*words: str) -> None:
    subprocess.run(
        ["ip", *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
    )

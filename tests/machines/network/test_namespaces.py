"""The two machines are two, their cable counts what crosses it, and nothing of them stays."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from rl_bridge.testing.processes import Child
from tests.machines.network.namespaces import enter, machines, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

NUM = 1 << 20
# No process has that id.
LEFT_BEHIND = f"rlb-{1 << 30:x}-a"


def names() -> list[str]:
    """The namespaces that there are."""
    return [path.name for path in Path("/run/netns").iterdir()]


class Host:
    """A process on one of the machines."""

    def __init__(self, namespace: str, address: str) -> None:
        enter(namespace)
        self.server = socket.create_server((address, 0))

    def port(self) -> int:
        return int(self.server.getsockname()[1])

    def receive(self) -> int:
        self.server.settimeout(10)
        line, _ = self.server.accept()
        with line:
            return sum(len(data) for data in iter(lambda: line.recv(1 << 16), b""))

    def send(self, address: str, port: int) -> None:
        with socket.create_connection((address, port), timeout=10) as line:
            line.sendall(bytes(NUM))


def test_bytes_between_two_machines_are_counted() -> None:
    with (
        machines() as (left, right),
        Child(Host, namespace=left.namespace, address=left.address) as here,
        Child(Host, namespace=right.namespace, address=right.address) as there,
    ):
        port = there.ready().call("port")
        there.tell("receive")
        here.ready().call("send", address=right.address, port=port)
        assert there.answer() == NUM
        assert left.traffic(here.pid).sent >= NUM
        assert right.traffic(there.pid).received >= NUM


def test_nothing_of_them_stays_also_of_a_run_that_was_killed() -> None:
    subprocess.run(["ip", "netns", "add", LEFT_BEHIND], check=True)
    with machines() as (left, _):
        assert left.namespace in names()
    assert LEFT_BEHIND not in names()
    assert not [name for name in names() if name.startswith(f"rlb-{os.getpid():x}-")]

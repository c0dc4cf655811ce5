"""Reads over a real network device, and what happens when its cable is pulled in the middle."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_bridge.testing.processes import Child, ChildError, until
from tests.machines.network.namespaces import Machine, machines, why_not
from tests.machines.roles import Engine, Owner, publish

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

MIB = 1 << 20
TCP = {"UCX_TLS": "tcp"}
ROWS = 65_536  # of 4 KiB: 256 MiB, which take long enough to be interrupted
STORE_PORT = 29_400  # the namespace is the test's own
DATA_PORTS = range(31_000, 31_020)
LISTEN = "0A"
DEADLINE_S = 4.0
# What a loaded machine may take beyond a deadline before it counts as a hang.
SLACK_S = 10.0


@contextmanager
def owners_on(
    machine: Machine,
    num: int,
    rows: int,
    *,
    port: int = 0,
    ucx: dict[str, str] = TCP,
) -> Iterator[list[Child]]:
    """Ranks of a trainer on one of the machines."""
    common = {
        "world_size": num,
        "store": (machine.address, STORE_PORT),
        "options": {"address": machine.address, "port": port},
        "rows": rows,
        "namespace": machine.namespace,
        "ucx": ucx,
    }
    with Child(Owner, rank=0, serves_store=True, **common) as first:
        if num == 1:
            yield [first.ready()]
            return
        first.ready()
        with Child(Owner, rank=1, **common) as second:
            yield [first, second.ready()]


def engine_on(machine: Machine, rows: int, rank: int = 0, degree: int = 1) -> Child:
    """A rank of an engine on one of the machines."""
    return Child(
        Engine,
        rank=rank,
        degree=degree,
        transports={"nixl": {"timeout_s": DEADLINE_S}},
        rows=rows,
        namespace=machine.namespace,
        ucx=TCP,
    )


def test_bytes_that_another_machine_reads_cross_the_cable() -> None:
    rows = 4096  # 16 MiB
    with (
        machines() as (left, right),
        owners_on(left, 2, rows) as owners,
        engine_on(right, rows, rank=1, degree=2) as engine,
    ):
        for version in (1, 2, 3):
            manifest = publish(owners, version)
            before = right.traffic(engine.ready().pid)
            assert engine.call("update", manifest=manifest)
            after = right.traffic(engine.pid)
            crossed = after.received - before.received
            # Half of the matrix is this rank's; nobody sends it the other half.
            assert 8 * MIB < crossed < 12 * MIB, crossed
            assert after.sent - before.sent < 2 * MIB
            for owner in owners:
                assert owner.call("states", manifest=manifest) == ["acknowledged"]
                owner.call("release", manifest=manifest)


def test_a_cable_pulled_in_the_middle_ends_the_update_and_the_same_engine_goes_on() -> None:
    with (
        machines() as (left, right),
        owners_on(left, 1, ROWS) as owners,
        engine_on(right, ROWS) as engine,
    ):
        assert engine.ready().call("update", manifest=publish(owners, 1))
        second = publish(owners, 2)
        before = right.traffic(engine.pid).received
        engine.tell("update", manifest=second)
        until(
            lambda: right.traffic(engine.pid).received - before > 16 * MIB,
            what="16 MiB of the update have crossed",
        )
        right.plug(is_in=False)
        start = time.monotonic()
        with pytest.raises(ChildError) as caught:
            engine.answer()
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        assert "WeightBridgeError" in caught.value.lineage, caught.value
        crossed = right.traffic(engine.pid).received - before
        assert crossed < ROWS * 4096, "the cable was pulled too late: nothing was shown"
        assert engine.call("holds", version=1)
        right.plug(is_in=True)
        _reaches(engine, owners, first_version=3)


def test_an_engine_whose_cable_is_out_when_the_update_comes_is_not_held_up() -> None:
    with (
        machines() as (left, right),
        owners_on(left, 1, 0) as owners,
        engine_on(right, 0) as engine,
    ):
        assert engine.ready().call("update", manifest=publish(owners, 1))
        right.plug(is_in=False)
        second = publish(owners, 2)
        start = time.monotonic()
        with pytest.raises(ChildError) as caught:
            engine.call("update", manifest=second)
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        assert "WeightBridgeError" in caught.value.lineage, caught.value
        assert engine.call("holds", version=1)
        right.plug(is_in=True)
        _reaches(engine, owners, first_version=3)


def test_the_ports_can_be_fixed_as_the_documentation_says() -> None:
    with machines() as (left, right):
        ucx = {
            **TCP,
            "UCX_NET_DEVICES": left.interface,
            "UCX_TCP_PORT_RANGE": f"{DATA_PORTS[0]}-{DATA_PORTS[-1]}",
        }
        with owners_on(left, 2, 0, port=9100, ucx=ucx) as owners, engine_on(right, 0) as engine:
            assert engine.ready().call("update", manifest=publish(owners, 1))
            found = _listening(owners[0].pid)
    addresses = {address for address, port in found if port != STORE_PORT}
    ports = {port for _, port in found} - {STORE_PORT}
    assert addresses == {left.address}
    assert ports - {*DATA_PORTS} == {9100, 9101}
    assert ports & {*DATA_PORTS}


def _listening(pid: int) -> list[tuple[str, int]]:
    """Where anything listens in the namespace of a process."""
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[3] == LISTEN:
            address, port = words[1].split(":")
            packed = int(address, 16).to_bytes(4, sys.byteorder)
            found.append((socket.inet_ntoa(packed), int(port, 16)))
    return found


def _reaches(engine: Child, owners: list[Child], *, first_version: int) -> None:
    """A version arrives again; TCP itself may need a few seconds to notice that it can."""
    failures: list[str] = []
    for version in range(first_version, first_version + 6):
        manifest = publish(owners, version)
        try:
            assert engine.call("update", manifest=manifest)
        except ChildError as error:
            failures.append(str(error))
            if "WeightBridgeError" not in error.lineage:
                raise
        else:
            return
        finally:
            for owner in owners:
                owner.call("release", manifest=manifest)
    raise AssertionError("\n".join(failures))

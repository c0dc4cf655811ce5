"""Every place for versions keeps its promises while trainers and readers race: `VersionStore`."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_bridge.errors import VersionNotFound
from rl_bridge.testing.processes import Child
from rl_bridge.transports.files.store import Marker, VersionStore, version_name
from rl_bridge.transports.files.transport import store_of

RUNS = pytest.mark.parametrize(
    "rounds", [150, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
FILE, NBYTES = "model.safetensors", 4096
_KINDS = ("directory", "objects")


def opened(kind: str, run: str) -> VersionStore:
    return store_of(
        run if kind == "directory" else f"local://{run}",
        storage_options={"auto_mkdir": True},
        request_timeout_s=30.0,
        lease_s=60.0,
    )


def marker(number: int) -> Marker:
    update_id = f"{number:012x}".ljust(32, "0")
    return Marker(sequence=0, weight_version=number, update_id=update_id, rank=0, header="0" * 32)


def content(number: int) -> list[bytes]:
    return [bytes([number % 251]) * NBYTES]


class Reader:
    """Leases the newest version, over and over, and reads it while it has the lease."""

    def __init__(self, *, kind: str, run: str) -> None:
        self.store = opened(kind, run)

    def read_until(self, last: int) -> int:
        num_read = 0
        while True:
            found = self.store.visible()
            if not found:
                continue
            newest = found[0]  # the one that goes first
            try:
                with self.store.leased(newest.name) as held:
                    self.store.require_size(newest.name, FILE, NBYTES)
                    memory = bytearray(NBYTES)
                    self.store.read(newest.name, FILE, NBYTES, [(0, memoryview(memory))])
                    assert memory == content(held.weight_version)[0]
                    num_read += 1
            except VersionNotFound as error:
                # It went before the lease was there; with the lease, nothing of it may go.
                assert FILE not in str(error), error  # noqa: PT017 - others are right
            if found[-1].marker.weight_version >= last:
                return num_read


@RUNS
@pytest.mark.parametrize("kind", _KINDS)
def test_a_collector_that_races_readers_removes_nothing_that_is_leased(
    tmp_path: Path, kind: str, rounds: int
) -> None:
    run = str(tmp_path / "run")
    num_readers = 8 if rounds > 1000 else 2
    store = opened(kind, run)
    writer = store.open_writer(0, fenced=True)
    with ExitStack() as stack:
        stack.callback(writer.close)
        children = [Child(Reader, kind=kind, run=run) for _ in range(num_readers)]
        readers = [stack.enter_context(child).ready() for child in children]
        for reader in readers:
            reader.tell("read_until", last=rounds)
        for number in range(1, rounds + 1):
            one = marker(number)
            name = version_name(number, one.update_id, one.rank)
            writer.write(name, [(FILE, content(number))], one).close()
            for older in store.visible()[:-1]:
                store.remove(older.name)
            writer.sweep()
        assert all(reader.answer() for reader in readers)
        for older in store.visible()[:-1]:
            assert store.remove(older.name)
        writer.sweep()
        assert [path.parent.name for path in Path(run).glob(f"0*/{FILE}")] == [name]

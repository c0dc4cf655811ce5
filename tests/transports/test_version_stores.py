"""Every place for versions keeps its promises while trainers and readers race, and die."""

import itertools
import os
import random
import traceback
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_bridge.errors import SegmentError, VersionNotFound
from rl_bridge.testing.processes import Child
from rl_bridge.transports.files.store import Marker, VersionStore, version_name
from rl_bridge.transports.files.transport import store_of
from tests.helpers import die_before_a_change
from tests.transports.exclusive_files import ExclusiveFiles
from tests.transports.slow_view import SlowView

MANY = pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(7200)])
FILE, NBYTES = "model.safetensors", 4096
_KINDS = ("directory", "objects")


def opened(kind: str, run: str) -> VersionStore:
    return store_of(
        run if kind == "directory" else f"exclusive://{run}",
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


@pytest.mark.parametrize("rounds", [150, MANY])
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


@pytest.mark.parametrize("kind", _KINDS)
def test_a_version_that_is_sealed_anew_stays_leased(tmp_path: Path, kind: str) -> None:
    store, one = opened(kind, str(tmp_path / "run")), marker(1)
    writer = store.open_writer(0, fenced=True)
    name = version_name(1, one.update_id, one.rank)
    own = writer.write(name, [(FILE, content(1))], one)
    with store.leased(name):
        own = writer.seal_anew(name, own, own.marker.model_copy(update={"is_committed": True}))
        own.close()
        assert not store.remove(name)
    assert store.remove(name)
    writer.close()


# ---- kills ---------------------------------------------------------------------------------------


class Killed:
    """Forks trainers that die somewhere, and looks at what they leave."""

    def __init__(self, *, kind: str, run: str) -> None:
        self.kind, self.run = kind, run
        self.draw = random.Random(0)
        self.view = SlowView(Path(run), Path(f"{run}-seen"), 0) if kind == "directory" else None

    def trainers(self, rounds: int) -> dict[str, int]:
        """Start so many, one after the other; returns how many were killed, and versions seen."""
        store = opened(self.kind, self.run)
        store.open_writer(0, fenced=True).close()
        told = {"killed": 0, "versions": 0, "seen": 0}
        number = 0
        for _ in range(rounds):
            before = {one.name for one in store.visible()}
            die_at = self.draw.randrange(_STEPS)
            child = os.fork()
            if not child:
                self._publish_until_killed(number, die_at)
            _, status = os.waitpid(child, 0)
            told["killed"] += os.WIFSIGNALED(status)
            assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
            found = store.visible()
            for one in found:
                memory = bytearray(NBYTES)
                with store.leased(one.name) as held:
                    assert held == one.marker
                    store.read(one.name, FILE, NBYTES, [(0, memoryview(memory))])
                assert memory == content(one.marker.weight_version)[0]
            told["seen"] += self._look_from_afar()
            names = {one.name for one in found}
            for removed in before - names:  # rightly, if there are newer ones that stay
                assert sum(name > removed for name in names) >= _KEPT, (before, names)
            number = max([number, *(one.marker.weight_version for one in found)])
            told["versions"] += len(names - before)
        return told

    def _look_from_afar(self) -> int:
        """Read what another machine sees by now; returns how many versions it could read."""
        if self.view is None:
            return 0
        self.view.catch_up(self.draw.randrange(20))
        store, num_read = opened(self.kind, str(self.view.root)), 0
        for one in store.visible():
            memory = bytearray(NBYTES)
            try:
                with store.leased(one.name) as held:
                    store.require_size(one.name, FILE, NBYTES)
                    store.read(one.name, FILE, NBYTES, [(0, memoryview(memory))])
            except SegmentError:  # not all of it is visible yet
                continue
            assert memory == content(held.weight_version)[0]
            num_read += 1
        return num_read

    def _publish_until_killed(self, number: int, die_at: int) -> None:
        try:
            files = [(ExclusiveFiles, name) for name in ("pipe_file", "rm_file")]
            die_before_a_change(itertools.count(die_at, -1), *files)
            store = opened(self.kind, self.run)
            writer = store.open_writer(0, fenced=True)
            writer.sweep()
            for version in (number + 1, number + 2):
                one = marker(version)
                name = version_name(version, one.update_id, one.rank)
                writer.write(name, [(FILE, content(version)), ("b", [b"x"])], one).close()
                for older in store.visible()[:-_KEPT]:
                    store.remove(older.name)
                writer.sweep()
            os._exit(0)
        finally:  # an error: the child must not go on as its parent
            traceback.print_exc()
            os._exit(1)


_KEPT, _STEPS = 2, 45


@pytest.mark.parametrize("rounds", [60, MANY])
@pytest.mark.parametrize("kind", _KINDS)
def test_trainers_killed_at_any_step_leave_whole_versions_and_lose_none(
    tmp_path: Path, kind: str, rounds: int
) -> None:
    with Child(Killed, kind=kind, run=str(tmp_path / "run")) as child:
        child.ready().tell("trainers", rounds=rounds)
        told = child.answer(deadline_s=7200.0)
    assert told["killed"] > rounds // 8
    assert told["versions"] > rounds // 8
    assert told["seen"] > rounds // 8 or kind == "objects"

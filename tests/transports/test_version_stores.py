"""Each place for versions keeps the same promises, also while trainers and readers race or die."""

import itertools
import os
import random
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.errors import ChecksumMismatch, SegmentError, VersionNotFound
from rl_bridge.installers import ModuleInstallAdapter
from rl_bridge.testing.processes import Child
from rl_bridge.transports.files.store import Marker, VersionStore, version_name
from rl_bridge.transports.files.transport import store_of
from tests.groups.rig import trainers
from tests.helpers import die_before_a_change
from tests.transports.exclusive_files import ExclusiveFiles
from tests.transports.slow_view import SlowView
from tests.transports.test_files import (
    WEIGHTS,
    assert_holds,
    files,
    flip,
    matrix,
    publish,
    shards_of,
)

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
                    self.store.require_sizes(newest.name, {FILE: NBYTES})
                    memory = bytearray(NBYTES)
                    self.store.read(newest.name, FILE, NBYTES, [(0, memoryview(memory))])
                    assert memory == content(held.weight_version)[0]
                    num_read += 1
            except VersionNotFound as error:
                # It went before the lease was there; with the lease, nothing of it may go.
                assert FILE not in str(error), error  # noqa: PT017 - others are right
            if found[-1].marker.weight_version >= last:
                return num_read


@pytest.mark.parametrize("rounds", [50, MANY])
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
        writer.seal_anew(name, own, own.marker.model_copy(update={"is_committed": True}))
        own.close()
        assert not store.remove(name)
    assert store.remove(name)
    writer.close()


# ---- bridges over each place ---------------------------------------------------------------------


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def there(kind: str, run: Path) -> dict[str, Any]:
    """What says where the versions are."""
    url = run if kind == "directory" else f"exclusive://{run}"
    return {"url": url, "storage_options": {"auto_mkdir": True}}


@pytest.fixture
def bridge_to(there: dict[str, Any]) -> Callable[..., FilesTensorBridge]:
    return lambda **more: files(there["url"], storage_options=there["storage_options"], **more)


Open = Callable[..., FilesTensorBridge]


def versions_in(bridge: FilesTensorBridge) -> list[int]:
    return [one.weight_version for one in bridge.versions()]


def parts_in(run: Path) -> dict[int, list[int]]:
    """Version -> ranks whose files are there."""
    found: dict[int, list[int]] = {}
    for path in sorted(run.glob("0*/manifest.json")):
        version, _, rank = (path.parent.name + "-0").split("-")[:3]
        found.setdefault(int(version), []).append(int(rank))
    return {version: sorted(ranks) for version, ranks in found.items()}


def test_a_version_stays_when_its_trainer_ends_and_an_engine_that_starts_late_installs_it(
    bridge_to: Open,
) -> None:
    with bridge_to() as trainer:
        for version in (1, 2, 3):
            trainer.release(publish(trainer, version))
    engine = torch.nn.ParameterDict({name: torch.zeros_like(one) for name, one in WEIGHTS.items()})
    with (
        bridge_to() as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine)
        ) as executor,
    ):
        executor.update_weights(bridge.newest() or "")
        assert_holds(dict(engine.items()), 3)
    with bridge_to() as following:
        publish(following, 4)
        assert versions_in(following) == [3, 4]


def test_what_is_read_is_not_removed_and_goes_when_nobody_reads_it(
    bridge_to: Open, kind: str, run: Path
) -> None:
    store = opened(kind, str(run))
    with bridge_to(keep_last=1) as trainer, bridge_to(source_worker="reader") as reader:
        first = publish(trainer, 1)
        with store.leased(store.find(first.update_id)):
            trainer.release(first)
            publish(trainer, 2)
            assert versions_in(trainer) == [1, 2]
            with bridge_to() as another:
                assert_holds(another.import_update(first), 1)
        publish(trainer, 3)
        assert 1 not in versions_in(trainer)
        with pytest.raises(SegmentError, match="it was removed"):
            reader.import_update(first)


def test_a_marker_that_this_release_cannot_read_is_left_alone_with_its_files(
    bridge_to: Open, run: Path
) -> None:
    with bridge_to() as trainer:
        publish(trainer, 1)
    marker = max([*run.glob("0*/STABLE"), *run.glob("STABLE/0-*")])
    marker.write_text('{"format": "rl_bridge.files/2"}')
    with bridge_to(keep_last=0) as trainer:
        trainer.release(publish(trainer, 2))
        assert versions_in(trainer) == []
    assert marker.exists()
    assert parts_in(run) == {1: [0]}


def test_a_run_that_goes_on_with_fewer_ranks_removes_the_parts_of_the_others(
    bridge_to: Open, there: dict[str, Any], kind: str, run: Path
) -> None:
    with trainers(2, "files", **there, keep_last=2) as group:
        for version in (1, 2):
            group.release(group.publish(shards_of(version), version=version))
    (kept,) = run.glob("0000000001-*-1")
    (kept / "KEEP").touch()
    (read,) = run.glob("0000000002-*-1")
    with opened(kind, str(run)).leased(read.name), bridge_to(keep_last=2) as trainer:
        for version in (3, 4, 5):
            trainer.release(publish(trainer, version))
        assert parts_in(run) == {1: [1], 2: [1], 4: [0], 5: [0]}
    (kept / "KEEP").unlink()
    for folder in run.glob("0*"):
        with suppress(OSError):
            folder.rmdir()  # an empty one, which no object store has
    with bridge_to(keep_last=2) as trainer:
        publish(trainer, 6)
        assert parts_in(run) == {5: [0], 6: [0]}


def test_a_version_that_is_kept_stays_until_it_is_let_go(bridge_to: Open) -> None:
    with bridge_to(keep_last=1) as trainer:
        first = publish(trainer, 1)
        with bridge_to() as reader:  # anybody may say it, and need not stay
            reader.keep(first)
        for version in (2, 3):
            trainer.release(trainer.latest_manifest or "")
            publish(trainer, version)
        assert versions_in(trainer) == [1, 3]
    with bridge_to(keep_last=1) as trainer:
        publish(trainer, 4)
        assert versions_in(trainer) == [1, 4]
        trainer.keep(first.update_id, False)
        publish(trainer, 5)
        trainer.release(trainer.latest_manifest or "")
        assert 1 not in versions_in(trainer)


def test_an_engine_that_starts_after_its_trainers_ended_installs_what_several_ranks_published(
    bridge_to: Open, there: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with trainers(2, "files", **there) as group:
        published = [group.publish(shards_of(version), version=version) for version in (1, 2)]
    with bridge_to() as reader:
        assert [one.to_json() for one in reader.versions()] == [one.to_json() for one in published]
        newest = reader.newest()
        assert newest is not None
        assert next(reader.watch()).update_id == newest.update_id
        assert reader.import_update(newest)["w"].equal(matrix(2))
    # (What is published is told as well where another test left that level behind.)
    told = [one for one in caplog.records if one.levelname != "INFO"]
    assert not told  # a part is nothing that had to be left out


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda one: os.truncate(one / "model.safetensors", 100), SegmentError, "has 100 bytes"),
        (lambda one: (one / "model.safetensors").unlink(), VersionNotFound, "is not there"),
        (lambda one: (one / "lists.bin").write_bytes(b"x"), SegmentError, "has 1 bytes, expected"),
        (flip, ChecksumMismatch, "expected"),
    ],
)
def test_files_that_are_not_what_was_published_are_refused_and_the_version_before_stays(
    bridge_to: Open,
    run: Path,
    damage: Callable[[Path], object],
    error: type[Exception],
    words: str,
) -> None:
    with bridge_to() as trainer, bridge_to(source_worker="reader") as reader:
        before = reader.import_update(publish(trainer, 1))
        manifest = publish(trainer, 2)
        damage(next(run.glob("0000000002-*")))
        with pytest.raises(error, match=words):
            reader.import_update(manifest)
        assert_holds(before, 1)
        assert_holds(reader.import_update(publish(trainer, 3)), 3)


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
        steps = itertools.cycle(self.draw.sample(range(_STEPS), _STEPS))
        for _ in range(rounds):
            before = {one.name for one in store.visible()}
            die_at = next(steps)
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
                    store.require_sizes(one.name, {FILE: NBYTES})
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


@pytest.mark.parametrize("rounds", [_STEPS, MANY])
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

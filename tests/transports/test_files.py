"""``files`` keeps every promise of a transport; its versions are checkpoints that outlive it."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.errors import (
    ChecksumMismatch,
    SegmentError,
    StaleUpdate,
    VersionNotFound,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import Piece, Placement
from rl_bridge.installers import ModuleInstallAdapter
from rl_bridge.manifest import AdapterSpec
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.memory import segment
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import Locate, locate_in_files
from rl_bridge.testing.processes import Child, ChildDied, ChildError
from rl_bridge.trainers import read_peft
from rl_bridge.transports.files.directory import DirectoryStore
from rl_bridge.transports.files.transport import Files, FilesPublisher
from tests.groups.meshes import Shards
from tests.groups.rig import trainers
from tests.transports.slow_view import SlowView


class TestFiles(TransportSuite):
    transport_class = Files
    locate: ClassVar[Locate] = staticmethod(locate_in_files)
    num_cycles = 10

    @pytest.fixture
    def transport_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"url": tmp_path / "run", "keep_last": 0, "fenced": False, "timeout_s": 0.05}


# ---- a directory of versions ---------------------------------------------------------------------

WEIGHTS = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {name: one + version for name, one in WEIGHTS.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def trainer(run: Path) -> Iterator[FilesTensorBridge]:
    with files(run, source_worker="trainer") as bridge:
        yield bridge


def files(run: Path | str, **options: Any) -> FilesTensorBridge:
    options = {"timeout_s": 0.05, **options}
    bridge = make_weight_bridge("files", url=run, suspicious="off", **options)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


def publish(trainer: FilesTensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(weights(version), weight_version=version)


def assert_holds(found: Mapping[str, torch.Tensor], version: int) -> None:
    assert all(found[name].equal(one) for name, one in weights(version).items())


def versions_in(run: Path) -> list[int]:
    return [one.weight_version for one in files(run).versions()]


def test_the_files_are_a_checkpoint_and_an_adapter_s_are_what_peft_reads(
    trainer: FilesTensorBridge, run: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    (config / "model.safetensors").write_text("not this one")
    publish(trainer, 1)
    (folder,) = run.glob("0*")
    assert_holds(load_file(folder / "model.safetensors"), 1)
    with files(tmp_path / "parts", config_dir=config, file_nbytes=1 << 20) as other:
        large = {f"w{number}": torch.full((200_000,), float(number)) for number in range(4)}
        other.publish(large, weight_version=1)
        (folder,) = (tmp_path / "parts").glob("0*")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == [
            f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)
        ]
        for name, file in index["weight_map"].items():
            assert load_file(folder / file)[name].equal(large[name])
        assert (folder / "config.json").read_text() == "{}"
        with files(f"file://{tmp_path}/parts") as reader:
            found = reader.import_update(other.newest() or "")
            assert all(found[name].equal(one) for name, one in large.items())
    path = "base_model.model.layers.0.q_proj"
    pair = {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.ones(6, 2)}
    shapes = {name: tuple(one.shape) for name, one in pair.items()}
    spec = AdapterSpec.inferred("policy", shapes, lora_alpha=4)
    manifest = trainer.publish(pair, weight_version=2, adapter=spec)
    found_spec, tensors = read_peft(next(run.glob("0000000002-*")), "policy")
    assert all(tensors[name].equal(one) for name, one in pair.items())
    assert found_spec.scaling_of("layers.0.q_proj") == spec.scaling_of("layers.0.q_proj") == 2.0
    with files(run) as reader:
        assert reader.import_update(manifest).keys() == pair.keys()


def test_an_adapter_that_peft_would_scale_otherwise_has_no_configuration_of_peft_s(
    trainer: FilesTensorBridge, run: Path
) -> None:
    path = "base_model.model.layers.0.q_proj"
    pair = {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.ones(6, 2)}
    spec = AdapterSpec.of_peft(
        "policy", {"r": 2, "lora_alpha": 4}, [], scalings={"layers.0.q_proj": 7.0}
    )
    manifest = trainer.publish(pair, weight_version=1, adapter=spec)
    (folder,) = run.glob("0*")
    assert not (folder / "adapter_config.json").exists()
    with files(run) as reader:
        assert reader.import_update(manifest).keys() == pair.keys()
    assert manifest.adapter is not None
    assert manifest.adapter.scaling_of("layers.0.q_proj") == 7.0


class Writer:
    """A trainer that is killed at a step of a publication."""

    def __init__(self, *, run: str) -> None:
        self.bridge = files(run)

    def publish(self, version: int) -> None:
        publish(self.bridge, version)

    def die_at(self, number: int) -> None:
        """Die at the step of this number from now on, of those that change something on disk."""
        left = itertools.count(number, -1)

        def fatal(original: Callable[..., Any], *, halves: bool = False) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                if not next(left):
                    if halves:
                        os.write(given[0], bytes(given[1][0])[: len(given[1][0]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*given, **options)

            return call

        for name, halves in (("fsync", False), ("writev", True)):
            setattr(os, name, fatal(getattr(os, name), halves=halves))
        for name in ("rename", "mkdir", "unlink"):
            setattr(Path, name, fatal(getattr(Path, name)))


@pytest.mark.parametrize("number", range(0, 30, 3))
def test_a_trainer_killed_at_any_step_leaves_whole_versions_and_the_next_one_goes_on(
    run: Path, number: int
) -> None:
    with Child(Writer, run=str(run)) as child:
        child.ready().call("publish", version=1)
        child.call("die_at", number=number)
        try:
            for version in (2, 3):
                child.call("publish", version=version)
        except ChildDied:
            pass
        else:
            pytest.fail("there are fewer steps: it lives")
    found = files(run).versions()
    assert found
    with files(run) as reader:
        for manifest in found:
            assert_holds(reader.import_update(manifest), manifest.weight_version)
    with files(run) as trainer:
        publish(trainer, 9)
        left = {path.name for path in run.iterdir()} - {".writer-0", "records"}
        assert all(re.fullmatch(r"\d{10}-[0-9a-f]{12}", name) for name in left)
        assert versions_in(run)[-1] == 9
        assert len(left) == len(versions_in(run))


def test_a_trainer_that_begins_anew_at_an_earlier_step_goes_on_behind_what_is_there(
    run: Path,
) -> None:
    with files(run, keep_last=5) as trainer:
        for version in (6, 7, 8):
            trainer.release(publish(trainer, version))
    assert versions_in(run) == [6, 7, 8]
    with files(run, keep_last=5) as trainer, files(run) as reader:
        assert trainer.publisher.last_version is None
        assert versions_in(run) == [6, 7, 8]  # fewer than are kept
        for version in (7, 8):
            trainer.release(publish(trainer, version))
        assert versions_in(run) == [6, 7, 8, 7, 8]
        newest = reader.newest()
        assert newest is not None
        assert newest.publisher_id == trainer.publisher.publisher_id
        assert_holds(reader.import_update(newest), 8)


def test_where_a_group_lost_a_part_or_was_not_committed_the_store_is_not_empty(run: Path) -> None:
    with trainers(2, "files", url=run) as group:
        group.publish(shards_of(1), version=1)
    with files(run) as reader:
        for folder in run.glob("0*"):
            marker = json.loads((folder / "STABLE").read_text())
            (folder / "STABLE").write_text(json.dumps({**marker, "is_committed": False}))
        with pytest.raises(VersionNotFound, match="parts of some"):
            reader.newest_verified()
        shutil.rmtree(next(run.glob("0*-1")))
        with pytest.raises(VersionNotFound, match="parts of some"):
            reader.newest_verified()
        shutil.rmtree(next(run.glob("0*")))
        assert reader.newest_verified() is None


def test_versions_that_are_to_stay_do(run: Path) -> None:
    with files(run, keep_last=2, keep_every=10) as trainer:
        for version in (10, 11, 12, 20, 21, 22, 23):
            trainer.release(publish(trainer, version))
        assert versions_in(run) == [10, 20, 22, 23]
        held = publish(trainer, 24)
        for version in (25, 26, 27):
            trainer.release(publish(trainer, version))
        assert versions_in(run) == [10, 20, 24, 26, 27]
        trainer.release(held)
        assert versions_in(run) == [10, 20, 26, 27]


def test_what_another_trainer_has_not_released_stays_also_where_several_may_publish(
    run: Path,
) -> None:
    with (
        files(run, fenced=False, keep_last=0) as first,
        files(run, fenced=False, keep_last=0) as second,
    ):
        held = publish(first, 1)
        second.release(publish(second, 2))
        with files(run) as reader:
            assert_holds(reader.import_update(held), 1)
    assert versions_in(run) == []


def test_a_second_trainer_is_refused_while_the_first_one_lives(run: Path) -> None:
    with files(run) as trainer, files(run, source_worker="second") as second:
        publish(trainer, 1)
        with pytest.raises(WeightBridgeUnavailableError, match=r"a publisher of rank 0 already"):
            publish(second, 2)
        trainer.close()
        publish(second, 2)
    assert versions_in(run) == [1, 2]


def test_a_trainer_that_wants_to_be_alone_is_refused_where_several_publish_and_the_reverse(
    run: Path,
) -> None:
    with files(run, fenced=False) as first, files(run, fenced=False) as second:
        publish(first, 1)
        publish(second, 2)
        with files(run) as alone, pytest.raises(WeightBridgeUnavailableError, match="expected one"):
            publish(alone, 3)
    with files(run) as alone:
        publish(alone, 3)
        with (
            files(run, fenced=False) as one,
            pytest.raises(WeightBridgeUnavailableError, match="fenced=False"),
        ):
            publish(one, 4)
    assert versions_in(run)[-1] == 3


@pytest.mark.parametrize("is_retaken", [False, True])
def test_an_older_trainer_that_lost_its_lock_is_refused_and_removes_nothing(
    run: Path, *, is_retaken: bool
) -> None:
    with files(run, keep_last=1) as older:
        older.release(publish(older, 5))
        if is_retaken:  # as where a server of NFS forgot the lock
            (run / ".writer-0").rename(run / "writer")
            shutil.copy(run / "writer", run / ".writer-0")
        else:
            (run / ".writer-0").unlink()
        with files(run, keep_last=2) as newer:
            newer.release(publish(newer, 6))
            newer.release(publish(newer, 7))
            with pytest.raises(WeightBridgeUnavailableError, match="has taken over"):
                publish(older, 8)
            older.close()
            assert versions_in(run) == [6, 7]
            publish(newer, 8)


def test_an_older_trainer_that_lost_its_lock_is_refused_before_its_group_is_shown(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainers(2, "files", url=run) as group:
        group.publish(shards_of(1), version=1)
        joining = FilesPublisher.join_group

        def late(end: FilesPublisher, update_id: str, manifest: GroupManifest) -> None:
            (run / ".writer-1").unlink(missing_ok=True)
            joining(end, update_id, manifest)

        monkeypatch.setattr(FilesPublisher, "join_group", late)
        found = group.try_publish(shards_of(2), version=2)
        assert all(isinstance(one, WeightBridgeError) for one in found)
    assert versions_in(run) == [1]


@pytest.mark.parametrize(
    ("number", "match"), [(errno.EIO, "Input/output error"), (errno.EACCES, "denied")]
)
def test_a_marker_that_cannot_be_read_is_an_error_and_no_missing_version(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, match: str
) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2):
            newest = publish(trainer, version)
        with monkeypatch.context() as patched:
            fail_on_marker(patched, number)
            with files(run) as reader:
                for look in (reader.newest, reader.versions):
                    with pytest.raises(WeightBridgeUnavailableError, match=match):
                        look()
                with pytest.raises(WeightBridgeUnavailableError, match=match):
                    reader.import_update(newest)
            publish(trainer, 3)  # who wrote it knows its place
            with files(run, fenced=False) as other, pytest.raises(WeightBridgeUnavailableError):
                other.newest()
        publish(trainer, 4)
    assert versions_in(run) == [1, 2, 3, 4]


def test_a_marker_that_cannot_be_read_stops_the_trainer_that_comes_next(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(run) as trainer:
        publish(trainer, 2)
    with monkeypatch.context() as patched:
        fail_on_marker(patched, errno.EIO)
        with (
            files(run) as trainer,
            pytest.raises(WeightBridgeUnavailableError, match="Input/output error"),
        ):
            publish(trainer, 3)
    assert versions_in(run) == [2]


def test_a_marker_of_another_rank_that_cannot_be_read_stops_nobody(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(run, source_rank=1) as trainer:
        publish(trainer, 2)
    with monkeypatch.context() as patched:
        fail_on_marker(patched, errno.EIO)
        with files(run) as trainer:
            publish(trainer, 3)
    assert versions_in(run) == [2, 3]


def test_a_watcher_outlives_looks_that_fail_and_says_so_at_the_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(run, keep_last=9) as trainer, files(run) as reader:
        publish(trainer, 1)
        watched = reader.watch(timeout_s=60, every_s=0.01)
        assert next(watched).weight_version == 1
        publish(trainer, 2)
        with monkeypatch.context() as patched:
            fail_on_marker(patched, errno.EIO, times=2)
            assert next(watched).weight_version == 2
        watched = reader.watch(timeout_s=0.05, every_s=0.01)
        assert next(watched).weight_version == 2
        fail_on_marker(monkeypatch, errno.EIO)
        with pytest.raises(WeightBridgeUnavailableError, match="Input/output error"):
            next(watched)
        with pytest.raises(WeightBridgeUnavailableError, match="Input/output error"):
            next(reader.watch(timeout_s=60, every_s=0.01))


def test_a_marker_that_was_replaced_where_nfs_looked_is_read_when_it_is_opened_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2):
            publish(trainer, version)
    with monkeypatch.context() as patched:
        fail_on_marker(patched, errno.ESTALE, times=2)
        assert versions_in(run) == [1, 2]
    fail_on_marker(monkeypatch, errno.ESTALE)
    with pytest.raises(WeightBridgeUnavailableError, match="Stale file handle"):
        versions_in(run)


def fail_on_marker(patched: pytest.MonkeyPatch, number: int, *, times: int = 10**9) -> None:
    """Have the marker of version 2 fail when it is opened, so many times."""
    opening, left = Path.open, itertools.count(times, -1)

    def flaky(path: Path, *given: Any, **options: Any) -> Any:
        if path.match("0000000002-*/STABLE") and next(left) > 0:
            raise OSError(number, os.strerror(number))
        return opening(path, *given, **options)

    patched.setattr(Path, "open", flaky)


def test_a_version_whose_predecessors_are_not_visible_goes_behind_what_its_trainer_wrote(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2):
            publish(trainer, version)
        with monkeypatch.context() as patched:  # as where a listing of NFS is an old one
            patched.setattr(DirectoryStore, "names", lambda _: [])
            publish(trainer, 3)
        publish(trainer, 4)
    assert versions_in(run) == [1, 2, 3, 4]


def test_a_child_that_a_trainer_forked_does_not_keep_the_next_trainer_out(run: Path) -> None:
    here, there = os.pipe()
    with files(run) as trainer:
        publish(trainer, 1)
        is_there, child_s = os.pipe()
        child = os.fork()
        if not child:
            os.write(child_s, b"x")
            os.read(here, 1)
            os._exit(0)
        assert os.read(is_there, 1) == b"x"
    try:
        with files(run) as following:
            publish(following, 2)
    finally:
        os.write(there, b"x")
        os.waitpid(child, 0)
        for one in (here, there, is_there, child_s):
            os.close(one)


def test_a_watcher_gets_the_newest_version_and_then_each_later_one(run: Path) -> None:
    with files(run) as trainer, files(run) as reader:
        publish(trainer, 1)
        publish(trainer, 2)
        watched = reader.watch(timeout_s=5.0, every_s=0.01)
        assert next(watched).weight_version == 2
        publish(trainer, 3)
        assert next(watched).weight_version == 3
        assert [one.weight_version for one in reader.watch(timeout_s=0.05, every_s=0.01)] == [3]


def test_a_watcher_that_the_kernel_tells_of_changes_need_not_look(run: Path) -> None:
    pytest.importorskip("watchfiles")
    ended = threading.Event()
    with files(run, keep_last=1) as trainer, files(run) as reader:
        manifest = publish(trainer, 1)

        def go_on(last: WeightUpdateManifest) -> None:
            for version in itertools.count(2):
                if ended.is_set():
                    return
                trainer.release(last)
                last = publish(trainer, version)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(go_on, manifest)
            try:
                watched = reader.watch(timeout_s=1000.0, every_s=1000.0)
                # Two looks come by themselves: before changes are told, and right after that. A
                # third one would come when the test is long over.
                seen = [one.weight_version for one in itertools.islice(watched, 5)]
            finally:
                ended.set()
    assert len(seen) == 5
    assert seen == sorted(set(seen))


def test_a_watcher_misses_none_where_each_version_is_removed_before_the_next(run: Path) -> None:
    reader = files(run)
    watched = reader.watch(timeout_s=30.0, every_s=0.01)
    for _ in range(2):  # trainers, one after the other, in a directory that is empty in between
        with files(run, keep_last=0) as trainer:
            for version in (1, 2, 3):
                manifest = publish(trainer, version)
                assert next(watched).update_id == manifest.update_id
                trainer.release(manifest)


def test_a_watcher_waits_for_a_directory_that_its_trainer_will_make(run: Path) -> None:
    assert list(files(run).watch(timeout_s=0.05, every_s=0.01)) == []
    with pytest.raises(ValueError, match="every_s=0: expected seconds above 0"):
        files(run).watch(every_s=0)


def test_a_watcher_is_not_given_an_older_version_where_the_newest_is_withdrawn(run: Path) -> None:
    with files(run, keep_last=0) as trainer, files(run) as reader:
        publish(trainer, 1)
        newest = publish(trainer, 2)
        watched = reader.watch(timeout_s=0.1, every_s=0.01)
        assert next(watched).weight_version == 2
        trainer.release(newest)
        assert versions_in(run) == [1]
        assert next(watched, None) is None


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda one: (one / "STABLE").unlink(), "is gone, or not written yet"),
        (lambda one: (one / "STABLE").write_text("{}"), "is no marker"),
        (lambda one: one.rename(one.with_name("elsewhere")), "it was removed, or is not visible"),
    ],
)
def test_a_version_without_its_marker_or_its_name_is_refused_and_the_one_before_stays(
    trainer: FilesTensorBridge, run: Path, damage: Callable[[Path], object], error: str
) -> None:
    with files(run) as reader:
        before = reader.import_update(publish(trainer, 1))
        manifest = publish(trainer, 2)
        damage(next(run.glob("0000000002-*")))
        with pytest.raises(SegmentError, match=error):
            reader.import_update(manifest)
        assert_holds(before, 1)
        assert_holds(reader.import_update(publish(trainer, 3)), 3)


def test_bytes_of_another_version_are_a_checksum_mismatch(
    trainer: FilesTensorBridge, run: Path
) -> None:
    publish(trainer, 1)
    manifest = publish(trainer, 2)
    one, other = sorted(run.glob("0*"))
    shutil.copy(one / "model.safetensors", other / "model.safetensors")
    with files(run) as reader, pytest.raises(ChecksumMismatch):
        reader.import_update(manifest)
    (other / "manifest.json").write_text((one / "manifest.json").read_text())
    assert versions_in(run) == [1]  # a manifest that the marker was not made for is not offered
    (one / "manifest.json").write_bytes(b"\xff")
    publish(trainer, 3)
    assert versions_in(run) == [3]


def test_a_full_disk_is_an_error_with_a_remedy_and_nothing_is_left_of_the_version(
    trainer: FilesTensorBridge, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trainer, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        with pytest.raises(SegmentError, match=r"No space left.*free space there"):
            publish(trainer, 2)
    assert versions_in(run) == [1]
    assert len(list(run.glob("[0.]*"))) == 2  # the version, and the lock
    publish(trainer, 3)


def test_a_version_that_cannot_be_leased_is_not_left_visible(
    trainer: FilesTensorBridge, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trainer, 1)

    def refused(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patched:
        patched.setattr(segment, "try_shared", refused)
        with pytest.raises(WeightBridgeUnavailableError, match="No locks available"):
            publish(trainer, 2)
    assert versions_in(run) == [1]
    publish(trainer, 3)


@pytest.mark.parametrize("url", ["file://host/run", ""])
def test_a_url_of_something_else_than_a_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a directory"):
        files(url)


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_that_sees_changes_late_and_in_any_order_reads_whole_versions_or_none(
    trainer: FilesTensorBridge, run: Path, seed: int
) -> None:
    view = SlowView(run, run.with_name("seen"), seed)
    draw, late = random.Random(seed), list[WeightUpdateManifest]()
    with files(view.root, timeout_s=0.001, fetch_once=False) as reader:
        for version in range(1, 9):
            manifest = publish(trainer, version)
            view.catch_up(draw.randrange(12))
            for one in (manifest, reader.newest() or manifest):
                is_whole = is_all_seen(run, view.root, one)
                try:
                    found = reader.import_update(one)
                except VersionNotFound:
                    assert not is_whole
                    late.append(one)
                else:
                    assert is_whole
                    assert_holds(found, one.weight_version)
                    reader.release_imported(one)
        # What was not visible in time is refused by nobody.
        view.catch_up()
        for one in late:
            assert_holds(reader.import_update(one), one.weight_version)
            reader.release_imported(one)
    assert late


def is_all_seen(made: Path, seen: Path, manifest: WeightUpdateManifest) -> bool:
    """Whether all files that an import takes are seen as they were made."""
    (folder,) = made.glob(f"{manifest.weight_version:010d}-*")
    names = ("LOCK", "STABLE", "model.safetensors", "lists.bin")
    pairs = [(folder / name, seen / folder.name / name) for name in names]
    return all(one.exists() and one.read_bytes() == there.read_bytes() for there, one in pairs)


@pytest.mark.parametrize("seed", range(4))
def test_a_version_of_which_changes_are_still_to_be_seen_is_waited_for(
    trainer: FilesTensorBridge, run: Path, seed: int
) -> None:
    view = SlowView(run, run.with_name("seen"), seed)
    manifest = publish(trainer, 1)
    with files(view.root, timeout_s=60.0) as reader, ThreadPoolExecutor(1) as pool:
        importing = pool.submit(reader.import_update, manifest)
        while not importing.done():
            view.catch_up(1)
        assert_holds(importing.result(), 1)


# ---- another user --------------------------------------------------------------------------------


class Nobody:
    """A process of a user that owns nothing."""

    def __init__(self, *, run: str) -> None:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
        self.run = run

    def look(self) -> list[int]:
        with files(self.run, fetch_once=False) as reader:
            for manifest in (found := reader.versions()):
                assert_holds(reader.import_update(manifest), manifest.weight_version)
                reader.acknowledge(manifest)
        return [one.weight_version for one in found]

    def publish(self) -> None:
        with files(self.run) as trainer:
            publish(trainer, 9)

    def keep(self) -> None:
        with files(self.run) as reader:
            reader.keep(reader.newest() or "")


_NOBODY = 65534


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_reads_what_it_may_and_is_told_what_it_may_not() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own is closed to others
        Path(place).chmod(0o755)
        run = Path(place) / "run"
        with files(run) as trainer:
            for version in (1, 2):
                publish(trainer, version)
        (folder,) = run.glob("0000000002-*")
        with Child(Nobody, run=str(run)) as child:
            assert child.ready().call("look") == [1, 2]
            for ask, words in (("publish", "cannot hold versions"), ("keep", "cannot be kept")):
                with pytest.raises(ChildError, match=rf"{words}: Permission denied") as told:
                    child.call(ask)
                assert told.value.kind == "WeightBridgeUnavailableError"
            names = ("model.safetensors", "lists.bin", "manifest.json", "LOCK", "STABLE")
            for path in (*(folder / name for name in names), folder, run):
                mode = path.stat().st_mode
                path.chmod(0)
                with pytest.raises(ChildError, match="Permission denied") as told:
                    child.call("look")
                assert told.value.kind == "WeightBridgeUnavailableError"
                path.chmod(mode)
            assert child.call("look") == [1, 2]


# ---- the newest version that is whole ------------------------------------------------------------


def flip(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "skipped", "reason"),
    [
        (flip, 1, "expected"),
        (lambda one: (one / "model.safetensors").unlink(), 1, "is not there"),
        (lambda one: os.truncate(one / "model.safetensors", 100), 1, "has 100 bytes"),
        (lambda one: (one / "manifest.json").write_text("{"), 0, "is left out"),
    ],
)
def test_who_starts_late_or_goes_on_takes_the_newest_version_that_is_whole(
    run: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    skipped: int,
    reason: str,
) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2, 3):
            publish(trainer, version)
    damage(next(run.glob("0000000003-*")))
    engine = torch.nn.ParameterDict({name: torch.zeros_like(one) for name, one in WEIGHTS.items()})
    with (
        files(run) as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine)
        ) as executor,
    ):
        executor.update_weights(bridge.newest_verified() or "")
        assert_holds(dict(engine.items()), 2)
    assert len([one for one in caplog.records if "version 3 is skipped" in one.message]) == skipped
    assert reason in caplog.text
    with files(run, keep_last=9) as trainer:
        found = trainer.newest_verified()
        assert found is not None
        assert_holds(trainer.import_update(found), 2)
        publish(trainer, found.weight_version + 1)
        assert trainer.newest() == trainer.latest_manifest


def test_a_bridge_that_skipped_a_version_skips_it_again_and_takes_none_below_the_active_one(
    run: Path,
) -> None:
    with files(run, keep_last=9) as trainer, files(run) as bridge:
        for version in (1, 2, 3):
            publish(trainer, version)
        flip(next(run.glob("0000000003-*")))
        for _ in range(2):
            second = bridge.newest_verified()
            assert second is not None
            assert second.weight_version == 2
        assert second is not None
        bridge.acknowledge(second)
        assert bridge.newest_verified() == second
        bridge.release_imported(second)
        shutil.rmtree(next(run.glob("0000000002-*")))
        for _ in range(2):
            with pytest.raises(StaleUpdate, match="version 2 of publisher"):
                bridge.newest_verified()
        fourth = publish(trainer, 4)
        assert bridge.newest_verified() == fourth
        bridge.reject(fourth, "not wanted")
        with pytest.raises(StaleUpdate):
            bridge.newest_verified()


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("file", ["model.safetensors", "lists.bin", "manifest.json"])
def test_a_file_that_cannot_be_read_now_makes_no_older_version_the_newest(
    run: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2):
            publish(trainer, version)
    opening, reading = os.open, Path.read_bytes

    def is_hit(path: object) -> bool:
        return Path(str(path)).match(f"0000000002-*/{file}")

    def flaky_open(path: Any, *given: Any, **options: Any) -> int:
        if is_hit(path):
            raise OSError(number, os.strerror(number))
        return opening(path, *given, **options)

    def flaky_read(path: Path) -> bytes:
        if is_hit(path):
            raise OSError(number, os.strerror(number))
        return reading(path)

    with files(run) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", flaky_open)
            patched.setattr(Path, "read_bytes", flaky_read)
            with pytest.raises(WeightBridgeUnavailableError, match=os.strerror(number)):
                reader.newest_verified()
        found = reader.newest_verified()  # nothing was rejected
        assert found is not None
        assert found.weight_version == 2


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json"])
def test_a_link_to_itself_in_a_file_s_place_is_damage(run: Path, file: str) -> None:
    with files(run, keep_last=9) as trainer:
        for version in (1, 2):
            publish(trainer, version)
    path = next(run.glob("0000000002-*")) / file
    path.unlink()
    path.symlink_to(path)
    with files(run) as reader:
        found = reader.newest_verified()
        assert found is not None
        assert found.weight_version == 1


def test_where_no_version_is_whole_that_is_an_error_and_not_an_empty_store(run: Path) -> None:
    with files(run) as bridge:
        assert bridge.newest_verified() is None  # its trainer will make the directory
    with files(run, keep_last=9) as trainer:
        for version in (1, 2, 3):
            publish(trainer, version)
    for folder in run.glob("000000000[23]-*"):
        flip(folder)
    with files(run) as bridge:
        with pytest.raises(VersionNotFound, match=r"a whole one among the newest 2, got none"):
            bridge.newest_verified(max_skipped=1)
        for folder in run.glob("0*"):
            (folder / "STABLE").write_text("{}")
        with pytest.raises(VersionNotFound, match="rl-bridge files verify"):
            bridge.newest_verified()
        with pytest.raises(ValueError, match="max_skipped"):
            bridge.newest_verified(max_skipped=-1)


# ---- versions of several ranks -------------------------------------------------------------------


def shards_of(version: int) -> list[Shards]:
    """What two ranks hold of one matrix."""
    whole = matrix(version)

    def part(rank: int) -> Shards:
        piece = Piece(
            name="w", global_shape=(4, 3), offset=(2 * rank, 0), shape=(2, 3), local_offset=(0, 0)
        )
        placed = Placement(dtype="float32", shape=(2, 3), pieces=(piece,))
        return {"w": whole[2 * rank : 2 * rank + 2].clone()}, {"w": placed}

    return [part(rank) for rank in (0, 1)]


def matrix(version: int) -> torch.Tensor:
    return torch.arange(12.0).view(4, 3) + version


def parts_in(run: Path) -> dict[int, list[int]]:
    """Version -> ranks whose directories are there."""
    found: dict[int, list[int]] = {}
    for path in sorted(run.glob("0*")):
        version, _, rank = (path.name + "-0").split("-")[:3]
        found.setdefault(int(version), []).append(int(rank))
    return {version: sorted(ranks) for version, ranks in found.items()}


# What transformers, PEFT, vLLM and SGLang take for a model, or for a part of one.
_LOADED = [
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack"),
    *("*.index.json", "*config.json", "params.json", "*.model", "*.tiktoken", "*.jinja"),
]


def test_no_loader_takes_a_part_for_a_model(run: Path, tmp_path: Path) -> None:
    configs = tmp_path / "config"
    configs.mkdir()
    for name in ("config.json", "params.json", "tokenizer.model", "chat_template.jinja"):
        (configs / name).write_text("{}")
    with trainers(2, "files", url=run, config_dir=configs) as group:
        group.publish(shards_of(1), version=1)
    for folder in run.glob("0*"):
        names = {path.name for path in folder.iterdir()}
        assert {"model.safetensors.part", "config.json.part", "lists.bin.part"} <= names
        assert [name for name in names for one in _LOADED if fnmatch(name, one)] == []


def test_parts_are_read_that_an_earlier_release_wrote_as_models(run: Path) -> None:
    with trainers(2, "files", url=run) as group:
        group.publish(shards_of(1), version=1)
    for folder in run.glob("0*"):
        for path in folder.glob("*.part"):
            path.rename(path.with_suffix(""))
        marker = json.loads((folder / "STABLE").read_text())
        assert marker.pop("suffix") == ".part"
        (folder / "STABLE").write_text(json.dumps(marker))
    with files(run) as reader:
        assert reader.import_update(reader.newest() or "")["w"].equal(matrix(1))


def test_the_marker_of_a_whole_version_is_one_that_earlier_releases_read(run: Path) -> None:
    with files(run) as trainer:
        publish(trainer, 1)
    (marker,) = run.glob("0*/STABLE")
    assert "suffix" not in json.loads(marker.read_text())


def test_a_group_that_lost_a_part_does_not_take_the_place_of_one_that_is_whole(run: Path) -> None:
    with trainers(2, "files", url=run, keep_last=2) as group:
        for version in (1, 2):
            group.publish(shards_of(version), version=version)
    shutil.rmtree(next(run.glob("0000000002-*-1")))
    for rank in (0, 1):
        with files(run, keep_last=1, source_rank=rank) as trainer:
            trainer.publisher  # noqa: B018 - which collects at its start
    with files(run) as reader:
        assert versions_in(run) == [1]
        assert reader.import_update(reader.newest() or "")["w"].equal(matrix(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_version_whose_rank_fails_in_the_vote_is_never_listed_and_leaves_no_part(
    run: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []

    def failing(end: FilesPublisher, update_id: str, manifest: GroupManifest) -> None:
        joining(end, update_id, manifest)
        listed.extend(one.weight_version for one in files(run).versions())
        if manifest.weight_version == 2 and manifest.parts[rank].update_id == update_id:
            raise SegmentError("planted: a full disk. Free space.")

    joining = FilesPublisher.join_group
    monkeypatch.setattr(FilesPublisher, "join_group", failing)
    with trainers(2, "files", url=run, keep_last=1) as group:
        group.release(group.publish(shards_of(1), version=1))
        found = group.try_publish(shards_of(2), version=2)
        assert sorted(type(one).__name__ for one in found) == ["GroupAborted", "SegmentError"]
        assert versions_in(run) == [1]
        assert parts_in(run) == {1: [0, 1]}  # what was not published takes no other's place
        group.release(group.publish(shards_of(3), version=3))
        assert parts_in(run) == {3: [0, 1]}
    assert set(listed) <= {1}


def test_parts_of_a_version_that_its_killed_ranks_did_not_commit_go_with_the_next_trainers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(FilesPublisher, "show_group", lambda *_: None)
        killed.setattr(FilesPublisher, "_collect", lambda *_: None)
        with trainers(2, "files", url=run) as group:
            group.publish(shards_of(1), version=1)
    assert parts_in(run) == {1: [0, 1]}
    assert versions_in(run) == []
    with trainers(2, "files", url=run) as group:
        group.publish(shards_of(2), version=2)
        assert parts_in(run) == {2: [0, 1]}


@pytest.mark.parametrize("dying", [0, 1])
def test_a_committed_version_is_listed_though_a_rank_died_before_it_could_say_so(
    run: Path, dying: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    showing = FilesPublisher.show_group

    def show_group(end: FilesPublisher, update_id: str) -> None:
        if end.names[update_id].endswith("-1") != bool(dying):
            showing(end, update_id)

    monkeypatch.setattr(FilesPublisher, "show_group", show_group)
    with trainers(2, "files", url=run) as group:
        published = group.publish(shards_of(1), version=1)
        assert versions_in(run) == [1]
    with files(run) as reader:
        assert reader.newest() == published
        assert reader.import_update(published)["w"].equal(matrix(1))


@pytest.mark.parametrize("left", ["{", '{"format": "rl_bridge.files/2"}', None])
def test_parts_stay_as_long_as_their_first_one_may_be_read_again(
    run: Path, left: str | None
) -> None:
    with trainers(2, "files", url=run, keep_last=9) as group:
        group.publish(shards_of(1), version=1)
    (first,) = run.glob(f"0000000001-{12 * '[0-9a-f]'}")
    marker = (first / "STABLE").read_bytes()
    if left is None:
        (first / "STABLE").unlink()
    else:
        (first / "STABLE").write_text(left)
    with files(run, keep_last=9, fenced=False) as trainer:  # which sweeps nothing unfinished
        publish(trainer, 2)
    (first / "STABLE").write_bytes(marker)
    assert sorted(versions_in(run)) == [1, 2]


def test_a_part_is_not_removed_while_its_rank_is_ahead_of_the_first(run: Path) -> None:
    """Neither while it is published, nor while the first rank's own part is there."""
    seen: list[dict[int, list[int]]] = []
    showing = FilesPublisher.show

    def show(end: FilesPublisher, manifest: WeightUpdateManifest, *, is_part: bool) -> None:
        if end.names or manifest.weight_layout.rank:
            showing(end, manifest, is_part=is_part)
            ahead.set()
            return
        assert ahead.wait(60)
        end._collect()
        seen.append(parts_in(run))
        showing(end, manifest, is_part=is_part)

    ahead = threading.Event()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FilesPublisher, "show", show)
        with trainers(2, "files", url=run) as group:
            group.publish(shards_of(1), version=1)
    assert seen == [{1: [1]}]
    assert versions_in(run) == [1]


def test_all_ranks_keep_the_same_versions(run: Path) -> None:
    with trainers(2, "files", url=run, keep_last=2, keep_every=10) as group:
        for version in (9, 10, 11, 12, 13):
            group.release(group.publish(shards_of(version), version=version))
        assert parts_in(run) == {10: [0, 1], 12: [0, 1], 13: [0, 1]}
    with trainers(2, "files", url=run, keep_last=1) as group:
        group.release(group.publish(shards_of(14), version=14))
        assert parts_in(run) == {14: [0, 1]}
        assert versions_in(run) == [14]


# ---- versions that are kept ----------------------------------------------------------------------


def test_of_a_version_that_is_kept_all_parts_stay(run: Path) -> None:
    with trainers(2, "files", url=run, keep_last=1) as group:
        first = group.publish(shards_of(1), version=1)
        with files(run) as reader:
            reader.keep(first.update_id)
        group.release(first)
        for version in (2, 3):
            group.release(group.publish(shards_of(version), version=version))
        assert parts_in(run) == {1: [0, 1], 3: [0, 1]}
        with files(run) as reader:
            reader.keep(first, False)
        group.publish(shards_of(4), version=4)
        assert parts_in(run) == {4: [0, 1]}


def test_a_version_that_is_not_there_cannot_be_kept(run: Path) -> None:
    with files(run, keep_last=0) as trainer:
        first = publish(trainer, 1)
        trainer.release(first)
        with files(run) as reader, pytest.raises(VersionNotFound, match="it was removed"):
            reader.keep(first)

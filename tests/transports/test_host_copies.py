"""Readers of ``files`` on one host fetch a version once, and lose nothing by it."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.errors import ChecksumMismatch
from rl_bridge.testing.processes import Child, ChildDied, until
from rl_bridge.transports.files import host_copies, transport
from rl_bridge.transports.files.directory import DirectoryStore
from rl_bridge.transports.files.transport import Files

NAMES = Path(tempfile.gettempdir())
WEIGHTS = {name: torch.arange(3 << 20, dtype=torch.float32) for name in ("v", "w")}
"""They are read in two chunks."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def trainer(run: Path) -> Iterator[FilesTensorBridge]:
    with files(run) as bridge:
        yield bridge


def files(run: Path | str, **options: Any) -> FilesTensorBridge:
    bridge = make_weight_bridge("files", url=run, suspicious="off", **options)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


def publish(trainer: FilesTensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish(
        {name: one + version for name, one in WEIGHTS.items()}, weight_version=version
    )


def assert_read(reader: FilesTensorBridge, manifest: WeightUpdateManifest) -> None:
    found = reader.import_update(manifest)
    version = manifest.weight_version
    assert all(found[name].equal(one + version) for name, one in WEIGHTS.items())


def damage(run: Path, *, by: int = 1) -> None:
    """Change the last byte of the newest version's weights."""
    path = max(run.glob("*/model.safetensors"))
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([(last + by) % 256]))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "PATIENCE_S", 0.05)


def names_of(manifest: WeightUpdateManifest) -> list[Path]:
    return list(NAMES.glob(f"rlb-files-*{manifest.update_id}"))


class Reader:
    """An engine in a process of its own."""

    def __init__(self, *, run: str) -> None:
        self.bridge = files(run)

    def read(self, manifest: str) -> None:
        assert_read(self.bridge, WeightUpdateManifest.from_json(manifest))

    def signal_itself_at_the_second_chunk(self, number: int) -> None:
        lock, calls, original = threading.Lock(), [0], DirectoryStore.read

        def read(*given: Any) -> None:
            with lock:
                calls[0] += 1
                if calls[0] == 2:
                    os.kill(os.getpid(), number)
            original(*given)

        DirectoryStore.read = read  # type: ignore[assignment,method-assign]  # in this process alone


@pytest.fixture
def engine(run: Path, trainer: FilesTensorBridge) -> Iterator[Child]:
    del trainer  # it makes the directory
    with Child(Reader, run=str(run)) as child:
        yield child.ready()


def test_a_version_that_one_engine_fetched_is_mapped_by_the_next_one_and_verified(
    run: Path, trainer: FilesTensorBridge, engine: Child
) -> None:
    manifest = publish(trainer, 1)
    engine.call("read", manifest=manifest.to_json())
    damage(run)
    with files(run) as second:
        assert_read(second, manifest)
        with files(run, fetch_once=False) as third, pytest.raises(ChecksumMismatch):
            third.import_update(manifest)
        looking = Files(url=run).consumer_end("verify", 0)
        assert looking.look(manifest).digests() != manifest.digests
        looking.close()


def test_what_was_mapped_stays_when_the_process_that_fetched_it_dies(
    run: Path, trainer: FilesTensorBridge, engine: Child
) -> None:
    manifest = publish(trainer, 1)
    engine.call("read", manifest=manifest.to_json())
    with files(run) as second:
        found = second.import_update(manifest)
        engine.process.kill()
        engine.process.join()
        assert all(found[name].equal(one + 1) for name, one in WEIGHTS.items())
    damage(run)
    with files(run) as third, pytest.raises(ChecksumMismatch):
        third.import_update(manifest)
    assert not names_of(manifest)


def test_engines_that_begin_at_the_same_time_fetch_once(
    run: Path, trainer: FilesTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(trainer, 1)
    reads: list[tuple[Any, ...]] = []
    original, all_are_here = DirectoryStore.read, threading.Barrier(4, timeout=60.0)

    def read(*given: Any) -> None:
        reads.append(given)
        if len(reads) == 1:
            all_are_here.wait()
        original(*given)

    find = DirectoryStore.find

    def found(store: DirectoryStore, update_id: str) -> str:
        name = find(store, update_id)
        if threading.current_thread() in waiting:
            all_are_here.wait()
        return name

    waiting: list[threading.Thread] = []
    monkeypatch.setattr(DirectoryStore, "read", read)
    monkeypatch.setattr(DirectoryStore, "find", found)

    def later(reader: FilesTensorBridge) -> None:
        waiting.append(threading.current_thread())
        assert_read(reader, manifest)

    with ExitStack() as stack:
        readers = [stack.enter_context(files(run)) for _ in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        every = [pool.submit(assert_read, readers[0], manifest)]
        every += [pool.submit(later, one) for one in readers[1:]]
        for one in every:
            one.result(timeout=60.0)
    assert len(reads) == 3  # two chunks, and the lists


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)], ids=["killed", "stopped"]
)
def test_a_process_that_does_not_end_its_fetch_costs_the_others_one_of_their_own(
    run: Path, trainer: FilesTensorBridge, engine: Child, number: int, ends: bool
) -> None:
    manifest = publish(trainer, 1)
    engine.call("signal_itself_at_the_second_chunk", number=number)
    with ThreadPoolExecutor(1) as pool, files(run) as second:
        call: Callable[..., Any] = engine.call
        fetching = pool.submit(call, "read", manifest=manifest.to_json())
        if ends:
            with pytest.raises(ChildDied):
                fetching.result(timeout=60.0)
        else:
            stat = Path(f"/proc/{engine.pid}/stat")
            until(lambda: ") T " in stat.read_text(), what="a stop of the engine")
        assert_read(second, manifest)
        if not ends:
            os.kill(engine.pid, signal.SIGCONT)
            fetching.result(timeout=60.0)


def test_a_fetch_that_is_slow_and_goes_on_is_waited_for(
    run: Path, trainer: FilesTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish({"w": torch.zeros(16 << 20)}, weight_version=1)  # one chunk
    monkeypatch.setattr(transport, "_PIECE_NBYTES", 1 << 20)
    monkeypatch.setattr(host_copies, "PATIENCE_S", 2.0)
    reads: list[tuple[Any, ...]] = []
    original = DirectoryStore.read

    def slow(*given: Any) -> None:
        reads.append(given)
        threading.Event().wait(0.04)
        original(*given)

    monkeypatch.setattr(DirectoryStore, "read", slow)
    with files(run) as first, files(run) as second, ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(reader.import_update, manifest) for reader in (first, second)]:
            one.result(timeout=60.0)
    assert len(reads) == 64 + 1


def test_a_name_that_was_left_in_another_container_goes_with_the_next_reader(run: Path) -> None:
    left = NAMES / f"rlb-files-{os.geteuid()}-1-{'0' * 32}"
    left.touch(mode=0o600)
    with files(run) as trainer, files(run) as reader:
        reader.import_update(publish(trainer, 1))
        assert not left.exists()


def test_what_is_not_the_version_is_not_offered(run: Path, trainer: FilesTensorBridge) -> None:
    manifest = publish(trainer, 1)
    damage(run)
    with files(run) as first, files(run) as second:
        with pytest.raises(ChecksumMismatch):
            first.import_update(manifest)
        damage(run, by=-1)
        assert_read(second, manifest)


def test_a_copy_whose_memory_was_written_again_is_not_mapped(
    run: Path, trainer: FilesTensorBridge
) -> None:
    manifests = [publish(trainer, version) for version in (1, 2, 3)]
    with files(run) as first, files(run) as second:
        for manifest in manifests:
            assert_read(first, manifest)
            first.release_imported(manifest)
        for manifest in manifests:
            assert_read(second, manifest)
    assert not any(map(names_of, manifests))


def test_a_name_that_a_killed_process_left_goes_with_the_next_reader(
    run: Path, trainer: FilesTensorBridge, engine: Child
) -> None:
    manifest = publish(trainer, 1)
    engine.call("read", manifest=manifest.to_json())
    assert names_of(manifest)
    engine.process.kill()
    engine.process.join()
    with files(run) as second:
        second.import_update(publish(trainer, 2))
        assert not names_of(manifest)

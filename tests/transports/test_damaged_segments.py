"""Segments that vanish, shrink or are replaced: a typed error, never a signal, on either side.

What is damaged is damaged from here; who meets it is a child, whose exit code tells of a signal.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import SegmentError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.peer import BridgeOver, Peer, hashes, sample_weights
from rl_bridge.testing.processes import Child, ChildError
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.shared_memory import SharedMemory

Damage = Callable[[Path], None]


def peer(**kwargs: Any) -> Child:
    return Child(Peer, transport_class=SharedMemory, transport_kwargs=kwargs)


def truncate(path: Path) -> None:
    os.truncate(path, mmap.PAGESIZE)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + mmap.PAGESIZE)


def unlink(path: Path) -> None:
    path.unlink()


def replace_by_a_copy(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy(path, copy)
    copy.replace(path)


def replace_by_a_link(path: Path) -> None:
    away = path.with_suffix(".away")
    path.rename(away)
    path.symlink_to(away)


def replace_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Damage, ...] = (
    truncate,
    empty,
    grow,
    unlink,
    replace_by_a_copy,
    replace_by_a_link,
    replace_by_a_pipe,
    replace_by_a_directory,
)


@pytest.fixture(scope="module")
def consumers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """One child for all damages: it must survive each."""
    with peer(directory=tmp_path_factory.mktemp("shared") / "segments") as child:
        yield child.ready()


@pytest.fixture
def directory(consumers: Child) -> Path:
    return Path(consumers.arguments["transport_kwargs"]["directory"])


def errors_of(call: Callable[[], object]) -> tuple[str, ...]:
    with pytest.raises(ChildError) as caught:
        call()
    return caught.value.lineage


def clear(directory: Path) -> None:
    for left in directory.glob("*"):
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def attempt(child: Child, name: str, **options: Any) -> Any:
    """Call: it answers, or fails with an error of the bridge's; None then."""
    try:
        return child.call(name, **options)
    except ChildError as error:
        if "WeightBridgeError" not in error.lineage:
            raise
    return None


@pytest.mark.parametrize("target", ["slot", "control"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_before_the_first_import(
    consumers: Child, directory: Path, damage: Damage, target: str
) -> None:
    with BridgeOver(SharedMemory(directory=directory)) as publisher:
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        damage(directory / manifest.handle[target]["name"])
        text = manifest.to_json()
        assert "SegmentError" in errors_of(lambda: consumers.call("import_update", manifest=text))
    clear(directory)
    with BridgeOver(SharedMemory(directory=directory)) as publisher:
        text = publisher.publish(sample_weights(2), weight_version=1).to_json()
        assert consumers.call("import_update", manifest=text) == hashes(sample_weights(2))


@pytest.mark.parametrize("target", ["slot", "control"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_between_two_imports_is_no_signal(
    consumers: Child, directory: Path, damage: Damage, target: str
) -> None:
    """The consumer has the files open and mapped, and goes on to report and to import."""
    with BridgeOver(SharedMemory(directory=directory)) as publisher:
        for version in (1, 2):
            manifest = publisher.publish(sample_weights(version), weight_version=version)
            consumers.call("import_update", manifest=manifest.to_json())
        damage(directory / manifest.handle[target]["name"])
        assert consumers.call("held", update_id=manifest.update_id) == hashes(sample_weights(2))
        consumers.call("acknowledge", update_id=manifest.update_id)
        consumers.call("drop", update_id=manifest.update_id)
        consumers.call("release", update_id=manifest.update_id)
        attempt(consumers, "import_update", manifest=manifest.to_json())
        attempt(consumers, "release", update_id=manifest.update_id)
    clear(directory)


def test_the_consumer_of_all_these_lives_on_and_ends_in_peace(
    consumers: Child, directory: Path
) -> None:
    with BridgeOver(SharedMemory(directory=directory)) as publisher:
        text = publisher.publish(sample_weights(3), weight_version=1).to_json()
        assert consumers.call("import_update", manifest=text) == hashes(sample_weights(3))
    consumers.call("close")
    assert consumers.stop() == 0


@pytest.mark.parametrize("target", ["slot", "control"])
@pytest.mark.parametrize("damage", [truncate, empty, unlink, replace_by_a_copy])
def test_a_publisher_whose_files_are_damaged_says_so_or_makes_new_ones(
    tmp_path: Path, damage: Damage, target: str
) -> None:
    with (
        peer(directory=tmp_path) as publisher,
        BridgeOver(SharedMemory(directory=tmp_path)) as consumer,
    ):
        text = publisher.call("publish", seed=1, weight_version=1)
        update_id = WeightUpdateManifest.from_json(text).update_id
        name = WeightUpdateManifest.from_json(text).handle[target]["name"]
        publisher.call("release", update_id=update_id)
        damage(tmp_path / name)
        attempt(publisher, "reports", update_id=update_id)
        for version in (2, 3):
            newer = attempt(publisher, "publish", seed=version, weight_version=version)
            attempt(publisher, "reports", update_id=update_id)
            if newer is not None:
                with suppress(SegmentError):
                    found = contents_of(consumer.import_update(newer))
                    assert found == contents_of(sample_weights(version))
        publisher.call("close")
        assert publisher.stop() == 0

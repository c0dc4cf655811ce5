"""A process that is short of memory: a shortage of its own, nothing wrong with the update."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.flip import LiveRange
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.memory.slots import SlotRing
from rl_bridge.memory.views import anonymous_pin
from rl_bridge.testing.processes import Child
from tests.helpers import open_fds
from tests.memory.slots_rig import SIZE, view_of, write

LARGE = 512 << 20
NAME = "rlb-0123456789ab-1.seg"


def mapped_nbytes() -> int:
    """Addresses that this process uses."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * vm.PAGE


def is_mapped(address: int) -> bool:
    try:
        vm.drop_pages(address, vm.PAGE)
    except OSError:
        return False
    return True


class Confined:
    """A process that may not map much more than it has."""

    def __init__(self) -> None:
        torch.zeros(10).add_(1)
        self.bridge = make_weight_bridge("shared-memory", source_worker="confined")

    def confine(self) -> None:
        """Set the limit."""
        resource.setrlimit(resource.RLIMIT_AS, (mapped_nbytes() + LARGE // 2, -1))

    def free(self) -> None:
        """Lift the limit."""
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    def say(self, what: str) -> str:
        """What an attempt to map much says."""
        attempts: dict[str, Callable[[], object]] = {
            "copy": lambda: anonymous_pin(LARGE),
            "live range": lambda: LiveRange(LARGE),
        }
        try:
            attempts[what]()
        except WeightBridgeUnavailableError as error:
            return str(error)
        return "it worked"

    def make(self, directory: str) -> list[object]:
        """Try to make a large named segment: the error, and how many descriptors came to stay."""
        before = len(open_fds())
        try:
            OwnedSegment.make(NAME, LARGE, directory=Path(directory))
        except SegmentError as error:
            return [str(error), len(open_fds()) - before]
        return ["it worked", 0]

    def load(self, manifest: str) -> int:
        """Import, and acknowledge."""
        self.bridge.import_update(manifest)
        (update_id,) = manifest.split('"update_id":"')[1:]
        self.bridge.acknowledge(update_id[:32])
        return self.bridge.active_weight_version or -1

    def attempt(self, manifest: str) -> list[object]:
        """Import what may not fit: the error's type, and what stayed behind."""
        fds, nbytes = len(open_fds()), mapped_nbytes()
        try:
            self.load(manifest)
        except WeightBridgeUnavailableError as error:
            return [str(error), len(open_fds()) - fds, mapped_nbytes() - nbytes < LARGE // 4]
        return ["it worked", 0, True]


@pytest.fixture(scope="module")
def process() -> Iterator[Child]:
    with Child(Confined) as child:
        yield child.ready()


@pytest.fixture
def confined(process: Child) -> Iterator[Child]:
    process.call("confine")
    yield process
    process.call("free")


def test_an_update_that_found_no_room_is_imported_when_there_is_room(confined: Child) -> None:
    with make_weight_bridge("shared-memory") as bridge:
        text = bridge.publish({"w": torch.empty(LARGE, dtype=torch.uint8)}, weight_version=1)
        said = confined.call("attempt", manifest=text.to_json())
        assert "Cannot allocate memory. Free some" in said[0]
        # The control record's descriptor and nothing else.
        assert said[1:] == [1, True]
        confined.call("free")
        assert confined.call("load", manifest=text.to_json()) == 1


@pytest.mark.parametrize("what", ["copy", "live range"])
def test_what_needs_addresses_says_that_there_are_none(what: str, confined: Child) -> None:
    assert "Cannot allocate memory" in confined.call("say", what=what)


def test_a_named_segment_that_cannot_be_mapped_leaves_no_name(
    confined: Child, tmp_path: Path
) -> None:
    said, num_fds = confined.call("make", directory=str(tmp_path))
    assert "Cannot allocate memory" in said
    assert list(tmp_path.iterdir()) == []
    assert num_fds == 0


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOMEM, WeightBridgeUnavailableError, "Cannot allocate memory"),
        (errno.EPERM, SegmentError, r"cannot be mapped.*not permitted.*Publish again"),
    ],
)
def test_a_view_that_cannot_be_mapped_gives_its_addresses_back(
    code: int, kind: type[Exception], said: str, ring: SlotRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []

    def refused(address: int, *_: object) -> None:
        reserved.append(address)
        raise OSError(code, os.strerror(code))

    slot = write(ring, 1)
    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.views.vm.map_fixed", refused)
    with pytest.raises(kind, match=said):
        view_of(slot)
    assert open_fds() == before
    assert not any(map(is_mapped, reserved))


def test_a_segment_that_cannot_be_sealed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    map_shared = vm.map_shared

    def noted(address: int, nbytes: int, fd: int) -> None:
        map_shared(address, nbytes, fd)
        mapped.append(address)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.segment.vm.map_shared", noted)
    monkeypatch.setattr("rl_bridge.memory.segment.vm.guard_from_fork", full)
    with pytest.raises(SegmentError, match="cannot make shared memory"):
        OwnedSegment.make("rl_bridge-test", SIZE)
    assert open_fds() == before
    assert len(mapped) == 1
    assert not is_mapped(mapped[0])

"""How the consumer of a group reads: in place or in ranges; no byte too few, none unseen."""

import ctypes
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.assembly import assemble as group_landing
from rl_bridge.assembly.assemble import Assembly, LandingPlan
from rl_bridge.assembly.end import GroupEnd
from rl_bridge.assembly.plan import make_plan
from rl_bridge.assembly.wanted import (
    Fused,
    TensorParallel,
    Wanted,
    WantedLayout,
    WantedTensor,
    WholeSlice,
    everything,
    parallel,
    slices,
)
from rl_bridge.errors import (
    ChecksumMismatch,
    DigestMismatch,
    SegmentError,
    SlotsExhausted,
    StaleUpdate,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.slots import ARRIVING, Slot
from rl_bridge.memory.views import Attachment, ImportedTensors, Pin, anonymous_pin
from rl_bridge.testing.faults import AroundConsumer, flip_byte
from rl_bridge.transports.base import ConsumerEnd, Landed, Landing, PartRequest
from rl_bridge.transports.shared_memory import SharedPublisher
from tests.groups.meshes import Shards, cut, flat_cut, model, same, share
from tests.groups.rig import local_clone_through, trainers
from tests.groups.test_reshard import layout_of

# Cut in two, "big" is cut between leaves, "small" within one, "row" at all only by some.
SHAPES = {"big": (96, 8192), "small": (10, 6), "row": (7,), "empty": (0, 3), "scale": ()}
DIMS: dict[str, int | None] = {**dict.fromkeys(SHAPES), "big": 0, "small": 0}


@dataclass
class Sky:
    """What lands, and how.

    Attributes:
        seed: of the order in which ranges land, and of their sizes.
        landed: requests of each version that was read to where it belongs.
        damage: part and byte of its arena that changes on its way.
        problem: raised when half of it is there.

    """

    seed: int = 0
    landed: list[Sequence[PartRequest]] = field(default_factory=list)
    damage: tuple[int, int] | None = None
    problem: BaseException | None = None

    def strike(self) -> None:
        """End a read in the middle."""
        if self.problem is not None:
            raise self.problem


class Falling(AroundConsumer):
    """Lands ranges in bits and in any order; all else is as in ``local-clone``."""

    lands = True

    def __init__(self, end: ConsumerEnd, sky: Sky) -> None:
        super().__init__(end)
        self._sky = sky

    def read_into(self, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        sky, dice = self._sky, random.Random(self._sky.seed)
        pins = [self.inner.attach(part.manifest).tensors.pin for part in parts]
        slot = landing.reserve()
        ctypes.memset(slot.address, 0xA5, 1)  # what was there before is no version
        left = [bits(part, dice) for part in parts]
        try:
            while any(left):
                place = dice.choice([at for at, one in enumerate(left) if one])
                start, target, nbytes = left[place].pop(0)
                ctypes.memmove(slot.address + target, pins[place].address + start, nbytes)
                hit, at = sky.damage or (-1, 0)
                if hit == place and start <= at < start + nbytes:
                    flip_byte(slot.address + target + at - start)
                landing.arrived(place, start + nbytes)
                sky.strike()
            for place, part in enumerate(parts):
                landing.arrived(place, part.manifest.table.arena_nbytes)
        except BaseException:
            landing.abandon(slot)
            raise
        sky.landed.append(parts)
        return Landed(slot, [pin.header for pin in pins])


def bits(part: PartRequest, dice: random.Random) -> list[tuple[int, int, int]]:
    """A part's ranges, cut anywhere: first byte there and here, size."""
    assert part.starts is not None
    assert part.nbytes is not None
    assert part.targets is not None
    found = []
    for start, nbytes, target in zip(part.starts, part.nbytes, part.targets, strict=True):
        cuts = sorted({0, int(nbytes), *(dice.randrange(int(nbytes) + 1) for _ in range(2))})
        found += [
            (int(start) + low, int(target) + low, high - low)
            for low, high in itertools.pairwise(cuts)
        ]
    return found


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sky]:
    """`local-clone` lands from here on, small ranges too, digested in a thread of its own."""
    found = Sky()
    local_clone_through(monkeypatch, lambda end: Falling(end, found))
    monkeypatch.setattr(group_landing, "_WORTH_NBYTES", 1)
    monkeypatch.setattr(group_landing, "BESIDE_NBYTES", 1)
    monkeypatch.setattr(group_landing, "_SLICE_NBYTES", 2 * LEAF_NBYTES)
    yield found
    assert not any(one.name == "rlb-digest" for one in threading.enumerate()), "a thread is left"


def shards(version: int, num: int = 2) -> list[Shards]:
    return cut(model(SHAPES, version), num, DIMS)


def flat(num: int) -> list[Shards]:
    found = {name: one for name, one in model(SHAPES, 1).items() if name not in {"empty", "scale"}}
    return flat_cut(found, num)


def publisher_of(bridge: GroupBridge) -> SharedPublisher:
    """The end that holds what was assembled."""
    end = bridge.consumer.end
    assert isinstance(end, GroupEnd)
    assert end._ring is not None
    return end._ring[1]


def ring_of(bridge: GroupBridge) -> list[Slot]:
    return publisher_of(bridge)._ring._slots


HALF = parallel(tensor=TensorParallel(2, 1, {"big": 0, "small": 0}))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (shards(1, 1), everything()),
        (shards(1), everything()),
        (shards(1, 5), everything()),
        (flat(3), everything()),
        (shards(1), HALF),
    ],
    ids=["one", "two", "uneven", "flat", "half"],
)
def test_ranges_that_arrive_in_any_order_make_the_published_bytes(
    sky: Sky,
    monkeypatch: pytest.MonkeyPatch,
    ranks: list[Shards],
    wanted: Wanted,
    seed: int,
) -> None:
    sky.seed = seed
    if seed % 2:  # what is small is digested as it comes, without a thread
        monkeypatch.setattr(group_landing, "BESIDE_NBYTES", 1 << 40)
    with trainers(len(ranks), "local-clone") as group, GroupBridge(wanted) as bridge:
        found = bridge.import_update(group.publish(ranks, 1))
        assert len(sky.landed) == 1, "it was copied"
        held = {name for tensors, _ in ranks for name in tensors}
        whole = {name: one for name, one in model(SHAPES, 1).items() if name in held}
        assert same(found, share(whole, 2, 1, DIMS) if wanted is HALF else whole)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Ranges of a part, ascending, and places for them in an arena in any order."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))
    order = draw(st.permutations(range(len(sizes))))
    starts, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        starts.append(at + gap)
        at += gap + size
    targets, at = [0] * len(sizes), 0
    for one in order:
        at += draw(st.integers(0, 4))
        targets[one] = at
        at += sizes[one]
    return starts, sizes, targets, at + draw(st.integers(0, 4))


@given(ranges(), st.data())
@settings(deadline=None)
def test_the_reached_mark_never_covers_a_missing_byte(
    given_: tuple[list[int], list[int], list[int], int], data: st.DataObject
) -> None:
    starts, sizes, targets, arena = given_
    mark = data.draw(st.integers(0, starts[-1] + sizes[-1] + 3))
    at, nbytes, goes = (np.array(one, np.int64) for one in (starts, sizes, targets))
    one = group_landing._PartRanges.of(0, at, nbytes, goes, arena)
    reached = one.reached(mark)
    missing = [
        target + max(0, min(size, mark - start))
        for start, size, target in zip(starts, sizes, targets, strict=True)
        if mark < start + size
    ]
    assert reached == min([*missing, arena])


def test_an_import_is_digested_once_and_pages_that_an_engine_wrote_again(
    sky: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    whole = Attachment._digest_all

    def counting(self: Attachment) -> bytes:
        passes.append(1)
        return whole(self)

    monkeypatch.setattr(Attachment, "_digest_all", counting)
    with trainers(2, "local-clone") as group, GroupBridge(max_slots=1) as bridge:
        for version in (1, 2, 3):
            manifest = group.publish(shards(version), version)
            found = cast("ImportedTensors", bridge.import_update(manifest))
            assert torch.equal(found["big"], model(SHAPES, version)["big"])
            assert len(passes) == (version == 3)
            if version == 2:
                found["big"][5].fill_(-1)  # this process's own copy of the page
            del found
            bridge.release(manifest)
            group.release(manifest)
            passes *= version == 3
    assert len(sky.landed) == 3


@pytest.mark.parametrize(
    ("tensor", "rank", "text"),
    [
        ("big", 1, "'big' in version 2, part of rank 1: bytes 0 to 1572864"),
        ("small", 0, "'small' in version 2, part of rank 0: bytes 0 to 120"),
        ("row", 0, "'row' in version 2, part of rank 0: bytes 0 to 28"),
    ],
)
def test_a_byte_that_changed_on_its_way_names_the_part(
    sky: Sky, tensor: str, rank: int, text: str
) -> None:
    with trainers(2, "local-clone") as group, GroupBridge() as bridge:
        first = group.publish(shards(1), 1)
        bridge.import_update(first)
        bridge.acknowledge(first)
        second = group.publish(shards(2), 2)
        sky.damage = rank, second.parts[rank].tensors[tensor].offset
        with pytest.raises(ChecksumMismatch, match=text):
            bridge.import_update(second)
        assert bridge.active_weight_version == 1
        assert bridge.update_status(second) == "rejected"
        for publisher in group.publishers:
            assert [one.state for one in publisher.consumers(second)] == ["rejected"]


def test_a_manifest_that_was_changed_on_its_way_is_refused_and_the_right_one_taken(
    sky: Sky,
) -> None:
    with trainers(2, "local-clone") as group, GroupBridge(max_slots=1) as bridge:
        manifest = group.publish(shards(1), 1)
        changed = GroupManifest.build(
            list(manifest.parts),
            manifest.layout,
            [one.bridge.publisher.leaf_list for one in group.publishers],
            metadata={"step": 7},
        )
        with pytest.raises(DigestMismatch, match="changed on its way"):
            bridge.import_update(changed.to_json())
        assert torch.equal(bridge.import_update(manifest)["big"], model(SHAPES, 1)["big"])
        assert len(sky.landed) == 2


@pytest.mark.parametrize("problem", [SegmentError("gone."), KeyboardInterrupt()], ids=["e", "i"])
def test_a_failed_read_releases_its_slot(sky: Sky, problem: BaseException) -> None:
    with trainers(2, "local-clone") as group, GroupBridge(max_slots=1) as bridge:
        first = group.publish(shards(1), 1)
        sky.problem = problem
        with pytest.raises(type(problem)):
            bridge.import_update(first)
        sky.problem = None
        second = group.publish(shards(2), 2)
        assert torch.equal(bridge.import_update(second)["big"], model(SHAPES, 2)["big"])
        assert len(ring_of(bridge)) == 1


def test_a_slot_that_a_late_read_may_still_write_is_not_used_again(
    sky: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Slot] = []
    plain = Falling.read_into

    def gives_up(self: Falling, parts: Sequence[PartRequest], landing: Landing) -> Landed:
        late.append(landing.reserve())
        late[0].update_id = ARRIVING
        raise SegmentError(f"update {parts[0].manifest.update_id} is gone. Publish again.")

    with trainers(2, "local-clone") as group, GroupBridge(max_slots=2) as bridge:
        monkeypatch.setattr(Falling, "read_into", gives_up)
        with pytest.raises(SegmentError):
            bridge.import_update(group.publish(shards(1), 1))
        monkeypatch.setattr(Falling, "read_into", plain)
        second = group.publish(shards(2), 2)
        found = bridge.import_update(second)
        ctypes.memset(late[0].address, 0xA5, late[0].capacity)
        assert torch.equal(found["big"], model(SHAPES, 2)["big"])
        assert late[0] in ring_of(bridge)
        third = group.publish(shards(3), 3)
        with pytest.raises(SlotsExhausted, match="may still write to one"):
            bridge.import_update(third)
        publisher_of(bridge).abandon(late[0])
        assert torch.equal(bridge.import_update(third)["big"], model(SHAPES, 3)["big"])
    assert len(sky.landed) == 2


def planned(ranks: list[Shards], wanted: Wanted | WantedLayout) -> LandingPlan | None:
    layout = layout_of(ranks)
    chosen = wanted if isinstance(wanted, WantedLayout) else wanted(layout.wholes)
    return LandingPlan.make(Assembly(make_plan(layout, chosen), layout), layout)


WIDE = {"w": (256, 8192)}
TWICE = WantedLayout(
    {
        name: WantedTensor(
            shape=(256, 8192),
            sources=(WholeSlice(name="w", offset=(0, 0), shape=(256, 8192), at=(0, 0)),),
        )
        for name in ("w", "again")
    }
)


@pytest.mark.parametrize(
    ("ranks", "wanted", "lands"),
    [
        (cut(model(WIDE), 2, {"w": 0}), everything(), True),
        (cut(model(WIDE), 2, {"w": 0}), slices({"w": [slice(0, 100)]}), False),
        (cut(model(WIDE), 2, {"w": 0}), slices({"w": [slice(0, 128)]}), True),
        (cut(model(WIDE), 2, {"w": 1}), everything(), False),
        (cut(model(WIDE), 2, {"w": 0}), TWICE, False),
        (cut(model({"w": (256, 64)}), 2, {"w": 0}), everything(), False),
    ],
    ids=["rows", "in-a-shard", "a-whole-shard", "columns", "twice", "small"],
)
def test_only_long_ranges_of_known_digests_are_read_without_a_copy(
    ranks: list[Shards], wanted: Wanted | WantedLayout, lands: bool
) -> None:
    assert (planned(ranks, wanted) is not None) == lands


# ---- ranges that are asked for -------------------------------------------------------------------


# "wide" has rows of a quarter of a leaf, so that some cuts are between leaves and most are not.
WISHED = {
    "wide": (24, 8192),
    "q": (6, 8),
    "k": (4, 8),
    "down": (8, 6),
    "norm": (5,),
    "empty": (0, 3),
    "scale": (),
}
WISHED_DIMS: dict[str, int | None] = {**dict.fromkeys(WISHED), "wide": 0, "q": 0, "k": 0, "down": 1}
GARBAGE = 0xA5


class Ranges(AroundConsumer):
    """Brings the ranges that are asked for, among garbage; all else is as in ``local-clone``."""

    def __init__(self, end: ConsumerEnd, calls: list[list[PartRequest]]) -> None:
        super().__init__(end)
        self._calls = calls

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        raise AssertionError(manifest.update_id)

    def attach_parts(self, parts: Sequence[PartRequest]) -> list[Attachment]:
        self._calls.append(list(parts))
        return [self._ranges(part) for part in parts]

    def _ranges(self, part: PartRequest) -> Attachment:
        whole = self.inner.attach(part.manifest).tensors.pin
        assert part.starts is not None
        assert part.nbytes is not None
        pin = anonymous_pin(whole.nbytes)
        pin.header = whole.header
        target, source = bytes_of(pin), bytes_of(whole)
        target[:] = GARBAGE
        for start, nbytes in zip(part.starts.tolist(), part.nbytes.tolist(), strict=True):
            target[start : start + nbytes] = source[start : start + nbytes]
        table = part.manifest.table
        return Attachment(table, pin, CPU_PLACE.plan(table.nbytes_column))


def bytes_of(pin: Pin) -> npt.NDArray[np.uint8]:
    """The pinned bytes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * pin.nbytes).from_address(pin.address))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[PartRequest]]:
    """What is asked for; `local-clone` brings nothing else from here on."""
    found: list[list[PartRequest]] = []
    local_clone_through(monkeypatch, lambda end: Ranges(end, found))
    return found


QKV = Fused("{}kv", ("{}q", "{}k"), dim=0)


def half(rank: int) -> dict[str, torch.Tensor]:
    """What one of two tensor-parallel engines holds."""
    return share(model(WISHED), 2, rank, WISHED_DIMS)


def fused() -> dict[str, torch.Tensor]:
    """What the second of two engines holds that keeps two tensors as one."""
    found = half(1)
    found["kv"] = torch.cat((found.pop("q"), found.pop("k")))
    return found


def uneven() -> list[Shards]:
    return cut(model(WISHED), 5, WISHED_DIMS)


def padded() -> list[Shards]:
    # Without the scalar and the empty tensor, which have no ranges of elements.
    found = {name: one for name, one in model(WISHED).items() if name not in {"scale", "empty"}}
    return flat_cut(found, 3, pad=7)


@pytest.mark.parametrize("ranks", [cut(model(WISHED), 2, WISHED_DIMS), uneven(), padded()])
@pytest.mark.parametrize("wish", ["whole", "half", "fused", "rows"])
def test_an_assembly_reads_only_the_ranges_that_it_asked_for(
    calls: list[list[PartRequest]], ranks: list[Shards], wish: str
) -> None:
    degree = TensorParallel(2, 1, {n: dim for n, dim in WISHED_DIMS.items() if dim is not None})
    wanted, expected = {
        "whole": (everything(), model(WISHED)),
        "half": (parallel(tensor=degree), half(1)),
        "fused": (parallel(tensor=degree, fused=[QKV]), fused()),
        "rows": (slices({"wide": [slice(9, 15)]}), {"wide": model(WISHED)["wide"][9:15]}),
    }[wish]
    with trainers(len(ranks), "local-clone") as group, GroupBridge(wanted) as bridge:
        found = bridge.import_update(group.publish(ranks, 1))
        held = {name for tensors, _ in ranks for name in tensors}
        assert found.keys() == {name for name in expected if name == "kv" or name in held}
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def test_a_slice_asks_for_its_leaves_and_the_leaf_list_only(
    calls: list[list[PartRequest]],
) -> None:
    wanted = slices({"wide": [slice(9, 15)]})
    with trainers(1, "local-clone") as group, GroupBridge(wanted) as bridge:
        bridge.import_update(group.publish(cut(model(WISHED), 1, WISHED_DIMS), 1))
    part = calls[0][0]
    assert part.nbytes is not None
    table = part.manifest.table
    assert part.nbytes.sum() == 2 * LEAF_NBYTES + table.leaves_nbytes


def test_whole_tensors_are_asked_for_at_once_in_order_and_without_the_leaf_lists(
    calls: list[list[PartRequest]],
) -> None:
    with trainers(4, "local-clone") as group, GroupBridge() as bridge:
        for version in (1, 2, 3):
            bridge.import_update(
                group.publish(cut(model(WISHED, version), 4, WISHED_DIMS), version)
            )
    assert [[part.manifest.source_rank for part in call] for call in calls] == [[0, 1, 2, 3]] * 3
    for first, later in zip(calls[0], calls[2], strict=True):
        assert first.starts is not None
        assert first.nbytes is not None
        assert first.starts is later.starts, "planned once"
        assert first.nbytes is later.nbytes
        ends = first.starts + first.nbytes
        assert (first.nbytes > 0).all()
        assert (first.starts[1:] > ends[:-1]).all(), "no two of them meet"
        table = first.manifest.table
        leaves = table.leaves_offset
        assert not ((first.starts <= leaves) & (leaves < ends)).any()


def test_ranks_that_are_not_read_are_connected_for_reports(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[PartRequest]]
) -> None:
    met: list[int] = []

    def meet(_: Ranges, manifests: Sequence[WeightUpdateManifest]) -> None:
        met.extend(one.source_rank for one in manifests)

    monkeypatch.setattr(Ranges, "meet", meet)
    wanted = slices({"wide": [slice(8, 10)]})
    with trainers(4, "local-clone") as group, GroupBridge(wanted) as bridge:
        bridge.import_update(group.publish(cut(model(WISHED), 4, WISHED_DIMS), 1))
    assert [part.manifest.source_rank for part in calls[0]] == [1]
    assert met == [0, 2, 3]


class FailsAt(ConsumerEnd):
    """Attaches a few, then fails."""

    def __init__(self, num: int, error: BaseException) -> None:
        self.made: list[Attachment] = []
        self._num = num
        self._error = error

    def attach(self, manifest: WeightUpdateManifest) -> Attachment:
        if len(self.made) == self._num:
            raise self._error
        table = manifest.table
        pin = anonymous_pin(table.arena_nbytes)
        self.made.append(Attachment(table, pin, BytePlan(table.nbytes_column)))
        return self.made[-1]

    report = settle = close = lambda *_: None  # type: ignore[assignment]  # nobody calls them


@pytest.mark.parametrize("error", [StaleUpdate("gone"), SegmentError("cut"), KeyboardInterrupt()])
def test_a_part_that_fails_leaves_no_other_part_attached(error: BaseException) -> None:
    with trainers(3, "local-clone") as group:
        manifest = group.publish(cut(model(WISHED), 3, WISHED_DIMS), 1)
        end = FailsAt(2, error)
        with pytest.raises(type(error)):
            end.attach_parts([PartRequest(manifest=part) for part in manifest.parts])
    assert [one.tensors.held for one in end.made] == [None, None]

"""What a group's consumer asks its transports for: all parts at once, and no byte too few."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_bridge.errors import SegmentError, StaleUpdate
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.wanted import (
    Fused,
    TensorParallel,
    everything,
    parallel,
    slices,
)
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.group_digests import LEAVES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.places import CPU_PLACE
from rl_bridge.memory.views import Attachment, Pin, anonymous_pin
from rl_bridge.transports.base import ConsumerEnd, PartRequest
from tests.groups.meshes import Shards, cut, flat_cut, model, share
from tests.groups.rig import AroundEnd, local_clone_through, trainers

# "wide" has rows of a quarter of a leaf, so that some cuts are between leaves and most are not.
SHAPES = {
    "wide": (24, 8192),
    "q": (6, 8),
    "k": (4, 8),
    "down": (8, 6),
    "norm": (5,),
    "empty": (0, 3),
    "scale": (),
}
DIMS: dict[str, int | None] = {**dict.fromkeys(SHAPES), "wide": 0, "q": 0, "k": 0, "down": 1}
GARBAGE = 0xA5


class Ranges(AroundEnd):
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
        whole = self._end.attach(part.manifest).tensors.pin
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
    return share(model(SHAPES), 2, rank, DIMS)


def fused() -> dict[str, torch.Tensor]:
    """What the second of two engines holds that keeps two tensors as one."""
    found = half(1)
    found["kv"] = torch.cat((found.pop("q"), found.pop("k")))
    return found


def uneven() -> list[Shards]:
    return cut(model(SHAPES), 5, DIMS)


def flat() -> list[Shards]:
    # Without the scalar and the empty tensor, which have no ranges of elements.
    found = {name: one for name, one in model(SHAPES).items() if name not in {"scale", "empty"}}
    return flat_cut(found, 3, pad=7)


@pytest.mark.parametrize("ranks", [cut(model(SHAPES), 2, DIMS), uneven(), flat()])
@pytest.mark.parametrize("wish", ["whole", "half", "fused", "rows"])
def test_an_assembly_reads_only_the_ranges_that_it_asked_for(
    calls: list[list[PartRequest]], ranks: list[Shards], wish: str
) -> None:
    degree = TensorParallel(2, 1, {name: dim for name, dim in DIMS.items() if dim is not None})
    wanted, expected = {
        "whole": (everything(), model(SHAPES)),
        "half": (parallel(tensor=degree), half(1)),
        "fused": (parallel(tensor=degree, fused=[QKV]), fused()),
        "rows": (slices({"wide": [slice(9, 15)]}), {"wide": model(SHAPES)["wide"][9:15]}),
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
        bridge.import_update(group.publish(cut(model(SHAPES), 1, DIMS), 1))
    part = calls[0][0]
    assert part.nbytes is not None
    table = part.manifest.table
    assert part.nbytes.sum() == 2 * LEAF_NBYTES + table.nbytes[table.rows[LEAVES]]


def test_whole_tensors_do_not_ask_for_the_leaf_list(calls: list[list[PartRequest]]) -> None:
    with trainers(2, "local-clone") as group, GroupBridge() as bridge:
        bridge.import_update(group.publish(cut(model(SHAPES), 2, DIMS), 1))
    for part in calls[0]:
        table = part.manifest.table
        at = table.offsets[table.rows[LEAVES]]
        assert part.starts is not None
        assert part.nbytes is not None
        assert not ((part.starts <= at) & (at < part.starts + part.nbytes)).any()


def test_ranges_are_in_order_and_do_not_meet(calls: list[list[PartRequest]]) -> None:
    with trainers(3, "local-clone") as group, GroupBridge() as bridge:
        bridge.import_update(group.publish(cut(model(SHAPES), 3, DIMS), 1))
    for part in calls[0]:
        assert part.starts is not None
        assert part.nbytes is not None
        assert (part.nbytes > 0).all()
        assert (part.starts[1:] > (part.starts + part.nbytes)[:-1]).all()


def test_all_parts_are_asked_for_at_once_with_the_same_arrays_for_every_version(
    calls: list[list[PartRequest]],
) -> None:
    with trainers(4, "local-clone") as group, GroupBridge() as bridge:
        for version in (1, 2, 3):
            bridge.import_update(group.publish(cut(model(SHAPES, version), 4, DIMS), version))
    assert [[part.manifest.source_rank for part in call] for call in calls] == [[0, 1, 2, 3]] * 3
    for first, later in zip(calls[0], calls[2], strict=True):
        assert first.starts is later.starts
        assert first.nbytes is later.nbytes


def test_parts_of_a_rank_that_nobody_needs_are_not_asked_for(
    calls: list[list[PartRequest]],
) -> None:
    wanted = slices({"wide": [slice(20, 24)]})
    with trainers(4, "local-clone") as group, GroupBridge(wanted) as bridge:
        bridge.import_update(group.publish(cut(model(SHAPES), 4, DIMS), 1))
    assert [part.manifest.source_rank for part in calls[0]] == [3]


def test_ranks_that_are_not_read_are_connected_for_reports(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[PartRequest]]
) -> None:
    met: list[int] = []

    def meet(_: Ranges, manifests: Sequence[WeightUpdateManifest]) -> None:
        met.extend(one.source_rank for one in manifests)

    monkeypatch.setattr(Ranges, "meet", meet)
    wanted = slices({"wide": [slice(8, 10)]})
    with trainers(4, "local-clone") as group, GroupBridge(wanted) as bridge:
        bridge.import_update(group.publish(cut(model(SHAPES), 4, DIMS), 1))
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
        manifest = group.publish(cut(model(SHAPES), 3, DIMS), 1)
        end = FailsAt(2, error)
        with pytest.raises(type(error)):
            end.attach_parts([PartRequest(manifest=part) for part in manifest.parts])
    assert [one.tensors.held for one in end.made] == [None, None]

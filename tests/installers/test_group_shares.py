"""A rank of several takes its boxes of a group's tensors, from the trainer ranks that hold them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.engines.load_plan import View
from rl_bridge.engines.rank_bridges import EngineBridges
from rl_bridge.errors import ChecksumMismatch, IncompatibleUpdate
from rl_bridge.groups import WantedLayout
from rl_bridge.manifest.group import GroupManifest
from tests.groups.meshes import Shards, cut, flat_cut
from tests.groups.rig import damage, trainers
from tests.installers.test_rank_shares import COLUMNS, HALF, RANKS, ROWS, Rank, weights


class GroupRank:
    """A rank whose bridges are those of an engine's rank."""

    def __init__(self, rank: int) -> None:
        self.rank = Rank(rank, None)  # type: ignore[arg-type]  # it imports by these
        self.model, self.installer = self.rank.model, self.rank.installer
        self.bridges = EngineBridges("engine")

    def update(self, group: GroupManifest) -> str:
        needs = self.installer.needs(group)
        mine, tensors = self.bridges.bring(group, self.rank.model.rank, needs)
        self.installer.prepare(mine, tensors)
        self.installer.install(mine, tensors)
        root = self.installer.prove().root
        assert root == mine.root
        self.installer.commit()
        bridge = self.bridges.of(group, self.rank.model.rank)
        bridge.acknowledge(group.update_id)
        bridge.release_imported(group.update_id)
        return root


@pytest.fixture
def ranks() -> Iterator[list[GroupRank]]:
    made = [GroupRank(rank) for rank in range(RANKS)]
    yield made
    for one in made:
        one.bridges.close()


def cuts(sent: dict[str, torch.Tensor]) -> dict[str, list[Shards]]:
    """As trainers cut: rows, columns, an uneven number of ranks, and ranges of elements."""
    return {
        "rows": cut(sent, 2, {"rows": 0, "norm": 0, "columns": 0}),
        "columns": cut(sent, 4, {"rows": 1, "norm": None, "columns": 1}),
        "uneven": cut(sent, 3, {"rows": 0, "norm": 0, "columns": 1}),
        "flat": flat_cut(sent, 3, pad=2),
    }


@pytest.mark.parametrize("how", ["rows", "columns", "uneven", "flat"])
def test_each_rank_installs_and_proves_its_boxes_and_all_trainer_ranks_hear_of_it(
    ranks: list[GroupRank], how: str
) -> None:
    versions = [weights(), {name: tensor + 1 for name, tensor in weights().items()}]
    with trainers(len(cuts(versions[0])[how])) as group:
        for version, sent in enumerate([*versions, *versions], 1):
            manifest = group.publish(cuts(sent)[how], version)
            for place, rank in enumerate(ranks):
                rank.update(manifest)
                held = rank.model.state_dict()
                assert torch.equal(held["rows"], sent["rows"][place * HALF :][:HALF])
                assert torch.equal(held["norm"], sent["norm"])
                assert torch.equal(held["columns"], sent["columns"].chunk(RANKS, dim=1)[place])
            for publisher in group.publishers:
                told = publisher.consumers(manifest)
                assert {(one.rank, one.state) for one in told} == {
                    (0, "released"),
                    (1, "released"),
                }
            group.release(manifest)


def test_a_rank_asks_for_the_boxes_that_it_reads(ranks: list[GroupRank]) -> None:
    with trainers(2) as group:
        manifest = group.publish(cut(weights(), 2, {"rows": 1, "norm": 0, "columns": 0}), 1)
        for place, rank in enumerate(ranks):
            wanted = rank.installer.needs(manifest)
            assert isinstance(wanted, WantedLayout)
            (rows,) = wanted.tensors["rows"].sources
            assert (rows.offset, rows.shape) == ((place * HALF, 0), (HALF, COLUMNS))
            (columns,) = wanted.tensors["columns"].sources
            half = COLUMNS // RANKS
            assert (columns.offset, columns.shape) == ((0, place * half), (4, half))
            assert rank.installer.needs(manifest) is wanted


def test_a_damaged_byte_is_refused_by_the_rank_that_takes_it_and_the_next_version_lands(
    ranks: list[GroupRank],
) -> None:
    dims = {"rows": 0, "norm": 0, "columns": 0}
    with trainers(2) as group:
        manifest = group.publish(cut(weights(), 2, dims), 1)
        rows = manifest.parts[1].tensors["rows"]
        damage(group, manifest, 1, rows.offset + rows.nbytes - 1)
        ranks[0].update(manifest)
        with pytest.raises(ChecksumMismatch, match="'rows' in version 1, part of rank 1: bytes "):
            ranks[1].update(manifest)
        assert not ranks[1].model.state_dict()["rows"].any()
        later = group.publish(cut(weights(), 2, dims), 2)
        for rank in ranks:
            rank.update(later)
        assert ranks[1].model.state_dict()["rows"].any()


def test_what_an_engine_does_not_take_is_refused_before_it_is_read(ranks: list[GroupRank]) -> None:
    sent = {**weights(), "strange": torch.ones(4)}
    with trainers(2) as group:
        dims = {"rows": 0, "norm": 0, "columns": 0, "strange": 0}
        manifest = group.publish(cut(sent, 2, dims), 1)
        with pytest.raises((IncompatibleUpdate, AttributeError), match="strange"):
            ranks[0].installer.needs(manifest)


# ---- views and boxes ----------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and a part of it: narrowed, transposed, flattened, split, repeated."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = whole
    for _ in range(draw(st.integers(0, 4))):
        step: Any = draw(st.sampled_from(["narrow", "transpose", "flatten", "split", "expand"]))
        dim = draw(st.integers(0, part.dim() - 1))
        size = part.shape[dim]
        if step == "narrow":
            start = draw(st.integers(0, size - 1))
            part = part.narrow(dim, start, draw(st.integers(1, size - start)))
        elif step == "transpose":
            part = part.transpose(dim, draw(st.integers(0, part.dim() - 1)))
        elif step == "flatten" and part.is_contiguous():
            part = part.view(-1)
        elif step == "split" and size % 2 == 0 and part.is_contiguous():
            part = part.view(*part.shape[:dim], 2, size // 2, *part.shape[dim + 1 :])
        elif step == "expand":
            part = part.unsqueeze(dim).expand(*part.shape[:dim], 3, *part.shape[dim:])
    return whole, part


@given(views())
def test_a_part_of_a_tensor_is_the_same_part_of_the_box_that_holds_it(
    case: tuple[torch.Tensor, torch.Tensor],
) -> None:
    whole, part = case
    view = View(tuple(part.shape), part.stride(), int(part.storage_offset()))
    box = view.box(whole.shape)
    inner = whole[tuple(slice(a, b) for a, b in zip(*box, strict=True))].contiguous()
    assert torch.equal(view.within(box, whole.shape).of(inner), part)


def test_a_box_is_no_larger_than_a_slice() -> None:
    whole = torch.empty(ROWS, 6, 4)
    part = whole[2:5, 1:3, ::2].permute(2, 0, 1)
    view = View(tuple(part.shape), part.stride(), int(part.storage_offset()))
    assert view.box(whole.shape) == ((2, 1, 0), (5, 3, 3))

"""A rank of several takes its boxes of a group's tensors, from the trainer ranks that hold them."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_bridge.engines.load_plan import View
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.rank_bridges import EngineBridges
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    StaleUpdate,
    WeightUpdateRejectedError,
)
from rl_bridge.groups import GroupBridge, WantedLayout, everything, slices
from rl_bridge.lifecycle import Event
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.memory.parts import Scope
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
        needs = self.installer.scope_of(group)
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
            wanted = rank.installer.scope_of(manifest)
            assert isinstance(wanted, WantedLayout)
            (rows,) = wanted.tensors["rows"].sources
            assert (rows.offset, rows.shape) == ((place * HALF, 0), (HALF, COLUMNS))
            (columns,) = wanted.tensors["columns"].sources
            half = COLUMNS // RANKS
            assert (columns.offset, columns.shape) == ((0, place * half), (4, half))
            assert rank.installer.scope_of(manifest) is wanted


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
            ranks[0].installer.scope_of(manifest)


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


# ---- what must not be mixed up ------------------------------------------------------------------


def half_of(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of the shapes of one rank's boxes."""
    return {
        "rows": sent["rows"][:HALF].clone(),
        "norm": sent["norm"],
        "columns": sent["columns"].chunk(RANKS, dim=1)[0].clone(),
    }


def test_whole_tensors_of_the_shapes_of_a_ranks_boxes_are_refused_behind_a_good_version_too(
    ranks: list[GroupRank],
) -> None:
    dims = {"rows": 0, "norm": 0, "columns": 0}
    with trainers(2) as group, GroupBridge() as assembler:
        good = group.publish(cut(weights(), 2, dims), 1)
        for rank in ranks:
            rank.update(good)
        half = group.publish(cut(half_of(weights()), 2, dims), 2)
        assembled = assembler.consumer.import_update(half).manifest
        assert assembled is not None
        for manifest in (half, assembled):
            with pytest.raises((IncompatibleUpdate, RuntimeError), match="start"):
                ranks[1].installer.scope_of(manifest)


def test_a_bridge_never_shows_one_layouts_memory_as_anothers() -> None:
    columns = slices({"rows": [None, slice(0, 4)]})
    with trainers(2) as group, GroupBridge(columns) as bridge:
        manifest = group.publish(cut(weights(), 2, {"rows": 0, "norm": 0, "columns": 0}), 1)
        bridge.import_update(manifest)
        whole = everything()(manifest.layout.wholes)
        with pytest.raises(WeightUpdateRejectedError, match="another part of it"):
            bridge.consumer.import_update(manifest, scope=whole)


def test_a_share_is_imported_again_by_an_equal_layout() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        manifest = group.publish(cut(weights(), 2, {"rows": 0, "norm": 0, "columns": 0}), 1)
        for _ in range(2):
            mine = slices({"rows": [None, slice(0, 4)]})(manifest.layout.wholes)
            found = bridge.consumer.import_update(manifest, scope=mine)
            assert torch.equal(found["rows"], weights()["rows"][:, :4])


def test_the_mapping_of_a_version_that_ranks_import_is_read_once_and_not_behind_its_release() -> (
    None
):
    sent = weights()
    with trainers(2) as group, GroupBridge() as bridge:
        dims = {"rows": 0, "norm": 0, "columns": 0}
        manifest = group.publish(cut(sent, 2, dims), 1)
        tensors = bridge.consumer.import_update(manifest, scope=Scope.LEASE)
        with ThreadPoolExecutor(4) as pool:
            for rows in pool.map(lambda _: tensors["rows"], range(4)):
                assert torch.equal(rows, sent["rows"])
        bridge.consumer.advance(manifest.update_id, Event.VERIFY)
        bridge.acknowledge(manifest)
        assert torch.equal(bridge.import_update(manifest)["norm"], sent["norm"])
        assert bridge.update_status(manifest) == "acknowledged"
        later = group.publish(cut(sent, 2, dims), 2)
        unread = bridge.consumer.import_update(later, scope=Scope.LEASE)
        bridge.release(later)
        with pytest.raises(StaleUpdate, match="released here before"):
            unread["rows"]


def test_publishers_hear_of_the_release_of_a_version_that_ranks_hold_however_late() -> None:
    with trainers(2) as group, GroupBridge() as bridge:
        dims = {"rows": 0, "norm": 0, "columns": 0}
        manifest = group.publish(cut(weights(), 2, dims), 1)
        bridge.consumer.import_update(manifest, scope=Scope.LEASE)
        bridge.consumer.advance(manifest.update_id, Event.VERIFY)
        bridge.acknowledge(manifest)
        for version in range(2, 14):  # more than are remembered of those that are over
            later = group.publish(
                cut(weights(norm=torch.full((COLUMNS,), version)), 2, dims), version
            )
            bridge.reject(later, "a test")
            group.release(later)
        bridge.release(manifest)
        assert [one.state for one in group.publishers[0].consumers(manifest)] == ["released"]


def test_a_head_that_the_engine_ties_may_be_cut_in_another_way() -> None:
    """Digests of tensors that are cut in different ways tell nothing: their bytes are read."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(6, 4)
            self.head = torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight
            self.requires_grad_(requires_grad=False)

        def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in given:
                if name == "embed.weight":
                    self.embed.weight.data.copy_(tensor)

    model = Tied()
    installer = ModelInstaller(model, EngineCompat())
    embed = torch.arange(24.0).view(6, 4)
    bridges = EngineBridges("engine")
    with trainers(2) as group:
        for version, head in enumerate((embed, embed + 1), 1):
            sent = {"embed.weight": embed, "head.weight": head}
            dims = {"embed.weight": 0, "head.weight": 1}
            manifest = group.publish(cut(sent, 2, dims), version)
            mine, tensors = bridges.bring(manifest, 0, installer.scope_of(manifest))
            if version == 1:
                installer.prepare(mine, tensors)
                installer.install(mine, tensors)
                assert installer.prove().root == mine.root
                installer.commit()
            else:
                with pytest.raises(IncompatibleUpdate, match=r"head\.weight"):
                    installer.prepare(mine, tensors)
    bridges.close()

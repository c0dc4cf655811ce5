"""A reader of a part of an update: it verifies exactly what it reads, and nothing else decides."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightUpdateRejectedError
from rl_bridge.lifecycle import Event, State
from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, digest_bytes
from rl_bridge.memory import parts
from rl_bridge.memory.parts import PartNeeds, Scope, leaves_of
from rl_bridge.memory.passes import Addresses, BytePlan, block_digests
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory

ROWS = 8
TENSORS = {
    "cut": torch.arange(ROWS * LEAF_NBYTES // 4, dtype=torch.float32).view(ROWS, -1),
    "other": torch.ones(3),
    "whole": torch.arange(1000, dtype=torch.bfloat16),
}
"""Each row of the first is one leaf."""
FIRST, END = 2, 5


def needs_of(manifest: WeightUpdateManifest) -> PartNeeds:
    rows = manifest.table.rows
    leaves = [(rows["cut"], FIRST, END, 0, LEAF_NBYTES), (rows["whole"], 0, 1, 0, 2000)]
    return PartNeeds.of(manifest.table, leaves)


class Pair:
    """A trainer whose bytes can be damaged, and a reader of a part."""

    def __init__(self, trainer: TensorBridge, faults: FaultInjecting, reader: TensorBridge) -> None:
        self.trainer, self.faults, self.reader = trainer, faults, reader
        self.manifest = trainer.publish(TENSORS, weight_version=1)
        self.needs = needs_of(self.manifest)

    def damage(self, name: str, nth: int = 0) -> None:
        self.faults.corrupt(self.manifest, self.manifest.tensors[name].offset + nth)

    def read(self) -> ImportedShare:
        found = self.reader.consumer.import_update(self.manifest, scope=self.needs)
        assert isinstance(found, ImportedShare)
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    faults = FaultInjecting(SharedMemory())
    with BridgeOver(faults) as trainer, make_weight_bridge("shared-memory") as reader:
        yield Pair(trainer, faults, reader)


@pytest.mark.parametrize("transport", ["local-clone", "shared-memory"])
def test_what_is_read_is_what_was_published(transport: str) -> None:
    with make_weight_bridge(transport) as bridge:
        manifest = bridge.publish(TENSORS, weight_version=1)
        found = bridge.consumer.import_update(manifest, scope=needs_of(manifest))
        assert torch.equal(found["cut"][FIRST:END], TENSORS["cut"][FIRST:END])
        assert torch.equal(found["whole"], TENSORS["whole"])
        bridge.acknowledge(manifest)
        assert bridge.update_state(manifest) is State.ACKNOWLEDGED


def test_a_part_is_imported_again_by_equal_ranges_and_not_by_others(pair: Pair) -> None:
    pair.read()
    pair.needs = needs_of(pair.manifest)
    assert torch.equal(pair.read()["cut"][FIRST:END], TENSORS["cut"][FIRST:END])
    pair.needs = PartNeeds.of(pair.manifest.table, [(0, 0, 1, 0, LEAF_NBYTES)])
    with pytest.raises(WeightUpdateRejectedError, match="another part of it"):
        pair.read()


def test_a_lease_is_imported_again_without_reading_a_byte(pair: Pair) -> None:
    consumer = pair.reader.consumer
    consumer.import_update(pair.manifest, scope=Scope.LEASE)
    consumer.advance(pair.manifest.update_id, Event.VERIFY)
    pair.damage("cut")
    again = consumer.import_update(pair.manifest, scope=Scope.LEASE)
    with pytest.raises(ChecksumMismatch, match="'cut'"):
        again["whole"]


def test_it_asks_for_its_ranges_and_the_leaf_list(pair: Pair) -> None:
    table, needs = pair.manifest.table, pair.needs
    nbytes = (END - FIRST) * LEAF_NBYTES + TENSORS["whole"].nbytes
    assert int(needs.nbytes.sum()) == nbytes
    # Neighbours are read in one go.
    assert nbytes + table.leaves_nbytes <= int(needs.read_nbytes.sum()) < nbytes + LEAF_NBYTES
    assert (np.diff(needs.read_starts) > 0).all()


@pytest.mark.parametrize("at", [FIRST * LEAF_NBYTES, END * LEAF_NBYTES - 1])
def test_a_byte_that_is_read_and_was_damaged_refuses_the_update(pair: Pair, at: int) -> None:
    pair.damage("cut", at)
    with pytest.raises(ChecksumMismatch, match=r"'cut'.*bytes 262144 to 655360"):
        pair.read()
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        pair.read()


@pytest.mark.parametrize("at", [0, FIRST * LEAF_NBYTES - 1, END * LEAF_NBYTES])
def test_a_byte_that_is_not_read_decides_nothing(pair: Pair, at: int) -> None:
    pair.damage("cut", at)
    pair.damage("other")
    assert torch.equal(pair.read()["cut"][FIRST:END], TENSORS["cut"][FIRST:END])


def test_a_damaged_leaf_list_refuses_the_update(pair: Pair) -> None:
    pair.faults.corrupt(pair.manifest, pair.manifest.table.leaves_offset)
    with pytest.raises(ChecksumMismatch, match="its leaf list does not make its digest"):
        pair.read()


def test_what_went_bad_after_the_import_is_found_by_a_second_look(pair: Pair) -> None:
    share = pair.read()
    share.verify(TENSORS)
    pair.damage("cut", FIRST * LEAF_NBYTES)
    share.verify(["other", "whole"])
    with pytest.raises(ChecksumMismatch, match="'cut'"):
        share.verify(TENSORS)


def test_leaves_tell_the_digest_of_what_they_cover_and_of_nothing_else(pair: Pair) -> None:
    share, (row, end) = pair.read(), (FIRST * LEAF_NBYTES, END * LEAF_NBYTES)
    plain = TENSORS["cut"].numpy().tobytes()
    assert share.digest("cut", row, end - row) == digest_bytes(plain[row:end])
    whole = TENSORS["whole"].view(torch.uint8).numpy().tobytes()
    assert share.digest("whole", 0, len(whole)) == digest_bytes(whole)
    assert share.digest("cut", row + 4, end - row - 4) is None
    assert share.digest("cut", row, end - row - 4) is None


def test_what_leaves_tell_is_what_was_published_whatever_the_bytes_are_now(pair: Pair) -> None:
    share, plain = pair.read(), TENSORS["cut"][FIRST:END].numpy().tobytes()
    pair.damage("cut", FIRST * LEAF_NBYTES)
    assert share.digest("cut", FIRST * LEAF_NBYTES, len(plain)) == digest_bytes(plain)


def test_a_leaf_list_that_went_bad_tells_nothing(pair: Pair) -> None:
    share = pair.read()
    pair.faults.corrupt(pair.manifest, pair.manifest.table.leaves_offset)
    with pytest.raises(ChecksumMismatch, match="its leaf list does not make its digest"):
        share.digest("cut", FIRST * LEAF_NBYTES, LEAF_NBYTES)


def test_it_cannot_be_imported_as_another_part_while_it_is_held(pair: Pair) -> None:
    share = pair.read()
    with pytest.raises(WeightUpdateRejectedError, match="imported already, another part of it"):
        pair.reader.import_update(pair.manifest)
    assert torch.equal(share["whole"], TENSORS["whole"])
    pair.reader.release_imported(pair.manifest)
    assert torch.equal(pair.reader.import_update(pair.manifest)["cut"], TENSORS["cut"])


def test_its_memory_is_given_back(pair: Pair) -> None:
    share = pair.read()
    pair.reader.release_imported(pair.manifest)
    assert pair.trainer.holders(pair.manifest)[0].tensors_held
    share.forget()
    assert not pair.trainer.holders(pair.manifest)[0].tensors_held


def test_what_a_reader_wrote_into_an_earlier_version_decides_nothing(pair: Pair) -> None:
    slots = set()
    for version in range(2, 8):  # until a slot comes again
        pair.manifest = pair.trainer.publish(TENSORS, weight_version=version)
        slots.add(str(pair.manifest.handle["slot"]))
        share = pair.read()
        assert torch.equal(share["cut"][FIRST:END], TENSORS["cut"][FIRST:END])
        share["cut"][FIRST:END].zero_()
        pair.reader.release_imported(pair.manifest)
        share.forget()
        pair.trainer.release(pair.manifest)
    assert len(slots) < version - 1


# ---- columns ------------------------------------------------------------------------------------

WIDE = {
    "columns": torch.randn(700, 1792).bfloat16(),
    "down": torch.randn(300, 4, 2048),
    "norm": torch.randn(1792),
    "rows": torch.randn(64, 1024),
}
PART = {"columns": slice(896, 1344), "down": slice(0, 256)}
"""Columns that are read: the third quarter, the first eighth."""


def columns_of(manifest: WeightUpdateManifest) -> PartNeeds:
    """What a reader of `PART`, of the vector and of half of the rows needs."""
    table = manifest.table
    found = [(table.rows["norm"], 0, 1, 0, WIDE["norm"].nbytes)]
    found.append((table.rows["rows"], 0, 1, 0, 4096))
    for name, columns in PART.items():
        tensor = WIDE[name]
        part = tensor.view(-1, tensor.shape[-1])[:, columns]
        item = tensor.element_size()
        dims = [(part.shape[0], part.stride(0) * item), (part.shape[1], item)]
        start = int(part.storage_offset()) * item
        leaves = leaves_of(dims, start, item, tensor.shape[-1] * item)
        found += [(table.rows[name], *leaf) for leaf in leaves]
    return PartNeeds.of(table, found)


class ColumnPair(Pair):
    """A trainer that digests columns, too, and a reader of some of them."""

    def __init__(self, trainer: TensorBridge, faults: FaultInjecting, reader: TensorBridge) -> None:
        self.trainer, self.faults, self.reader = trainer, faults, reader
        self.manifest = trainer.publish(WIDE, weight_version=1)
        self.needs = columns_of(self.manifest)


@pytest.fixture
def columns() -> Iterator[ColumnPair]:
    faults = FaultInjecting(SharedMemory(columns=True))
    with BridgeOver(faults) as trainer, make_weight_bridge("shared-memory") as reader:
        yield ColumnPair(trainer, faults, reader)


def test_a_reader_of_columns_reads_the_blocks_that_hold_them(columns: ColumnPair) -> None:
    share = columns.read()
    needed = WIDE["norm"].nbytes + LEAF_NBYTES
    for name, part in PART.items():
        assert torch.equal(share[name][..., part], WIDE[name][..., part])
        needed += WIDE[name][..., part].nbytes
    assert torch.equal(share["norm"], WIDE["norm"])
    needs, table = columns.needs, columns.manifest.table
    assert needs.verified_nbytes == needed
    read = needed + table.lists_nbytes
    assert read <= int(needs.read_nbytes.sum()) <= read + 512  # and what aligns tensors
    ends = needs.read_starts + needs.read_nbytes
    assert (needs.read_starts[1:] > ends[:-1]).all()
    assert needs.end == ends[-1]


@pytest.mark.parametrize(
    ("name", "row", "column"),
    [("columns", 0, 1792), ("columns", 699, 2687), ("down", 0, 0), ("down", 1199, 1023)],
)
def test_a_byte_of_a_needed_column_that_was_damaged_refuses_the_update(
    columns: ColumnPair, name: str, row: int, column: int
) -> None:
    columns.damage(name, row * WIDE[name].shape[-1] * WIDE[name].element_size() + column)
    with pytest.raises(ChecksumMismatch, match=f"{name!r} in version 1: bytes"):
        columns.read()
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        columns.read()


@pytest.mark.parametrize(
    ("name", "at"), [("columns", 1791), ("columns", 2688), ("down", 1024), ("rows", LEAF_NBYTES)]
)
def test_a_byte_of_another_column_decides_nothing(columns: ColumnPair, name: str, at: int) -> None:
    columns.damage(name, at)
    share = columns.read()
    assert torch.equal(share["columns"][:, PART["columns"]], WIDE["columns"][:, PART["columns"]])


def test_columns_that_are_overwritten_while_they_are_verified_refuse_the_update(
    columns: ColumnPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwritten(blocks: npt.NDArray[np.uint64], **options: Any) -> npt.NDArray[np.uint8]:
        first = block_digests(blocks[:1], **options)
        columns.damage("down")
        return np.concatenate((first, block_digests(blocks[1:], **options)))

    monkeypatch.setattr(parts, "block_digests", overwritten)
    with pytest.raises(ChecksumMismatch, match="'down' in version 1: bytes"):
        columns.read()
    monkeypatch.undo()
    columns.manifest = columns.trainer.publish(WIDE, weight_version=2)
    assert torch.equal(columns.read()["down"][..., PART["down"]], WIDE["down"][..., PART["down"]])


@pytest.mark.parametrize("nth", [0, -1])
def test_a_damaged_column_list_refuses_the_update(columns: ColumnPair, nth: int) -> None:
    table = columns.manifest.table
    at = table.columns_offset + nth % table.columns_nbytes
    columns.faults.corrupt(columns.manifest, at)
    with pytest.raises(ChecksumMismatch, match="column list checksum mismatch"):
        columns.read()


def test_a_digest_of_the_column_list_that_was_changed_on_its_way_is_refused(
    columns: ColumnPair,
) -> None:
    sent = columns.manifest
    columns.manifest = sent.model_copy(update={"columns": "0" * 32})
    with pytest.raises(DigestMismatch, match="header"):  # a reader of all does not look at the list
        columns.reader.import_update(columns.manifest)
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        columns.read()
    columns.manifest = columns.trainer.publish(WIDE, weight_version=2)
    sent, columns.manifest = (
        columns.manifest,
        columns.manifest.model_copy(update={"columns": "0" * 32}),
    )
    with pytest.raises(DigestMismatch, match="header"):
        columns.read()
    columns.manifest = sent
    assert torch.equal(columns.read()["norm"], WIDE["norm"])


def test_a_publisher_whose_column_list_lies_is_refused(
    columns: ColumnPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = BytePlan.take_columns

    def lie(plan: BytePlan, src: Addresses) -> npt.NDArray[np.uint8]:
        found = honest(plan, src)
        found[::DIGEST_NBYTES] ^= 1
        return found

    monkeypatch.setattr(BytePlan, "take_columns", lie)
    columns.manifest = columns.trainer.publish(
        {name: tensor + 1 for name, tensor in WIDE.items()}, weight_version=2
    )
    with pytest.raises(ChecksumMismatch, match="in version 2: bytes"):
        columns.read()
    # The digests of its tensors decide about a whole update.
    whole = columns.trainer.publish(WIDE, weight_version=3)
    assert torch.equal(columns.reader.import_update(whole)["down"], WIDE["down"])


def test_a_column_that_went_bad_after_the_import_is_found_by_a_second_look(
    columns: ColumnPair,
) -> None:
    share = columns.read()
    share.verify(WIDE)
    columns.damage("down", 8192)
    with pytest.raises(ChecksumMismatch, match="'down'"):
        share.verify(["norm", "down"])
    share.verify(["norm", "columns"])


def test_without_a_column_list_a_reader_of_columns_takes_whole_leaves(pair: Pair) -> None:
    manifest = pair.trainer.publish(WIDE, weight_version=2)
    needs = columns_of(manifest)
    assert not len(needs.blocks.rows)
    assert needs.verified_nbytes > sum(WIDE[name].nbytes for name in PART)


def test_columns_of_which_most_are_needed_are_read_by_leaf(columns: ColumnPair) -> None:
    table = columns.manifest.table
    row = table.rows["columns"]
    count = int(table.leaf_counts[row])
    for high in (3584, 3585 - 448):
        needs = PartNeeds.of(table, [(row, 0, count, 0, high)])
        assert not len(needs.blocks.rows)
        assert needs.verified_nbytes == WIDE["columns"].nbytes
    # Whoever needs all of it besides has it in leaves, too.
    needs = PartNeeds.of(table, [(row, 0, count, 0, 448), (row, 0, count, 0, 3584)])
    assert not len(needs.blocks.rows)


def test_two_ranges_of_columns_of_one_tensor_are_joined(columns: ColumnPair) -> None:
    table = columns.manifest.table
    row = table.rows["columns"]
    count = int(table.leaf_counts[row])
    ranges = [(row, 0, count, 0, 448), (row, 0, count, 1792, 2240), (row, 0, count, 448, 500)]
    needs = PartNeeds.of(table, ranges)
    assert needs.verified_nbytes == 700 * 3 * 448
    assert sorted(set(needs.read_nbytes.tolist()) - {table.columns_nbytes}) == [448, 896]

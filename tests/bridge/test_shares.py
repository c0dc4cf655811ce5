"""A reader of a part of an update: it verifies exactly what it reads, and nothing else decides."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.errors import ChecksumMismatch, WeightUpdateRejectedError
from rl_bridge.lifecycle import State
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.memory.parts import PartNeeds
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
    return PartNeeds.of(manifest.table, [(rows["cut"], FIRST, END), (rows["whole"], 0, 1)])


class Pair:
    """A trainer whose bytes can be damaged, and a reader of a part."""

    def __init__(self, trainer: TensorBridge, faults: FaultInjecting, reader: TensorBridge) -> None:
        self.trainer, self.faults, self.reader = trainer, faults, reader
        self.manifest = trainer.publish(TENSORS, weight_version=1)
        self.needs = needs_of(self.manifest)

    def damage(self, name: str, nth: int = 0) -> None:
        self.faults.corrupt(self.manifest, self.manifest.tensors[name].offset + nth)

    def read(self) -> ImportedShare:
        found = self.reader.consumer.import_update(self.manifest, needs=self.needs)
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
        found = bridge.consumer.import_update(manifest, needs=needs_of(manifest))
        assert torch.equal(found["cut"][FIRST:END], TENSORS["cut"][FIRST:END])
        assert torch.equal(found["whole"], TENSORS["whole"])
        bridge.acknowledge(manifest)
        assert bridge.update_state(manifest) is State.ACKNOWLEDGED


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

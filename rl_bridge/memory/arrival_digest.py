"""Digests of an update while it arrives: each tensor as soon as its last byte is there."""

import ctypes
import threading
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from rl_bridge.manifest.digest import (
    DIGEST_NBYTES,
    LEAF_NBYTES,
    digest_rows,
    leaf_digests,
    tensor_digest,
)
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import BytePlan

BESIDE_NBYTES = 32 << 20
"""From this size on a `Digester` saves more than its thread costs."""


class _Step:
    """The small tensors that are complete at a mark."""

    def __init__(self, mark: int, rows: npt.NDArray[np.intp], table: TensorTable) -> None:
        self.mark = mark
        self.rows = rows
        self.offsets = table.offset_column[rows]
        self.passes = BytePlan(table.nbytes_column[rows])
        self.place: slice | None = None
        """Where their digests lie; None if a large tensor is between them."""
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
            first = int(rows[0])
            self.place = slice(first * DIGEST_NBYTES, (first + len(rows)) * DIGEST_NBYTES)


class ArrivalPlan:
    """Which tensors are complete after which slice: made once per layout and slice size.

    Tensors of up to a slice are digested as a whole, many at a time; larger ones leaf by leaf.
    """

    def __init__(self, table: TensorTable, slice_nbytes: int) -> None:
        """Cut a layout."""
        self.table = table
        self.slice_nbytes = slice_nbytes
        offsets = table.offset_column.astype(np.int64)
        sizes = table.nbytes_column.astype(np.int64)
        is_small = sizes <= slice_nbytes
        small = np.flatnonzero(is_small)
        ends = (offsets + sizes)[small]
        self.large = [int(row) for row in np.flatnonzero(~is_small)]
        # The small tensors that end in each slice. Their ends grow with their rows.
        marks = [*range(slice_nbytes, table.arena_nbytes, slice_nbytes), table.arena_nbytes]
        cuts = np.searchsorted(ends, marks, side="right")
        self.steps: list[_Step] = []
        first = 0
        for mark, cut in zip(marks, cuts.tolist(), strict=True):
            rows = small[first:cut]
            first = max(first, cut)
            self.steps.append(_Step(mark, rows, table))

    def start(self, address: int) -> "ArrivalDigest":
        """Begin with an arena that will arrive at an address."""
        return ArrivalDigest(self, address)


class ArrivalDigest:
    """The digests of one arrival."""

    def __init__(self, plan: ArrivalPlan, address: int) -> None:
        """Begin; nothing has arrived."""
        self._plan = plan
        self._address = address
        self._digests = bytearray(len(plan.table.names) * DIGEST_NBYTES)
        self._next_step = 0
        self._large = list(plan.large)
        self._leaves: list[bytes] = []
        self._leaf_nbytes = 0

    def advance(self, watermark: int) -> None:
        """Digest what is complete now that the first `watermark` bytes are there."""
        plan = self._plan
        while self._next_step < len(plan.steps) and plan.steps[self._next_step].mark <= watermark:
            step = plan.steps[self._next_step]
            self._next_step += 1
            if len(step.rows):
                # One thread: the other cores carry bytes.
                addresses = step.offsets + np.uint64(self._address)
                found = step.passes.digest(addresses, num_threads=1)
                if step.place is not None:
                    self._digests[step.place] = found
                else:
                    digest_rows(self._digests)[step.rows] = digest_rows(found)
        while self._large and self._advance_large(self._large[0], watermark):
            del self._large[0]

    def _advance_large(self, row: int, watermark: int) -> bool:
        table = self._plan.table
        start, nbytes = table.offsets[row], table.nbytes[row]
        there = min(watermark - start, nbytes)
        if there < nbytes:
            there = max(there, 0) // LEAF_NBYTES * LEAF_NBYTES
        size = there - self._leaf_nbytes
        if size > 0:
            data = (ctypes.c_char * size).from_address(self._address + start + self._leaf_nbytes)
            self._leaves.append(leaf_digests(memoryview(data).cast("B")))
            self._leaf_nbytes = there
        if there < nbytes:
            return False
        digest = tensor_digest(b"".join(self._leaves), nbytes)
        self._digests[row * DIGEST_NBYTES : (row + 1) * DIGEST_NBYTES] = digest
        self._leaves.clear()
        self._leaf_nbytes = 0
        return True

    def digests(self) -> bytes | None:
        """16 bytes per tensor, in layout order; None if not everything has arrived."""
        if self._next_step < len(self._plan.steps) or self._large:
            return None
        return bytes(self._digests)


class Digester(threading.Thread):
    """Digests what arrived while more arrives."""

    def __init__(self, digest: ArrivalDigest) -> None:
        """Begin with `start`; `digest` belongs to this thread until `stop`."""
        super().__init__(name="rlb-digest", daemon=True)
        self._digest = digest
        self._marks: SimpleQueue[int | None] = SimpleQueue()
        self._problem: BaseException | None = None

    def put(self, mark: int | None) -> None:
        """The first `mark` bytes are there; None: there will be no more."""
        self._marks.put(mark)

    def run(self) -> None:
        """Digest, until there is no more."""
        try:
            while (mark := self._marks.get()) is not None:
                self._digest.advance(mark)
        except Exception as error:  # noqa: BLE001 - raised where the digests are wanted
            self._problem = error

    def stop(self) -> None:
        """Wait until all marks are digested. Idempotent."""
        if self.ident is not None:
            self.put(None)
            self.join()

    def check(self) -> None:
        """Raise what `run` raised, if it did."""
        if self._problem is not None:
            raise self._problem

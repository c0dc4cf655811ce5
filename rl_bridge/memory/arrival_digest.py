"""Digests of an update while it arrives: each tensor as soon as its last byte is there."""

import ctypes
import threading
from collections import deque

import numpy as np

from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, leaf_digests, tensor_digest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import BytePlan

__all__ = ["BESIDE_NBYTES", "ArrivalDigest", "ArrivalPlan", "Digester"]

BESIDE_NBYTES = 32 << 20
"""From this size on a `Digester` saves more than its thread costs."""


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
        # Of each slice: the small tensors that end in it. Their ends grow with their rows.
        marks = [*range(slice_nbytes, table.arena_nbytes, slice_nbytes), table.arena_nbytes]
        cuts = np.searchsorted(ends, marks, side="right")
        self.steps: list[tuple[int, np.ndarray, BytePlan]] = []
        first = 0
        for mark, cut in zip(marks, cuts.tolist(), strict=True):
            rows = small[first:cut]
            first = max(first, cut)
            self.steps.append((mark, rows, BytePlan(table.nbytes_column[rows])))

    def start(self, address: int) -> "ArrivalDigest":
        """Begin with an arena that will arrive at an address."""
        return ArrivalDigest(self, address)


class ArrivalDigest:
    """The digests of one arrival."""

    def __init__(self, plan: ArrivalPlan, address: int) -> None:
        """Begin; nothing has arrived."""
        self._plan = plan
        self._address = address
        self._digests = np.zeros((len(plan.table.names), DIGEST_NBYTES), np.uint8)
        self._next_step = 0
        self._large = list(plan.large)
        self._leaves: list[bytes] = []
        self._leaf_nbytes = 0

    def advance(self, watermark: int) -> None:
        """Digest what is complete now that the first `watermark` bytes are there."""
        plan = self._plan
        while self._next_step < len(plan.steps) and plan.steps[self._next_step][0] <= watermark:
            _, rows, passes = plan.steps[self._next_step]
            self._next_step += 1
            if len(rows):
                addresses = plan.table.offset_column[rows] + np.uint64(self._address)
                # One thread: the other cores carry bytes.
                found = passes.digest(addresses, num_threads=1)
                self._digests[rows] = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_NBYTES)
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
        self._digests[row] = np.frombuffer(digest, np.uint8)
        self._leaves.clear()
        self._leaf_nbytes = 0
        return True

    def digests(self) -> bytes | None:
        """16 bytes per tensor, in layout order; None if not everything has arrived."""
        if self._next_step < len(self._plan.steps) or self._large:
            return None
        return self._digests.tobytes()


class Digester(threading.Thread):
    """Digests what arrived while more arrives."""

    def __init__(self, digest: ArrivalDigest) -> None:
        """Begin with `start`; `digest` belongs to this thread until `stop`."""
        super().__init__(name="rlb-digest", daemon=True)
        self._digest = digest
        self._marks: deque[int | None] = deque()
        self._has_some = threading.Semaphore(0)
        self._problem: BaseException | None = None

    def put(self, mark: int | None) -> None:
        """The first `mark` bytes are there; None: there will be no more."""
        self._marks.append(mark)
        self._has_some.release()

    def run(self) -> None:
        """Digest, until there is no more."""
        try:
            while True:
                self._has_some.acquire()
                mark = self._marks.popleft()
                if mark is None:
                    return
                self._digest.advance(mark)
        except Exception as error:  # noqa: BLE001 - raised where the digests are wanted
            self._problem = error

    def stop(self) -> None:
        """Wait until all marks are digested. Idempotent."""
        if self.ident is not None:
            self.put(None)
            self.join()

    def check(self) -> None:
        """Raise what came in between, where something did."""
        if self._problem is not None:
            raise self._problem

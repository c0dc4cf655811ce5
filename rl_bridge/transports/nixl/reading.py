"""Reads one version: its stamp, its bytes, and its stamp again.

A one-sided read does not notice when the publisher writes. The lease keeps the publisher from
writing; the stamp, read again behind the last byte, shows whether it wrote all the same (a lease
was lost, or memory was released). A write begins by changing the stamp, so an unchanged stamp means
that nothing was written since the version was published.

Which bytes are read from where, and in which steps, is planned once per slot and request.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from rl_bridge.errors import MalformedManifest
from rl_bridge.memory.arrival_digest import BESIDE_NBYTES, ArrivalDigest, Digester
from rl_bridge.memory.slots import Slot, Stamp, parse_stamp
from rl_bridge.transports.nixl.agent import Agent, AgentError, Made
from rl_bridge.transports.nixl.messages import Leased

STEP_NBYTES = 8 << 20
"""Bytes of one read: they are digested while the next reads are under way."""
_MAX_ROWS = 1024
# Ranges closer to each other than this are read as one: the bytes between cost less than a
# descriptor of their own.
_NEAR_NBYTES = 4096
# Over a network, so much of what is asked for may be read besides, between ranges: the closest are
# joined first. Its other readers wait for these bytes, too.
_MOST_BETWEEN = 1 / 32
# Reads under way at a time: the next reads wait at the publisher while one is digested here.
_WINDOW = 4

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A list of ranges, and how it is cut into reads.

    Attributes:
        places: first byte of each range in the reader's arena.
        addresses: of each range at the publisher.
        nbytes: size of each range.
        cuts: the row that each read begins with, and the number of rows.
        marks: after each read, the publisher's arena has arrived up to this byte.

    """

    places: _Column
    addresses: npt.NDArray[np.uint64]
    nbytes: _Column
    cuts: tuple[int, ...]
    marks: tuple[int, ...]


def plan_steps(
    leased: Leased,
    arena_nbytes: int,
    starts: _Column | None,
    nbytes: _Column | None,
    *,
    targets: _Column | None = None,
    is_local: bool = False,
) -> Steps:
    """Cut a request into reads.

    Args:
        leased: where the version lies.
        arena_nbytes: its size.
        starts: first byte of each range that is asked for; None: everything.
        nbytes: size of each range.
        targets: where each range goes in another arena; None: to the same place.
        is_local: whether no network lies in between.

    Raises:
        MalformedManifest: the publisher's ranges do not lie in the arena.

    """
    at = np.array(leased.starts, np.int64)
    size = np.array(leased.nbytes, np.int64)
    address = np.array(leased.addresses, np.uint64)
    ends = at + size
    # Each number is checked before the sum: a sum of absurd numbers may wrap around.
    is_absurd = (at > arena_nbytes) | (size > arena_nbytes) | (size < 1) | (ends > arena_nbytes)
    if is_absurd.any() or (ends[:-1] > at[1:]).any():
        raise MalformedManifest(
            f"update {leased.update_id}: its publisher's ranges do not fit its arena. Publish "
            "again, with one release on both sides."
        )
    if starts is None or nbytes is None:
        low, high = at, ends
        source = np.arange(len(at))
    else:
        # With targets, the bytes between two ranges would land on other ranges: do not join.
        most = np.inf if is_local else _MOST_BETWEEN * nbytes.sum()
        first, last = starts, starts + nbytes
        if targets is None:
            first, last = _joined(first, last, most)
        low, high, source = _inside(first, last, at, ends)
    low, high, source = _split(low, high, source)
    rows = address[source] + (low - at[source]).astype(np.uint64)
    cuts = _cuts(high - low)
    marks = tuple(int(high[cut - 1]) for cut in cuts[1:])
    places = low
    if starts is not None and targets is not None:
        asked = np.searchsorted(starts, low, side="right") - 1
        places = targets[asked] + (low - starts[asked])
    return Steps(places, rows, high - low, cuts, marks)


def _joined(starts: _Column, ends: _Column, most: float) -> tuple[_Column, _Column]:
    """Join ranges that are near each other, with at most so many bytes between them."""
    if not len(starts):
        return starts, ends
    between = starts[1:] - ends[:-1]
    order = np.argsort(between, kind="stable")
    is_apart = between > _NEAR_NBYTES
    is_apart[order] |= np.cumsum(between[order]) > most
    begins = np.flatnonzero(np.concatenate(([True], is_apart)))
    lasts = np.concatenate((begins[1:], [len(starts)])) - 1
    return starts[begins], ends[lasts]


def _inside(
    low: _Column, high: _Column, at: _Column, ends: _Column
) -> tuple[_Column, _Column, _Column]:
    """Cut ranges at the borders of the publisher's ranges."""
    first = np.searchsorted(ends, low, side="right")
    last = np.searchsorted(at, high, side="left")
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(low)), counts)
    source = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return np.maximum(low[rows], at[source]), np.minimum(high[rows], ends[source]), source


def _split(low: _Column, high: _Column, source: _Column) -> tuple[_Column, _Column, _Column]:
    """Cut long ranges at multiples of a step."""
    first, end = low // STEP_NBYTES, -(-high // STEP_NBYTES)
    counts = end - first
    rows = np.repeat(np.arange(len(low)), counts)
    step = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return (
        np.maximum(low[rows], step * STEP_NBYTES),
        np.minimum(high[rows], (step + 1) * STEP_NBYTES),
        source[rows],
    )


def _cuts(sizes: _Column) -> tuple[int, ...]:
    """Group rows into reads of about a step."""
    cuts = [0]
    total = count = 0
    for row, size in enumerate(sizes.tolist()):
        if count and (total + size > STEP_NBYTES or count >= _MAX_ROWS):
            cuts.append(row)
            total = count = 0
        total += size
        count += 1
    if len(sizes):
        cuts.append(len(sizes))
    return tuple(cuts)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Reads that were made for a pair of slots, and can be posted again and again."""

    steps: Steps
    reads: tuple[Made, ...]
    stamp: Made
    near: Made | None
    """The descriptors of this side that the reads were made of; None if there are no reads."""


class Reading:
    """One version that is being read into a slot."""

    def __init__(
        self,
        agent: Agent,
        prepared: Prepared,
        page: torch.Tensor,
        *,
        slot: Slot,
        digest: ArrivalDigest | None,
        on_arrival: Callable[[int], None] | None = None,
        expected: tuple[str, int],
        arena_nbytes: int,
    ) -> None:
        """Begin; nothing is posted yet.

        The stamp, which arrives in `page`, must show the `expected` update and generation.
        `on_arrival` is called with each mark up to which the version has arrived. Without `digest`,
        nothing is digested.
        """
        self._arena_nbytes = arena_nbytes
        self.slot = slot
        self.digest = digest
        self.stamp: Stamp | None = None
        self.is_torn = False
        self._agent = agent
        self._prepared = prepared
        self._page = page
        self._on_arrival = on_arrival
        self._expected = expected
        self._stage: Literal["new", "before", "bytes", "after", "done"] = "new"
        self._next = 0
        self._window: deque[tuple[Made, int]] = deque()
        self._stamping: Made | None = None
        is_beside = digest is not None and arena_nbytes >= BESIDE_NBYTES
        self._beside = Digester(digest) if digest is not None and is_beside else None

    @property
    def is_done(self) -> bool:
        """Whether it has ended; `is_torn` says how."""
        return self._stage == "done"

    @property
    def in_flight(self) -> bool:
        """Whether bytes may still arrive."""
        return bool(self._window) or self._stamping is not None

    def drain(self) -> bool:
        """Make progress after the reading was given up; returns whether all reads have ended."""
        pending = [read for read, _ in self._window]
        if self._stamping is not None:
            pending.append(self._stamping)
        self._stamping = None
        self._window = deque((read, 0) for read in pending if not self._ended(read))
        return not self._window

    def _ended(self, read: Made) -> bool:
        try:
            return self._agent.check(read) == "DONE"
        except AgentError:
            return True

    @property
    def has_begun(self) -> bool:
        """Whether the first answer came: the connection works."""
        return self._stage in {"bytes", "after", "done"}

    def step(self) -> bool:
        """Go on as far as possible without waiting; returns whether anything happened.

        Raises:
            AgentError: a read failed.

        """
        is_moving = False
        while not self.is_done:
            stage = self._stage
            if not self._advance():
                break
            is_moving = True
            if self._stage == stage:
                break  # give the other readings their turn
        return is_moving

    def _advance(self) -> bool:
        match self._stage:
            case "new":
                self._post_stamp()
                self._stage = "before"
                return True
            case "before" if self._stamp_is_there():
                if self._checked():
                    self._stage = "bytes"
                    if self._beside is not None:
                        self._beside.start()
                return True
            case "bytes":
                return self._move_window()
            case "after" if self._stamp_is_there():
                if self._checked():
                    self._stage = "done"
                return True
        return False

    def _post_stamp(self) -> None:
        self._page.zero_()
        self._stamping = self._prepared.stamp
        if self._agent.post(self._stamping) == "DONE":
            self._stamping = None

    def _stamp_is_there(self) -> bool:
        if self._stamping is not None and self._agent.check(self._stamping) == "DONE":
            self._stamping = None
        return self._stamping is None

    def _checked(self) -> bool:
        self.stamp = parse_stamp(self._page.numpy().tobytes())
        found = None if self.stamp is None else (self.stamp.update_id, self.stamp.generation)
        if found != self._expected:
            self.is_torn = True
            self._stage = "done"
        return not self.is_torn

    def _move_window(self) -> bool:
        reads, marks = self._prepared.reads, self._prepared.steps.marks
        is_moving = False
        while self._window and self._agent.check(self._window[0][0]) == "DONE":
            self._arrived(self._window.popleft()[1])
            is_moving = True
        while self._next < len(reads) and len(self._window) < _WINDOW:
            read, mark = reads[self._next], marks[self._next]
            self._next += 1
            self._window.append((read, mark))
            is_moving = True
            if self._agent.post(read) == "DONE" and len(self._window) == 1:
                self._window.popleft()
                self._arrived(mark)
                break  # give the other readings their turn
        if not self._window and self._next == len(reads):
            self._arrived(self._arena_nbytes)
            self._post_stamp()
            self._stage = "after"
        return is_moving

    def _arrived(self, mark: int) -> None:
        if self._on_arrival is not None:
            self._on_arrival(mark)
        if self._beside is not None:
            self._beside.put(mark)
        elif self.digest is not None:
            self.digest.advance(mark)

    def finish(self) -> bytes | None:
        """Return the digests of the bytes that arrived; None if they are to be made later."""
        self.stop()
        if self._beside is not None:
            self._beside.check()
        return None if self.digest is None else self.digest.digests()

    def stop(self) -> None:
        """Wait for digests that are under way. Idempotent."""
        if self._beside is not None:
            self._beside.stop()

"""Runs lanes side by side in one pair of processes: probe each, then A B C A B C ..."""

import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _lib.lanes import LaneSpec
from _lib.pair import LaneFailedError, Pair
from _lib.payload import PayloadSpec
from _lib.stats import summarise

__all__ = ["Group", "Row", "count_steps", "run_group", "share_probes"]

_TIMES = ("publish_s", "receive_s", "usable_s", "load_s", "loaded_s")
_PROBE_UPDATES = 2
_PROBED = frozenset({"memory", "survives_step", "survives_publish"})
_ALONE = "alone; peak of two updates, the first held while the second arrives"
_BESIDE = "beside other lanes, whose memory is taken off; peak of two updates, none held"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Lanes that run interleaved, and how often."""

    name: str
    spec: PayloadSpec
    lanes: tuple[LaneSpec, ...]
    warmup: int
    reps: int
    needs_all: bool = False


@dataclass(slots=True, kw_only=True)
class Row:
    """What one lane did in one group."""

    lane: LaneSpec
    group: str
    status: str = "ok"
    reason: str | None = None
    snapshot: bool | None = None
    survives_step: bool | None = None
    survives_publish: bool | None = None
    memory: dict[str, Any] | None = None
    warmup_samples: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Say in words what a consumer holds."""
        if self.snapshot is None:
            return "not probed"
        if self.snapshot:
            return "snapshot"
        if self.survives_step:
            return "reused buffer: the next publish overwrites what the consumer holds"
        return "alias of the trainer's live memory: its next step changes what the consumer holds"

    def to_json(self) -> dict[str, Any]:
        """Return the row as it stands in the results file."""
        times = {key: summarise([s[key] for s in self.samples]) for key in _TIMES if self.samples}
        return {
            "name": self.lane.name,
            "title": self.lane.title,
            "group": self.group,
            "status": self.status,
            "reason": self.reason,
            "verified": self.lane.verified,
            "snapshot": self.snapshot,
            "kind": self.kind,
            "survives_step": self.survives_step,
            "survives_next_publish": self.survives_publish,
            **times,
            "memory": self.memory,
            "warmup_samples": self.warmup_samples,
            "samples": self.samples,
        }


def count_steps(group: Group, *, probe: Collection[str] = ()) -> int:
    """Return how many updates the group will run, for a progress bar."""
    runnable = [lane.name for lane in group.lanes if _missing(lane) is None]
    if group.needs_all and len(runnable) < len(group.lanes):
        return 0
    probed = sum(name in probe for name in runnable)
    return _PROBE_UPDATES * probed + len(runnable) * (group.warmup + group.reps)


def _missing(lane: LaneSpec) -> str | None:
    """Return why a lane cannot run here, or None."""
    if lane.requires is None or importlib.util.find_spec(lane.requires) is not None:
        return None
    return f"{lane.requires} is not installed; to include this row: {lane.install_hint}"


def _peak(
    samples: Sequence[dict[str, Any]],
    spec: PayloadSpec,
    before: Mapping[str, Mapping[str, int]],
    start: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return the peaks that the probed updates reached, less what other lanes held.

    Args:
        samples: the updates.
        spec: the lane's payload.
        before: what was in use before the lane was set up.
        start: what was in use before any lane was.

    """

    def peak(role: str, key: str, *others: str) -> int:
        held = sum(before[role][other] - start[role][other] for other in others)
        return max(int(sample["memory"][role][key]) for sample in samples) - held

    resident = ("rss_anon", "rss_shmem", "rss_file")
    shared = max(peak("trainer", "shared"), peak("engine", "shared")) - before["trainer"]["shared"]
    private = peak("trainer", "rss_anon", "rss_anon") + peak("engine", "rss_anon", "rss_anon")
    return {
        "trainer_peak_rss_nbytes": peak("trainer", "rss_peak", *resident),
        "engine_peak_rss_nbytes": peak("engine", "rss_peak", *resident),
        "private_nbytes": private,
        "shared_memory_nbytes": shared,
        "total_nbytes": private + shared,
        "total_in_payloads": round((private + shared) / spec.nbytes, 2),
    }


def _probe(pair: Pair, row: Row, spec: PayloadSpec, tick: Callable[[], None]) -> None:
    """Check every byte, see what later steps do to tensors in use, and take the peak of memory.

    Alone in the pair, so that the memory is this lane's.
    """
    lane = row.lane
    before = pair.memory()
    pair.setup(lane)
    first = pair.update(lane, probe=True, keep=True)
    tick()
    second = pair.update(lane, probe=True)
    tick()
    row.survives_step = second["survives_step"]
    row.survives_publish = second["survives_publish"]
    row.snapshot = bool(row.survives_step and row.survives_publish)
    row.memory = _peak((first, second), spec, before, before) | {"how": _ALONE}
    pair.teardown(lane, free_resident=True)


def _set_up_and_weigh(
    pair: Pair,
    row: Row,
    spec: PayloadSpec,
    start: Mapping[str, Mapping[str, int]],
    tick: Callable[[], None],
) -> None:
    """Set a lane up; its first warm-up updates come at once and tell what it adds to memory."""
    before = pair.memory()
    pair.setup(row.lane)
    samples = []
    for _ in range(_PROBE_UPDATES):
        samples.append(pair.update(row.lane, probe=True))
        tick()
    row.memory = _peak(samples, row.lane.spec or spec, before, start) | {"how": _BESIDE}
    row.warmup_samples += [
        {key: value for key, value in sample.items() if key not in _PROBED} for sample in samples
    ]


def _sample(pair: Pair, lane: LaneSpec, into: list[dict[str, Any]]) -> None:
    into.append(pair.update(lane))


def _try(row: Row, action: Callable[[], None]) -> None:
    """Run one step of a lane that still works; a peer's failure is a row, ours ends the run."""
    if row.status != "ok":
        return
    try:
        action()
    except LaneFailedError as error:
        if row.lane.verified:
            raise
        row.status, row.reason = "failed", str(error)


def run_group(
    group: Group, *, tick: Callable[[], None], probe: Collection[str] = (), weigh: bool = False
) -> list[Row]:
    """Run a group and return one row per lane, in order.

    Args:
        group: what to run.
        tick: called after every update.
        probe: names of the lanes that are looked at alone first: every byte, and their memory.
        weigh: take the memory of the lanes from their warm-up, which costs no update.

    """
    rows = [Row(lane=lane, group=group.name) for lane in group.lanes]
    for row in rows:
        reason = _missing(row.lane)
        if reason is not None:
            row.status, row.reason = "skipped", reason
    absent = [row.reason for row in rows if row.reason is not None]
    if absent and group.needs_all:
        return [row for row in rows if row.reason is not None]
    alive = [row for row in rows if row.status == "ok"]
    if not alive:
        return rows
    with Pair(group.spec, [row.lane for row in alive]) as pair:
        for row in alive:
            if row.lane.name in probe:
                _try(row, partial(_probe, pair, row, group.spec, tick))
        start = pair.memory()
        for row in alive:
            if weigh:
                _try(row, partial(_set_up_and_weigh, pair, row, group.spec, start, tick))
            else:
                _try(row, partial(pair.setup, row.lane))
        _repeat(pair, alive, group, tick)
    return rows


def _repeat(pair: Pair, rows: Sequence[Row], group: Group, tick: Callable[[], None]) -> None:
    """Run every lane once per repetition, in turn; the first ones warm up."""
    for repetition in range(group.warmup + group.reps):
        for row in rows:
            into = row.warmup_samples if repetition < group.warmup else row.samples
            if into is row.warmup_samples and repetition < len(into):
                continue  # it was taken when the lane was weighed
            _try(row, partial(_sample, pair, row.lane, into))
            tick()


def share_probes(rows: Sequence[Row], others: Sequence[Row]) -> None:
    """Give rows that were not probed what the same lanes of another group showed."""
    probed = {row.lane.name: row for row in others if row.memory is not None}
    for row in rows:
        twin = probed.get(row.lane.name)
        if row.memory is None and twin is not None and twin.memory is not None:
            row.snapshot = twin.snapshot
            row.survives_step, row.survives_publish = twin.survives_step, twin.survives_publish
            row.memory = twin.memory | {"how": f"{twin.memory['how']}; in the group {twin.group}"}

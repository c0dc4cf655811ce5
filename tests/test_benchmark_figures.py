"""The benchmark's bookkeeping: what was not measured is said, and every row states its memory."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
OURS_S = 0.1


@pytest.fixture(scope="module", autouse=True)
def benchmarks_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def module(name: str) -> Any:
    return importlib.import_module(f"_lib.{name}")


def row(name: str, usable_s: float | None, *, snapshot: bool | None = True) -> Any:
    """A lane that was measured once, or not at all."""
    found = module("groups").Row(
        lane=module("lanes").LaneSpec(name=name, title=name, module=""), group="g"
    )
    if usable_s is None:
        found.status, found.reason = "skipped", "it is not installed"
    else:
        found.samples.append({"usable_s": usable_s, "loaded_s": usable_s, "extras": {}})
        found.snapshot = snapshot
    return found


def peers(*others: Any) -> Any:
    figures = module("ratios").Figures()
    module("ratios").peer_figures(figures, [[row("ours", OURS_S), *others]])
    return figures


@pytest.mark.parametrize(
    ("others", "aim_met", "reason"),
    [
        ({"slow": 0.2}, True, None),
        ({"slow": 0.2, "absent": None}, None, "not measured: absent"),
        ({"fast": 0.05, "absent": None}, False, "not led: fast, not measured: absent"),
    ],
    ids=["led", "one-not-measured", "one-faster"],
)
def test_peers_that_are_faster_or_not_measured_are_named(
    others: dict[str, float | None], aim_met: bool | None, reason: str | None
) -> None:
    rows = [row(name, usable_s) for name, usable_s in others.items()]
    figures = peers(*rows, row("alias", 0.01, snapshot=False))
    found = figures.details["peers"]
    assert (found["aim_met"], found["reason"]) == (aim_met, reason)
    assert figures.ratios["peers"] == {"ours": OURS_S, "alias": 0.01, **others}


def test_a_peer_that_failed_half_way_counts_as_not_measured() -> None:
    failed = row("failed", 0.2)
    failed.status, failed.reason = "failed", "it broke"
    figures = peers(failed)
    assert figures.ratios["peers"]["failed"] is None
    assert figures.details["peers"]["aim_met"] is None


def test_a_peer_that_is_measured_in_a_later_group_counts() -> None:
    figures = module("ratios").Figures()
    groups = [[row("ours", OURS_S), row("late", None)], [row("ours", OURS_S), row("late", 0.2)]]
    module("ratios").peer_figures(figures, groups)
    assert figures.ratios["peers"]["late"] == 0.2
    assert figures.details["peers"]["aim_met"] is True


def test_a_row_that_was_not_probed_shows_what_the_same_lane_showed_elsewhere() -> None:
    bare, seen, other = row("a", 0.1, snapshot=None), row("a", 0.1), row("b", 0.1, snapshot=None)
    seen.memory = {"total_nbytes": 5, "how": "alone"}
    module("groups").share_probes([bare, other], [seen])
    assert bare.memory == {"total_nbytes": 5, "how": "alone; in the group g"}
    assert bare.snapshot is True
    assert other.memory is None


def test_lanes_of_their_own_size_are_weighed_by_their_warm_up() -> None:
    plan, groups, payload = module("plan"), module("groups"), module("payload")
    spec = payload.PayloadSpec.for_nbytes(8 << 20, num_tensors=4)
    lanes = tuple(plan.replace(plan.OURS_FLIP, name=name, spec=spec) for name in ("one", "two"))
    group = groups.Group(name="g", spec=spec, lanes=lanes, warmup=3, reps=1)
    ticks: list[None] = []
    rows = groups.run_group(group, tick=lambda: ticks.append(None), weigh=True)
    assert len(ticks) == groups.count_steps(group) == 8
    for found in rows:
        assert (len(found.warmup_samples), len(found.samples)) == (3, 1)
        assert found.warmup_samples[0].keys() == found.samples[0].keys()
        # The trainer's own weights at least; the machine's shared memory may move meanwhile.
        assert found.memory["private_nbytes"] >= spec.nbytes
        assert found.memory["trainer_peak_rss_nbytes"] > spec.nbytes

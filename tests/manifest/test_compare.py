"""The no-op and wrong-payload detector: what is suspicious about an update in its run."""

import logging

import pytest

from rl_bridge import WeightUpdateManifest
from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest.compare import Policy, Watch
from rl_bridge.manifest.table import TensorTable
from tests.helpers import make_manifest

Layout = dict[str, tuple[str, tuple[int, ...]]]
THREE: Layout = {"a": ("float32", (2,)), "b": ("float32", (2,)), "empty": ("float32", (0,))}


def version(
    number: int,
    digests: str,
    *,
    layout: Layout = THREE,
    trainable: set[str] | None = None,
    ties: dict[str, str] | None = None,
    publisher: str = "b",
) -> WeightUpdateManifest:
    """A manifest whose tensors have one letter each for their digests."""
    flags = None if trainable is None else frozenset(trainable)
    table = TensorTable.pack(layout, trainable=flags, ties=ties)
    block = "".join(letter * 16 for letter in digests).encode()
    return make_manifest(
        table,
        weight_version=number,
        digests=block,
        update_id=f"{number:032x}",
        publisher_id=publisher * 32,
    )


def versions(*digests: str, layout: Layout = THREE, trainable: set[str] | None = None) -> list[str]:
    """What is logged of versions 0, 1, ... with these digests."""
    return run(
        *(
            version(number, one, layout=layout, trainable=trainable)
            for number, one in enumerate(digests)
        )
    )


def run(*updates: WeightUpdateManifest, watch: Watch | None = None) -> list[str]:
    """What is logged of some updates that follow each other."""
    watch, found = watch or Watch(), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rl_bridge.manifest.compare")
    log.addHandler(handler)
    try:
        for update in updates:
            watch.judge(update)
            watch.note(update)
    finally:
        log.removeHandler(handler)
    return found


# ---- nothing changes -----------------------------------------------------------------------------


def test_an_update_that_changes_nothing_is_told_once_something_has_changed() -> None:
    (told,) = versions("xyz", "Xyz", "Xyz", "Qyz", trainable={"a"})
    assert "version 2 (after 1) changes nothing that is trained" in told


@pytest.mark.parametrize("trainable", [None, {"a"}])
def test_a_run_may_begin_with_a_step_that_changes_nothing(trainable: set[str] | None) -> None:
    assert versions("xyz", "xyz", "Xyz", "Qyz", trainable=trainable) == []


@pytest.mark.parametrize("trainable", [None, {"a", "b"}])
def test_a_run_that_never_changes_is_told_once(trainable: set[str] | None) -> None:
    (told,) = versions("xyz", "xyz", "xyz", "xyz", "xyz", trainable=trainable)
    assert "version 2 (after 1) changes nothing that is trained" in told


@pytest.mark.parametrize("trainable", [None, {"a", "b"}])
def test_each_update_that_changes_nothing_is_refused_if_that_is_asked_for(
    trainable: set[str] | None,
) -> None:
    watch = Watch(Policy.REJECT)
    run(version(0, "xyz", trainable=trainable), watch=watch)
    for number in (1, 2):
        with pytest.raises(
            SuspiciousUpdate, match=rf"version {number} \(after 0\) changes nothing"
        ):
            watch.judge(version(number, "xyz", trainable=trainable))
    watch.judge(version(4, "Xyz", trainable=trainable))


def test_what_is_not_trained_may_change_and_hides_nothing() -> None:
    (told,) = versions("xyz", "Xyz", "Xqz", "Xrz", trainable={"a"})
    assert "version 2 (after 1) changes nothing that is trained" in told


def test_idle_updates_that_are_not_in_a_row_are_told_each() -> None:
    told = versions("xyz", "Xyz", "Xyz", "Qyz", "Qyz", trainable={"a"})
    assert [line.split(" (")[0] for line in told] == [
        "suspicious update: version 2",
        "suspicious update: version 4",
    ]


# ---- something falls silent ----------------------------------------------------------------------

MATRIX: tuple[str, tuple[int, ...]] = ("float32", (1024,))
FOUR: Layout = {**dict.fromkeys("abcd", MATRIX), "norm": ("float32", (8,))}


def steps(*rows: str) -> list[str]:
    """Digests by tensor (a row of letters each, one per version) as digests by version."""
    return ["".join(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("trainable", [None, set(FOUR)])
def test_half_of_the_tensors_that_stop_are_told_once(trainable: set[str] | None) -> None:
    lively, stopped, norm = "0123456789ABCDEFG", "01234444444444444", "00000000000000000"
    (told,) = versions(
        *steps(lively, lively, stopped, stopped, norm), layout=FOUR, trainable=trainable
    )
    assert (
        "version 5 (after 4): 2 tensors with 50% of the trained bytes did not change: c, d" in told
    )


def test_trainable_tensors_that_never_change_are_told_once_if_they_are_many() -> None:
    lively, frozen, norm = "0123456789ABCDEFGHIJ", "0" * 20, "0" * 20
    rows = steps(lively, lively, lively, frozen, norm)
    (told,) = versions(*rows, layout=FOUR, trainable=set(FOUR))
    assert "version 8 (after 7): 1 tensors with 25% of the trained bytes" in told
    assert "did not change: d. They" in told
    assert versions(*rows, layout=FOUR, trainable={"a", "b", "c", "norm"}) == []
    assert versions(*rows, layout=FOUR) == [], "they may be frozen"


def test_tensors_that_stop_early_are_told_when_that_lasts() -> None:
    lively, stopped = "0123456789ABCDEFGHIJ", "01222222222222222222"
    rows = steps(lively, lively, lively, stopped, stopped)
    (told,) = versions(*rows, layout=FOUR, trainable=set(FOUR))
    assert "version 10 (after 9)" in told


def test_few_bytes_may_stop_and_may_go_on() -> None:
    lively, norm = "0123456789ABCDEF", "0123455555567777"
    assert versions(*steps(*[lively] * 4, norm), layout=FOUR, trainable=set(FOUR)) == []


def test_a_small_tensor_may_stop_whatever_its_share() -> None:
    small: Layout = dict.fromkeys("ab", ("bfloat16", (2047,)))
    rows = steps("0123456789ABCDEF", "0123456666666666")
    assert versions(*rows, layout=small, trainable={"a", "b"}) == []


def test_tensors_that_change_now_and_then_are_not_expected_to_change() -> None:
    lively, expert = "0123456789ABCDEF", "0122334556677889"
    rows = steps(lively, lively, expert, expert, lively)
    assert versions(*rows, layout=FOUR, trainable=set(FOUR)) == []


def test_an_idle_update_does_not_make_the_run_forget_what_is_usual() -> None:
    rows = steps("0123445", "0123445", "0123444", "0123444", "0000000")
    first, second = versions(*rows, layout=FOUR, trainable=set(FOUR))
    assert "version 5 (after 4) changes nothing" in first
    assert "version 6 (after 5): 2 tensors" in second


# ---- weights that were there before --------------------------------------------------------------


def test_weights_of_an_earlier_version_are_told_once() -> None:
    (told,) = versions("xyz", "Xyz", "Qyz", "Xyz", "xyz", trainable={"a"})
    assert "version 3 has the weights of version 1 once more" in told


def test_the_first_version_is_remembered_and_the_last_ones() -> None:
    watch = Watch()
    letters = [chr(33 + n) + chr(33 + m) + "z" for n in range(40) for m in range(40)]
    updates = [version(n, digests) for n, digests in enumerate(letters)]
    assert run(*updates, watch=watch) == []
    (told,) = run(version(2000, letters[0]), watch=watch)
    assert "has the weights of version 0 once more" in told
    (stream,) = watch._streams.values()
    assert len(stream.roots) < len(letters)


# ---- dtypes and layouts --------------------------------------------------------------------------


def test_another_dtype_is_told_tied_names_too() -> None:
    before: Layout = {"a": ("float32", (2,)), "b": ("float32", (2,))}
    after: Layout = {"a": ("float32", (2,)), "b": ("bfloat16", (2,))}
    (told,) = run(
        version(1, "xy", layout=before, ties={"head": "b"}),
        version(2, "xz", layout=after, ties={"head": "b"}, trainable={"a"}),
        version(3, "Xz", layout=after, ties={"head": "b"}, trainable={"a"}),
    )
    assert "2 tensors: b (float32 to bfloat16), head (float32 to bfloat16)" in told


def test_a_name_that_is_new_or_gone_has_no_other_dtype() -> None:
    before: Layout = {"a": ("float32", (1,)), "gone": ("float64", (1,))}
    after: Layout = {"a": ("float32", (1,)), "new": ("int8", (1,))}
    renamed: Layout = {"b": ("float32", (1,)), "new": ("int8", (1,))}
    updates = [
        version(number, digests, layout=layout)
        for number, (digests, layout) in enumerate((("xy", before), ("XY", after), ("uv", renamed)))
    ]
    assert run(*updates) == []


def test_declaring_more_trainable_tensors_changes_the_layout_and_still_compares() -> None:
    (told,) = run(version(1, "xyz"), version(2, "xYz"), version(3, "xQz", trainable={"a"}))
    assert "changes nothing" in told


def test_another_layout_begins_anew() -> None:
    more: Layout = {"0-new": ("float32", (3,)), **THREE}
    first, second = version(1, "xyz"), version(2, "nxyz", layout=more)
    assert run(first, second) == []


# ---- whose versions ------------------------------------------------------------------------------


def test_another_publisher_and_the_same_update_once_more_are_no_finding() -> None:
    first = version(1, "xyz")
    assert run(first, version(2, "Xyz"), version(2, "Xyz"), version(1, "Xyz", publisher="c")) == []


def test_streams_are_bounded() -> None:
    watch = Watch()
    for number in range(300):
        spec = {"name": f"a{number}", "config": {}, "scaling": 1.0}
        update = version(number, "xyz").model_copy()
        made = make_manifest(
            update.table,
            weight_version=number,
            update_id=f"{number:032x}",
            metadata={"layout": {"kind": "adapter"}, "adapter": spec},
        )
        watch.note(made)
    assert len(watch._streams) <= 256


def test_a_long_list_of_names_is_cut() -> None:
    layout: Layout = {f"t{index}": ("int8", (1,)) for index in range(8)}
    other: Layout = {f"t{index}": ("uint8", (1,)) for index in range(8)}
    (told,) = run(version(1, "abcdefgh", layout=layout), version(2, "abcdefgH", layout=other))
    assert "t4 (int8 to uint8) and 3 more" in told

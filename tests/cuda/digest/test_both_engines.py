"""Digest and pack on a device: the kernel, interpreted by Triton, and torch's own operations.

Both are asked the same questions about memory of the CPU. The answers of the kernel come from a
child process, since Triton has to be told to interpret before it is imported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.testing.processes import DEADLINE_S, Child
from tests.cuda.digest import rig
from tests.cuda.digest.interpreted import Interpreted

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Child]:
    if rig.NO_TRITON:
        pytest.skip(rig.NO_TRITON)
    with Child(Interpreted) as child:
        if cause := child.ready().call("lacks"):
            pytest.skip(cause)
        yield child


@pytest.fixture(params=["torch", "triton"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Asks one engine: the name of a function of the rig, and its arguments."""
    if request.param == "torch":
        return lambda name, *arguments: getattr(rig, name)("torch", *arguments)
    child = request.getfixturevalue("interpreted")

    def asked(name: str, *arguments: Any) -> Any:
        child.tell("ask", question=name, arguments=list(arguments))
        return child.answer(deadline_s=5 * DEADLINE_S)  # interpreting a kernel takes its time

    return asked


@pytest.mark.parametrize(
    "most_nbytes", [LEAF_NBYTES + 1, pytest.param(1 << 30, marks=pytest.mark.full)]
)
def test_the_digests_of_the_normative_page_come_out_of_one_call(ask: Ask, most_nbytes: int) -> None:
    assert ask("of_the_page", most_nbytes) == []


@pytest.mark.parametrize(
    "shift", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (16, 8, 4, 2, 3))]
)
def test_small_tensors_of_each_size_and_alignment_are_digested_and_packed(
    ask: Ask, shift: int
) -> None:
    assert ask("of_sizes", rig.SMALL, [shift]) == []


@pytest.mark.parametrize(
    ("shift", "sizes"),
    [(1, [LEAF_NBYTES + 1]), pytest.param(0, rig.BORDERS, marks=pytest.mark.full)],
)
def test_tensors_around_the_end_of_a_leaf_are_digested_and_packed(
    ask: Ask, shift: int, sizes: list[int]
) -> None:
    assert ask("of_sizes", sizes, [shift]) == []


NUMBERS = ["bfloat16", "float8_e4m3fnuz", "int32"]
MORE = sorted(DTYPE_NBYTES.keys() - {*NUMBERS, "float4_e2m1fn_x2", "complex32"})


@pytest.mark.parametrize("dtypes", [NUMBERS, pytest.param(MORE, marks=pytest.mark.full)], ids=len)
def test_nan_is_found_in_its_tensor_and_forgotten(ask: Ask, dtypes: list[str]) -> None:
    assert ask("not_finite", dtypes) == []


def test_later_updates_are_digested_too_also_when_they_lie_elsewhere(ask: Ask) -> None:
    assert ask("of_sizes", [5000, 0, 77], [2, 2, 16, 32, 5]) == []


def test_tensors_inside_and_outside_an_arena_are_digested_in_place(ask: Ask) -> None:
    assert ask("half_in_an_arena")


def test_many_tensors_are_digested_in_one_call(ask: Ask) -> None:
    assert ask("of_sizes", [index * 7 % 300 for index in range(40)], [2]) == []


def test_offsets_beyond_4_gib_are_reached(ask: Ask) -> None:
    assert ask("far_away") == []


@pytest.mark.parametrize("size", [1, 7, 100, 1024, 4095, 5003])
def test_nothing_is_read_before_or_behind_a_tensor(ask: Ask, size: int) -> None:
    assert ask("guarded", size)


def test_a_flip_of_any_bit_of_a_kib_changes_the_digest() -> None:
    assert rig.flipped("torch", range(8192)) == 8193


def test_a_flip_in_any_word_of_a_kib_changes_the_kernels_digest(interpreted: Child) -> None:
    # One bit in each word, and each of 64 twice: interpreting all 8,192 would take minutes.
    bits = [64 * word + word * 5 % 64 for word in range(128)]
    assert interpreted.call("ask", question="flipped", arguments=[bits]) == 129


def test_all_aligned_tensors_are_one_launch(interpreted: Child) -> None:
    aligned, odd, gathered = interpreted.call("launches")
    assert aligned == [[16, 3]]
    assert odd == [[1, 1], [4, 1], [16, 1]]
    assert gathered == [[16, 1], [16, 2]]


def test_rows_are_laid_out_once_for_each_set_of_addresses(interpreted: Child) -> None:
    # An arena's are the plan's; what is partly gathered takes two launches, of rows of their own.
    assert interpreted.call("rows_made") == [1, 0, 0, 0, 1, 1, 0, 2, 0]


def test_rows_of_addresses_that_do_not_come_again_are_given_up(interpreted: Child) -> None:
    assert interpreted.call("kept") == 4


def test_the_kernel_is_compared_with_the_reference_before_it_is_used(interpreted: Child) -> None:
    assert interpreted.call("found_out", planted="nothing") == [None, "triton"]
    cause, engine = interpreted.call("found_out", planted="wrong key")
    assert "disagrees with xxhash" in cause
    assert engine == "torch"


def test_a_kernel_that_cannot_be_launched_is_not_used_and_the_cause_is_reported(
    interpreted: Child,
) -> None:
    cause, engine = interpreted.call("found_out", planted="no compiler")
    assert "(RuntimeError: Failed to find C compiler)" in cause
    assert engine == "torch"

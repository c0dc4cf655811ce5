"""The kernel as it is compiled for an H200 (sm_90), by Triton's own compiler and no GPU."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from rl_bridge.cuda.leaves import LOOK_ANY, LOOK_PLAIN, WIDEST, WIDTHS
from rl_bridge.testing.processes import Child
from tests.cuda.digest import rig
from tests.cuda.digest.compiler import Compiler

Variant = tuple[bool, int] | tuple[bool, int, int]
Compiled = Callable[[Variant], dict[str, Any]]

DIGEST, PACK = (False, WIDEST), (True, WIDEST)
LOOK = (True, WIDEST, LOOK_PLAIN)
"""As `PACK`, and looks for NaN."""
OTHERS = [(copy, width) for copy in (False, True) for width in WIDTHS[1:]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    if rig.NO_TRITON:
        pytest.skip(rig.NO_TRITON)
    with Child(Compiler, folder=str(tmp_path_factory.mktemp("triton"))) as child:
        if cause := child.ready().call("lacks"):
            pytest.skip(cause)

        @cache
        def compiled(variant: Variant) -> dict[str, Any]:
            copy, width, look = (*variant, 0)[:3]
            found: dict[str, Any] = child.call(
                "compiled", copy=copy, width=width, look=look, capability=90
            )
            return found

        yield compiled


FULL = [pytest.param(variant, marks=pytest.mark.full) for variant in OTHERS]


@pytest.mark.parametrize("variant", [DIGEST, PACK, LOOK, (True, WIDEST, LOOK_ANY), *FULL], ids=str)
def test_nothing_is_spilled(compiled: Compiled, variant: Variant) -> None:
    found = compiled(variant)
    assert (found["stack"], found["spilled"]) == (0, 0)


@pytest.mark.parametrize("variant", [DIGEST, PACK, LOOK], ids=["digest", "pack", "look"])
def test_aligned_leaves_leave_room_for_32_warps_and_meet_in_registers(
    compiled: Compiled, variant: Variant
) -> None:
    found = compiled(variant)
    assert found["registers"] <= 65536 // (32 * 32)
    assert found["shared"] == 0


def test_aligned_leaves_are_read_and_written_16_bytes_at_a_time(compiled: Compiled) -> None:
    # Two for each block: four at once, those that are left over, and the last.
    assert compiled(DIGEST)["wide_loads"] >= 10
    assert compiled(DIGEST)["wide_stores"] == 0
    assert (compiled(PACK)["wide_loads"], compiled(PACK)["wide_stores"]) >= (10, 10)


@pytest.mark.full
def test_sources_that_are_not_aligned_are_packed_with_wide_writes_all_the_same(
    compiled: Compiled,
) -> None:
    for variant in OTHERS:
        found = compiled(variant)
        assert found["wide_loads"] == 0, variant
        assert found["wide_stores"] >= 10 * variant[0], variant


@pytest.mark.parametrize("variant", [DIGEST, PACK, LOOK, FULL[-1]], ids=str)
def test_words_are_unsigned_and_places_have_64_bits(compiled: Compiled, variant: Variant) -> None:
    found = compiled(variant)
    assert found["signed_shifts"] == 0
    assert found["narrowed"] == []
    assert found["narrow_products"] == []

"""peft under FSDP2: merged weights, base weights, or adapters alone, under the right names."""

from collections.abc import Callable

import pytest

from tests.extractors.worlds import World, assembled
from tests.trainers import peft_cases


@pytest.fixture
def two(worlds: Callable[[int, str], World]) -> World:
    return worlds(2, "peft_cases")


@pytest.mark.parametrize("adapters", ["merged", "base", "only"])
def test_ranks_publish_what_peft_itself_would_save(two: World, adapters: str) -> None:
    reports = two.run("parts", adapters=adapters)
    whole = peft_cases.expected(adapters)
    assert assembled(reports) == whole
    assert [report["full"] for report in reports] == [whole, whole]


def test_an_update_that_was_not_merged_is_refused_also_after_one_that_was(two: World) -> None:
    assert all("Call model.merge_adapter()" in answer for answer in two.run("forgotten"))

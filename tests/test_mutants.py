"""Generated bugs are real ones, and the same in every run."""

import ast
from pathlib import Path

import pytest

from tests.mutants import CARRIERS, ROOT, files_for, mutants_of, sample


@pytest.mark.parametrize("path", CARRIERS)
def test_each_module_that_carries_a_guarantee_can_be_changed_in_many_places(path: str) -> None:
    whole = ast.dump(ast.parse((ROOT / "rl_bridge" / path).read_text("utf-8")))
    mutants = mutants_of(path)
    assert len(mutants) > 20
    for mutant in mutants[:: len(mutants) // 10]:
        assert ast.dump(ast.parse(mutant.source)) != whole, mutant


@pytest.mark.parametrize("path", CARRIERS)
def test_each_has_tests_that_are_there(path: str) -> None:
    files = files_for(path)
    assert any("guarantees" in file for file in files)
    assert all(Path(ROOT, file).exists() for file in files)
    assert len(files) == len(set(files)) >= 4


def test_a_sample_is_drawn_by_its_seed() -> None:
    assert [str(one) for one in sample(20, 3)] == [str(one) for one in sample(20, 3)]
    assert [str(one) for one in sample(20, 3)] != [str(one) for one in sample(20, 4)]
    assert len({one.path for one in sample(200, 1)}) > len(CARRIERS) // 2

"""The list of planted bugs does not rot: each still has its place, its file and its tests."""

import ast
from pathlib import Path

import pytest

from tests.mutants import ROOT, planted, read_mutants

MUTANTS = read_mutants()


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 18


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_can_be_planted(name: str) -> None:
    mutant = MUTANTS[name]
    path = ROOT / "rl_bridge" / mutant.path
    text = planted(path.read_text("utf-8"), mutant)
    if path.suffix == ".py":
        ast.parse(text)
    assert Path(ROOT, mutant.tests.split()[0]).exists()


def test_a_bug_whose_place_is_gone_is_told() -> None:
    mutant = next(iter(MUTANTS.values()))
    with pytest.raises(ValueError, match="stale: 0 places"):
        planted("", mutant)

"""The examples with DeepSpeed and Megatron run as their readers would run them."""

from pathlib import Path

import pytest

from tests.strategies.test_trainer_examples import run


def test_zero3_on_two_ranks_reaches_an_engine(tmp_path: Path) -> None:
    said = run("deepspeed_zero3_to_one_engine.py", cwd=tmp_path)
    assert "4 versions from 2 ranks of ZeRO-3 in 1 engine, equal to the byte" in said


@pytest.mark.parametrize(("trainer", "engine"), [("2", "1"), ("1", "2")])
def test_megatron_reaches_an_engine_of_another_degree(
    trainer: str, engine: str, tmp_path: Path
) -> None:
    said = run("megatron_tensor_parallel.py", trainer, engine, cwd=tmp_path)
    assert f"4 versions from Megatron TP{trainer} in an engine of TP{engine}" in said

"""Fan-in: each engine reads what it needs from all owners, whoever comes, goes or dies."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_bridge.testing.processes import Child, ChildError
from tests.machines.roles import Engine, Owner, owners_of, publish

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 6.0
# What a loaded machine may take beyond a deadline before it counts as a hang.
SLACK_S = 10.0


@pytest.mark.parametrize(("num", "degree"), [(1, 2), (3, 2), (4, 1)])
def test_any_number_of_owners_feeds_any_number_of_engines(num: int, degree: int) -> None:
    """Every value is unique among ranks, rows and versions."""
    with owners_of(num) as (owners, _), ExitStack() as stack:
        engines = [
            stack.enter_context(Child(Engine, rank=rank, degree=degree)) for rank in range(degree)
        ]
        for version in (1, 2, 3):
            manifest = publish(owners, version)
            for engine in engines:
                engine.ready().tell("update", manifest=manifest)
            assert all(engine.answer() for engine in engines)
            for owner in owners:
                assert owner.call("states", manifest=manifest) == ["acknowledged"] * degree
                owner.call("release", manifest=manifest)


def test_an_owner_that_dies_ends_its_version_and_a_new_one_in_its_place_goes_on() -> None:
    options = {"nixl": {"timeout_s": DEADLINE_S}}
    with (
        owners_of(3) as (owners, meet),
        Child(Engine, rank=0, degree=1, transports=options) as engine,
    ):
        assert engine.ready().call("update", manifest=publish(owners, 1))
        second = publish(owners, 2)
        owners[1].process.kill()
        owners[1].process.join()
        start = time.monotonic()
        with pytest.raises(ChildError) as caught:
            engine.call("update", manifest=second)
        assert "WeightBridgeError" in caught.value.lineage, caught.value
        assert time.monotonic() - start < DEADLINE_S + SLACK_S
        assert engine.call("holds", version=1)
        with Child(Owner, rank=1, world_size=3, store=meet) as fresh:
            again = [owners[0], fresh.ready(), owners[2]]
            assert engine.call("update", manifest=publish(again, 3))


def test_an_engine_that_dies_in_between_holds_nobody_up() -> None:
    with (
        owners_of(2) as (owners, _),
        Child(Engine, rank=0, degree=1) as dies,
        Child(Engine, rank=0, degree=1) as lives,
    ):
        manifest = publish(owners, 1)
        assert dies.ready().call("update", manifest=manifest)
        assert lives.ready().call("update", manifest=manifest)
        dies.process.kill()
        dies.process.join()
        for version in range(2, 6):
            manifest = publish(owners, version)
            assert lives.call("update", manifest=manifest)
            for owner in owners:
                owner.call("release", manifest=manifest)


def test_the_example_runs_as_its_reader_would_run_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "examples" / "machines" / "fan_in.py")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = "5 versions from 2 FSDP2 ranks in 2 engine ranks over nixl, equal to the byte"
    assert said in done.stdout

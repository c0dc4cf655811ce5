"""A trainer that is sharded over processes updates an engine of two ranks: nobody has the whole."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rl_bridge.errors import WeightBridgeError
from tests.engines.drive import Setting, answers, executor_for, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import RealTrainer, Updates

SETTING = Setting(Kind("qwen3"), in_process=False, ranks=2)
CASES = "tests.trainers_torch.publishing"
DAMAGED = "model.layers.1.mlp.down_proj.weight"
pytestmark = pytest.mark.timeout(600)  # engines start


@dataclass(kw_only=True)
class Run(Updates):
    """Of vLLM."""

    llm: Any
    fresh: tuple[object, object]

    def plant(self) -> None:
        self.llm.collective_rpc("plant_fault", args=("exchange", 9, "", 1))

    def uproot(self) -> None:
        self.llm.collective_rpc("uproot_fault")

    def check(self, what: str) -> None:
        told = self.llm.collective_rpc("rl_bridge", args=("describe",))
        said = {(rank["pending"], rank["torn"], rank["stage"]) for rank in told}
        assert said == {(None, "", "idle")}, what
        assert len({rank["root"] for rank in told}) == 1, what
        assert answers(self.llm) == self.fresh[self.holds], what

    def a_trainer_rank_is_killed_when_an_engine_rank_imports(self) -> None:
        self.trainer.end()
        manifest = self.publish()
        self.llm.collective_rpc("kill_in_import", args=(self.trainer.pids[0], "before", 1))
        with pytest.raises(WeightBridgeError, match="cannot be opened"):
            self.executor.update_weights(manifest)
        self.uproot()
        self.trainer.end()

    def failures(self) -> list[Callable[[], None]]:
        return [*super().failures(), self.a_trainer_rank_is_killed_when_an_engine_rank_imports]


@pytest.fixture(scope="module")
def paths(checkpoints: Checkpoints) -> list[str]:
    return [checkpoints.path(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture(scope="module")
def run(
    paths: list[str], references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    second = references.of(SETTING, 1)
    with (
        start(SETTING, paths[0]) as llm,
        executor_for(llm) as executor,
        Elsewhere(4, tmp_path_factory.mktemp("ranks"), CASES, sys.executable, CASES) as ranks,
    ):
        yield Run(
            executor=executor,
            trainer=RealTrainer(ranks, "begin_fsdp2", paths),
            worker="vllm",
            damaged=DAMAGED,
            damage_says=rf"{DAMAGED!r}.* part of rank 3",
            llm=llm,
            fresh=(answers(llm), second),
        )


def test_updates_of_a_sharded_trainer_with_failures_between_them_equal_fresh_engines(
    run: Run,
) -> None:
    run.alternate(4)


def test_a_trainer_rank_that_dies_while_it_is_read_costs_no_more_than_its_version(
    run: Run,
) -> None:
    """What is mapped already stays: it is verified as ever."""
    manifest = run.publish()
    run.llm.collective_rpc("kill_in_import", args=(run.trainer.pids[1], "within", 0))
    with suppress(WeightBridgeError):  # the other rank may come too late
        run.executor.update_weights(manifest)
        run.holds = 1 - run.holds
    run.uproot()
    run.trainer.end()
    run.check("a rank died")
    run.update()
    run.check("the next update")


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-engines` makes"
)
def test_ranges_of_elements_by_zero3_on_two_ranks_are_cut_again_by_rows_and_columns(
    run: Run, paths: list[str], tmp_path: Path
) -> None:
    with Elsewhere(2, tmp_path, CASES, PYTHON, "tests.trainers.deepspeed_cases") as ranks:
        other = replace(run, trainer=RealTrainer(ranks, "begin_zero3", paths))
        other.alternate(3, [other.an_engine_rank_fails])
        run.holds = other.holds


@pytest.mark.full
def test_twenty_updates_of_a_sharded_trainer_equal_fresh_engines(run: Run) -> None:
    run.alternate(20)

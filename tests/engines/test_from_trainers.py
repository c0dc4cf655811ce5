"""A trainer that is sharded over processes updates an engine of two ranks: nobody has the whole."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import RolloutExecutor
from rl_bridge.errors import ChecksumMismatch, WeightBridgeError
from rl_bridge.groups import GroupManifest
from tests.engines.drive import Setting, answers, executor_for, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import ShardedTrainer

SETTING = Setting(Kind("qwen3"), in_process=False, ranks=2)
CASES = "tests.trainers_torch.publishing"
DAMAGED = "model.layers.1.mlp.down_proj.weight"


@dataclass(slots=True)
class Run:
    """An engine, its driver, a trainer of four ranks, and what fresh engines answer."""

    llm: Any
    executor: RolloutExecutor
    trainer: ShardedTrainer
    fresh: tuple[object, object]
    holds: int = 0

    def publish(self) -> GroupManifest:
        return self.trainer.publish(1 - self.holds)

    def update(self) -> GroupManifest:
        manifest = self.publish()
        self.executor.update_weights(manifest)
        self.holds = 1 - self.holds
        return manifest

    def roots(self) -> list[tuple[object, ...]]:
        told = self.llm.collective_rpc("rl_bridge", args=("describe",))
        return [tuple(rank[key] for key in ("root", "pending", "torn", "stage")) for rank in told]


@pytest.fixture(scope="module")
def paths(checkpoints: Checkpoints) -> list[str]:
    return [checkpoints.path(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture(scope="module")
def run(
    paths: list[str], references: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    second = references.of(SETTING, 1)
    meeting: Path = tmp_path_factory.mktemp("ranks")
    with (
        start(SETTING, paths[0]) as llm,
        executor_for(llm, of_groups=True) as executor,
        Elsewhere(4, meeting, CASES, sys.executable, CASES) as ranks,
    ):
        trainer = ShardedTrainer(ranks, "begin_fsdp2", paths)
        yield Run(llm, executor, trainer, (answers(llm), second))


# ---- what goes wrong between two updates ---------------------------------------------------------


def an_engine_rank_fails(run: Run) -> None:
    run.llm.collective_rpc("plant_fault", args=("exchange", 9, "", 1))
    with pytest.raises(WeightBridgeError, match=r"rank 1: .*planted"):
        run.executor.update_weights(run.publish())
    run.llm.collective_rpc("uproot_fault")


def a_byte_goes_bad(run: Run) -> None:
    manifest = run.publish()
    run.trainer.damage(manifest, 3, DAMAGED)
    with pytest.raises(ChecksumMismatch, match=rf"{DAMAGED!r}.* part of rank 3"):
        run.executor.update_weights(manifest)


def a_trainer_rank_is_killed_before_the_import(run: Run) -> None:
    run.trainer.end()  # of memory that an engine rank has mapped by now it would need no publisher
    manifest = run.publish()
    run.trainer.kill(2)
    with pytest.raises(WeightBridgeError, match="cannot be opened"):
        run.executor.update_weights(manifest)


def a_trainer_rank_is_killed_when_an_engine_rank_imports(run: Run) -> None:
    run.trainer.end()
    manifest = run.publish()
    run.llm.collective_rpc("kill_in_import", args=(run.trainer.pids[0], "before", 1))
    with pytest.raises(WeightBridgeError, match="cannot be opened"):
        run.executor.update_weights(manifest)
    run.llm.collective_rpc("uproot_fault")
    run.trainer.end()


Failure = Callable[[Run], None]
FAILURES: list[Failure] = [
    an_engine_rank_fails,
    a_byte_goes_bad,
    a_trainer_rank_is_killed_before_the_import,
    a_trainer_rank_is_killed_when_an_engine_rank_imports,
]


def alternate(run: Run, times: int, failures: Sequence[Failure] = FAILURES) -> None:
    for turn in range(times):
        before = run.roots()
        fails = failures[turn % len(failures)]
        fails(run)
        assert run.roots() == before
        assert answers(run.llm) == run.fresh[run.holds], fails.__name__
        manifest = run.update()
        assert answers(run.llm) == run.fresh[run.holds], f"update {turn}"
        ack = run.executor.last_ack
        assert ack is not None
        assert ack.proof.root == manifest.root
        # The driver's process read nothing of it, and the trainer's ranks gathered nothing.
        assert not {"attach", "assemble"} & ack.timings_ms.keys()
        assert run.trainer.asked == []
        assert run.trainer.told(manifest) == {
            ("rollout", 0, "acknowledged"),
            ("vllm", 0, "released"),
            ("vllm", 1, "released"),
        }


@pytest.mark.timeout(600)
def test_updates_of_a_sharded_trainer_with_failures_between_them_equal_fresh_engines(
    run: Run,
) -> None:
    alternate(run, len(FAILURES))


@pytest.mark.timeout(600)
def test_a_trainer_rank_that_dies_while_it_is_read_costs_no_more_than_its_version(
    run: Run,
) -> None:
    """What is mapped already stays: it is verified as ever."""
    manifest = run.publish()
    run.llm.collective_rpc("kill_in_import", args=(run.trainer.pids[1], "within", 0))
    with suppress(WeightBridgeError):  # the other rank may come too late
        run.executor.update_weights(manifest)
        run.holds = 1 - run.holds
    run.llm.collective_rpc("uproot_fault")
    run.trainer.end()
    assert answers(run.llm) == run.fresh[run.holds]
    run.update()
    assert answers(run.llm) == run.fresh[run.holds]


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-engines` makes"
)
@pytest.mark.timeout(600)
def test_ranges_of_elements_by_zero3_on_two_ranks_are_cut_again_by_rows_and_columns(
    run: Run, paths: list[str], tmp_path: Path
) -> None:
    with Elsewhere(2, tmp_path, CASES, PYTHON, "tests.trainers.deepspeed_cases") as ranks:
        other = replace(run, trainer=ShardedTrainer(ranks, "begin_zero3", paths))
        alternate(other, 3, FAILURES[:1])
        run.holds = other.holds


@pytest.mark.full
@pytest.mark.timeout(600)
def test_twenty_updates_of_a_sharded_trainer_equal_fresh_engines(run: Run) -> None:
    alternate(run, 20)

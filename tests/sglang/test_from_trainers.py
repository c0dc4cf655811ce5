"""Megatron on four processes updates an engine of two ranks: each reads its rows and columns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_bridge import RolloutExecutor
from rl_bridge.errors import ChecksumMismatch, WeightBridgeError
from rl_bridge.groups import GroupManifest
from tests.engines.models import Checkpoints, Kind
from tests.sglang.bench import Bench, Engines, executor_for
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import ShardedTrainer

KIND = Kind("qwen2")
# Queries, keys and values of a layer, as Megatron has them in one.
DAMAGED = "decoder.layers.1.self_attention.linear_qkv.weight"
pytestmark = [
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-sglang` makes"
    ),
    pytest.mark.timeout(600),  # engines start
]


@dataclass(slots=True)
class Run:
    """An engine with its driver, and a trainer: two of its ranks have layer 0, two have layer 1."""

    bench: Bench
    executor: RolloutExecutor
    trainer: ShardedTrainer

    def publish(self) -> GroupManifest:
        return self.trainer.publish(1 - self.bench.holds)

    def update(self) -> GroupManifest:
        manifest = self.publish()
        self.executor.update_weights(manifest)
        self.bench.holds = 1 - self.bench.holds
        return manifest


@pytest.fixture(scope="module")
def run(
    engines: Engines, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    bench = engines.bench(KIND, 2)
    paths = [checkpoints.path(KIND, version) for version in (0, 1)]
    cases, imports = "tests.trainers_torch.publishing", "tests.trainers.megatron_cases"
    with (
        executor_for(bench.engine, of_groups=True) as executor,
        Elsewhere(4, tmp_path_factory.mktemp("ranks"), cases, PYTHON, imports) as ranks,
    ):
        yield Run(bench, executor, ShardedTrainer(ranks, "begin_megatron", paths))


# ---- what goes wrong between two updates ---------------------------------------------------------


def an_engine_rank_fails(run: Run) -> None:
    run.bench.plant("fail", 7, 1)
    with pytest.raises(WeightBridgeError, match=r"rank 1: .*planted"):
        run.executor.update_weights(run.publish())
    run.bench.uproot()


def a_byte_goes_bad(run: Run) -> None:
    manifest = run.publish()
    run.trainer.damage(manifest, 3, DAMAGED)
    with pytest.raises(ChecksumMismatch, match="part of rank 3"):
        run.executor.update_weights(manifest)


def a_trainer_rank_is_killed(run: Run) -> None:
    run.trainer.end()  # of memory that an engine rank has mapped by now it would need no publisher
    manifest = run.publish()
    run.trainer.kill(2)
    with pytest.raises(WeightBridgeError, match="cannot be opened"):
        run.executor.update_weights(manifest)


FAILURES: list[Callable[[Run], None]] = [
    an_engine_rank_fails,
    a_byte_goes_bad,
    a_trainer_rank_is_killed,
]


def alternate(run: Run, times: int) -> None:
    for turn in range(times):
        fails = FAILURES[turn % len(FAILURES)]
        fails(run)
        run.bench.check(fails.__name__)
        manifest = run.update()
        run.bench.check(f"update {turn}")
        ack = run.executor.last_ack
        assert ack is not None
        assert (ack.proof.root, ack.proof.method) == (manifest.root, "digest")
        # The driver's process read nothing of it, and the trainer's ranks gathered nothing.
        assert not {"attach", "assemble"} & ack.timings_ms.keys()
        assert run.trainer.asked == []
        assert run.trainer.told(manifest) == {
            ("rollout", 0, "acknowledged"),
            ("sglang", 0, "released"),
            ("sglang", 1, "released"),
        }


def test_updates_of_megatron_with_failures_between_them_equal_fresh_engines(run: Run) -> None:
    alternate(run, len(FAILURES))


@pytest.mark.full
def test_twenty_updates_of_megatron_equal_fresh_engines(run: Run) -> None:
    alternate(run, 20)

"""The demo with a real vLLM engine, in the rollout's process and behind HTTP; engines that lie."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.demo.rollout import Engine, Rollout, RolloutConfig, RolloutWorker
from rl_bridge.demo.trainer import PromiseBroken, Trainer, logprob_tolerance
from rl_bridge.demo.vllm_engine import VLLMSampler
from tests.engines.demo_run import run_shortly

FAILS = "after 10 of "


def below(pid: int) -> set[str]:
    """The processes that any thread of this one started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {child for path in lists for child in path.read_text().split()}


@pytest.mark.timeout(420)
@pytest.mark.full  # the others are longer runs
def test_a_short_run_keeps_every_promise(tmp_path: Path) -> None:
    run_shortly(Engine.VLLM, tmp_path, product="vLLM 0.", processes=2, fails=FAILS)


@pytest.mark.timeout(420)
def test_trainer_side_car_and_server_keep_every_promise_as_processes_of_their_own(
    tmp_path: Path,
) -> None:
    product, before = "a server of vLLM 0.", below(os.getpid())
    run_shortly(Engine.VLLM_HTTP, tmp_path, product=product, processes=4, fails=FAILS)
    assert below(os.getpid()) <= before
    # The side-car's own line:
    assert "could not commit update" in (tmp_path / "vllm-http.log").read_text("utf-8")


@pytest.mark.timeout(420)
def test_an_adapter_of_two_trainer_ranks_reaches_two_engine_ranks_and_every_promise_is_kept(
    tmp_path: Path,
) -> None:
    fails = "after adapter policy@"
    product = "two ranks of vLLM 0."
    run_shortly(Engine.VLLM, tmp_path, product=product, processes=4, fails=fails, lora=True)


# ---- engines that lie ---------------------------------------------------------------------------

CONFIG = RolloutConfig(transport="shared-memory", seed=3, engine=Engine.VLLM)


@pytest.fixture(scope="module")
def worker() -> Iterator[RolloutWorker]:
    with closing(RolloutWorker(CONFIG)) as worker:
        yield worker


class InThisProcess(Rollout):
    """A rollout whose worker a test can reach, although its transport crosses processes."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._task, self._worker, self._child = CONFIG.task, worker, None


def overwrite_a_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)


@pytest.mark.timeout(420)
def test_an_engine_that_does_not_hold_what_it_says_is_found_out(worker: RolloutWorker) -> None:
    with closing(Trainer(CONFIG, InThisProcess(worker), num_steps=9)) as trainer:
        row, _ = trainer.step(1, None)
        assert row.logprob_max_abs_diff <= logprob_tolerance(Engine.VLLM)
        assert isinstance(worker.sampler, VLLMSampler)
        llm = worker.sampler.llm
        label = llm.get_weight_version()
        llm.update_weight_version("7@elsewhere")
        with pytest.raises(PromiseBroken, match="7@elsewhere"):
            trainer.sample(1)
        llm.update_weight_version(label)
        trainer.sample(1)
        llm.apply_model(overwrite_a_norm)
        with pytest.raises(PromiseBroken, match="stale or torn"):
            trainer.sample(1)

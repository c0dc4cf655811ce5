"""The demo with a real vLLM engine: a short run with planted faults, and engines that lie."""

import io
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_bridge.demo import run_demo
from rl_bridge.demo.rollout import Engine, Rollout, RolloutConfig, RolloutWorker
from rl_bridge.demo.trainer import Fault, PromiseBroken, Trainer, logprob_tolerance
from rl_bridge.demo.vllm_engine import VLLMSampler

LOGPROB_TOLERANCE = logprob_tolerance(Engine.VLLM)
STEPS = 10


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    out = tmp_path_factory.mktemp("demo")
    screen = io.StringIO()
    run_demo(engine="vllm", steps=STEPS, out=out, console=Console(file=screen, width=120))
    return json.loads((out / "demo.json").read_text("utf-8")), screen.getvalue(), out


@pytest.mark.timeout(420)
def test_a_short_run_keeps_every_promise(short_run: tuple[dict[str, Any], str, Path]) -> None:
    found = short_run[0]
    assert found["engine"] == "vllm"
    assert found["engine_name"].startswith("vLLM 0.")
    assert (found["refused"], found["undone"], found["num_processes"]) == (2, 1, 2)
    assert found["versions_installed"] == STEPS - 2
    assert found["reward_first"] < 0.2
    assert found["reward_last"] > 2 * found["reward_first"]
    assert found["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE
    assert found["logprob_min_diff_if_stale"] > 100 * LOGPROB_TOLERANCE
    # 64 prompts with 8 answers each step, and 8 prompts behind each of the three faults.
    assert found["labels_checked"] == STEPS * 512 + 3 * 64
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(420)
def test_faults_leave_the_engine_at_its_version(
    short_run: tuple[dict[str, Any], str, Path],
) -> None:
    faults = {fault["kind"]: fault for fault in short_run[0]["faults"]}
    assert list(faults) == [fault.value for fault in Fault]
    assert faults[Fault.CORRUPTED]["error"] == "ChecksumMismatch"
    assert faults[Fault.STALE]["error"] == "StaleUpdate"
    half_way = faults[Fault.HALF_WAY]
    assert half_way["outcome"] == "undone"
    assert half_way["message"].startswith("EngineFault: the engine failed after 10 of ")
    for fault in faults.values():
        assert fault["active_version"] != fault["version"]
        assert fault["logprob_max_abs_diff"] <= LOGPROB_TOLERANCE


@pytest.mark.timeout(420)
def test_screen_and_files_name_the_engine(short_run: tuple[dict[str, Any], str, Path]) -> None:
    found, screen, out = short_run
    for words in (found["engine_name"], "REFUSED", "UNDONE", "outputs, each with the label"):
        assert words in screen
    assert "install failed" not in screen  # the planted fault's traceback is the log's
    assert "EngineFault" in (out / "vllm.log").read_text("utf-8")
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------ engines that lie

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
        assert row.logprob_max_abs_diff <= LOGPROB_TOLERANCE
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

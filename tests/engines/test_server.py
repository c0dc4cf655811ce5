"""vLLM's HTTP server is updated by its URL, from another process, and by a side-car before it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.errors import DeadlineExceeded, IncompatibleUpdate
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, answers, executor_for, start
from tests.engines.drivers import STEPS, drive
from tests.engines.matrix import few_of
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import Served, served
from tests.engines.sidecars import DEATH, URL
from tests.engines.trainer import Trainer
from tests.helpers import stop
from tests.remote.process import SidecarProcess, make_key

SETTING = Setting(Kind("llama"), in_process=False)
DEADLINE_S = 60
HANG_S = 3
DYING = "tests.engines.sidecars:dying"


@pytest.fixture(scope="module")
def fresh(checkpoints: Checkpoints) -> list[Answers]:
    made = []
    for version in (0, 1):
        with start(Setting(SETTING.kind), checkpoints.path(SETTING.kind, version)) as llm:
            # One at a time, as the server is asked: sums depend on what is computed together.
            made.append(tuple(answers(llm, (prompt,))[0] for prompt in PROMPTS))
    return made


@pytest.fixture(scope="module")
def server(
    checkpoints: Checkpoints, fresh: list[Answers], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    path = checkpoints.path(SETTING.kind, 0)
    with served(SETTING, path, log, VLLM_SERVER_DEV_MODE="1") as made:
        yield made


@pytest.fixture(scope="module")
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


def label(server: Served) -> str:
    return str(server.call("weight_info", method="GET").json()["weight_version"])


@pytest.fixture
def executor(server: Served) -> Iterator[RolloutExecutor]:
    with executor_for(server.url, timeout_s=DEADLINE_S) as made:
        yield made


@pytest.mark.timeout(240)
def test_it_is_a_fresh_engine_after_updates_and_failures(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    assert fresh[0] != fresh[1]
    assert server.answers() == fresh[0]
    for step, failure in enumerate(FAILURES, 1):
        told = label(server)
        fail(failure, server, executor.update_weights, weights[step % 2], trainer)
        assert server.answers() == fresh[(step - 1) % 2], f"behind {failure}"
        assert label(server) == told
        manifest = trainer.publish(weights[step % 2])
        executor.update_weights(manifest)
        assert server.answers() == fresh[step % 2], f"update {step}"
        assert label(server) == f"{manifest.weight_version}@{manifest.root}"


def test_it_is_a_fresh_engine_after_updates_by_its_own_routes(
    server: Served,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    assert server.call("init_weight_transfer_engine", json={"init_info": {}}).is_success
    for step in range(2):
        manifest = trainer.publish(weights[step % 2])
        info = {"update_info": {"manifest": manifest.to_json()}}
        assert server.call("start_weight_update").is_success
        assert server.call("update_weights", json=info).is_success
        finish = {"weight_version": str(manifest.weight_version)}
        assert server.call("finish_weight_update", json=finish).is_success
        assert server.answers() == fresh[step % 2]
        damaged = {**weights[0], "model.norm.weight": torch.full((128,), float("inf"))}
        info = {"update_info": {"manifest": trainer.publish(damaged).to_json()}}
        assert server.call("start_weight_update").is_success
        assert not server.call("update_weights", json=info).is_success
        assert server.answers() == fresh[step % 2]


def test_requests_under_way_change_version_at_a_token_that_they_tell(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    old = trainer.publish(weights[0])
    executor.update_weights(old)
    choices: list[dict[str, Any]] = []
    asking = [
        threading.Thread(target=lambda p=prompt: choices.append(server.generate(p, 400)))
        for prompt in PROMPTS
    ]
    for thread in asking:
        thread.start()
    manifests = [old]
    while any(thread.is_alive() for thread in asking) and len(manifests) < 40:
        manifests.append(trainer.publish(weights[len(manifests) % 2]))
        executor.update_weights(manifests[-1])
    for thread in asking:
        thread.join(60)
    labels = [f"{manifest.weight_version}@{manifest.root}" for manifest in manifests]
    assert len(choices) == len(PROMPTS)
    for choice in choices:
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(choice["token_ids"]) == 400
        order = [labels.index(span["version"]) for span in spans]
        assert order == sorted(set(order))
    # No request comes to its end between two updates: a rank stages between steps, not beside them.
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)
    executor.update_weights(trainer.publish(weights[1]))
    assert server.answers() == fresh[1]


@pytest.mark.timeout(240)  # each driver is a process that imports torch
@pytest.mark.parametrize("step", few_of(STEPS, "installed"))
def test_what_a_killed_driver_left_is_ended_by_the_next_ones_recover(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
    *,
    tmp_path: Path,
    step: str,
) -> None:
    executor.update_weights(trainer.publish(weights[0]))
    manifest = trainer.publish(weights[1])
    if step == "undone":
        server.collective_rpc("plant_fault", ["exchange", 5])
    mark = tmp_path / "stands"
    driver = multiprocessing.get_context("spawn").Process(
        target=drive, args=(server.url, manifest.to_json(), step, str(mark)), daemon=True
    )
    driver.start()
    try:
        until(lambda: mark.exists() or not driver.is_alive(), what=f"the driver {step}")
        assert driver.is_alive()
    finally:
        driver.kill()
        driver.join(DEADLINE_S)
        server.collective_rpc("uproot_fault")
    paused = server.call("is_paused", method="GET").json()["is_paused"]
    assert paused == (step != "resumed")
    with executor_for(server.url, timeout_s=DEADLINE_S) as following:
        following.recover()
        assert not server.call("is_paused", method="GET").json()["is_paused"]
        (rank,) = server.collective_rpc("rl_bridge", ["describe"])
        assert rank["pending"] is None  # the trainer's slot is free
        forward = step in {"installed", "resumed"}
        assert server.answers() == fresh[int(forward)]
        assert (label(server) == f"{manifest.weight_version}@{manifest.root}") == forward
        following.update_weights(trainer.publish(weights[0]))
        following.check_servable()
        assert server.answers() == fresh[0]


# ---- a side-car before it, a process of its own --------------------------------------------------


@pytest.fixture
def sidecar(tmp_path: Path, server: Served) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    (tmp_path / URL).write_text(server.url)
    made = SidecarProcess(tmp_path, make_key(tmp_path))
    yield made
    made.kill()


def test_by_a_side_car_it_is_a_fresh_engine_after_updates_and_failures(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    assert sidecar.start(server.url, take_over=True).state == "empty"
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        for step, failure in enumerate(FAILURES, 1):
            manifest = trainer.publish(weights[step % 2])
            ack = engine.update_weights(manifest)
            assert (ack.weight_version, ack.proof.root) == (manifest.weight_version, manifest.root)
            assert server.answers() == fresh[step % 2], f"update {step}"
            told = label(server)
            assert told == f"{manifest.weight_version}@{manifest.root}"
            fail(failure, server, engine.update_weights, weights[1 - step % 2], trainer)
            assert server.answers() == fresh[step % 2], f"behind {failure} at {step}"
            assert label(server) == told
            status = engine.status()
            assert (status.state, status.active_root) == ("serving", manifest.root)
        other = trainer.publish({"other.weight": torch.ones(3)})
        with pytest.raises(IncompatibleUpdate):
            engine.update_weights(other)
        assert engine.update(other).stage == "refused"
        assert (server.answers(), label(server)) == (fresh[step % 2], told)
        states = {report.worker: report.state for report in trainer.holders(manifest)}
        assert states["sidecar"] == "acknowledged"
        assert "vllm" in states  # which has memory of its own, and has let go of the trainer's


@pytest.mark.timeout(300)
def test_killed_behind_any_step_its_next_start_brings_the_living_server_to_a_version(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    holds = 0
    sidecar.start(DYING)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        held = trainer.publish(weights[holds])
        engine.update_weights(held)
        for step in ("prepare", "resume"):
            following = trainer.publish(weights[1 - holds])
            (sidecar.directory / DEATH).write_text(step)
            with pytest.raises(EngineLost):
                engine.update_weights(following)
            sidecar.died()
            status = sidecar.start(DYING)
            if step != "prepare":  # its commit had begun
                held, holds = following, 1 - holds
            assert (status.state, status.active_root) == ("serving", held.root), (step, status)
            assert status.recovery.outcome == "reinstalled"
            assert server.answers() == fresh[holds], step
            assert label(server) == f"{held.weight_version}@{held.root}"
            assert not server.call("is_paused", method="GET").json()["is_paused"], step
            if step == "prepare":  # nothing was wrong with it: the same one may come again
                assert engine.update_weights(following).root == following.root
                held, holds = following, 1 - holds
        held = trainer.publish(weights[1 - holds])
        assert engine.update_weights(held).root == held.root
        assert server.answers() == fresh[1 - holds]


@pytest.mark.timeout(200)
def test_a_server_that_stands_still_is_told_within_the_deadline(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    sidecar.start(server.url, step_timeout_s=HANG_S, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        manifest = trainer.publish(weights[1])
        engine.import_weights(manifest)
        os.killpg(server.process.pid, signal.SIGSTOP)
        stop(server.process.pid)
        try:
            with pytest.raises(DeadlineExceeded):
                engine.prepare_weights(manifest)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: engine.status().busy is None, what="the step is over")
        engine.update_weights(trainer.publish(weights[1]))
        assert server.answers() == fresh[1]


# ---- a server that is gone -----------------------------------------------------------------------


@pytest.mark.timeout(DEADLINE_S)  # it is not waited for an engine that is gone
def test_a_killed_worker_is_a_typed_error(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    executor.update_weights(trainer.publish(weights[0]))
    server.collective_rpc("plant_fault", ["exchange", 5, "kill"])

    def ask() -> None:
        # It gets an answer or an error, and is not left waiting.
        with suppress(AssertionError, httpx.TransportError):
            server.generate(PROMPTS[0], 400)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises((EngineLost, TornEngine), match="fresh engine"):
        executor.update_weights(trainer.publish(weights[1]))
    with pytest.raises(TornEngine):
        executor.check_servable()
    asking.join(DEADLINE_S)
    assert not asking.is_alive()


@pytest.fixture(scope="module")
def following(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server behind the one that was killed."""
    log = tmp_path_factory.mktemp("following") / "log"
    path = checkpoints.path(SETTING.kind, 0)
    with served(SETTING, path, log, VLLM_SERVER_DEV_MODE="1") as made:
        yield made


@pytest.mark.timeout(300)  # it starts
def test_a_fresh_server_serves_only_what_it_was_given(
    following: Served,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    with executor_for(following.url, timeout_s=DEADLINE_S) as executor:
        with pytest.raises(WeightBridgeUnavailableError):
            executor.check_servable()
        executor.update_weights(trainer.publish(weights[1]))
        executor.check_servable()
        assert following.answers() == fresh[1]


def test_a_server_that_is_gone_is_told_by_its_side_car_and_not_servable(
    following: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    sidecar.start(following.url, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        engine.update_weights(trainer.publish(weights[0]))
        engine.check_servable()
        following.end()
        with pytest.raises(EngineLost, match="fresh"):
            engine.update_weights(trainer.publish(weights[1]))
        status = engine.status()
        assert (status.state, status.servable) == ("lost", False)
        with pytest.raises(EngineLost, match="send it a version"):
            engine.check_servable()

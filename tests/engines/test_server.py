"""vLLM's HTTP server is updated by its URL, from another process."""

import multiprocessing
import threading
import time
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
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, answers, executor_for, start
from tests.engines.drivers import STEPS, drive
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import Served, served
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("llama"), in_process=False)
DEADLINE_S = 60


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


@pytest.fixture
def executor(server: Served) -> Iterator[RolloutExecutor]:
    with executor_for(server.url, timeout_s=DEADLINE_S) as made:
        yield made


@pytest.mark.timeout(240)
def test_it_is_a_fresh_engine_after_twenty_updates_and_failures(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    assert fresh[0] != fresh[1]
    assert server.answers() == fresh[0]
    for step in range(1, 21):
        if step % 3 == 0:
            told = server.call("weight_info", method="GET").json()["weight_version"]
            failure = list(FAILURES)[step // 3 % len(FAILURES)]
            fail(failure, server, executor.update_weights, weights[step % 2], trainer)
            assert server.answers() == fresh[(step - 1) % 2], f"behind {failure} at {step}"
            assert server.call("weight_info", method="GET").json()["weight_version"] == told
        manifest = trainer.publish(weights[step % 2])
        executor.update_weights(manifest)
        assert server.answers() == fresh[step % 2], f"update {step}"
        told = server.call("weight_info", method="GET").json()["weight_version"]
        assert told == f"{manifest.weight_version}@{manifest.root}"


def test_it_is_a_fresh_engine_after_updates_by_its_own_routes(
    server: Served,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    assert server.call("init_weight_transfer_engine", json={"init_info": {}}).is_success
    for step in range(4):
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


def test_a_fault_in_its_worker_is_undone(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    executor.update_weights(trainer.publish(weights[0]))
    for point, nth in (("exchange", 6), ("pack", 3), ("corrupt", 2), ("wrong pack", 1)):
        fault = {"method": "plant_fault", "args": [point, nth]}
        assert server.call("collective_rpc", json=fault).is_success
        with pytest.raises(Exception, match=r"planted|does not hold|differ from the weight"):
            executor.update_weights(trainer.publish(weights[1]))
        assert server.call("collective_rpc", json={"method": "uproot_fault"}).is_success
        assert server.answers() == fresh[0], point
    executor.update_weights(trainer.publish(weights[1]))
    assert server.answers() == fresh[1]


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
@pytest.mark.parametrize("step", STEPS)
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
        told = server.call("weight_info", method="GET").json()["weight_version"]
        assert (told == f"{manifest.weight_version}@{manifest.root}") == forward
        following.update_weights(trainer.publish(weights[0]))
        following.check_servable()
        assert server.answers() == fresh[0]


# The last tests of this file: there is no server behind them.
@pytest.mark.timeout(300)  # a second server starts
def test_a_killed_worker_is_a_typed_error_and_a_fresh_server_serves_only_what_it_was_given(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
    *,
    checkpoints: Checkpoints,
    tmp_path: Path,
) -> None:
    executor.update_weights(trainer.publish(weights[0]))
    server.collective_rpc("plant_fault", ["exchange", 5, "kill"])
    manifest = trainer.publish(weights[1])

    def ask() -> None:
        # It gets an answer or an error, and is not left waiting.
        with suppress(AssertionError, httpx.TransportError):
            server.generate(PROMPTS[0], 400)

    asking = threading.Thread(target=ask)
    asking.start()
    begin = time.monotonic()
    with pytest.raises((EngineLost, TornEngine), match="fresh engine"):
        executor.update_weights(manifest)
    assert time.monotonic() - begin < DEADLINE_S / 2, "it waited for an engine that was gone"
    with pytest.raises(TornEngine):
        executor.check_servable()
    asking.join(60)
    assert not asking.is_alive()
    path = checkpoints.path(SETTING.kind, 0)
    with (
        served(SETTING, path, tmp_path / "log", VLLM_SERVER_DEV_MODE="1") as following,
        executor_for(following.url, timeout_s=60) as other,
    ):
        with pytest.raises(WeightBridgeUnavailableError):
            other.check_servable()
        other.update_weights(manifest)
        other.check_servable()
        assert following.answers() == fresh[1]


def test_a_server_that_was_killed_is_a_typed_error(
    server: Served,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    server.end()
    with pytest.raises((EngineLost, TornEngine), match="fresh engine"):
        executor.update_weights(trainer.publish(weights[1]))


def test_a_server_without_its_development_routes_says_which_variable_is_missing(
    trainer: Trainer,
) -> None:
    import http.server

    class Bare(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def do_GET(self) -> None:
            self.send_error(404)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Say nothing."""

        def log_error(self, *args: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Bare) as bare:
        thread = threading.Thread(target=bare.serve_forever, daemon=True)
        thread.start()
        with (
            executor_for(f"http://127.0.0.1:{bare.server_port}", timeout_s=20) as executor,
            pytest.raises(WeightBridgeUnavailableError, match="VLLM_SERVER_DEV_MODE=1"),
        ):
            executor.update_weights(trainer.publish({"w": torch.ones(2)}))
        bare.shutdown()
        thread.join(20)

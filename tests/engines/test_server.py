"""vLLM's HTTP server is updated by its URL, from another process, and by a side-car before it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.errors import DeadlineExceeded, IncompatibleUpdate
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, answers, executor_for, start
from tests.engines.drivers import STEPS, drive
from tests.engines.matrix import few_of
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import ADAPTER, Checkpoints, Kind
from tests.engines.served import DEV, Served, served
from tests.engines.sidecars import URL
from tests.engines.stand import Stand, label_of
from tests.engines.trainer import Trainer
from tests.helpers import stop
from tests.remote.process import SidecarProcess, make_key
from tests.trainers_torch.worlds import World

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
    with served(SETTING, path, log, environment=DEV) as made:
        yield made


class OnServer(Stand):
    def check(self, what: object = "") -> None:
        super().check(what)
        assert not self.engine.is_paused(), what


@pytest.fixture
def make_stand(
    checkpoints: Checkpoints, fresh: list[Answers], trainer: Trainer
) -> Callable[[Served], OnServer]:
    weights = [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]
    return lambda server: OnServer(server, trainer, weights, fresh)


@pytest.fixture
def stand(make_stand: Callable[[Served], OnServer], server: Served) -> OnServer:
    return make_stand(server)


@pytest.fixture
def executor(server: Served) -> Iterator[RolloutExecutor]:
    with executor_for(server.url, timeout_s=DEADLINE_S) as made:
        yield made


def test_a_server_without_our_routes_takes_no_adapter_and_says_how_it_is_started(
    executor: RolloutExecutor, checkpoints: Checkpoints
) -> None:
    weights = load_file(f"{checkpoints.adapter(0)}/adapter_model.safetensors")
    spec = AdapterSpec.of_peft("policy", ADAPTER, [])
    with make_weight_bridge("shared-memory") as bridge:
        manifest = bridge.publish(weights, weight_version=1, adapter=spec)
        with pytest.raises(WeightBridgeUnavailableError, match="VLLM_PLUGINS=rl_bridge"):
            executor.update_weights(manifest)


@pytest.mark.timeout(240)
def test_it_is_a_fresh_engine_after_updates_and_failures(
    stand: OnServer, executor: RolloutExecutor
) -> None:
    assert stand.fresh[0] != stand.fresh[1]
    stand.check("as it was started")
    for failure in FAILURES:
        told = stand.engine.label()
        sent = stand.weights[1 - stand.holds]
        fail(failure, stand.engine, executor.update_weights, sent, stand.trainer)
        stand.check(failure)
        assert stand.engine.label() == told
        manifest = stand.update(executor)
        stand.check(f"behind {failure}")
        assert stand.engine.label() == label_of(manifest)


def test_it_is_a_fresh_engine_after_updates_by_its_own_routes(stand: OnServer) -> None:
    server = stand.engine
    assert server.call("init_weight_transfer_engine", json={"init_info": {}}).is_success
    for number in range(2):
        manifest = stand.publish(number)
        stand.holds = number
        info = {"update_info": {"manifest": manifest.to_json()}}
        assert server.call("start_weight_update").is_success
        assert server.call("update_weights", json=info).is_success
        finish = {"weight_version": str(manifest.weight_version)}
        assert server.call("finish_weight_update", json=finish).is_success
        stand.check()
        damaged = {**stand.weights[0], "model.norm.weight": torch.full((128,), float("inf"))}
        info = {"update_info": {"manifest": stand.trainer.publish(damaged).to_json()}}
        assert server.call("start_weight_update").is_success
        assert not server.call("update_weights", json=info).is_success
        assert server.answers() == stand.fresh[stand.holds]


def test_skyrl_updates_a_server_by_its_own_policy_worker(
    checkpoints: Checkpoints, stand: OnServer, tmp_path: Path
) -> None:
    trainer = World(1, tmp_path, "tests.integrations.framework_ranks")
    trainer.run("skyrl_begins", url=stand.engine.url)
    for number in (1, 0, 1):
        assert trainer.run("sync", path=checkpoints.path(SETTING.kind, number)) == [""]
        stand.holds = number
        stand.check()
        name = next(iter(stand.weights[0]))
        path = checkpoints.path(SETTING.kind, 1 - number)
        (refused,) = trainer.run("sync", path=path, damaged=name)
        assert name in refused
        stand.check()
    trainer.run("leave_engines")
    trainer.leave()


def test_requests_under_way_change_version_at_a_token_that_they_tell(
    stand: OnServer, executor: RolloutExecutor
) -> None:
    manifests = [stand.update(executor, 0)]
    choices: list[dict[str, Any]] = []
    asking = [
        threading.Thread(target=lambda p=prompt: choices.append(stand.engine.generate(p, 400)))
        for prompt in PROMPTS
    ]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking) and len(manifests) < 40:
        manifests.append(stand.update(executor))
    for thread in asking:
        thread.join(60)
    labels = [label_of(manifest) for manifest in manifests]
    assert len(choices) == len(PROMPTS)
    for choice in choices:
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(choice["token_ids"]) == 400
        order = [labels.index(span["version"]) for span in spans]
        assert order == sorted(set(order))
    # No request comes to its end between two updates: a rank stages between steps, not beside them.
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)
    stand.update(executor, 1)
    stand.check()


@pytest.mark.timeout(240)  # each driver is a process that imports torch
@pytest.mark.parametrize("step", few_of(STEPS, "installed"))
def test_what_a_killed_driver_left_is_ended_by_the_next_ones_recover(
    stand: OnServer, executor: RolloutExecutor, tmp_path: Path, step: str
) -> None:
    server = stand.engine
    stand.update(executor, 0)
    manifest = stand.publish()
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
    assert server.is_paused() == (step != "resumed")
    with executor_for(server.url, timeout_s=DEADLINE_S) as following:
        following.recover()
        (rank,) = server.collective_rpc("rl_bridge", ["describe"])
        assert rank["pending"] is None  # the trainer's slot is free
        stand.holds = int(step in {"installed", "resumed"})
        stand.check()
        assert (server.label() == label_of(manifest)) == bool(stand.holds)
        stand.update(following, 0)
        following.check_servable()
        stand.check()


# ---- a side-car before it, a process of its own --------------------------------------------------


@pytest.fixture
def sidecar(tmp_path: Path, server: Served) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    (tmp_path / URL).write_text(server.url)
    made = SidecarProcess(tmp_path, make_key(tmp_path))
    yield made
    made.kill()


def test_by_a_side_car_it_is_a_fresh_engine_after_updates_and_failures(
    stand: OnServer, sidecar: SidecarProcess
) -> None:
    server, trainer = stand.engine, stand.trainer
    assert sidecar.start(server.url, take_over=True).state == "empty"
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        for failure in FAILURES:
            manifest = stand.publish()
            ack = engine.update_weights(manifest)
            stand.holds = 1 - stand.holds
            assert (ack.weight_version, ack.proof.root) == (manifest.weight_version, manifest.root)
            stand.check(f"before {failure}")
            told = server.label()
            assert told == label_of(manifest)
            fail(failure, server, engine.update_weights, stand.weights[1 - stand.holds], trainer)
            stand.check(f"behind {failure}")
            assert server.label() == told
            status = engine.status()
            assert (status.state, status.active_root) == ("serving", manifest.root)
        other = trainer.publish({"other.weight": torch.ones(3)})
        with pytest.raises(IncompatibleUpdate):
            engine.update_weights(other)
        assert engine.update(other).stage == "refused"
        stand.check()
        assert server.label() == told
        states = {report.worker: report.state for report in trainer.holders(manifest)}
        assert states["sidecar"] == "acknowledged"
        assert "vllm" in states  # which has memory of its own, and has let go of the trainer's


@pytest.mark.timeout(300)
def test_killed_behind_any_step_its_next_start_brings_the_living_server_to_a_version(
    stand: OnServer, sidecar: SidecarProcess
) -> None:
    # Behind the pause its commit has begun.
    stand.side_car_dies(sidecar, DYING, {"prepare": False, "resume": True})


@pytest.mark.timeout(200)
def test_a_server_that_stands_still_is_told_within_the_deadline(
    stand: OnServer, sidecar: SidecarProcess
) -> None:
    server = stand.engine
    sidecar.start(server.url, step_timeout_s=HANG_S, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        manifest = stand.publish(1)
        engine.import_weights(manifest)
        os.killpg(server.process.pid, signal.SIGSTOP)
        stop(server.process.pid)
        try:
            with pytest.raises(DeadlineExceeded):
                engine.prepare_weights(manifest)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: engine.status().busy is None, what="the step is over")
        stand.update(engine, 1)
        stand.check()


# ---- a server that is gone -----------------------------------------------------------------------


@pytest.mark.timeout(DEADLINE_S)  # it is not waited for an engine that is gone
def test_a_killed_worker_is_a_typed_error(stand: OnServer, executor: RolloutExecutor) -> None:
    server = stand.engine
    stand.update(executor, 0)
    server.collective_rpc("plant_fault", ["exchange", 5, "kill"])

    def ask() -> None:
        # It gets an answer or an error, and is not left waiting.
        with suppress(AssertionError, httpx.TransportError):
            server.generate(PROMPTS[0], 400)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises((EngineLost, TornEngine), match="fresh engine"):
        executor.update_weights(stand.publish(1))
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
    with served(SETTING, path, log, environment=DEV) as made:
        yield made


@pytest.mark.timeout(300)  # it starts
def test_a_fresh_server_serves_only_what_it_was_given(
    make_stand: Callable[[Served], OnServer], following: Served
) -> None:
    stand = make_stand(following)
    with executor_for(following.url, timeout_s=DEADLINE_S) as executor:
        with pytest.raises(WeightBridgeUnavailableError):
            executor.check_servable()
        stand.update(executor, 1)
        executor.check_servable()
        stand.check()


def test_a_server_that_is_gone_is_told_by_its_side_car_and_not_servable(
    make_stand: Callable[[Served], OnServer], following: Served, sidecar: SidecarProcess
) -> None:
    stand = make_stand(following)
    sidecar.start(following.url, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        stand.update(engine, 0)
        engine.check_servable()
        following.end()
        with pytest.raises(EngineLost, match="fresh"):
            engine.update_weights(stand.publish(1))
        status = engine.status()
        assert (status.state, status.servable) == ("lost", False)
        with pytest.raises(EngineLost, match="send it a version"):
            engine.check_servable()

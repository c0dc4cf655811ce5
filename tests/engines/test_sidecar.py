"""A side-car before a real vLLM server: three processes, and each of the last two may die."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_bridge import EngineLost
from rl_bridge.errors import DeadlineExceeded, IncompatibleUpdate
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, answers, start
from tests.engines.mishaps import FAILURES, fail
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import Served, served
from tests.engines.sidecars import DEATH, URL
from tests.engines.trainer import Trainer
from tests.helpers import stop
from tests.remote.process import SidecarProcess, make_key

SETTING = Setting(Kind("llama"), in_process=False)
DEADLINE_S = 60
HANG_S = 5
DYING = "tests.engines.sidecars:dying"

Versions = list[dict[str, torch.Tensor]]


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
def versions(checkpoints: Checkpoints) -> Versions:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture
def sidecar(tmp_path: Path, server: Served) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    (tmp_path / URL).write_text(server.url)
    made = SidecarProcess(tmp_path, make_key(tmp_path))
    yield made
    made.kill()


def label(server: Served) -> str:
    return str(server.call("weight_info", method="GET").json()["weight_version"])


@pytest.mark.timeout(300)  # a server starts, and two engines before it
def test_the_server_is_a_fresh_engine_after_updates_and_failures(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    versions: Versions,
    fresh: list[Answers],
) -> None:
    assert sidecar.start(server.url).state == "empty"
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        for step in range(1, 7):
            manifest = trainer.publish(versions[step % 2])
            ack = engine.update_weights(manifest)
            assert (ack.weight_version, ack.proof.root) == (manifest.weight_version, manifest.root)
            assert server.answers() == fresh[step % 2], f"update {step}"
            told = label(server)
            assert told == f"{manifest.weight_version}@{manifest.root}"
            failure = list(FAILURES)[step % len(FAILURES)]
            fail(failure, server, engine.update_weights, versions[1 - step % 2], trainer)
            assert server.answers() == fresh[step % 2], f"behind {failure} at {step}"
            assert label(server) == told
            status = engine.status()
            assert (status.state, status.active_root) == ("serving", manifest.root)
        other = trainer.publish({"other.weight": torch.ones(3)})
        with pytest.raises(IncompatibleUpdate):
            engine.update_weights(other)
        assert engine.update(other).stage == "refused"
        assert (server.answers(), label(server)) == (fresh[0], told)
        states = {report.worker: report.state for report in trainer.holders(manifest)}
        assert states["sidecar"] == "acknowledged"
        assert "vllm" in states  # which has memory of its own, and has let go of the trainer's


@pytest.mark.timeout(300)
def test_killed_behind_any_step_its_next_start_brings_the_living_server_to_a_version(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    versions: Versions,
    fresh: list[Answers],
) -> None:
    holds = 0
    sidecar.start(DYING)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        held = trainer.publish(versions[holds])
        engine.update_weights(held)
        for step in ("prepare", "install", "resume", "commit"):
            following = trainer.publish(versions[1 - holds])
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
        held = trainer.publish(versions[1 - holds])
        assert engine.update_weights(held).root == held.root
        assert server.answers() == fresh[1 - holds]


@pytest.mark.timeout(200)
def test_a_server_that_stands_still_is_told_within_the_deadline(
    server: Served,
    sidecar: SidecarProcess,
    trainer: Trainer,
    versions: Versions,
    fresh: list[Answers],
) -> None:
    sidecar.start(server.url, step_timeout_s=HANG_S, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        manifest = trainer.publish(versions[1])
        engine.import_weights(manifest)
        os.killpg(server.process.pid, signal.SIGSTOP)
        stop(server.process.pid)
        try:
            with pytest.raises(DeadlineExceeded):
                engine.prepare_weights(manifest)
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: engine.status().busy is None, what="the step is over")
        engine.update_weights(trainer.publish(versions[1]))
        assert server.answers() == fresh[1]


# The last test of this file: there is no server behind it.
@pytest.mark.timeout(200)
def test_a_server_that_is_gone_is_told_and_not_servable(
    server: Served, sidecar: SidecarProcess, trainer: Trainer, versions: Versions
) -> None:
    sidecar.start(server.url, take_over=True)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        engine.update_weights(trainer.publish(versions[0]))
        engine.check_servable()
        server.end()
        begin = time.monotonic()
        with pytest.raises(EngineLost, match="fresh"):
            engine.update_weights(trainer.publish(versions[1]))
        assert time.monotonic() - begin < DEADLINE_S
        status = engine.status()
        assert (status.state, status.servable) == ("lost", False)
        with pytest.raises(EngineLost, match="send it a version"):
            engine.check_servable()

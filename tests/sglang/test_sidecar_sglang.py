"""A side-car before a real SGLang server: three processes, and each of the last two may die."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import EngineLost, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate, SessionRefused
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer
from tests.remote.process import SidecarProcess, make_key
from tests.sglang.bench import Bench, Engines
from tests.sglang.served import Served, make_api_key, served
from tests.sglang.sidecars import DEATH, URL

KIND = Kind("qwen2")
DEADLINE_S = 120
DYING = "tests.sglang.sidecars:dying"


@pytest.fixture(scope="module")
def reference(engines: Engines) -> Bench:
    return engines.bench(KIND)


@pytest.fixture(scope="module")
def server(
    checkpoints: Checkpoints, reference: Bench, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    with served(checkpoints.path(KIND, 0), log) as server:
        yield server


@pytest.fixture
def sidecar(tmp_path: Path, server: Served) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    (tmp_path / URL).write_text(server.url)
    made = SidecarProcess(tmp_path, make_key(tmp_path))
    yield made
    made.kill()


def check(server: Served, reference: Bench, version: int, what: object) -> None:
    """It holds and answers what a fresh engine of that version does."""
    assert server.sums() == reference.sums[version], what
    assert server.answers() == reference.fresh[version], what


def test_killed_behind_any_step_its_next_start_brings_the_living_server_to_a_version(
    server: Served, sidecar: SidecarProcess, trainer: Trainer, reference: Bench
) -> None:
    holds = 0
    sidecar.start(DYING)
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        held = trainer.publish(reference.weights[holds])
        engine.update_weights(held)
        for step in ("prepare", "install", "commit"):
            following = trainer.publish(reference.weights[1 - holds])
            (sidecar.directory / DEATH).write_text(step)
            with pytest.raises(EngineLost):
                engine.update_weights(following)
            sidecar.died()
            status = sidecar.start(DYING)
            if step != "prepare":  # all ranks had proven it, so it goes forward
                held, holds = following, 1 - holds
            assert (status.state, status.active_root) == ("serving", held.root), (step, status)
            assert status.recovery.outcome == "reinstalled"
            check(server, reference, holds, step)
            assert server.label() == f"{held.weight_version}@{held.root}"
            if step == "prepare":  # nothing was wrong with it: the same one may come again
                assert engine.update_weights(following).root == following.root
                held, holds = following, 1 - holds


def test_the_bytes_come_by_broadcast_to_the_side_car_and_to_the_server(
    server: Served, sidecar: SidecarProcess, reference: Bench
) -> None:
    api_key = make_api_key(sidecar.directory)
    options: dict[str, Any] = {
        "server": "sglang",
        "transport": "broadcast",
        "api_key_file": api_key,
    }
    sidecar.start(server.url, **options, take_over=True)
    with (
        make_weight_bridge("broadcast", source_worker="trainer", address="127.0.0.1") as trainer,
        sidecar.client(timeout_s=DEADLINE_S) as engine,
    ):
        for number, version in enumerate((1, 0), 1):
            manifest = trainer.publish(reference.weights[version], weight_version=number)
            assert engine.update_weights(manifest).proof.root == manifest.root
            check(server, reference, version, manifest)
            told = {report.worker for report in trainer.holders(manifest.update_id) if report}
            assert "sglang" in told
        assert engine.status().transport == "broadcast"


def test_it_takes_updates_with_the_servers_key_until_the_server_is_gone(
    server: Served, sidecar: SidecarProcess, trainer: Trainer, reference: Bench
) -> None:
    api_key = make_api_key(sidecar.directory)
    options: dict[str, Any] = {"server": "sglang", "api_key_file": api_key}
    assert sidecar.start(server.url, **options).state == "empty"
    with sidecar.client(timeout_s=DEADLINE_S) as engine:
        # The one of the test before was killed, and this one has no books of it.
        with pytest.raises(SessionRefused, match=r"driver .* has this engine"):
            engine.update_weights(trainer.publish(reference.weights[1]))
        sidecar.kill()
        assert sidecar.start(server.url, **options, take_over=True).state == "empty"
        for version in (1, 0):
            manifest = trainer.publish(reference.weights[version])
            assert engine.update_weights(manifest).proof.root == manifest.root
            check(server, reference, version, manifest)
            other = trainer.publish({"other.weight": torch.ones(3)})
            with pytest.raises(IncompatibleUpdate):
                engine.update_weights(other)
            check(server, reference, version, other)
            assert engine.status().active_root == manifest.root
        server.end()  # nobody asks it after this test
        with pytest.raises(EngineLost, match="fresh"):
            engine.update_weights(trainer.publish(reference.weights[1]))
        assert engine.status().state == "lost"

"""A server by its URL, and by a side-car: the same transaction, with requests under way."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.sglang.engine_adapter import PauseMode
from rl_bridge.engines.sglang.loaders import ROUTES, RouteName
from rl_bridge.engines.staging import Staging
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.models import Checkpoints, Kind
from tests.engines.sidecars import URL
from tests.engines.stand import WAIT_S, Stand, label_of
from tests.engines.trainer import Trainer
from tests.remote.process import SidecarProcess, make_key
from tests.sglang.bench import Engines, executor_for
from tests.sglang.served import KEY, Served, make_api_key, served
from tests.trainers_torch.worlds import World

KIND = Kind("qwen2")
DYING = "tests.sglang.sidecars:dying"


@pytest.fixture(scope="module")
def server(
    checkpoints: Checkpoints, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    engines.bench(KIND)  # first: whoever ends an engine of this process ends all of its children
    log = tmp_path_factory.mktemp("served") / "log"
    with served(checkpoints.path(KIND, 0), log) as server:
        yield server


class OnServer(Stand):
    sums: Sequence[dict[str, str]] = ()

    def check(self, what: object = "") -> None:
        assert self.engine.sums() == self.sums[self.holds], what
        super().check(what)


@pytest.fixture
def stand(server: Served, engines: Engines, trainer: Trainer) -> OnServer:
    bench = engines.bench(KIND)
    made = OnServer(
        server, trainer, bench.weights, bench.fresh, holds=bench.sums.index(server.sums())
    )
    made.sums = bench.sums
    return made


@pytest.mark.parametrize("route", ROUTES)
def test_a_server_takes_updates_by_each_route(
    route: RouteName, stand: OnServer, tmp_path: Path
) -> None:
    with executor_for(stand.engine.url, route=route, tmp_path=tmp_path, api_key=KEY) as executor:
        for _ in range(2):
            manifest = stand.update(executor)
            stand.check()
            assert stand.engine.label() == label_of(manifest)


def test_miles_updates_a_server_by_its_own_protocol(
    checkpoints: Checkpoints, stand: OnServer, tmp_path: Path
) -> None:
    trainer = World(1, tmp_path, "tests.integrations.framework_ranks")
    trainer.run("miles_begins", url=stand.engine.url, key=KEY)
    for version, number in ((1, 1), (3, 0), (5, 1)):  # miles counts refused ones
        assert trainer.run("sync", path=checkpoints.path(KIND, number)) == [""]
        stand.holds = number
        stand.check()
        assert stand.engine.label() == str(version)
        name = next(iter(stand.weights[0]))
        (refused,) = trainer.run("sync", path=checkpoints.path(KIND, 1 - number), damaged=name)
        assert name in refused
        stand.check()
    trainer.run("leave_engines")
    trainer.leave()


def test_a_server_does_nothing_without_its_key(stand: OnServer) -> None:
    with executor_for(stand.engine.url, api_key="another") as executor:
        with pytest.raises(WeightBridgeUnavailableError, match="api_key"):
            executor.update_weights(stand.publish())
        stand.check()


class Request:
    """A request that has begun: its first token is there."""

    def __init__(self, server: Served) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._has_begun = threading.Event()
        self._done: Future[dict[str, Any]] = self._pool.submit(
            lambda: server.stream([1, 2, 3], TOKENS, self._has_begun.set)
        )
        assert self._has_begun.wait(WAIT_S)
        assert not self._done.done(), "the request was over before the update began"

    def output(self) -> dict[str, Any]:
        output = self._done.result(WAIT_S)
        self._pool.shutdown()
        return output


TOKENS = 480


def running(server: Served, executor: RolloutExecutor) -> list[Request]:
    """A request that begins when the next update is about to pause the server.

    Earlier it could be over by then, on a machine where other things keep the update waiting.
    """
    adapter: Any = executor.weight_install_adapter
    stop = adapter._serving.stop
    begun: list[Request] = []

    def begin_and_stop(**how: Any) -> None:
        if not begun:
            begun.append(Request(server))
        stop(**how)

    adapter._serving.stop = begin_and_stop
    return begun


@pytest.mark.parametrize("staging", ["beside", "through"])
@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_a_running_request_tells_which_tokens_come_from_which_version(
    pause: PauseMode, staging: Staging, stand: OnServer
) -> None:
    server = stand.engine
    cache = "flush" if pause == "retract" else "keep"
    before = server.label()
    with executor_for(
        server.url, serving={"pause": pause, "cache": cache}, api_key=KEY, staging=staging
    ) as executor:
        requests = running(server, executor)
        label = label_of(stand.update(executor))
        spans = requests[0].output()["meta_info"]["weight_versions"]
        assert executor.last_ack is not None
        assert executor.last_ack.proof.staging == staging
    assert [span["version"] for span in spans] == [before, label]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == TOKENS
    stand.check()


@pytest.mark.parametrize("updates", [0, 1], ids=["the first", "later"])
@pytest.mark.parametrize("staging", ["beside", "through"])
def test_a_cache_that_live_requests_hold_refuses_the_update_and_all_goes_back(
    staging: Staging, updates: int, stand: OnServer
) -> None:
    """SGLang reports a failure then, although the weights have changed."""
    server = stand.engine
    with executor_for(
        server.url, serving={"pause": "in_place"}, api_key=KEY, staging=staging
    ) as executor:
        for _ in range(updates):  # which an undo may write once more, instead of a copy
            stand.update(executor)
        before = server.label()
        requests = running(server, executor)
        with pytest.raises(WeightUpdateRejectedError, match="could not be dropped"):
            executor.update_weights(stand.publish())
        output = requests[0].output()
    assert {span["version"] for span in output["meta_info"]["weight_versions"]} == {before}
    (alone,) = server.generate([[1, 2, 3]], max_new_tokens=TOKENS)
    assert output["output_ids"] == alone["output_ids"]
    stand.check()


def test_abort_ends_running_requests(stand: OnServer) -> None:
    server = stand.engine
    with executor_for(server.url, serving={"pause": "abort"}, api_key=KEY) as executor:
        requests = running(server, executor)
        stand.update(executor)
        assert requests[0].output()["meta_info"]["finish_reason"]["type"] == "abort"
    stand.check()


# ---- a side-car before it, a process of its own --------------------------------------------------


@pytest.fixture
def sidecar(tmp_path: Path, server: Served) -> Iterator[SidecarProcess]:
    """One that is not started, and only this test's."""
    (tmp_path / URL).write_text(server.url)
    made = SidecarProcess(tmp_path, make_key(tmp_path))
    yield made
    made.kill()


def test_killed_behind_any_step_its_next_start_brings_the_living_server_to_a_version(
    stand: OnServer, sidecar: SidecarProcess
) -> None:
    # All ranks had proven it, so it goes forward.
    stand.side_car_dies(sidecar, DYING, {"install": True, "commit": True})


@pytest.mark.parametrize("transport", ["shared-memory", "broadcast"])
def test_a_side_car_takes_updates_with_the_servers_key(
    transport: str, stand: OnServer, sidecar: SidecarProcess
) -> None:
    options: dict[str, Any] = {"server": "sglang", "transport": transport, "take_over": True}
    options["api_key_file"] = make_api_key(sidecar.directory)
    address: dict[str, Any] = {"address": "127.0.0.1"} if transport == "broadcast" else {}
    assert sidecar.start(stand.engine.url, **options).state == "empty"
    with (
        make_weight_bridge(transport, source_worker="trainer", **address) as trainer,
        sidecar.client(timeout_s=WAIT_S) as engine,
    ):
        for number in (1, 3):
            manifest = trainer.publish(stand.weights[1 - stand.holds], weight_version=number)
            assert engine.update_weights(manifest).proof.root == manifest.root
            stand.holds = 1 - stand.holds
            other = trainer.publish({"other.weight": torch.ones(3)}, weight_version=number + 1)
            with pytest.raises(IncompatibleUpdate):
                engine.update_weights(other)
            stand.check()
            assert "sglang" in {one.worker for one in trainer.holders(manifest.update_id)}
            status = engine.status()
            assert (status.active_root, status.transport) == (manifest.root, transport)


# ---- the last test: there is no server behind it -------------------------------------------------


def test_a_server_that_is_killed_is_told_within_the_deadline(stand: OnServer) -> None:
    server = stand.engine
    with executor_for(server.url, api_key=KEY, take_over=True) as executor:
        stand.update(executor)
        killer = threading.Thread(target=server.end)
        adapter = executor.weight_install_adapter
        original = adapter._serving.stop  # type: ignore[union-attr]

        def killed(**how: Any) -> None:
            original(**how)
            killer.start()
            killer.join(WAIT_S)

        adapter._serving.stop = killed  # type: ignore[union-attr]
        with pytest.raises((EngineLost, TornEngine)):
            executor.update_weights(stand.publish())
        with pytest.raises(TornEngine):
            executor.check_servable()

"""Data-parallel replicas of one ``AsyncLLM``: all have a version, or none has it.

Each replica is a process with a model of its own, and votes with nobody. They keep the engine
protocol, and no request of any replica sees what is not installed on all of them.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    EngineLost,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.engines import EngineDriver, default_label
from rl_bridge.engines.vllm.client import connect
from rl_bridge.testing import EngineSuite, EngineUnderTest
from rl_bridge.testing.engine_faults import FAULT
from rl_bridge.testing.processes import until
from rl_bridge.vllm import VLLMEngineAdapter, VLLMServing
from tests.engines.drive import PROMPTS, Setting, executor_for
from tests.engines.looped import Looped, looped
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.served import DEV, Served, served
from tests.engines.stand import Stand, label_of
from tests.engines.trainer import Trainer
from tests.in_ci import TOGETHER

SETTING = Setting(Kind("qwen3", tied=True), in_process=False)
REPLICAS = (0, 1)
TOKENS = 150
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def running(checkpoints: Checkpoints, references: References) -> Iterator[EngineUnderTest]:
    yield from engine_of(SETTING, checkpoints, references)


def engine_of(
    setting: Setting, checkpoints: Checkpoints, references: References
) -> Iterator[EngineUnderTest]:
    fresh = [(references.of(setting, number),) * len(REPLICAS) for number in (0, 1)]
    with started(setting, checkpoints) as engine:
        yield EngineUnderTest(engine, (fresh[0], fresh[1]))


def started(setting: Setting, checkpoints: Checkpoints) -> AbstractContextManager[Looped]:
    path = checkpoints.path(setting.kind, 0)
    return looped(setting, path, data_parallel_size=len(REPLICAS))


def answers(engine: Looped) -> object:
    """Of each replica."""
    return tuple(engine.answers(replica=replica) for replica in REPLICAS)


def ask_all(engine: Looped, method: str, *given: object) -> list[Any]:
    """Call a method of all workers of all replicas; vLLM's own returns those of the first."""
    each = engine.run(
        engine.llm.engine_core.call_utility_all_async("collective_rpc", method, None, given)
    )
    return [said for replica in each for said in replica]


@pytest.mark.timeout(400)  # engines start
class TestReplicas(EngineSuite):
    setting = SETTING
    replicas = len(REPLICAS)
    kills = ("install",)
    every = 4
    asks_each_call = False
    in_ci = TOGETHER

    @pytest.fixture(autouse=True)
    def models(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def start(self) -> AbstractContextManager[Looped]:
        return started(self.setting, self.checkpoints)

    def make_driver(
        self, engine: Looped, *, label: Any = default_label, **options: Any
    ) -> EngineDriver:
        client = connect(engine.llm, loop=engine.loop)
        return VLLMEngineAdapter(client, serving=VLLMServing(label=label), **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return self.checkpoints.weights(SETTING.kind, number)

    def answers(self, engine: Looped) -> object:
        return answers(engine)

    def in_ranks(self, engine: Looped, text: str) -> list[str]:
        return ask_all(engine, "in_rank", text)


@FULL  # two replicas on two ranks each
class TestReplicasOfTwoRanks(TestReplicas):
    setting = Setting(SETTING.kind, in_process=False, ranks=2)
    ranks = 4
    every = 8

    @pytest.fixture(scope="class")
    def running(
        self, checkpoints: Checkpoints, references: References
    ) -> Iterator[EngineUnderTest]:
        yield from engine_of(self.setting, checkpoints, references)


# ---- requests under way -------------------------------------------------------------------------


@pytest.fixture
def engine(running: EngineUnderTest) -> Looped:
    looped: Looped = running.engine
    return looped


class OnReplicas(Stand):
    def answers(self) -> object:
        return answers(self.engine)


@pytest.fixture
def stand(running: EngineUnderTest, trainer: Trainer, checkpoints: Checkpoints) -> Stand:
    return OnReplicas(running.engine, trainer, weights_of(checkpoints), running.fresh)


def weights_of(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.mark.parametrize("fails", [None, *REPLICAS])
def test_each_request_of_each_replica_is_answered_by_one_version(
    engine: Looped, stand: Stand, fails: int | None
) -> None:
    """Those under way by the old one; those behind by the new one, if every replica took it."""
    with executor_for(
        engine.llm, loop=engine.loop, serving={"pause": "wait", "cache": "reset"}
    ) as executor:
        old = stand.update(executor, 0)
        new = stand.publish()
        expected = engine.answers(tokens=TOKENS)
        asked = [(p, replica) for p in range(len(PROMPTS)) for replica in REPLICAS]
        under_way = [engine.ask(PROMPTS[p], TOKENS, replica) for p, replica in asked]
        for request in under_way:
            request.reach(10)
        if fails is None:
            executor.update_weights(new)
            stand.holds = 1
        else:
            ask_all(engine, "in_rank", planted("prove", fails))
            with pytest.raises(WeightUpdateRejectedError, match=f"rank {fails}: .*{FAULT}"):
                executor.update_weights(new)
            ask_all(engine, "in_rank", '{"ask": "uproot"}')
        for (prompt, _), request in zip(asked, under_way, strict=True):
            output = request.result().outputs[0]
            assert [span.version for span in output.weight_versions] == [label_of(old)]
            assert tuple(output.token_ids) == expected[prompt][0]
        stand.check()
        for replica in REPLICAS:
            (span,) = engine.ask(PROMPTS[0], 8, replica).result().outputs[0].weight_versions
            assert span.version == label_of(new if fails is None else old)


def test_vllm_tells_what_the_first_replica_said_and_a_driver_hears_all(engine: Looped) -> None:
    told = engine.run(engine.llm.collective_rpc("tell_pid"))
    assert told == ask_all(engine, "tell_pid")[:1]
    heard = engine.run(engine.llm.collective_rpc("rl_bridge", args=("describe",)))
    assert [reply["rank"] for reply in heard] == list(REPLICAS)


def test_vllms_own_calls_are_refused_by_all_replicas(engine: Looped, stand: Stand) -> None:
    """Nobody would see to it that all install."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    before = ask_all(engine, "in_rank", '{"ask": "contents"}')
    info = {"manifest": stand.publish(1).to_json()}
    engine.run(engine.llm.start_weight_update())
    with pytest.raises(Exception, match=r"is replica \d of a data-parallel group"):
        engine.run(engine.llm.update_weights(WeightTransferUpdateRequest(update_info=info)))
    assert ask_all(engine, "in_rank", '{"ask": "contents"}') == before


# The last test with this engine: there is none behind it.
def test_a_replica_that_was_killed_is_a_typed_error_within_its_deadline(
    engine: Looped, stand: Stand
) -> None:
    with executor_for(engine.llm, loop=engine.loop) as executor:
        stand.update(executor, 0)
        _, pid = ask_all(engine, "tell_pid")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((EngineLost, TornEngine)):
            executor.update_weights(stand.publish(1))
        until(lambda: engine.llm.errored, what="vLLM notices, too")
        with pytest.raises((EngineLost, TornEngine)):
            executor.update_weights(stand.publish(1))


@FULL
@pytest.mark.timeout(400)  # an engine starts
def test_replicas_that_share_experts_are_refused_by_name(
    checkpoints: Checkpoints, trainer: Trainer
) -> None:
    setting = Setting(Kind("moe"), in_process=False)
    with (
        started(setting, checkpoints) as engine,
        executor_for(engine.llm, loop=engine.loop) as executor,
        pytest.raises(WeightBridgeUnavailableError, match="data_parallel_size=2, and its replicas"),
    ):
        executor.update_weights(trainer.publish(checkpoints.weights(setting.kind, 1)))


# ---- a server -----------------------------------------------------------------------------------


@FULL
@pytest.mark.timeout(400)  # a server starts
def test_a_server_updates_all_of_its_replicas_or_none(
    checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path
) -> None:
    path, log = checkpoints.path(SETTING.kind, 0), tmp_path / "server.log"
    with (
        served(SETTING, path, log, replicas=2, environment=DEV) as server,
        executor_for(server.url) as executor,
    ):
        stand = Stand(server, trainer, weights_of(checkpoints), ())
        first = stand.update(executor, 1)
        assert held(server) == {first.update_id: 2}
        server.collective_rpc("in_rank", [planted("prove", 1)])
        with pytest.raises(WeightUpdateRejectedError, match=f"rank 1: .*{FAULT}"):
            executor.update_weights(stand.publish(0))
        assert held(server) == {first.update_id: 2}
        server.collective_rpc("in_rank", ['{"ask": "uproot"}'])
        third = stand.update(executor, 0)
        assert held(server) == {third.update_id: 2}


def held(server: Served) -> Counter[str]:
    """The updates that its workers hold, and how many hold each."""
    return Counter(said["update_id"] for said in server.collective_rpc("rl_bridge", ["describe"]))


def planted(step: str, rank: int) -> str:
    return json.dumps({"ask": "plant", "step": step, "fault": "raises", "rank": rank})

"""Updates by vLLM's own calls, on ranks that are threads. No vLLM is needed here."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import (
    TensorBridge,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.rpc import RankGroup
from rl_bridge.engines.vllm.host import NativeUpdates, VLLMHost, manifest_of
from rl_bridge.errors import MalformedManifest, SessionRefused
from tests.integrations.threaded_engine import (
    WAIT_S,
    Engine,
    broken,
    driven,
    driver,
    publish,
    update,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(2)
    yield engine
    engine.close()


def receive(engine: Engine, *texts: str) -> Sequence[str]:
    """Each rank is given its text, at once."""
    updates = [NativeUpdates(rank) for rank in engine.ranks]
    with ThreadPoolExecutor(len(updates)) as threads:
        calls = [
            threads.submit(one.receive, text) for one, text in zip(updates, texts, strict=True)
        ]
        return [call.result(WAIT_S) for call in calls]


def both(engine: Engine, text: str) -> Sequence[str]:
    return receive(engine, text, text)


def commit(engine: Engine) -> None:
    for rank in engine.ranks:
        NativeUpdates(rank).commit()


def test_ranks_hold_one_version_if_one_of_them_cannot_read_the_next(
    engine: Engine, trainer: TensorBridge
) -> None:
    first, second = publish(trainer, 1).to_json(), publish(trainer, 2).to_json()
    assert both(engine, first) == ["", ""]  # and its finish_weight_update never comes
    one, other = receive(engine, second, second[:-5])
    assert one == other != ""
    assert engine.versions == [1, 1]
    assert both(engine, second) == ["", ""]
    assert engine.versions == [2, 2]


def test_a_shortage_in_one_rank_costs_the_others_no_update(
    engine: Engine, trainer: TensorBridge
) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    text = publish(trainer, 1).to_json()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[1], "prepare", out_of_memory)
        assert set(both(engine, text)) == {"rank 1: MemoryError"}
    assert both(engine, text) == ["", ""]


def test_an_update_that_one_rank_refused_stays_refused_in_all(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[1], "prepare", broken)
        assert set(both(engine, manifest.to_json())) == {"rank 1: RuntimeError: planted"}
    told = {report.reason for report in trainer.holders(manifest)}
    assert told == {"another rank refused it", "RuntimeError: planted"}


def test_a_rank_that_fails_to_install_is_told_by_all_and_all_are_back(
    engine: Engine, trainer: TensorBridge
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.models[0], "prove", broken)
        assert set(both(engine, publish(trainer, 1).to_json())) == {"rank 0: RuntimeError: planted"}
    assert engine.versions == [0, 0]
    assert engine.is_idle()


def test_ranks_that_were_given_different_updates_take_either_when_all_are_given_it(
    engine: Engine, trainer: TensorBridge
) -> None:
    first, second = publish(trainer, 1).to_json(), publish(trainer, 2).to_json()
    assert "given different updates" in receive(engine, first, second)[0]
    assert engine.versions == [0, 0]
    assert both(engine, second) == ["", ""]


def test_an_unfinished_update_is_taken_back_and_logged_when_the_next_one_comes(
    engine: Engine, trainer: TensorBridge, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = publish(trainer, 1), publish(trainer, 2)
    for manifest in (first, second):
        assert both(engine, manifest.to_json()) == ["", ""]
    assert any("taken back" in record.getMessage() for record in caplog.records)
    for report in trainer.holders(first):
        assert "installed, and taken back" in str(report.reason)
    commit(engine)
    assert {reply["update_id"] for reply in engine.ask("describe", {})} == {second.update_id}


def test_an_unfinished_update_may_come_again(engine: Engine, trainer: TensorBridge) -> None:
    text = publish(trainer, 1).to_json()
    assert [both(engine, text) for _ in range(2)] == [["", ""], ["", ""]]
    commit(engine)
    assert engine.versions == [1, 1]


def test_finishing_without_an_update_is_refused(engine: Engine) -> None:
    with pytest.raises(WeightUpdateRejectedError, match="no update is installed"):
        NativeUpdates(engine.ranks[0]).commit()


# ---- one driver at a time -----------------------------------------------------------------------


def test_vllms_own_calls_are_refused_by_the_name_of_the_driver_that_has_the_engine(
    engine: Engine, trainer: TensorBridge
) -> None:
    adapter = driver(engine)
    update(adapter, publish(trainer, 1))
    text = publish(trainer, 2).to_json()
    (said,) = set(both(engine, text))
    assert "rank 0: SessionRefused: driver " in said
    assert "has this engine" in said
    assert engine.versions == [1, 1]
    adapter.close()
    assert both(engine, text) == ["", ""]
    commit(engine)
    assert engine.versions == [2, 2]


def test_a_driver_is_refused_while_vllms_own_calls_have_an_update_and_recover_commits_it(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.serves, left = False, publish(trainer, 1)  # nobody labels what comes by these calls
    assert both(engine, left.to_json()) == ["", ""]
    with driven(engine) as (executor, _):
        with pytest.raises(SessionRefused, match="driver vLLM's own calls has this engine"):
            executor.update_weights(publish(trainer, 2))
        executor.recover()
        assert {reply["update_id"] for reply in engine.ask("describe", {})} == {left.update_id}
        with pytest.raises(WeightUpdateRejectedError, match="no update is installed"):
            commit(engine)
        executor.update_weights(publish(trainer, 3))
    assert engine.versions == [3, 3]


def test_both_ways_may_take_turns(engine: Engine, trainer: TensorBridge) -> None:
    engine.serves = False
    for version in (1, 3):
        with driven(engine) as (executor, _):
            executor.update_weights(publish(trainer, version))
        assert both(engine, publish(trainer, version + 1).to_json()) == ["", ""]
        commit(engine)
    assert engine.versions == [4, 4]


# ---- what is read, and which engines are refused ------------------------------------------------


def test_a_manifest_is_read_from_its_text_or_from_that_text_parsed() -> None:
    with make_weight_bridge("local-clone") as bridge:
        text = bridge.publish({"w": torch.ones(2)}, weight_version=1).to_json()
    assert manifest_of(text).to_json() == manifest_of(json.loads(text)).to_json() == text


@pytest.mark.parametrize("given", [None, 7, ["w"], {}, {"update_info": 1}, {"w": {"w": 1}}, "w"])
def test_values_that_are_no_manifest_are_malformed(given: object) -> None:
    with pytest.raises(MalformedManifest):
        manifest_of(given)


def host(**parallel: int) -> VLLMHost:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
    return VLLMHost(torch.nn.Module(), config, RankGroup(0, 1))


ALONE = {"data_parallel_size": 1, "data_parallel_index": 0, "pipeline_parallel_size": 1}
ALONE |= {"elastic_ep_max_dp_size": 1, "enable_elastic_ep": False}


def test_an_engine_that_stands_alone_is_supported() -> None:
    host(**ALONE).check({})
    host(data_parallel_size=1, pipeline_parallel_size=1).check({})  # an older vLLM has no index
    host(**{**ALONE, "elastic_ep_max_dp_size": 2, "enable_elastic_ep": True}).check({})


def test_replicas_that_a_driver_holds_together_are_supported() -> None:
    for number in (0, 1):
        one = host(**{**ALONE, "data_parallel_index": number, "elastic_ep_max_dp_size": 2})
        one.check({"replicas": 2})
        assert one.rank == number


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2, and its replicas take each step"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3, expected 1"),
        ({"data_parallel_index": 1}, "is replica 1 of a data-parallel group"),
        # The first one of its group is told by what else vLLM left of their number.
        ({"elastic_ep_max_dp_size": 2}, "is replica 0 of a data-parallel group"),
    ],
    ids=str,
)
def test_ranks_that_cannot_decide_together_are_refused_by_number(
    parallel: dict[str, Any], says: str
) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=says):
        host(**{**ALONE, **parallel}).check({})

"""What was given up before an engine was touched may come again, also where its ranks import it.

And two drivers of one update: neither takes the other's install back.
"""

import errno
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightUpdateRejectedError,
)
from rl_bridge.engines.vllm.client import Replies
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.errors import (
    DriverError,
    IncompatibleUpdate,
    TransportUnavailable,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.groups.bridge import GROUP
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_engine_adapter import Engine, broken, driver, engine, trainer
from tests.integrations.test_rank import RANKS, Group, Model, publish, rank_with

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


def exhausted(*_args: Any, **_kwargs: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def out_of_memory(*_args: Any, **_kwargs: Any) -> None:
    raise MemoryError


def interrupted(*_args: Any, **_kwargs: Any) -> None:
    raise KeyboardInterrupt


def cut_off(engine: Engine, executor: RolloutExecutor, manifest: Any, where: str) -> None:
    """An update that is interrupted, or short of something, before the engine is touched."""
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        if verb != "prepare":
            return real(verb, payload)
        with pytest.MonkeyPatch.context() as patch:
            if where == "a rank is short of descriptors":
                patch.setattr(os, "open", exhausted)
            if where == "a rank is short of memory":
                patch.setattr(engine.rank._installer, "prepare", out_of_memory)
            if where == "interrupted while it stages":
                patch.setattr(engine.rank._installer, "prepare", interrupted)
            told = real(verb, payload)
        if where == "interrupted behind that":
            raise KeyboardInterrupt
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", call)
        with pytest.raises((KeyboardInterrupt, WeightBridgeUnavailableError)) as caught:
            executor.update_weights(manifest)
    assert "may be installed again" in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    "where",
    [
        "a rank is short of descriptors",
        "a rank is short of memory",
        "interrupted while it stages",
        "interrupted behind that",
    ],
)
def test_an_update_that_was_given_up_before_the_engine_was_touched_is_installed_the_next_time(
    engine: Engine, trainer: TensorBridge, where: str
) -> None:
    manifest = publish(trainer, 1)
    with driver(engine) as (executor, _):
        cut_off(engine, executor, manifest, where)
        executor.update_weights(manifest)
    assert engine.rank.describe()["update_id"] == manifest.update_id


def test_an_update_whose_engine_is_gone_before_it_stages_goes_to_a_fresh_one(
    engine: Engine, trainer: TensorBridge
) -> None:
    def gone(*_args: Any, **_options: Any) -> Replies:
        raise EngineLost("planted")

    manifest = publish(trainer, 1)
    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "call", gone)
            with pytest.raises(EngineLost, match="planted"):
                executor.update_weights(manifest)
        executor.update_weights(manifest)
        executor.check_servable()


@pytest.mark.parametrize("recovers", [False, True])
def test_a_driver_that_died_as_it_staged_an_update_sends_it_again_when_it_is_back(
    engine: Engine, trainer: TensorBridge, *, recovers: bool
) -> None:
    manifest = publish(trainer, 1)
    VLLMEngineAdapter(engine).prepare(manifest, {})
    with driver(engine) as (executor, _):
        if recovers:
            executor.recover()
        executor.update_weights(manifest)
    assert engine.rank.describe()["update_id"] == manifest.update_id


def test_an_update_that_was_cut_off_as_a_rank_let_go_of_it_is_installed_the_next_time(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    VLLMEngineAdapter(engine).prepare(manifest, {})
    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._bridges.of(manifest, 0), "release_imported", interrupted)
            with pytest.raises(KeyboardInterrupt):
                executor.update_weights(manifest)
        executor.update_weights(manifest)
    assert engine.rank.describe()["update_id"] == manifest.update_id


class Elsewhere(WeightBridgeUnavailableError):
    """Of a transport of somebody's own: the driver does not have it."""


@pytest.mark.parametrize(
    "error",
    [
        DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "no memory is left", "Free some."),
        TransportUnavailable("cuda-vmm", "no device is left", "Use another one."),
        Elsewhere("nothing is left. Use less."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_rank_is_short_of_costs_no_update_whichever_error_tells_it(
    engine: Engine, trainer: TensorBridge, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    manifest = publish(trainer, 1)
    with driver(engine) as (executor, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.rank._installer, "prepare", fail)
            with pytest.raises(WeightBridgeUnavailableError, match="is left"):
                executor.update_weights(manifest)
        executor.update_weights(manifest)
    assert engine.rank.describe()["update_id"] == manifest.update_id


def test_a_refusal_is_told_before_what_another_rank_is_only_short_of(
    engine: Engine, trainer: TensorBridge
) -> None:
    real = engine.call

    def both(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        (told,) = real(verb, payload)
        short = {**told, "ok": False, "type": "WeightBridgeUnavailableError", "message": "short"}
        refused = {**short, "rank": 1, "type": "IncompatibleUpdate", "message": "planted"}
        return [short, refused] if verb == "prepare" else [told]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", both)
        with pytest.raises(IncompatibleUpdate, match="rank 1: planted"):
            VLLMEngineAdapter(engine).prepare(publish(trainer, 1), {})


def test_what_a_rank_refused_is_told_to_the_trainer_and_never_let_in_again(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    adapter = VLLMEngineAdapter(engine)
    real = engine.call

    def another_refuses(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        (told,) = real(verb, payload)
        if verb != "prepare":
            return [told]
        refused = {"ok": False, "type": "IncompatibleUpdate", "message": "planted"}
        return [told, {**told, **refused, "rank": 1}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", another_refuses)
        with pytest.raises(WeightUpdateRejectedError, match="rank 1: planted"):
            adapter.prepare(manifest, {})
    adapter.abandon()
    (report,) = [report for report in trainer.holders(manifest) if report.worker == "vllm"]
    assert (report.reason, report.tensors_held) == ("another rank refused it", 0)
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        adapter.prepare(manifest, {})


def receive(ranks: Sequence[VLLMRank], group: Group, *texts: str) -> list[str]:
    """By vLLM's own calls: each rank its text."""
    pairs = zip(ranks, texts, strict=True)
    return group.each([partial(rank.receive, text) for rank, text in pairs])


def test_what_one_rank_is_short_of_costs_the_others_no_update_by_vllms_own_calls(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, models = Group(monkeypatch, RANKS), [Model() for _ in range(RANKS)]
    ranks, text = [rank_with(model) for model in models], publish(trainer, 1).to_json()
    with monkeypatch.context() as patch:
        patch.setattr(models[1], "prepare", out_of_memory)
        assert set(receive(ranks, group, text, text)) == {"MemoryError"}
    assert receive(ranks, group, text, text) == ["", ""]
    for rank in ranks:
        rank.close()


def test_what_one_rank_refused_no_other_lets_in_again_by_vllms_own_calls(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, models = Group(monkeypatch, RANKS), [Model() for _ in range(RANKS)]
    ranks, manifest = [rank_with(model) for model in models], publish(trainer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(models[1], "prepare", broken)
        receive(ranks, group, *[manifest.to_json()] * RANKS)
    told = {report.reason for report in trainer.holders(manifest) if report.worker == "vllm"}
    assert told == {"another rank refused it", "RuntimeError: planted"}
    for rank in ranks:
        rank.close()


def test_ranks_that_were_given_different_updates_take_either_when_all_are_given_it(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, ranks = Group(monkeypatch, RANKS), [rank_with(Model()) for _ in range(RANKS)]
    first, second = publish(trainer, 1).to_json(), publish(trainer, 2).to_json()
    assert "given different updates" in receive(ranks, group, first, second)[0]
    assert receive(ranks, group, second, second) == ["", ""]
    for rank in ranks:
        rank.close()


def test_what_a_driver_that_died_had_staged_may_come_by_vllms_own_calls(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    VLLMEngineAdapter(engine).prepare(manifest, {})
    assert engine.rank.receive(manifest.to_json()) == ""


def test_what_nobody_finished_may_come_again_by_vllms_own_calls(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    assert [engine.rank.receive(manifest.to_json()) for _ in range(2)] == ["", ""]
    engine.rank.commit()
    assert engine.rank.describe()["update_id"] == manifest.update_id


@pytest.mark.parametrize("first", ["prepare", "install"])
def test_a_driver_that_is_refused_takes_back_nothing_of_another_one_with_the_same_update(
    engine: Engine, trainer: TensorBridge, first: str
) -> None:
    manifest = publish(trainer, 1)
    mine, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    other.prepare(manifest, {})
    if first == "prepare":
        mine.prepare(manifest, {})
        with pytest.raises(WeightUpdateRejectedError, match="another driver came in between"):
            other.install(manifest, {})
        mine.install(manifest, {})
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(other, "_look_at_ranks", lambda: None)  # (it has looked before)
            mine.prepare(manifest, {})
            mine.install(manifest, {})
            with pytest.raises(WeightUpdateRejectedError, match="is installed on this rank"):
                other.prepare(manifest, {})
    other.undo()
    mine.prove()
    mine.resume()
    mine.commit()
    assert engine.rank.describe()["update_id"] == manifest.update_id


def test_a_driver_that_stood_still_behind_its_install_says_nothing_of_its_successors_version(
    engine: Engine, trainer: TensorBridge
) -> None:
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    real = VLLMEngineAdapter.resume

    def stands_still(late: VLLMEngineAdapter) -> None:
        patch.setattr(VLLMEngineAdapter, "resume", real)
        with driver(engine) as (successor, _):
            successor.update_weights(theirs)
        real(late)

    with pytest.MonkeyPatch.context() as patch, driver(engine) as (executor, _):
        patch.setattr(VLLMEngineAdapter, "resume", stands_still)
        with pytest.raises(TornEngine, match="another driver came in between"):
            executor.update_weights(mine)
    assert engine.rank.describe()["update_id"] == theirs.update_id
    assert engine.shown == f"2@{theirs.root}"
    assert not engine.is_paused()


def test_a_driver_that_was_overtaken_says_nothing_before_its_successor_has_committed_either(
    engine: Engine, trainer: TensorBridge
) -> None:
    late, successor = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    late.prepare(mine, {})
    late.install(mine, {})
    successor.prepare(theirs, {})  # (finds the first one's, and commits it)
    successor.install(theirs, {})
    successor.resume()
    with pytest.raises(WeightUpdateRejectedError, match="another driver came in between"):
        late.resume()
    successor.commit()
    assert engine.rank.describe()["update_id"] == theirs.update_id
    assert engine.shown == f"2@{theirs.root}"


def test_a_driver_that_is_refused_ends_no_pause_of_another_ones(
    engine: Engine, trainer: TensorBridge
) -> None:
    one, other = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    mine, theirs = publish(trainer, 1), publish(trainer, 2)
    one.prepare(mine, {})
    other.prepare(theirs, {})
    other.install(theirs, {})
    with pytest.raises(WeightUpdateRejectedError, match="another driver came in between"):
        one.install(mine, {})
    one.undo()
    assert engine.is_paused()


def test_a_driver_that_was_replaced_takes_no_label_back_that_is_its_successors_own(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1)
    late, successor = VLLMEngineAdapter(engine), VLLMEngineAdapter(engine)
    for each in (late, successor):  # (the second one finds the first one's, and commits it)
        each.prepare(manifest, {})
        each.install(manifest, {})
        each.resume()
    successor.commit()
    for _attempt in range(2):
        with pytest.raises(WeightUpdateRejectedError, match="another driver has updated"):
            late.undo()
    assert engine.rank.describe()["update_id"] == manifest.update_id
    assert engine.shown == f"1@{manifest.root}"


def test_what_a_rank_answers_another_driver_is_not_taken_for_the_answer_to_ones_own(
    engine: Engine,
) -> None:
    real, answers = engine.call, list[Replies]()

    def heard(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        answers.append(real(verb, payload))
        return answers[-1]

    def one_behind(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        answers.append(real(verb, payload))
        return answers.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "call", heard)
        VLLMEngineAdapter(engine).describe()
        patch.setattr(engine, "call", one_behind)
        with pytest.raises(EngineLost, match="out of step"):
            VLLMEngineAdapter(engine).describe()


def test_what_was_assembled_of_a_group_is_refused_with_what_to_do(
    engine: Engine, trainer: TensorBridge
) -> None:
    manifest = publish(trainer, 1).model_copy(update={"transport": GROUP})
    with (
        GroupBridge() as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=VLLMEngineAdapter(engine)
        ) as executor,
        pytest.raises(WeightBridgeError),
    ):
        executor.update_weights(manifest)
    with pytest.raises(WeightBridgeUnavailableError, match="Publish what was assembled"):
        VLLMEngineAdapter(engine).prepare(manifest, {})

"""vLLM's own calls at the wrong moment: all ranks refuse them together, and the engine goes on.

vLLM reads the ranks' answers in order and stops at the first error. Where more than the last rank
fails, what the others said is taken for the answers to the next calls.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.vllm import VLLMEngineAdapter
from tests.engines.drive import Setting, answers, executor_for, native_update, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3", tied=True), in_process=False, ranks=2)


@pytest.fixture(scope="module")
def llm(checkpoints: Checkpoints) -> Iterator[Any]:
    with start(SETTING, checkpoints.path(SETTING.kind, 0)) as made:
        made.init_weight_transfer_engine({"init_info": {}})
        yield made


@pytest.fixture(scope="module")
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


def damaged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    return {**weights, name: torch.full_like(weights[name], float("nan"))}


def info(manifest: Any) -> dict[str, Any]:
    return {"update_info": {"manifest": manifest.to_json()}}


def told(llm: Any) -> list[dict[str, Any]]:
    replies = llm.collective_rpc("rl_bridge", args=("describe",))
    assert [reply["rank"] for reply in replies] == [0, 1]
    return list(replies)


def began(llm: Any) -> None:
    llm.start_weight_update()


CALLS: dict[str, tuple[Callable[[Any], None] | None, Callable[[Any, Any], None], str]] = {
    "update": (None, lambda llm, good: llm.update_weights(info(good)), "must be called before"),
    "finish": (None, lambda llm, _: llm.finish_weight_update("v"), "without a matching start"),
    "start again": (began, lambda llm, _: llm.start_weight_update(), "already"),
    "draft": (None, lambda llm, _: llm.start_draft_weight_update(), "draft"),
    "shut down": (began, lambda llm, _: llm.shutdown_weight_transfer_engine(), "active"),
    "one of two": (
        began,
        lambda llm, good: llm.collective_rpc("update_weights", args=([info(good)["update_info"]],)),
        "expected one for each",
    ),
}


@pytest.mark.timeout(240)  # the first one starts the engine
@pytest.mark.parametrize("name", CALLS)
def test_a_call_outside_of_its_session_is_one_error_and_the_ranks_stay_in_step(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]], name: str
) -> None:
    before, call, says = CALLS[name]
    with executor_for(llm) as executor:
        executor.update_weights(trainer.publish(weights[0]))
        old = answers(llm)
    good = trainer.publish(weights[1])
    if before is not None:
        before(llm)
    with pytest.raises(Exception, match=says):
        call(llm, good)
    assert [reply["pending"] for reply in told(llm)] == [None, None]
    assert answers(llm) == old
    if before is not None and name != "one of two":  # the session goes on
        llm.update_weights(info(good))
        llm.finish_weight_update("v")
    else:
        native_update(llm, good)
    assert {reply["update_id"] for reply in told(llm)} == {good.update_id}
    assert answers(llm) != old


def test_finishing_behind_a_refusal_is_one_error_and_the_ranks_stay_in_step(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    native_update(llm, trainer.publish(weights[0]))
    old = answers(llm)
    llm.start_weight_update()
    with pytest.raises(Exception, match="NaN"):
        llm.update_weights(info(trainer.publish(damaged(weights[1]))))
    for _ in range(3):  # as a `finally` does, again and again
        with pytest.raises(Exception, match="without a matching start"):
            llm.finish_weight_update("v")
    assert answers(llm) == old
    native_update(llm, trainer.publish(weights[1]))
    assert answers(llm) != old


def test_what_was_taken_back_leaves_no_label(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    with executor_for(llm) as executor:
        executor.update_weights(trainer.publish(weights[0]))
        old, label = answers(llm), llm.get_weight_version()
    llm.start_weight_update()
    llm.update_weights(info(trainer.publish(weights[1])))
    llm.collective_rpc("forget_proof", args=(0,))  # as if a dead driver's rank got no further
    with executor_for(llm) as executor, pytest.raises(IncompatibleUpdate, match="NaN"):
        executor.update_weights(trainer.publish(damaged(weights[1])))
    assert (answers(llm), llm.get_weight_version()) == (old, label)
    with pytest.raises(Exception, match="no update is installed"):  # the session is still open
        llm.finish_weight_update()
    native_update(llm, trainer.publish(weights[1]))
    assert answers(llm) != old


def test_an_unfinished_update_that_the_next_one_takes_back_is_told_to_its_trainer(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    native_update(llm, trainer.publish(weights[0]))
    first, second = trainer.publish(weights[1]), trainer.publish(weights[0])
    llm.start_weight_update()
    llm.update_weights(info(first))
    with pytest.raises(Exception, match="is installed and not finished"):
        llm.init_weight_transfer_engine({"init_info": {"cast": True}})
    llm.start_weight_update()
    llm.update_weights(info(second))
    llm.finish_weight_update("v")
    reports = [report for report in trainer.holders(first) if report.worker == "vllm"]
    assert {report.rank for report in reports} == {0, 1}
    for report in reports:
        reason = report.reason or ""
        assert "installed, and taken back" in reason, report
        assert f"version {second.weight_version} came before" in reason
    assert {reply["update_id"] for reply in told(llm)} == {second.update_id}


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_refusal_names_the_version_that_an_earlier_driver_left(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]], *, is_finished: bool
) -> None:
    left = trainer.publish(weights[0])
    llm.start_weight_update()
    llm.update_weights(info(left))
    if is_finished:
        llm.finish_weight_update("v")
    with executor_for(llm) as executor, pytest.raises(IncompatibleUpdate) as caught:
        executor.update_weights(trainer.publish(damaged(weights[1])))
    assert f"ranks hold version {left.weight_version}." in "".join(caught.value.__notes__)
    if not is_finished:
        with pytest.raises(Exception, match="no update is installed"):
            llm.finish_weight_update()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"cast": "false"}, "expected True or False"),
        ({"transports": {"shared-memory": {"max_slots": 0}}}, "max_slots"),
    ],
    ids=["type", "transport"],
)
def test_a_wrong_option_is_refused(llm: Any, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told):
        llm.init_weight_transfer_engine({"init_info": wrong})
    llm.init_weight_transfer_engine({"init_info": {}})


# ---- what a worker is given -----------------------------------------------------------------


def test_ranks_that_are_given_different_updates_install_neither(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    native_update(llm, trainer.publish(weights[0]))
    old = answers(llm)
    first, second = trainer.publish(weights[0]), trainer.publish(weights[1])
    each = [info(manifest)["update_info"] for manifest in (first, second)]
    llm.start_weight_update()
    with pytest.raises(Exception, match="given different updates"):
        llm.collective_rpc("update_weights", args=(each,))
    assert [reply["pending"] for reply in told(llm)] == [None, None]
    assert answers(llm) == old
    third = trainer.publish(weights[1])
    llm.start_weight_update()
    llm.collective_rpc("update_weights", args=([info(third)["update_info"]] * 2,))
    llm.finish_weight_update("v")
    assert {reply["update_id"] for reply in told(llm)} == {third.update_id}
    assert answers(llm) != old


@pytest.mark.parametrize(
    "wrong",
    [
        ("prepare", {}),
        ("prepare", {"manifest": 5, "driver": [], "epoch": {}}),
        ("open", {"epoch": "x"}),
        ("open", {"epoch": -1}),
        ("prepare", ["manifest"]),
        ("prepare", "manifest"),
        ("install", {"update_id": ["x"]}),
        ("commit", {}),
        ("commit", {"update_id": {}}),
        ("no such verb", {}),
        (["describe"], {}),
        ({}, 0),
    ],
    ids=str,
)
def test_whatever_a_rank_is_asked_it_answers(llm: Any, wrong: tuple[Any, Any]) -> None:
    before = told(llm)
    replies = llm.collective_rpc("rl_bridge", args=wrong)
    assert [(reply["rank"], reply["ok"]) for reply in replies] == [(0, False), (1, False)]
    assert all(reply["message"] for reply in replies)
    assert told(llm) == before


@pytest.mark.parametrize("given", [None, 7, "manifest", [0, {}], {}, {"manifest": None}, {"x": 1}])
def test_an_update_info_that_is_none_is_one_error(llm: Any, given: object) -> None:
    before = told(llm)
    llm.start_weight_update()
    with pytest.raises(Exception, match="MalformedManifest"):
        llm.collective_rpc("update_weights", args=(given,))
    assert told(llm) == before
    with pytest.raises(Exception, match="without a matching start"):
        llm.finish_weight_update("v")


# ---- two drivers ----------------------------------------------------------------------------


def test_a_second_driver_is_refused_by_name_and_touches_nothing(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    one, other = VLLMEngineAdapter(llm), VLLMEngineAdapter(llm)
    mine, theirs = trainer.publish(weights[0]), trainer.publish(weights[1])
    one.prepare(mine, {})
    old = answers(llm)
    steps: list[Callable[[], object]] = [
        lambda: other.prepare(theirs, {}),
        lambda: native_refused(llm, theirs),
    ]
    for step in steps:
        with pytest.raises(Exception, match=rf"driver .*process {os.getpid()} on .* has this"):
            step()
    assert {reply["pending"] for reply in told(llm)} == {mine.update_id}
    assert answers(llm) == old
    one.install(mine, {})
    one.resume()
    one.commit()
    one.close()
    native_update(llm, theirs)
    assert {reply["update_id"] for reply in told(llm)} == {theirs.update_id}


def native_refused(llm: Any, manifest: Any) -> None:
    llm.start_weight_update()
    llm.update_weights(info(manifest))


def test_finishing_without_an_update_is_an_error_and_ends_the_session(
    llm: Any, trainer: Trainer, weights: list[dict[str, torch.Tensor]]
) -> None:
    llm.start_weight_update()
    with pytest.raises(Exception, match="no update is installed"):
        llm.finish_weight_update("nothing")
    native_update(llm, trainer.publish(weights[1]))

"""G11 Suspicious: an update that cannot be what was meant is flagged at once.

One that changes nothing, trainable tensors that did not change, and a narrower dtype: by `publish`
and by the executor, with the policy `off`, `warn` (the default, by the log) or `reject`.

It ends at what is known: for a plain state dict, name the trainable tensors with `trainable=`.
Versions of one publisher are compared, and nobody else's.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest import Policy

Weights = dict[str, torch.Tensor]


def weights(value: float = 0.0, dtype: torch.dtype = torch.float32) -> Weights:
    return {"base": torch.ones(4), "head": torch.full((3,), value, dtype=dtype)}


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", suspicious="reject") as made:
        yield made


# ---- what is found ------------------------------------------------------------------------------


def test_an_update_that_changes_nothing_is_flagged(trainer: TensorBridge) -> None:
    trainer.publish(weights(), weight_version=1)
    with pytest.raises(SuspiciousUpdate, match=r"version 2 \(after 1\) changes nothing"):
        trainer.publish(weights(), weight_version=2)


def test_trainable_tensors_that_did_not_change_are_flagged_by_name(trainer: TensorBridge) -> None:
    trainer.publish(weights(1), weight_version=1, trainable=["base", "head"])
    with pytest.raises(SuspiciousUpdate, match="1 trainable tensors did not change: base"):
        trainer.publish(weights(2), weight_version=2, trainable=["base", "head"])


def test_a_modules_parameters_are_trainable_unless_they_are_frozen(trainer: TensorBridge) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    trainer.publish(model, weight_version=1)
    for parameter in model[1].parameters():
        parameter.data += 1
    with pytest.raises(SuspiciousUpdate, match="2 trainable tensors did not change"):
        trainer.publish(model, weight_version=2)
    model[0].requires_grad_(requires_grad=False)
    assert trainer.publish(model, weight_version=2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.int32),
        (torch.float16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_narrower_dtype_is_flagged_also_at_the_same_width(
    before: torch.dtype, after: torch.dtype, trainer: TensorBridge
) -> None:
    trainer.publish(weights(1, before), weight_version=1)
    with pytest.raises(SuspiciousUpdate, match="narrows the dtype of 1 tensors: head"):
        trainer.publish(weights(2, after), weight_version=2)


# ---- what is no finding -------------------------------------------------------------------------


def test_a_wider_dtype_other_names_and_frozen_tensors_are_no_finding(trainer: TensorBridge) -> None:
    trainer.publish(weights(1, torch.bfloat16), weight_version=1)
    trainer.publish(weights(1, torch.float32), weight_version=2)
    more = {"more": torch.ones(1)}
    for version in (3, 4):
        trainer.publish(weights(version) | more, weight_version=version, trainable=["head"])


def test_another_stream_may_begin_with_what_the_engine_holds() -> None:
    with RolloutExecutor(suspicious="reject") as executor:
        for version in (1, 1):  # a trainer that was started anew
            with make_weight_bridge("shared-memory") as trainer:
                executor.update_weights(trainer.publish(weights(), weight_version=version))
        assert executor.active_weight_version == 1


# ---- what is done about it ----------------------------------------------------------------------


def test_a_publication_that_was_refused_leaves_its_number_free(trainer: TensorBridge) -> None:
    first = trainer.publish(weights(1), weight_version=1)
    with pytest.raises(SuspiciousUpdate):
        trainer.publish(weights(1), weight_version=2)
    assert trainer.latest_manifest == first
    assert trainer.publish(weights(2), weight_version=2).weight_version == 2


def test_an_executor_that_rejects_leaves_its_engine_as_it_was() -> None:
    with (
        make_weight_bridge("shared-memory", suspicious="off") as trainer,
        RolloutExecutor(suspicious="reject") as executor,
    ):
        executor.update_weights(trainer.publish(weights(1), weight_version=1))
        same = trainer.publish(weights(1), weight_version=2)
        with pytest.raises(SuspiciousUpdate, match="changes nothing"):
            executor.update_weights(same)
        assert executor.active_weight_version == 1
        assert [report.state for report in trainer.holders(same)] == ["rejected"]
        executor.update_weights(trainer.publish(weights(2), weight_version=3))
        assert executor.active_weight_version == 3


@pytest.mark.parametrize("policy", [None, "warn", Policy.WARN, "off"], ids=repr)
def test_by_default_a_finding_is_logged_and_with_off_it_is_not(
    policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {} if policy is None else {"suspicious": policy}
    with (
        caplog.at_level(logging.WARNING, "rl_bridge"),
        make_weight_bridge("shared-memory", **options) as trainer,
        RolloutExecutor(**options) as executor,
    ):
        for version in (1, 2):
            executor.update_weights(trainer.publish(weights(), weight_version=version))
    told = [record for record in caplog.records if "changes nothing" in record.getMessage()]
    assert len(told) == (0 if policy == "off" else 2), "once by each side"


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    for make in (make_weight_bridge, RolloutExecutor):
        with pytest.raises(ValueError, match="'off', 'warn', 'reject'"):
            make(suspicious="loud")

"""G11 Suspicious: an update that cannot be what was meant is flagged at once.

One that changes nothing, a stale copy of all or of much of the weights, another dtype: by
`publish`, once, with the policy `off`, `warn` (the default, by the log) or `reject`. NaN and Inf
have such a policy of their own.

It ends at what is known: what a run has never shown is not missed. Versions of one publisher are
compared, and nobody else's.
"""

import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest import Policy

Weights = dict[str, torch.Tensor]


def weights(value: float = 0.0, dtype: torch.dtype = torch.float32) -> Weights:
    return {"base": torch.ones(4), "head": torch.full((3,), value, dtype=dtype)}


def step(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", suspicious="reject", max_slots=8) as made:
        yield made


# ---- what is found ------------------------------------------------------------------------------


def test_updates_that_change_nothing_are_one_line_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are not refused: engines may have refused the version before, for a cause of theirs."""
    with make_weight_bridge("shared-memory", max_slots=16) as trainer:
        for version, value in enumerate([0, 0, 0, 0, 1, 1, 1, 2]):
            trainer.publish(weights(value), weight_version=version)
    told = [one for one in caplog.messages if "changes nothing" in one]
    assert [one.split("version ")[1].split(" ")[0] for one in told] == ["2", "5"]


def test_an_update_that_changes_nothing_is_flagged(trainer: TensorBridge) -> None:
    trainer.publish(weights(), weight_version=1)
    with pytest.raises(SuspiciousUpdate, match=r"version 2 \(after 1\) changes nothing"):
        trainer.publish(weights(), weight_version=2)


def test_the_frozen_base_in_place_of_the_trained_weights_is_flagged(trainer: TensorBridge) -> None:
    for version in range(3):
        trainer.publish(weights(version), weight_version=version)
    with pytest.raises(SuspiciousUpdate, match="version 3 has the weights of version 0 once more"):
        trainer.publish(weights(0), weight_version=3)


def test_a_half_that_stops_changing_is_flagged_by_name(trainer: TensorBridge) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    for version in range(5):
        step(model)
        trainer.publish(model, weight_version=version)
    step(model[1])
    with pytest.raises(SuspiciousUpdate, match=r"1 tensors with 48% .* did not change: 0\.weight"):
        trainer.publish(model, weight_version=5)
    step(model[0])
    assert trainer.publish(model, weight_version=5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_another_dtype_is_flagged(
    before: torch.dtype, after: torch.dtype, trainer: TensorBridge
) -> None:
    trainer.publish(weights(1, before), weight_version=1)
    with pytest.raises(SuspiciousUpdate, match="another dtype for 1 tensors: head"):
        trainer.publish(weights(2, after), weight_version=2)


BAD = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("transport", ["shared-memory", "local-clone", "files"])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_nan_and_inf_are_refused_by_name(transport: str, bad: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {"url": tmp_path / "run"} if transport == "files" else {}
    with make_weight_bridge(transport, nonfinite="reject", **options) as trainer:
        trainer.publish(weights(1), weight_version=1)
        strided = torch.ones(4, 4).t()
        strided[2, 3] = bad
        with pytest.raises(SuspiciousUpdate, match=r"version 2: 1 tensors hold NaN .* strided"):
            trainer.publish(weights(2) | {"strided": strided}, weight_version=2)
        with pytest.raises(SuspiciousUpdate, match=r"version 2: 1 tensors hold NaN .* head"):
            trainer.publish(weights(bad), weight_version=2)
        assert trainer.publish(weights(3), weight_version=2).weight_version == 2


@pytest.mark.parametrize(("policy", "lines"), [("warn", 1), ("off", 0)])
def test_nan_is_let_through_if_that_is_asked_for(
    policy: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with make_weight_bridge("shared-memory", nonfinite=policy) as trainer:
        for version in (1, 2, 3):
            mask = torch.full((4,), -torch.inf)
            trainer.publish(weights(version) | {"mask": mask}, weight_version=version)
    assert [one.split(": ")[1] for one in caplog.messages] == ["version 1"] * lines


# ---- what is no finding -------------------------------------------------------------------------


def test_other_names_and_frozen_tensors_are_no_finding(trainer: TensorBridge) -> None:
    trainer.publish(weights(1), weight_version=1)
    more = {"more": torch.ones(1)}
    for version in range(2, 16):
        made = trainer.publish(weights(version) | more, weight_version=version, trainable=["head"])
        trainer.release(made.update_id)


def test_a_sound_run_in_bfloat16_is_silent(trainer: TensorBridge) -> None:
    # Steps of AdamW at a usual learning rate: norms stay as they are, and matrices hardly change.
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in "abcd"]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for version in range(40):
        model(torch.randn(16, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        served = copy.deepcopy(model).bfloat16()
        made = trainer.publish(served, weight_version=version)
        trainer.release(made.update_id)


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
        RolloutExecutor() as executor,
    ):
        for version, value in enumerate((1, 2, 2), start=1):
            executor.update_weights(trainer.publish(weights(value), weight_version=version))
    told = [record for record in caplog.records if "changes nothing" in record.getMessage()]
    assert len(told) == (0 if policy == "off" else 1)


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    cases: list[tuple[Any, str]] = [
        (partial(make_weight_bridge, "shared-memory"), "suspicious"),
        (partial(make_weight_bridge, "shared-memory"), "nonfinite"),
        (RolloutExecutor, "suspicious"),
    ]
    for make, option in cases:
        with pytest.raises(ValueError, match=f"{option}='loud' .* 'off', 'warn', 'reject'"):
            make(**{option: "loud"})

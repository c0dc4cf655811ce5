"""Updates in steps: what each leaves behind, and what gives a waiting one up."""

from collections.abc import Callable, Iterator

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.errors import (
    IllegalTransition,
    IncompatibleUpdate,
    UnknownUpdate,
    WeightUpdateRejectedError,
)
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import weights


@pytest.fixture
def executor(transport: str, adapter: Recording) -> Iterator[TwoPhaseExecutor]:
    with make_weight_bridge(transport, source_worker="rollout") as bridge:
        yield TwoPhaseExecutor(weight_bridge=bridge, weight_install_adapter=adapter)


def prepared(publisher: TensorBridge, executor: TwoPhaseExecutor) -> WeightUpdateManifest:
    """Version 1 active, version 2 prepared."""
    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    executor.import_weights(manifest.to_json())
    executor.prepare_weights(manifest)
    return manifest


def test_an_update_in_steps_is_the_same_transaction(
    publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    assert content(executor.import_weights(manifest)) == content(weights(1))
    assert adapter.calls == []
    executor.prepare_weights(manifest)
    assert (adapter.calls, executor.active_weight_version) == (["prepare"], None)
    waiting = executor.pending_weight_update_id
    assert waiting == manifest.update_id
    tensors = executor.commit_weights(manifest)
    assert adapter.calls == ["prepare", "install", "prove", "commit"]
    assert content(tensors) == content(adapter.engine) == content(weights(1))
    assert (executor.active_weight_version, executor.pending_weight_update_id) == (1, None)
    ack = executor.last_ack
    assert ack is not None
    assert {"attach", "verify", "prepare", "install", "prove", "total"} <= set(ack.timings_ms)


def test_nothing_is_committed_that_was_not_prepared(
    publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    with pytest.raises(UnknownUpdate, match="Import its manifest first"):
        executor.prepare_weights(manifest)
    executor.import_weights(manifest)
    with pytest.raises(IllegalTransition, match="Call prepare_weights first"):
        executor.commit_weights(manifest)
    executor.prepare_weights(manifest)
    with pytest.raises(IllegalTransition, match="prepared already"):
        executor.prepare_weights(manifest)
    executor.commit_weights(manifest)
    with pytest.raises(UnknownUpdate):
        executor.commit_weights(manifest)
    assert adapter.calls == ["prepare", "install", "prove", "commit"]


ENDS: dict[str, Callable[[TwoPhaseExecutor, TensorBridge], object]] = {
    "abort": lambda executor, _: executor.abort_weights(
        str(executor.pending_weight_update_id), "its trainer went away"
    ),
    "recover": lambda executor, _: executor.recover(),
    "another import": lambda executor, publisher: executor.import_weights(publish(publisher, 3)),
    "another update": lambda executor, publisher: executor.update_weights(publish(publisher, 3)),
    "release": lambda executor, _: executor.release_weights(),
    "close": lambda executor, _: executor.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_prepared_update_is_given_up_by(
    end: str, publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = prepared(publisher, executor)
    abandoned: list[str] = []
    adapter.abandon = lambda: abandoned.append(end)  # type: ignore[method-assign]
    ENDS[end](executor, publisher)
    assert abandoned == [end]
    assert bridge_of(executor).update_status(manifest.update_id) == "rejected"
    if end != "close":
        with pytest.raises(UnknownUpdate):
            executor.commit_weights(manifest)
    expected = weights(3) if end == "another update" else weights(1)
    assert content(adapter.engine) == content(expected)


def test_an_update_that_the_engine_refuses_is_given_up(
    publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.import_weights(manifest)
    adapter.fails["prepare"] = IncompatibleUpdate("another model. Publish this one's.")
    with pytest.raises(IncompatibleUpdate):
        executor.prepare_weights(manifest)
    assert executor.pending_weight_update_id is None
    with pytest.raises(UnknownUpdate):
        executor.commit_weights(manifest)


def test_a_commit_that_fails_is_undone(
    publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = prepared(publisher, executor)
    adapter.fails["install"] = OSError("no more memory")
    with pytest.raises(OSError, match="no more memory"):
        executor.commit_weights(manifest)
    assert content(adapter.engine) == content(weights(1))
    assert (executor.active_weight_version, executor.is_torn) == (1, False)
    adapter.fails.clear()
    executor.update_weights(publish(publisher, 3))


def test_a_step_from_inside_an_update_is_refused(
    publisher: TensorBridge, executor: TwoPhaseExecutor, adapter: Recording
) -> None:
    manifest = prepared(publisher, executor)
    refused: list[str] = []

    def abandon() -> None:
        with pytest.raises(WeightUpdateRejectedError, match="when that one is over") as caught:
            executor.abort_weights(manifest, "from inside")
        refused.append(str(caught.value))

    adapter.abandon = abandon  # type: ignore[method-assign]
    executor.abort_weights(manifest, "from outside")
    assert len(refused) == 1

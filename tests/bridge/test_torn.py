"""Torn: install and undo both failed. The engine must not serve until it is whole again."""

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
)
from rl_bridge.errors import (
    IncompatibleUpdate,
    StaleUpdate,
    TornEngine,
    WeightUpdateRejectedError,
)
from rl_bridge.lifecycle import State
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import weights

OWN = LookupError("the engine said no")


def tear(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording, version: int
) -> WeightUpdateManifest:
    """Fail an install and its undo."""
    adapter.fails = {"install": OWN, "undo": OSError("out of memory")}
    manifest = publish(publisher, version)
    with pytest.raises(TornEngine):
        executor.update_weights(manifest)
    adapter.fails = {}
    return manifest


def test_a_failed_undo_is_torn_and_says_both_reasons_and_the_ways_out(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.fails = {"install": OWN, "undo": OSError("out of memory")}
    manifest = publish(publisher, 2)
    with pytest.raises(TornEngine) as caught:
        executor.update_weights(manifest)
    text = str(caught.value)
    assert "version 2 failed to install (LookupError: the engine said no)" in text
    assert "its undo failed too (OSError: out of memory)" in text
    assert "call recover(), or install a later version in full" in text
    assert caught.value.__cause__ is OWN
    assert executor.is_torn
    assert executor.active_weight_version is None
    bridge = bridge_of(executor)
    assert bridge.update_state(manifest.update_id) is State.TORN
    assert bridge.update_status(manifest.update_id) == "rejected"
    reason = "LookupError: the engine said no; undo: OSError: out of memory"
    assert bridge.rejection_reason(manifest.update_id) == reason
    with pytest.raises(TornEngine, match=r"torn by version 2: LookupError.*Call recover"):
        executor.check_servable()


@pytest.mark.parametrize("has_version", [False, True], ids=["first", "later"])
def test_recovering_completes_the_undo(
    has_version: bool, publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    if has_version:
        executor.update_weights(publish(publisher, 1))
    before = content(adapter.engine)
    manifest = tear(publisher, executor, adapter, 2)
    assert content(adapter.engine) != before
    adapter.fails = {"undo": OSError("still out of memory")}
    with pytest.raises(
        TornEngine, match="recover: the undo of version 2 failed again: OSError: still out"
    ):
        executor.recover()
    torn = [executor.is_torn]
    adapter.fails = {}
    executor.recover()
    assert [*torn, executor.is_torn] == [True, False]
    assert content(adapter.engine) == before
    assert executor.active_weight_version == (1 if has_version else None)
    assert bridge_of(executor).update_state(manifest.update_id) is State.REJECTED
    if has_version:
        executor.check_servable()
    with pytest.raises(WeightUpdateRejectedError):
        executor.update_weights(manifest)
    executor.update_weights(publish(publisher, 3))
    assert content(adapter.engine) == content(weights(3))


def test_the_torn_version_itself_may_be_installed_in_full(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    manifest = tear(publisher, executor, adapter, 2)
    executor.update_weights(manifest)
    assert not executor.is_torn
    assert executor.active_weight_version == 2
    assert content(adapter.engine) == content(weights(2))
    assert bridge_of(executor).update_state(manifest.update_id) is State.ACKNOWLEDGED


def test_a_second_try_of_the_torn_version_that_is_undone_heals_too(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    before = content(adapter.engine)
    manifest = tear(publisher, executor, adapter, 2)
    adapter.fails = {"install": OWN}
    with pytest.raises(LookupError):
        executor.update_weights(manifest)
    assert not executor.is_torn
    assert content(adapter.engine) == before
    assert executor.active_weight_version == 1
    assert bridge_of(executor).update_state(manifest.update_id) is State.REJECTED


def test_a_later_version_that_is_refused_or_fails_leaves_the_engine_torn(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    torn = tear(publisher, executor, adapter, 2)
    adapter.fails = {"prepare": LookupError("does not fit")}
    with pytest.raises(LookupError) as caught:
        executor.update_weights(publish(publisher, 3))
    assert "the engine is still torn" in caught.value.__notes__[0]
    adapter.fails = {"install": OWN, "undo": OSError("again")}
    manifest = publish(publisher, 4)
    with pytest.raises(TornEngine):
        executor.update_weights(manifest)
    assert executor.is_torn
    bridge = bridge_of(executor)
    assert bridge.update_state(manifest.update_id) is State.TORN
    adapter.fails = {}
    executor.recover()
    assert content(adapter.engine) == content(weights(1))
    assert executor.active_weight_version == 1
    for update in (torn, manifest):
        assert bridge.update_state(update.update_id) is State.REJECTED


def test_each_of_several_torn_versions_may_be_installed_in_full(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    earlier = tear(publisher, executor, adapter, 2)
    later = tear(publisher, executor, adapter, 3)
    with pytest.raises(TornEngine, match="torn by version 3"):
        executor.check_servable()
    adapter.fails = {"install": OWN, "undo": OSError("again")}
    with pytest.raises(TornEngine):
        executor.update_weights(earlier)
    with pytest.raises(TornEngine, match="torn by version 2"):
        executor.check_servable()
    adapter.fails = {}
    executor.update_weights(earlier)
    assert not executor.is_torn
    assert executor.active_weight_version == 2
    bridge = bridge_of(executor)
    assert bridge.update_state(earlier.update_id) is State.ACKNOWLEDGED
    assert bridge.update_state(later.update_id) is State.REJECTED


def test_a_torn_engine_refuses_the_version_before_and_names_recover(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    first = publish(publisher, 1)
    executor.update_weights(first)
    tear(publisher, executor, adapter, 2)
    adapter.calls.clear()
    with pytest.raises(StaleUpdate, match="recover"):
        executor.update_weights(first)
    assert adapter.calls == []
    assert executor.is_torn
    assert bridge_of(executor).update_status(first.update_id) == "acknowledged"


def test_a_system_exit_in_an_undo_is_raised_and_leaves_a_torn_engine(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    own = LookupError("no")
    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    adapter.fails = {"install": own, "undo": SystemExit(3)}
    with pytest.raises(SystemExit) as caught:
        executor.update_weights(manifest)
    assert caught.value.code == 3
    assert "stopped the undo of version 2; the engine is torn" in caught.value.__notes__[0]
    assert caught.value.__context__ is own
    assert executor.is_torn
    assert bridge_of(executor).update_state(manifest.update_id) is State.TORN
    adapter.fails = {}
    executor.recover()
    assert content(adapter.engine) == content(weights(1))


def broken() -> dict[str, BaseException]:
    """What an adapter fails with; made anew, as an exception that is kept keeps tensors."""
    return {"install": LookupError("the engine said no"), "undo": OSError("out of memory")}


@pytest.mark.parametrize("is_healed_by_another", [False, True])
def test_an_update_that_is_released_meanwhile_tears_the_engine_all_the_same(
    is_healed_by_another: bool,
    publisher: TensorBridge,
    executor: RolloutExecutor,
    adapter: Recording,
) -> None:
    class Releasing(dict[str, BaseException]):
        """What fails; at the install, whoever shares the bridge releases the update as well."""

        def __contains__(self, step: object) -> bool:
            if step == "install":
                executor.bridge.release(manifest.update_id)
            return super().__contains__(step)

    executor.update_weights(publish(publisher, 1))
    manifest = publish(publisher, 2)
    adapter.fails = Releasing(broken())
    with pytest.raises(TornEngine, match=r"undo failed too .*call recover\(\)"):
        executor.update_weights(manifest)
    assert executor.is_torn
    adapter.fails = {}
    if is_healed_by_another:
        executor.update_weights(publish(publisher, 3))
    else:
        executor.recover()
    version = 3 if is_healed_by_another else 1
    assert executor.active_weight_version == version
    assert content(adapter.engine) == content(weights(version))


def test_a_torn_engine_is_not_given_tensors_that_no_undo_could_bring_back(
    trainer: TensorBridge, rollout: TensorBridge
) -> None:
    engine = {"a": torch.zeros(2), "b": torch.zeros(2)}
    adapter = ModuleInstallAdapter(engine, strict=False)
    executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)

    def update(version: int, *names: str) -> None:
        sent = {name: torch.full((2,), float(version)) for name in names}
        executor.update_weights(trainer.publish(sent, weight_version=version))

    update(1, "a", "b")
    update(2, "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "prove", fails)
        patch.setattr(adapter, "undo", fails)
        with pytest.raises(TornEngine):
            update(3, "a")
    with pytest.raises(IncompatibleUpdate, match="recover"):
        update(4, "a", "b")
    executor.recover()
    assert executor.active_weight_version == 2
    assert {name: one.tolist() for name, one in engine.items()} == {"a": [2, 2], "b": [1, 1]}


def fails() -> None:
    raise OWN

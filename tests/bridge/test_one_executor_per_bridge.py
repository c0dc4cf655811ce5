"""Which engine an acknowledgement speaks of is never in doubt, and others' updates stay."""

from collections.abc import Iterator

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, SharedMemoryTensorBridge
from rl_bridge.errors import WeightBridgeUnavailableError


@pytest.fixture
def bridge() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="both", suspicious="off") as made:
        yield made


def executor_on(bridge: SharedMemoryTensorBridge) -> RolloutExecutor:
    engine = {"weight": torch.zeros(4)}
    return RolloutExecutor(
        weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine)
    )


def test_a_second_executor_on_a_bridge_is_refused_until_the_first_is_closed(
    bridge: SharedMemoryTensorBridge,
) -> None:
    first = executor_on(bridge)
    with pytest.raises(WeightBridgeUnavailableError, match="serves another RolloutExecutor"):
        executor_on(bridge)
    first.close()
    executor_on(bridge).update_weights(bridge.publish({"weight": torch.ones(4)}, weight_version=1))


def test_an_executor_that_was_dropped_leaves_its_bridge_to_the_next(
    bridge: SharedMemoryTensorBridge,
) -> None:
    executor_on(bridge)
    executor_on(bridge).update_weights(bridge.publish({"weight": torch.ones(4)}, weight_version=1))


def test_an_executor_on_a_publishing_bridge_leaves_its_updates_to_other_readers(
    bridge: SharedMemoryTensorBridge,
) -> None:
    executor = executor_on(bridge)
    first = bridge.publish({"weight": torch.ones(4)}, weight_version=1)
    second = bridge.publish({"weight": torch.full((4,), 2.0)}, weight_version=2)
    executor.update_weights(first)
    executor.update_weights(second)
    executor.release_weights()
    with SharedMemoryTensorBridge(source_worker="other") as other:
        assert other.import_update(first)["weight"].tolist() == [1.0] * 4
        assert other.import_update(second)["weight"].tolist() == [2.0] * 4
    assert [r.state for r in bridge.holders(first.update_id) if r.worker == "both"] == ["released"]

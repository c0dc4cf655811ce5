"""What an executor is given wrongly is told when it is made."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, SharedMemoryTensorBridge


@pytest.fixture
def bridge() -> Iterator[SharedMemoryTensorBridge]:
    with SharedMemoryTensorBridge(source_worker="rollout") as made:
        yield made


class Least:
    """All that an executor needs of a bridge."""

    def import_update(self, manifest: object) -> Mapping[str, torch.Tensor]:
        return {}

    def acknowledge(self, update_id: str) -> None:
        pass

    def reject(self, update_id: str, reason: str) -> None:
        pass

    def release(self, update_id: str) -> None:
        pass


def test_a_bridge_is_whatever_has_its_verbs(bridge: SharedMemoryTensorBridge) -> None:
    least = Least()
    assert RolloutExecutor(weight_bridge=least).bridge is least
    assert RolloutExecutor(weight_bridge=bridge).bridge is bridge


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("shared-memory", r"the str 'shared-memory'.*make_weight_bridge\('shared-memory'\)"),
        (SharedMemoryTensorBridge, "the class SharedMemoryTensorBridge.*Make an object of it"),
        (Future(), "a Future, which has no import_update and no acknowledge and no reject"),
    ],
)
def test_what_is_no_bridge_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"weight_bridge: got {message}"):
        RolloutExecutor(weight_bridge=given)

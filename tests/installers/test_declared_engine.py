"""What of an adapter counts as its engine: what it declares by a name, and nothing that is guessed.

A wrong guess would be a false proof and a false undo: of a staging buffer, of a draft model.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, SharedMemoryTensorBridge, make_weight_bridge
from rl_bridge.errors import TornEngine
from rl_bridge.installers.wrapped import _declared

Tensors = Mapping[str, torch.Tensor]


def executor_of(adapter: Any) -> RolloutExecutor:
    return RolloutExecutor(
        weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
        weight_install_adapter=adapter,
        suspicious="off",
    )


def linear(value: float) -> torch.nn.Linear:
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


class RemoteEngine:
    """No module: it may as well be in another process."""

    def __init__(self) -> None:
        self.weights = {name: torch.zeros_like(t) for name, t in linear(0).state_dict().items()}

    def values(self) -> set[float]:
        return {v for tensor in self.weights.values() for v in tensor.flatten().tolist()}


class Staging:
    """Copies into a buffer of its own, then pushes that to the engine; it may fail half-way."""

    def __init__(self, remote: RemoteEngine) -> None:
        self.remote = remote
        self.staging = {name: torch.zeros_like(t) for name, t in remote.weights.items()}
        self.pushes = 2
        self.is_lost = False

    def install(self, manifest: object, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self.staging[name].copy_(tensor)
        for name in list(self.staging)[: self.pushes]:
            self.remote.weights[name].copy_(self.staging[name])
        if self.is_lost:
            self.pushes = 0
            raise ConnectionError

    def release(self, update_id: str) -> None:
        pass


def test_a_staging_buffer_proves_nothing(trainer: SharedMemoryTensorBridge) -> None:
    adapter = Staging(RemoteEngine())
    adapter.pushes = 0
    executor = executor_of(adapter)
    executor.update_weights(trainer.publish(linear(1), weight_version=1))
    assert executor.last_ack is not None
    assert executor.last_ack.proof.method == "unproven"


def test_a_staging_buffer_that_was_put_back_does_not_make_an_engine_whole(
    trainer: SharedMemoryTensorBridge,
) -> None:
    adapter = Staging(remote := RemoteEngine())
    executor = executor_of(adapter)
    executor.update_weights(trainer.publish(linear(1), weight_version=1))
    adapter.pushes, adapter.is_lost = 1, True
    with pytest.raises(TornEngine):
        executor.update_weights(trainer.publish(linear(2), weight_version=2))
    assert remote.values() == {1, 2}
    assert executor.active_weight_version is None
    with pytest.raises(TornEngine):
        executor.check_servable()


class Holder:
    """Installs nothing: only its attributes are looked at."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def install(self, manifest: object, tensors: Tensors) -> None:
        pass

    def release(self, update_id: str) -> None:
        pass


MODULE, OTHER = linear(0), linear(0)
DICT = {"w": torch.zeros(2)}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"engine": MODULE}, MODULE),
        ({"model": MODULE}, MODULE),
        ({"module": MODULE}, MODULE),
        ({"engine": DICT}, DICT),
        ({"engine": MODULE, "model": OTHER}, MODULE),
        ({"engine": None, "model": MODULE}, MODULE),
        ({"model": MODULE, "module": MODULE}, MODULE),
        ({"model": MODULE, "module": "a name"}, MODULE),
        ({"model": MODULE, "module": OTHER}, None),
        ({"engine": object(), "model": MODULE}, None),
        ({"engine": {"w": 1}}, None),
        ({"engine": {}}, None),
        ({"engine": torch.nn.Module()}, None),
        ({"model": DICT}, None),
        ({"draft": MODULE}, None),
        ({"weights": DICT}, None),
        ({"_engine": MODULE}, None),
        ({}, None),
    ],
)
def test_an_engine_is_what_is_declared_as_one(
    attributes: dict[str, object], expected: object
) -> None:
    assert _declared(Holder(**attributes))[1] is expected


def test_an_engine_in_a_slot_is_declared_and_one_that_is_computed_is_not() -> None:
    class Slotted:
        __slots__ = ("engine",)
        engine: torch.nn.Module

    class Computing:
        @property
        def engine(self) -> torch.nn.Module:
            raise AssertionError

    slotted = Slotted()
    assert _declared(slotted)[1] is None
    slotted.engine = MODULE
    assert _declared(slotted)[1] is MODULE
    assert _declared(Computing())[1] is None


@pytest.mark.parametrize(
    "attributes", [{}, {"model": MODULE, "module": OTHER}, {"draft": MODULE, "loss": OTHER}]
)
def test_an_adapter_whose_engine_cannot_be_seen_is_told_which_names_count(
    attributes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    executor_of(Holder(**attributes))
    assert "an attribute named 'engine' (an nn.Module or a dict of tensors)" in caplog.text
    assert "'model' or 'module' (an nn.Module; not two different ones)" in caplog.text


class Reloading:
    """Makes a new engine for each update; it may fail behind that."""

    def __init__(self) -> None:
        self.model: torch.nn.Module | None = None
        self.fails = False

    def install(self, manifest: object, tensors: Tensors) -> None:
        model = torch.nn.Linear(2, 2)
        model.load_state_dict(dict(tensors))
        self.model = model
        if self.fails:
            raise ConnectionError

    def release(self, update_id: str) -> None:
        pass


def test_an_engine_that_an_install_made_anew_is_the_one_that_is_proven(
    trainer: SharedMemoryTensorBridge,
) -> None:
    executor = executor_of(adapter := Reloading())
    for version in (1, 2):
        executor.update_weights(trainer.publish(linear(version), weight_version=version))
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "digest"
        assert adapter.model is not None
        assert set(adapter.model.state_dict()["bias"].tolist()) == {version}


def test_an_engine_that_a_failed_install_replaced_comes_back(
    trainer: SharedMemoryTensorBridge,
) -> None:
    executor = executor_of(adapter := Reloading())
    executor.update_weights(trainer.publish(linear(1), weight_version=1))
    before, adapter.fails = adapter.model, True
    with pytest.raises(ConnectionError):
        executor.update_weights(trainer.publish(linear(2), weight_version=2))
    assert adapter.model is before
    assert before is not None
    assert set(before.state_dict()["bias"].tolist()) == {1}
    assert not executor.is_torn


def test_an_engine_that_was_replaced_between_updates_is_the_one_that_is_restored(
    trainer: SharedMemoryTensorBridge,
) -> None:
    class InPlace(Reloading):
        def install(self, manifest: object, tensors: Tensors) -> None:
            assert self.model is not None
            self.model.load_state_dict(dict(tensors))
            if self.fails:
                raise ConnectionError

    adapter = InPlace()
    adapter.model = linear(0)
    executor = executor_of(adapter)
    executor.update_weights(trainer.publish(linear(1), weight_version=1))
    adapter.model, adapter.fails = linear(5), True
    with pytest.raises(ConnectionError):
        executor.update_weights(trainer.publish(linear(2), weight_version=2))
    assert set(adapter.model.state_dict()["bias"].tolist()) == {5}

"""What people publish by mistake is told in words that say what to write instead."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.errors import IncompatibleUpdate, MalformedManifest
from tests.bridge.engines import linear_weights


def weights() -> dict[str, Any]:
    return {"w": torch.ones(2), "b": torch.ones(1)}


@pytest.mark.parametrize("version", [np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_an_integer_of_another_library_is_a_version(version: Any, trainer: TensorBridge) -> None:
    manifest = trainer.publish(weights(), weight_version=version)
    assert manifest.weight_version == 3
    assert type(manifest.weight_version) is int


@pytest.mark.parametrize("version", [True, np.True_, 3.0, np.float32(3), "3", -1])
def test_what_is_no_integer_of_0_or_more_is_no_version(version: Any, trainer: TensorBridge) -> None:
    with pytest.raises(MalformedManifest, match="expected an int of 0 or more"):
        trainer.publish(weights(), weight_version=version)


@pytest.mark.parametrize("version", [2**63, 2**64, 10**5000], ids=["63", "64", "many"])
def test_a_version_that_no_manifest_can_carry_is_told_before_anything_is_copied(
    version: int, trainer: TensorBridge
) -> None:
    with pytest.raises(MalformedManifest, match=r"below 2\*\*63"):
        trainer.publish(weights(), weight_version=version)
    trainer.publish(weights(), weight_version=2**63 - 1)


def test_what_holds_no_names_is_not_trainable(trainer: TensorBridge) -> None:
    names: Any = 5
    with pytest.raises(IncompatibleUpdate, match=r"trainable=5 holds no names"):
        trainer.publish(weights(), weight_version=1, trainable=names)


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(7), torch.tensor(0.5)])
def test_a_number_of_another_library_in_the_metadata_is_told_of_item(
    value: Any, trainer: TensorBridge
) -> None:
    with pytest.raises(MalformedManifest, match=r"metadata\.loss.*\.item\(\) gives a plain number"):
        trainer.publish(weights(), weight_version=1, metadata={"loss": value})
    trainer.publish(weights(), weight_version=1, metadata={"loss": value.item()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name(trainer: TensorBridge) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(WeightBridgeUnavailableError, match="'w' is a nested tensor"):
        trainer.publish({"w": nested}, weight_version=1)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("weight", r"trainable='weight' is one str, expected names. Write trainable=\['weight'\]"),
        (torch.nn.Linear(2, 2).parameters(), "trainable holds a Parameter, expected names"),
        ([1, 2], "trainable holds a int, expected names"),
    ],
)
def test_a_trainable_that_is_no_collection_of_names_is_refused(
    trainable: Any, message: str, trainer: TensorBridge
) -> None:
    with pytest.raises(IncompatibleUpdate, match=message):
        trainer.publish(weights(), weight_version=1, trainable=trainable)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ({"w": np.zeros(2)}, r"torch\.from_numpy\(array\)"),
        ({"model": weights(), "step": 3}, r"inner state dict alone, such as checkpoint\['model'\]"),
        ({**weights(), "step": 3}, "Leave it out of the state dict"),
    ],
)
def test_what_is_no_tensor_is_refused_with_what_to_publish_instead(
    source: Any, remedy: str, trainer: TensorBridge
) -> None:
    with pytest.raises(IncompatibleUpdate, match=remedy):
        trainer.publish(source, weight_version=1)


def reusing(buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(3):
        yield f"w{index}", buffer[: index + 1].fill_(index)


def test_a_buffer_that_an_iterator_uses_for_several_tensors_is_refused(
    trainer: TensorBridge,
) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"'w0' was written to after .* buffer\.clone"):
        trainer.publish(reusing(torch.zeros(4)), weight_version=1)
    trainer.publish(((n, t.clone()) for n, t in reusing(torch.zeros(4))), weight_version=1)


def test_a_tied_tensor_of_an_iterator_is_a_tie(trainer: TensorBridge) -> None:
    tied = torch.ones(2)
    manifest = trainer.publish(iter([("a", tied), ("b", tied)]), weight_version=1)
    assert manifest.total_nbytes == 8


def test_an_iterator_of_inference_tensors_is_taken(trainer: TensorBridge) -> None:
    with torch.inference_mode():
        made = [("a", torch.ones(2))]
    assert trainer.publish(iter(made), weight_version=1).total_nbytes == 8


def test_a_module_is_published_without_its_state_dict_being_made(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    expected = list(model.state_dict())
    monkeypatch.setattr(torch.nn.Module, "state_dict", lambda *_, **__: pytest.fail("made"))
    manifest = trainer.publish(model, weight_version=1)
    assert list(manifest.tensors) == sorted(expected)


@pytest.mark.parametrize("where", ["_parameters", "_buffers"])
def test_what_was_put_into_a_module_by_hand_and_is_no_tensor_is_refused(
    where: str, trainer: TensorBridge
) -> None:
    model = torch.nn.Linear(2, 2)
    getattr(model, where)["odd"] = 1.0
    with pytest.raises(IncompatibleUpdate, match="'odd' is a float, expected a tensor"):
        trainer.publish(model, weight_version=1)


def test_a_published_module_is_not_kept(trainer: TensorBridge) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    gone = weakref.ref(model[0])
    trainer.publish(model, weight_version=1)
    del model
    gc.collect()
    assert gone() is None


def _cut(nbytes: int) -> Callable[[torch.Tensor], None]:
    return lambda tensor: tensor.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize("nbytes", [0, 4])
def test_a_tensor_whose_storage_was_freed_or_cut_is_refused(nbytes: int) -> None:
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        weights = linear_weights(1.0)
        first = trainer.publish(weights, weight_version=1)
        _cut(nbytes)(weights["weight"])
        with pytest.raises(WeightBridgeUnavailableError, match="'weight' has lost its storage"):
            trainer.publish(weights, weight_version=2)
        engine = linear_weights(0.0)
        _cut(nbytes)(engine["weight"])
        adapter = ModuleInstallAdapter(engine)
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        with pytest.raises(IncompatibleUpdate, match=r"'weight'.*has lost its storage"):
            executor.update_weights(first)

"""A snapshot brings a model back: the same objects, holding the same objects and bytes."""

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from rl_bridge.engines.vllm.reload import ModelSnapshot
from rl_bridge.errors import IncompatibleUpdate


class Kernel:
    """What a layer computes with, beside its parameters."""

    def __init__(self) -> None:
        """Begin."""
        self.handler = object()
        self.packed = torch.arange(4.0)


class Layer(torch.nn.Module):
    """Parameters, buffers, attributes, a helper, and a cache."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.kernel = Kernel()
        self.notes: dict[str, Any] = {"parts": [torch.full((2,), 7.0)]}
        self.kv_cache = torch.zeros(1 << 20)


class Model(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.second.weight = self.first.weight


def snapshot_of(model: torch.nn.Module) -> ModelSnapshot:
    made = ModelSnapshot(model, helpers=(f"{__name__}.",))
    made.copy_bytes()
    return made


def state(model: Model) -> list[Any]:
    found: list[Any] = []
    for layer in (model.first, model.second):
        found += [(key, id(value)) for key, value in vars(layer).items()]
        found += [list(layer.state_dict()), sorted(layer._non_persistent_buffers_set)]
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        tensors |= {"packed": layer.kernel.packed, "part": layer.notes["parts"][0]}
        found += [
            (name, id(t), t.data_ptr(), t.shape, t.stride(), t.tolist(), dict(vars(t)))
            for name, t in tensors.items()
        ]
        found += [id(layer.kernel.handler), sorted(vars(layer.kernel)), list(layer.notes)]
    return found


def overwrite(model: Model) -> None:
    model.first.weight.data.add_(1)
    model.first.kernel.packed.zero_()
    model.first.notes["parts"][0].zero_()


def rebind(model: Model) -> None:
    model.first.weight.data = torch.zeros(3, 2)
    model.first.weight.extra = 1  # type: ignore[attr-defined]  # as loaders do
    model.first.kernel.packed = torch.zeros(1)


def replace(model: Model) -> None:
    del model.first.weight
    model.first.weight = torch.nn.Parameter(torch.empty(0, device="meta"))
    del model.second.scale
    model.second.register_buffer("passing", torch.ones(3), persistent=True)
    model.first.kernel = Kernel()


def decorate(model: Model) -> None:
    model.first.added = 1  # type: ignore[assignment]  # nn.Module's annotations want a module
    model.first.kernel.handler = object()
    model.first.kernel.more = 2  # type: ignore[attr-defined]  # as kernels do
    model.first.notes["parts"].append(3)
    model.first.notes["new"] = 4
    del model.second.kernel


@pytest.mark.parametrize("change", [overwrite, rebind, replace, decorate])
def test_every_change_is_brought_back(change: Any) -> None:
    model = Model()
    before = state(model)
    snapshot = snapshot_of(model)
    change(model)
    for _ in range(2):  # again, as after an interrupt
        snapshot.restore()
        assert state(model) == before
    assert model.second.weight is model.first.weight


def test_other_state_is_not_copied_and_shared_tensors_once() -> None:
    weights = 6 * 4  # one, for both layers
    rest = 2 * (2 + 2 + 4 + 2) * 4
    assert ModelSnapshot(Model(), helpers=(f"{__name__}.",)).nbytes == weights + rest


def test_helpers_of_strangers_are_left_alone() -> None:
    model = Model()
    snapshot = ModelSnapshot(model, helpers=("somebody.else.",))
    snapshot.copy_bytes()
    other = model.first.kernel.handler = object()
    snapshot.restore()
    assert model.first.kernel.handler is other


def test_tensors_made_of_tensors_are_refused() -> None:
    model = Model()
    twins = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]  # torch's own
    model.first.weight = torch.nn.Parameter(twins)
    with pytest.raises(IncompatibleUpdate, match="TwoTensor, whose bytes cannot be brought back"):
        ModelSnapshot(model)

"""Tensors that share a place with others, and places that others look at."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.engines.load_checks import check_same
from rl_bridge.engines.load_plan import LoadPlan, Route, View, learn
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.skeleton import EngineCompat, Target, User
from rl_bridge.engines.vllm import model_installer
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.model import WeightUpdateManifest

SHAPE = (64, 32)


class Tied(torch.nn.Module):
    """Keeps its head and its embeddings as one, and takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Parameter(torch.zeros(SHAPE), requires_grad=False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do."""
        for _, tensor in given:
            self.words.data.copy_(tensor)


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("local-clone") as bridge:
        yield bridge


def planned(names: Iterable[str]) -> LoadPlan:
    kinds = dict.fromkeys(names, (torch.float32, SHAPE))
    return learn(Tied(), kinds, EngineCompat(), admit=lambda *_: None)


def published(trainer: TensorBridge, head: float) -> WeightUpdateManifest:
    sent = {"words": torch.full(SHAPE, 2.0), "head": torch.full(SHAPE, head)}
    return trainer.publish(sent, weight_version=1)


def test_tensors_that_go_to_one_place_are_let_in_where_they_are_the_same(
    trainer: TensorBridge,
) -> None:
    check_same(planned(["words", "head"]), published(trainer, 2.0))


def test_tensors_that_go_to_one_place_and_differ_are_refused_before_anything_is_made(
    trainer: TensorBridge,
) -> None:
    model, manifest = Tied(), published(trainer, 3.0)
    installer = ModelInstaller(model, EngineCompat())
    with pytest.raises(IncompatibleUpdate, match=r"'head' and 'words' both go to .*'words', exp"):
        installer.prepare(manifest, trainer.import_update(manifest))
    assert installer._staged is None


def test_what_an_install_writes_in_place_is_asked_for_twice(
    trainer: TensorBridge,
) -> None:
    """Once for the next version, once to go back."""
    model = Tied()
    model.register_buffer("flat", model.words.view(-1), persistent=False)
    nbytes = model.words.nbytes
    manifest = published(trainer, 2.0)
    installer = ModelInstaller(model, EngineCompat(), memory_budget_nbytes=2 * nbytes - 1)
    with pytest.raises(IncompatibleUpdate, match=f"takes {2 * nbytes} bytes more"):
        installer.prepare(manifest, trainer.import_update(manifest))


def test_a_tensor_of_which_a_packed_layer_takes_a_part_is_looked_at_for_the_rest() -> None:
    """A layer's product tells of NaN in its own weight only."""
    packed, plain = torch.nn.Module(), torch.nn.Module()
    targets = [
        Target(torch.empty(SHAPE, device="meta"), [User(name, module, "weight")])
        for name, module in (("packed.weight", packed), ("plain.weight", plain))
    ]
    part = View(SHAPE, (SHAPE[1], 1), 0)

    def taken(source: str, target: int) -> Route:
        return Route(source, part, target, part, is_whole=False)

    steps: dict[int, Any] = {0: [taken("both", 0), taken("one", 0)], 1: [taken("both", 1)]}
    canaries: Any = [SimpleNamespace(module=packed)]
    assert model_installer._asked_about(LoadPlan(targets, steps), canaries) == {"one"}

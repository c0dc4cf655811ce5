"""Loaders that compute what they load, as those of Mamba2 and Plamo3 do, behind vLLM's own reload.

A small model is loaded, processed and reloaded by vLLM's own code; and an engine with a hybrid.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader.weight_utils import (
    composed_weight_loader,
    default_weight_loader,
)
from vllm.model_executor.utils import set_weight_attrs

from rl_bridge import InstallProof
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.drive import Setting, answers, executor_for, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.test_derived_tensors import config, loaded, update
from tests.engines.trainer import Trainer

__all__ = ["config"]

Weights = dict[str, torch.Tensor]
WIDTH = 64


class Fused(torch.nn.Module):
    """q and k, packed by vLLM when they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = UnquantizedLinearMethod()
        made = torch.empty(2 * WIDTH, WIDTH, dtype=torch.float32)
        self.weight = torch.nn.Parameter(made, requires_grad=False)

        def load(param: torch.Tensor, loaded: torch.Tensor, part: int) -> None:
            param.data[part * WIDTH :][:WIDTH].copy_(loaded)

        set_weight_attrs(self.weight, {"weight_loader": load})


class Mixer(torch.nn.Module):
    """What is computed, beside a parameter that is copied and a buffer that is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(torch.empty(8), requires_grad=False)
        self.D = torch.nn.Parameter(torch.empty(8), requires_grad=False)
        self.register_buffer("turn", torch.zeros(8))
        computed = composed_weight_loader(default_weight_loader, lambda x: -torch.exp(x.float()))
        set_weight_attrs(self.A, {"weight_loader": computed})


class Model(torch.nn.Module):
    """A hybrid in small."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.mixer = Fused(), Mixer()

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As vLLM's do: what they do not know they skip."""
        for name, tensor in given:
            if name in {"q", "k"}:
                weight: Any = self.qk.weight
                weight.weight_loader(weight, tensor, "qk".index(name))
            elif hasattr(self.mixer, name):
                target = getattr(self.mixer, name)
                getattr(target, "weight_loader", default_weight_loader)(target, tensor)


def weights(number: float, **changed: torch.Tensor | None) -> Weights:
    made: dict[str, torch.Tensor | None] = {
        name: torch.full((WIDTH, WIDTH), number + i) for i, name in enumerate("qk")
    }
    made |= {name: torch.full((8,), number) for name in ("A", "D", "turn")}
    return {name: tensor for name, tensor in {**made, **changed}.items() if tensor is not None}


def content(model: Model) -> Weights:
    linear: Any = model.qk
    with torch.no_grad():
        product = linear.cpu_linear(torch.eye(WIDTH), linear.weight, None)
    held = {"qk": product, "A": model.mixer.A, "D": model.mixer.D, "turn": model.mixer.turn}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def same(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def engine(config: VllmConfig) -> Callable[[float], Model]:
    return lambda number: loaded(Model(), config, weights(number))


def updated(model: Model, config: VllmConfig, trainer: Trainer, sent: Weights) -> InstallProof:
    return update(VLLMReloadAdapter, model, config, trainer, sent).proof


def test_it_is_a_fresh_engine_and_only_what_is_computed_is_unproven(
    engine: Callable[[float], Model],
    config: VllmConfig,
    trainer: Trainer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = engine(1)
    with caplog.at_level(logging.WARNING, logger="rl_bridge"):
        proof = updated(model, config, trainer, weights(2))
    message = caplog.records[-1].getMessage()
    assert message.endswith("what 1 layers hold cannot be read back, so it is unproven: mixer")
    assert same(content(model), content(engine(2)))
    assert (proof.method, proof.root) == ("unproven", "")
    assert proof.tensors == 3  # q, k and D


WRONG: Mapping[str, tuple[Weights, str]] = {
    "misnamed": (weights(2, k=None, K=torch.ones(WIDTH, WIDTH)), "'qk.weight': 4096 of its 8192"),
    "cast": (weights(2, D=torch.full((8,), 1e300, dtype=torch.float64)), "tensor 'D' has numbers"),
    "computed": (weights(2, A=torch.full((8,), 100.0)), r"'mixer\.A': 8 of its 8 numbers are NaN"),
    "buffer": (
        weights(2, turn=torch.full((8,), 1e300, dtype=torch.float64)),
        r"'mixer\.turn': 8 of its 8 numbers are NaN",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_beside_what_is_computed(
    engine: Callable[[float], Model], config: VllmConfig, trainer: Trainer, wrong: str
) -> None:
    model = engine(1)
    before = content(model)
    sent, match = WRONG[wrong]
    with pytest.raises(IncompatibleUpdate, match=match):
        updated(model, config, trainer, sent)
    assert same(content(model), before)


@pytest.mark.timeout(300)  # engines start
def test_a_hybrid_engine_is_a_fresh_one_and_refuses_what_does_not_fit(
    checkpoints: Checkpoints, trainer: Trainer
) -> None:
    kind = Kind("hybrid")  # in float32: see test_derived_tensors.py
    with start(Setting(kind), checkpoints.path(kind, 1)) as llm:
        second = answers(llm)
    sent = [checkpoints.weights(kind, version) for version in (0, 1)]
    key = next(name for name in sent[1] if "k_proj" in name)
    lost = {name: tensor for name, tensor in sent[1].items() if name != key}
    numbers = next(name for name in sent[1] if name.endswith("A_log"))
    broken = {**sent[1], numbers: torch.full_like(sent[1][numbers], 100)}
    with (
        start(Setting(kind), checkpoints.path(kind, 0)) as llm,
        executor_for(llm, staging="reload") as executor,
    ):
        fresh = [answers(llm), second]
        assert fresh[0] != fresh[1]
        for step in (1, 2, 3):
            for wrong, match in ((lost, "qkv_proj"), (broken, r"mamba\.A': 8 of its 8 numbers")):
                with pytest.raises(IncompatibleUpdate, match=match):
                    executor.update_weights(trainer.publish(wrong))
                assert answers(llm) == fresh[(step - 1) % 2]
            executor.update_weights(trainer.publish(sent[step % 2]))
            assert answers(llm) == fresh[step % 2]
            assert executor.last_ack is not None
            assert executor.last_ack.proof.tensors == len(sent[1]) - 1  # all but A

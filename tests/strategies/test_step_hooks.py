"""One line in a training loop: what is published behind a step, and what a failure does."""

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.hooks import StepPublisher, StepSender, weight_sync_callback
from rl_bridge.trainers.base import WeightMetadata
from rl_bridge.trainers.chunks import WeightChunk
from rl_bridge.trainers.state_dict import StateDictExtractor
from tests.strategies.rig import make_model, rig


class Loop:
    """A model in training, and an engine that follows it."""

    def __init__(self, trainer: TensorBridge, rollout: TensorBridge) -> None:
        self.bridge = trainer
        self.model, self.engine = make_model(1), make_model(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.executor = RolloutExecutor(
            weight_bridge=rollout,
            weight_install_adapter=ModuleInstallAdapter(self.engine, mode="copy"),
        )
        self.manifests: list[WeightUpdateManifest] = []

    def send(self, manifest: WeightUpdateManifest) -> None:
        self.manifests.append(manifest)
        self.executor.update_weights(manifest.to_json())

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 16)).square().sum().backward()
        self.optimizer.step()

    @property
    def is_equal(self) -> bool:
        pairs = zip(self.model.parameters(), self.engine.parameters(), strict=True)
        return all(torch.equal(mine, its) for mine, its in pairs)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with make_weight_bridge("shared-memory") as trainer, make_weight_bridge("shared-memory") as it:
        made = Loop(trainer, it)
        yield made
        made.executor.close()


def test_the_engine_follows_each_step_from_the_initial_sync_on(loop: Loop) -> None:
    publisher = StepPublisher(loop.bridge, loop.model, send=loop.send)
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        loop.executor.check_servable()
    publisher.publish()
    loop.executor.check_servable()
    handle = publisher.after_steps_of(loop.optimizer)
    for step in range(1, 5):
        loop.train()
        assert loop.is_equal
        assert loop.executor.active_weight_version == step
        assert loop.manifests[-1].metadata["step"] == step
    handle.remove()
    loop.train()
    assert not loop.is_equal


def test_only_every_so_many_steps_are_published(loop: Loop) -> None:
    StepPublisher(loop.bridge, loop.model, send=loop.send, every=3).after_steps_of(loop.optimizer)
    for _ in range(7):
        loop.train()
    assert [one.metadata["step"] for one in loop.manifests] == [3, 6]
    assert [one.weight_version for one in loop.manifests] == [0, 1]


def test_a_source_may_be_made_anew_each_time(loop: Loop) -> None:
    extractor = StateDictExtractor(loop.model)
    publisher = StepPublisher(loop.bridge, extractor.local, send=loop.send)
    publisher.after_steps_of(loop.optimizer)
    for _ in range(3):
        loop.train()
        assert loop.is_equal


def test_a_failed_send_raises_out_of_the_step_and_withdraws_the_update(loop: Loop) -> None:
    publisher = StepPublisher(loop.bridge, loop.model, send=loop.send)
    publisher.publish()
    publisher.after_steps_of(loop.optimizer)
    loop.executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.train()
    assert loop.bridge.update_status(loop.manifests[-1].update_id) == "released"
    assert loop.bridge.update_status(loop.manifests[0].update_id) == "published"


class AsyncSend:
    async def __call__(self, manifest: WeightUpdateManifest) -> None: ...


@pytest.mark.parametrize(
    "send",
    [AsyncSend().__call__, AsyncSend(), partial(AsyncSend().__call__)],
    ids=["method", "object", "partial"],
)
def test_an_async_send_is_refused_at_the_door(loop: Loop, send: Any) -> None:
    with pytest.raises(TypeError, match=r"send= is async def, expected a plain.*asyncio\."):
        StepPublisher(loop.bridge, loop.model, send=send)


def test_a_send_that_returns_what_nothing_awaits_is_told_and_its_update_withdrawn(
    loop: Loop,
) -> None:
    def later(manifest: WeightUpdateManifest) -> object:
        return AsyncSend()(manifest)

    publisher = StepPublisher(loop.bridge, loop.model, send=later)
    with pytest.raises(TypeError, match="send= returned a coroutine, which nothing awaits"):
        publisher.publish()
    assert loop.bridge.latest_manifest is not None
    assert loop.bridge.update_status(loop.bridge.latest_manifest.update_id) == "released"


def test_a_publisher_without_send_is_told_what_to_give(loop: Loop) -> None:
    with pytest.raises(TypeError, match=r"send=None: expected a function.*\.update_weights"):
        StepPublisher(loop.bridge, loop.model)


def test_the_publisher_casts(loop: Loop) -> None:
    manifests: list[WeightUpdateManifest] = []
    StepPublisher(loop.bridge, loop.model, manifests.append, dtype=torch.bfloat16).publish()
    assert {one.dtype for one in manifests[0].tensors.values()} == {"bfloat16"}


def test_a_strategys_sender_follows_the_steps_as_well() -> None:
    with rig() as r:
        model = torch.nn.Module()
        for name, tensor in r.engine.weights.items():
            model.register_buffer(name.replace(".", "_"), tensor + 1)
        r.engine.weights.clear()
        r.engine.weights.update(
            {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
        )
        weight = torch.nn.Parameter(torch.ones(3))
        model.weight = weight
        r.engine.weights["weight"] = torch.zeros(3)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        sender = StepSender(r.sender, StateDictExtractor(model), r.client)
        sender.after_steps_of(optimizer)
        for step in range(1, 3):
            weight.grad = torch.ones(3)
            optimizer.step()
            assert torch.equal(r.engine.weights["weight"], torch.full((3,), 1.0 - step))


class Renaming(StateDictExtractor):
    """Whole tensors travel by other names than this rank's own have, as Megatron's do."""

    def full(self, dtype: torch.dtype | None = None) -> Iterator[WeightChunk]:
        for chunk in super().full(dtype):
            yield replace(chunk, names=[f"model.{name}" for name in chunk.names])

    def metadata(self, dtype: torch.dtype | None = None) -> dict[str, WeightMetadata]:
        found = super().metadata(dtype)
        return {f"model.{name}": replace(one, name=f"model.{name}") for name, one in found.items()}


def test_trainable_tensors_are_named_as_they_travel() -> None:
    with rig() as r:
        model = torch.nn.Linear(3, 1, bias=False)
        r.engine.weights.clear()
        r.engine.weights["model.weight"] = torch.zeros(1, 3)
        StepSender(r.sender, Renaming(model), r.client).publish()
        assert torch.equal(r.engine.weights["model.weight"], model.weight)


def test_a_step_inside_an_event_loop_is_refused_before_anything_is_sent() -> None:
    async def inside() -> None:
        with rig() as r:
            StepSender(r.sender, StateDictExtractor(make_model(1)), r.client).publish()

    with pytest.raises(WeightBridgeUnavailableError, match="Run the training in a thread"):
        asyncio.run(inside())


@pytest.mark.parametrize("every", [0, -1])
def test_publishing_every_zero_steps_is_refused(loop: Loop, every: int) -> None:
    with pytest.raises(ValueError, match="expected 1 or more steps"):
        StepPublisher(loop.bridge, loop.model, send=loop.send, every=every)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_a_callback_without_transformers_says_what_to_do(loop: Loop) -> None:
    hook: Any = StepPublisher(loop.bridge, loop.model, send=loop.send)
    with pytest.raises(WeightBridgeUnavailableError, match="Install it in the trainer's"):
        weight_sync_callback(hook)

"""LoRA adapters through an executor: each is a stream of its own beside the engine's weights."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate, SuspiciousUpdate, UnknownUpdate
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.manifest import AdapterSpec
from tests.bridge.engines import Recording, content, publish
from tests.helpers import weights

_PATH = "base_model.model.layers.0.q_proj"
DEADLINE_S = 20


def pair(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = {"lora_A": (2, 8), "lora_B": (4, 2)}
    return {f"{_PATH}.{w}.weight": torch.randn(size, generator=draw) for w, size in sizes.items()}


class Applied(Recording):
    """What an engine holds of one adapter."""

    def __init__(self) -> None:
        super().__init__({name: torch.zeros_like(one) for name, one in pair(0).items()})
        self.during: Callable[[], object] = lambda: None

    def prove(self) -> object:  # type: ignore[override]  # what it returns is the same
        self.during()
        return super().prove()

    def lora_request(self, version: int | None) -> object:
        return version, content(self.engine)


class Applying(Recording):
    """An engine that applies adapters."""

    def __init__(self) -> None:
        super().__init__(dict(weights(0)))
        self.applied: dict[str, Applied] = {}

    def for_adapter(self, name: str) -> TransactionalAdapter:
        return self.applied.setdefault(name, Applied())


@pytest.fixture
def engine() -> Applying:
    return Applying()


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", suspicious="off") as bridge:
        yield bridge


@pytest.fixture
def executor(engine: Applying) -> Iterator[RolloutExecutor]:
    with RolloutExecutor(weight_install_adapter=engine) as made:
        yield made


def publish_pair(trainer: TensorBridge, version: int, name: str = "policy") -> WeightUpdateManifest:
    given = pair(version)
    found = {key: tuple(one.shape) for key, one in given.items()}
    spec = AdapterSpec.inferred(name, found, lora_alpha=4)
    return trainer.publish(given, weight_version=version, adapter=spec)


def test_versions_of_the_weights_and_of_each_adapter_are_streams_of_their_own(
    trainer: TensorBridge, executor: RolloutExecutor, engine: Applying
) -> None:
    with make_weight_bridge("shared-memory", suspicious="off") as base:
        executor.update_weights(publish(base, 3))
        executor.update_weights(publish_pair(trainer, 1))
        executor.update_weights(publish_pair(trainer, 2, "other"))
        assert executor.active_weight_version == 3
        versions = [executor.adapter_version(name) for name in ("policy", "other", "third")]
        assert versions == [1, 2, None]
        assert executor.last_ack is not None
        assert executor.last_ack.weight_version == 2
        assert content(engine.engine) == content(weights(3))
        assert content(engine.applied["policy"].engine) == content(pair(1))
        executor.update_weights(publish(base, 4))
        assert executor.last_ack.weight_version == 4
        assert content(engine.applied["other"].engine) == content(pair(2))


def test_a_version_that_changed_nothing_is_refused_where_that_is_asked_for() -> None:
    """An adapter whose every push was the same went unnoticed for two months (verl #7495)."""
    with make_weight_bridge("shared-memory", suspicious="reject") as trainer:
        publish_pair(trainer, 1)
        given = pair(1)
        spec = AdapterSpec.inferred(
            "policy", {n: tuple(one.shape) for n, one in given.items()}, lora_alpha=4
        )
        with pytest.raises(SuspiciousUpdate, match="changes nothing"):
            trainer.publish(given, weight_version=2, adapter=spec)
        publish_pair(trainer, 3)


def test_a_version_that_fails_leaves_the_one_before_and_no_other_stream_is_touched(
    trainer: TensorBridge, executor: RolloutExecutor, engine: Applying
) -> None:
    executor.update_weights(publish_pair(trainer, 1))
    applied = engine.applied["policy"]
    applied.fails["prove"] = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        executor.update_weights(publish_pair(trainer, 2))
    assert executor.adapter_version("policy") == 1
    assert content(applied.engine) == content(pair(1))
    assert engine.calls == []
    applied.fails.clear()
    executor.update_weights(publish_pair(trainer, 3))
    assert executor.lora_request("policy") == (None, content(pair(3)))


def test_a_request_is_named_while_an_update_is_under_way_in_another_thread(
    trainer: TensorBridge, executor: RolloutExecutor, engine: Applying
) -> None:
    executor.update_weights(publish_pair(trainer, 1))
    with ThreadPoolExecutor(1) as other:

        def during() -> None:
            asked = other.submit(executor.lora_request, "policy", 1)
            assert asked.result(DEADLINE_S)[0] == 1

        engine.applied["policy"].during = during
        executor.update_weights(publish_pair(trainer, 2))
    assert executor.adapter_version("policy") == 2


def test_an_adapter_that_no_update_brought_is_unknown_by_name(executor: RolloutExecutor) -> None:
    with pytest.raises(UnknownUpdate, match=r"'typo'.*update_weights first"):
        executor.lora_request("typo")


def test_an_engine_that_applies_none_refuses_it_and_names_the_way_out(
    trainer: TensorBridge,
) -> None:
    engine = Recording(dict(weights(0)))
    with RolloutExecutor(weight_install_adapter=engine) as executor:
        manifest = publish_pair(trainer, 1)
        with pytest.raises(IncompatibleUpdate, match=r"'policy'.*Recording.*merged=True"):
            executor.update_weights(manifest)
        assert engine.calls == []
        assert content(engine.engine) == content(weights(0))

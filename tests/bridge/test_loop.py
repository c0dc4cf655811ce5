"""What a loop leaves to `publish`: the next number, the cast, and the end of older versions."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import SuspiciousUpdate, WeightBridgeError
from rl_bridge.manifest.adapter import AdapterSpec


def published(bridge: TensorBridge, *manifests: WeightUpdateManifest) -> list[int]:
    """Versions of those that can still be imported."""
    return [one.weight_version for one in manifests if bridge.update_status(one) == "published"]


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 5), float(value))}


class Tied(torch.nn.Module):
    """A head that is its embedding; a strided view, a counter and a mask beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.strided = torch.nn.Parameter(torch.randn(5, 3).t())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor([1, 2**40]))
        self.register_buffer("mask", torch.tensor([True, False]))


# ---- numbers ------------------------------------------------------------------------------------


def test_versions_begin_at_0_and_count_on(bridge: TensorBridge) -> None:
    assert [bridge.publish(model(n), keep=1).weight_version for n in range(3)] == [0, 1, 2]
    assert bridge.publish(model(3), 7, keep=1).weight_version == 7
    assert bridge.publish(model(4)).weight_version == 8


def test_a_publisher_to_a_store_counts_on_from_what_lies_there(tmp_path: Path) -> None:
    with make_weight_bridge("files", url=str(tmp_path)) as bridge:
        bridge.publish(model(1), 41)
    with make_weight_bridge("files", url=str(tmp_path)) as bridge:
        assert bridge.publish(model(2)).weight_version == 42


# ---- the cast -----------------------------------------------------------------------------------


def test_floating_point_tensors_are_cast_and_others_are_not(bridge: TensorBridge) -> None:
    module = Tied()
    manifest = bridge.publish(module, dtype=torch.bfloat16)
    found = bridge.import_update(manifest)
    for name, given in module.state_dict().items():
        wanted = given.to(torch.bfloat16) if given.is_floating_point() else given
        assert found[name].dtype is wanted.dtype
        assert torch.equal(found[name], wanted), name


def test_tied_tensors_stay_tied_when_they_are_cast(bridge: TensorBridge) -> None:
    manifest = bridge.publish(Tied(), dtype=torch.bfloat16)
    assert dict(manifest.table.ties) == {"head.weight": "embed.weight"}


def test_a_cast_version_is_the_same_as_one_that_was_cast_before(bridge: TensorBridge) -> None:
    module = Tied()
    before = {
        name: one.to(torch.bfloat16) if one.is_floating_point() else one.clone()
        for name, one in module.state_dict().items()
    }
    before["head.weight"] = before["embed.weight"]
    trainable = [name for name, _ in module.named_parameters()]
    cast = bridge.publish(module, dtype=torch.bfloat16, trainable=trainable)
    assert cast.root == bridge.publish(before, trainable=trainable).root


def test_the_dtype_may_change_from_one_version_to_the_next(publisher: TensorBridge) -> None:
    state = model(1.0)
    wanted = (torch.bfloat16, None, torch.float16, torch.bfloat16)
    for dtype in wanted:
        manifest = publisher.publish(state, dtype=dtype, keep=1)
        (described,) = manifest.tensors.values()
        assert described.dtype == str(dtype or torch.float32).removeprefix("torch.")


def test_an_inf_that_only_the_cast_makes_is_found_and_told_as_that(transport: str) -> None:
    with make_weight_bridge(transport, nonfinite="reject") as bridge:
        state = {"w": torch.tensor([70_000.0])}
        bridge.publish(state)
        with pytest.raises(SuspiciousUpdate, match=r"above 65504 are Inf in torch\.float16"):
            bridge.publish(state, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16"])
def test_a_dtype_without_floating_point_numbers_is_told(dtype: Any, bridge: TensorBridge) -> None:
    with pytest.raises(TypeError, match=r"expected one such as torch\.bfloat16"):
        bridge.publish(model(), dtype=dtype)


# ---- older versions -----------------------------------------------------------------------------


def test_versions_that_nobody_holds_go_but_for_the_newest(publisher: TensorBridge) -> None:
    made = [publisher.publish(model(n), keep=2) for n in range(5)]
    assert published(publisher, *made) == [3, 4]


def test_without_keep_every_version_stays(publisher: TensorBridge) -> None:
    made = [publisher.publish(model(n)) for n in range(3)]
    assert published(publisher, *made) == [0, 1, 2]


def test_a_version_that_a_consumer_holds_stays_until_it_let_go(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first = publisher.publish(model(1), keep=1)
    held = consumer.import_update(first)
    second = publisher.publish(model(2), keep=1)
    assert published(publisher, first, second) == [0, 1]
    assert float(held["w"][0, 0]) == 1.0
    consumer.acknowledge(first)
    del held
    consumer.release(first)
    gc.collect()
    third = publisher.publish(model(3), keep=1)
    assert published(publisher, first, second, third) == [2]


def test_the_version_of_a_consumer_that_is_gone_goes(publisher: TensorBridge) -> None:
    with make_weight_bridge(publisher.transport, source_worker="rollout") as consumer:
        first = publisher.publish(model(1), keep=1)
        consumer.import_update(first)
    del consumer
    gc.collect()
    second = publisher.publish(model(2), keep=1)
    assert published(publisher, first, second) == [1]


def test_a_version_that_was_let_go_cannot_be_imported(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    first = publisher.publish(model(1), keep=1)
    publisher.publish(model(2), keep=1)
    with pytest.raises(WeightBridgeError, match="is gone"):
        consumer.import_update(first)


def test_an_adapter_does_not_push_the_weights_out(publisher: TensorBridge) -> None:
    shapes = {f"base_model.model.q.lora_{letter}.weight": (2, 2) for letter in "AB"}
    pair = {name: torch.ones(shape) for name, shape in shapes.items()}
    spec = AdapterSpec.inferred("policy", shapes, lora_alpha=4)
    weights = publisher.publish(model(1), keep=1)
    adapters = [publisher.publish(pair, adapter=spec, keep=1) for _ in range(2)]
    assert published(publisher, weights, *adapters) == [0, 2]


@pytest.mark.parametrize(
    ("keep", "error"), [(0, ValueError), ("all", TypeError), (True, ValueError)]
)
def test_keep_counts_versions(keep: Any, error: type[Exception], bridge: TensorBridge) -> None:
    with pytest.raises(error, match=r"keep=.*expected an int of 1 or more"):
        bridge.publish(model(), keep=keep)


@pytest.fixture
def loop(publisher: TensorBridge) -> Iterator[tuple[TensorBridge, RolloutExecutor]]:
    engine = model()
    with make_weight_bridge(publisher.transport, source_worker="rollout") as rollout:
        adapter = ModuleInstallAdapter(engine, mode="copy")
        yield publisher, RolloutExecutor(rollout, adapter)


def test_a_loop_of_any_length_keeps_two_versions(
    loop: tuple[TensorBridge, RolloutExecutor],
) -> None:
    bridge, executor = loop
    made = []
    for step in range(10):
        made.append(bridge.publish(model(step), dtype=torch.float32, keep=1))
        executor.update_weights(made[-1])
    assert executor.active_weight_version == 9
    assert published(bridge, *made) == [8, 9]


def test_a_number_that_a_failed_publication_used_up_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(2)}
    with make_weight_bridge("files", url=tmp_path / "run", state_dir=tmp_path / "state") as bridge:
        assert bridge.publish(state).weight_version == 0

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(bridge.publisher.end, "show", full)
            with pytest.raises(OSError, match="No space left"):
                bridge.publish(state)
        assert bridge.publish(state).weight_version == 2


def test_a_store_that_is_ahead_of_the_state_directory_gives_the_next_number(tmp_path: Path) -> None:
    state, url = {"w": torch.ones(2)}, tmp_path / "run"
    with make_weight_bridge("files", url=url, state_dir=tmp_path / "state") as bridge:
        bridge.publish(state)
    with make_weight_bridge("files", url=url) as bridge:
        bridge.publish(state)
        newest = bridge.publish(state)
    (marker,) = url.glob(f"*-{newest.update_id[:12]}/STABLE")
    marker.write_text("damaged")
    with make_weight_bridge("files", url=url, state_dir=tmp_path / "state") as bridge:
        assert bridge.publish(state).weight_version == 3

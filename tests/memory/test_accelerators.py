"""Tensors on an accelerator are published over the transports of a CPU.

No accelerator is at hand where these tests run: `Elsewhere` stands in for a tensor on one. It names
a GPU as its device, refuses to be read in place, and computes and is copied through torch's
dispatcher, as tensors there are.
"""

from collections.abc import Mapping
from typing import Any, Self

import pytest
import torch
from torch.utils._pytree import tree_map_only

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.memory import tensors as facts

PLACE = torch.device("cuda", 0)


class Elsewhere(torch.Tensor):
    """A tensor whose bytes torch alone can reach."""

    its: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=PLACE
        )
        made.its = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without a class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, named = tree_map_only(cls, lambda one: one.its, (args, dict(kwargs or {})))
        named.pop("device", None)
        target = args[0]
        told = func(*given, **named)
        is_here = isinstance(target, torch.Tensor) and not isinstance(target, cls)
        return told if is_here else tree_map_only(torch.Tensor, cls, told)

    def data_ptr(self) -> int:
        return self.its.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.its.untyped_storage()


@pytest.fixture(autouse=True)
def a_stand_in_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_PLAIN", facts._PLAIN | {Elsewhere})


@pytest.fixture(params=["shared-memory", "local-clone", "broadcast", "files"])
def options(request: pytest.FixtureRequest, tmp_path: Any) -> Mapping[str, Any]:
    return {"transport": request.param, **({"url": tmp_path} if request.param == "files" else {})}


def elsewhere(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: Elsewhere(one) for name, one in state.items()}


def test_what_lies_on_an_accelerator_arrives(options: Mapping[str, Any]) -> None:
    base = torch.randn(6, 4)
    state = {"w": base, "tied": base, "strided": base.t(), "n": torch.arange(5), "no": base[:0]}
    moved = Elsewhere(base)
    given = elsewhere(state) | {"w": moved, "tied": moved}
    with make_weight_bridge(**options) as trainer, make_weight_bridge(**options) as rollout:
        for version in (1, 2):
            base.add_(1)
            manifest = trainer.publish(given, weight_version=version)
            tensors = rollout.import_update(manifest.to_json())
            assert all(torch.equal(tensors[name], one) for name, one in state.items())
            assert manifest.table.ties == {"w": "tied"}
            rollout.release(manifest)


def test_they_are_cast_on_the_way(options: Mapping[str, Any]) -> None:
    state = {"w": torch.randn(6, 4), "n": torch.arange(5)}
    with make_weight_bridge(**options) as trainer, make_weight_bridge(**options) as rollout:
        manifest = trainer.publish(elsewhere(state), dtype=torch.bfloat16)
        tensors = rollout.import_update(manifest)
        assert torch.equal(tensors["w"], state["w"].bfloat16())
        assert torch.equal(tensors["n"], state["n"])


def test_nan_is_found_in_them(caplog: pytest.LogCaptureFixture) -> None:
    with make_weight_bridge("shared-memory") as trainer:
        trainer.publish(elsewhere({"w": torch.full((4,), torch.nan)}), weight_version=1)
    assert "1 tensors hold NaN or Inf" in caplog.text


def test_a_model_on_an_accelerator_updates_an_engine_on_the_cpu() -> None:
    model, engine = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with (
        make_weight_bridge("shared-memory") as trainer,
        make_weight_bridge("shared-memory") as rollout,
        RolloutExecutor(rollout, ModuleInstallAdapter(engine, mode="copy")) as executor,
    ):
        manifest = trainer.publish(elsewhere(model.state_dict()), weight_version=1)
        assert executor.update_weights(manifest).proof.root == manifest.root
    assert torch.equal(model.weight, engine.weight)


def test_a_tensor_without_bytes_is_refused_still() -> None:
    with (
        make_weight_bridge("shared-memory") as trainer,
        pytest.raises(WeightBridgeUnavailableError, match="materialise it first"),
    ):
        trainer.publish({"w": torch.empty(3, device="meta")}, weight_version=1)

"""Installing by exchanging storages. CUDA itself is replaced by the CPU; modules are real ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm import external_storage
from rl_bridge.engines.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
from rl_bridge.errors import IncompatibleUpdate


class Model(torch.nn.Module):
    """An embedding, a layer, and a head that is the embedding's weight."""

    def __init__(self, seed: int) -> None:
        """Random weights."""
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        found: torch.Tensor = self.head(self.norm(self.layer(self.embed(tokens))))
        return found


TOKENS = torch.arange(7)


@pytest.fixture
def bridge() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory") as bridge:
        yield bridge


def adapter_for(engine: Any) -> VLLMCUDAVMMExternalStorageAdapter:
    return VLLMCUDAVMMExternalStorageAdapter(engine, _device="cpu")


def places(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {n: (id(t), t.data_ptr()) for n, t in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS)
    return found


def test_the_engine_computes_with_the_imported_memory(bridge: TensorBridge) -> None:
    engine, trained = Model(0), Model(1)
    assert not torch.equal(logits(engine), logits(trained))
    objects = {name: place[0] for name, place in places(engine).items()}
    executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter_for(engine))
    imported = executor.update_weights(bridge.publish(trained, weight_version=1))
    assert torch.equal(logits(engine), logits(trained))
    for name, tensor in engine.state_dict(keep_vars=True).items():
        assert tensor.data_ptr() == imported[name].data_ptr(), name
        assert id(tensor) == objects[name], name
    assert engine.head.weight is engine.embed.weight
    assert executor.last_ack is not None
    proof = executor.last_ack.proof
    assert (proof.method, proof.digested_nbytes) == ("identity", 0)
    assert proof.tensors == len(engine.state_dict())


def test_numbers_that_are_none_are_refused_and_a_mask_is_not(bridge: TensorBridge) -> None:
    engine, trained = Model(0), Model(1)
    for model in (engine, trained):
        model.register_buffer("mask", torch.full((3,), -torch.inf))
    before = places(engine)
    adapter = adapter_for(engine)
    manifest = bridge.publish(trained, weight_version=1)
    adapter.prepare(manifest, bridge.import_update(manifest))
    trained.layer.weight.data[0, 0] = torch.nan
    manifest = bridge.publish(trained, weight_version=2)
    with pytest.raises(IncompatibleUpdate, match=r"'layer\.weight': 1 of its 16 numbers"):
        adapter.prepare(manifest, bridge.import_update(manifest))
    assert places(engine) == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("missing", r"that it does not hold \['layer\.weight'\]"),
        ("strange", r"that the engine has not \['more'\]"),
        ("shape", r"'layer\.bias': the engine has float32\[4\], the update float32\[3\]"),
        ("dtype", r"'layer\.bias': the engine has float32\[4\], the update float64\[4\]"),
        ("untied", "the engine ties 'embed.weight' and 'head.weight'"),
        ("stride", r"'layer\.weight' has strides \[4, 1\], the engine's \[1, 4\]"),
        ("device", "the update is on cpu, expected cuda"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_before_anything_is_touched(
    bridge: TensorBridge, monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    engine, state = Model(0), dict(Model(1).state_dict())
    adapter = adapter_for(engine)
    if wrong == "missing":
        del state["layer.weight"]
    elif wrong == "strange":
        state["more"] = torch.ones(1)
    elif wrong == "shape":
        state["layer.bias"] = torch.ones(3)
    elif wrong == "dtype":
        state["layer.bias"] = state["layer.bias"].double()
    elif wrong == "untied":
        state["head.weight"] = state["head.weight"] + 1
    elif wrong == "stride":
        engine.layer.weight.data = engine.layer.weight.data.t().contiguous().t()
    elif wrong == "device":
        monkeypatch.setattr(external_storage, "cuda_cause", lambda: None)
        adapter = VLLMCUDAVMMExternalStorageAdapter(engine)
    before = places(engine)
    manifest = bridge.publish(state, weight_version=1)
    with pytest.raises(IncompatibleUpdate, match=words):
        adapter.install(manifest, bridge.import_update(manifest))
    assert places(engine) == before


def test_the_gpus_of_the_engine_are_drained_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drained: list[tuple[str, int]] = []
    monkeypatch.setattr(
        external_storage,
        "driver_at",
        lambda *which: SimpleNamespace(fence=lambda: drained.append(which)),
    )
    adapter, on = adapter_for(Model(0)), (2, 1, 0, 2)
    held = {
        n: SimpleNamespace(is_cuda=at > 0, device=torch.device("cuda", at))
        for n, at in enumerate(on)
    }
    monkeypatch.setattr(adapter._model, "state_dict", lambda: held)
    with adapter._drained():
        assert drained == [("cuda", 1), ("cuda", 2)]


def test_the_engine_is_drained_before_storages_go_either_way(
    bridge: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, trained = Model(0), Model(1)
    before, seen = places(engine), list[bool]()

    @contextmanager
    def drained(_: object) -> Iterator[None]:
        seen.append(places(engine) == before)
        yield

    monkeypatch.setattr(VLLMCUDAVMMExternalStorageAdapter, "_drained", drained)
    adapter = adapter_for(engine)
    manifest = bridge.publish(trained, weight_version=1)
    adapter.install(manifest, bridge.import_update(manifest))
    assert places(engine) != before
    adapter.undo()
    assert places(engine) == before
    assert seen == [True, False], "before they were exchanged, and before they were given back"


def test_without_cuda_the_cause_and_the_way_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_storage, "cuda_cause", lambda: "no driver today")
    with pytest.raises(WeightBridgeUnavailableError, match=r"no driver today\. Use VLLMEngine"):
        VLLMCUDAVMMExternalStorageAdapter(Model(0))


def test_every_holder_of_a_model_is_understood() -> None:
    model = Model(0)
    runner = SimpleNamespace(get_model=lambda: model)
    core = SimpleNamespace(engine_core=object())
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=core, vllm_config=config),
        apply_model=lambda function: [function(model)],
    )
    for engine in (model, runner, SimpleNamespace(model_runner=runner), llm):
        assert adapter_for(engine)._model is model
    with pytest.raises(TypeError, match="engine is a str"):
        adapter_for("http://127.0.0.1")


def test_an_engine_whose_memory_is_out_of_reach_is_refused() -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    elsewhere = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object()))
    with pytest.raises(WeightBridgeUnavailableError, match="another process"):
        adapter_for(elsewhere)
    runner = SimpleNamespace(get_model=lambda: Model(0), vllm_config=config)
    with pytest.raises(WeightBridgeUnavailableError, match="enforce_eager=True"):
        adapter_for(runner)

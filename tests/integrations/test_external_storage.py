"""Installing by exchanging storages. CUDA itself is replaced by the CPU; modules are real ones."""

from collections.abc import Iterator
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
from rl_bridge.engines.vllm.external_storage import VLLMCUDAVMMExternalStorageAdapter
from rl_bridge.errors import IncompatibleUpdate, ProofFailed


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
    with make_weight_bridge("local-clone") as bridge:
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


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_install_that_fails_half_way_is_taken_back(bridge: TensorBridge, at: int) -> None:
    engine = Model(0)
    before, answers = places(engine), logits(engine)

    adapter = adapter_for(engine)
    manifest = bridge.publish(Model(1), weight_version=1)
    tensors = dict(bridge.import_update(manifest))
    bad = list(tensors)[at]
    adapter.prepare(manifest, tensors)
    tensors[bad] = torch.ones(1, dtype=torch.complex64).to_sparse()  # no storage to exchange
    with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
        adapter.install(manifest, tensors)
    adapter.undo()
    assert places(engine) == before
    assert torch.equal(logits(engine), answers)
    adapter.undo()
    assert places(engine) == before


def test_a_failure_behind_the_install_is_undone_by_the_executor(bridge: TensorBridge) -> None:
    engine = Model(0)
    before, answers = places(engine), logits(engine)

    class Moved(VLLMCUDAVMMExternalStorageAdapter):
        def install(self, manifest: Any, tensors: Any) -> None:
            super().install(manifest, tensors)
            engine.layer.weight.data = engine.layer.weight.data.clone()  # same bytes, elsewhere

    adapter = Moved(engine, _device="cpu")
    executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
    with pytest.raises(ProofFailed, match=r"'layer\.weight'.*not the imported tensor"):
        executor.update_weights(bridge.publish(Model(1), weight_version=1))
    assert places(engine) == before
    assert torch.equal(logits(engine), answers)
    assert executor.active_weight_version is None


def test_the_tensors_are_kept_until_their_update_is_released(bridge: TensorBridge) -> None:
    engine = Model(0)
    adapter = adapter_for(engine)
    manifest = bridge.publish(Model(1), weight_version=1)
    adapter.install(manifest, bridge.import_update(manifest))
    adapter.commit()
    assert set(adapter._kept) == {manifest.update_id}
    adapter.release("another")
    assert set(adapter._kept) == {manifest.update_id}
    adapter.release(manifest.update_id)
    assert not adapter._kept


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("missing", r"\['layer\.weight'\] are not in the update.*or say strict=False"),
        ("strange", r"\['more'\] not in the engine"),
        ("shape", r"'layer\.bias' is float32\[3\]"),
        ("dtype", r"'layer\.bias' is float64\[4\]"),
        ("stride", r"'layer\.weight' is .* strides \[1, 4\]"),
        ("untied", "one parameter of the engine and two"),
        ("device", "is on meta, expected cpu"),
        ("apart", r"'layer\.bias' is on cpu and the engine's on meta"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_touched(
    bridge: TensorBridge, wrong: str, words: str
) -> None:
    engine = Model(0)
    if wrong == "apart":
        engine.layer.bias = torch.nn.Parameter(engine.layer.bias.to("meta"))
    before = places(engine)
    manifest = bridge.publish(Model(1), weight_version=1)
    tensors = dict(bridge.import_update(manifest))
    if wrong == "missing":
        del tensors["layer.weight"]
    elif wrong == "strange":
        tensors["more"] = torch.ones(1)
    elif wrong == "shape":
        tensors["layer.bias"] = torch.ones(3)
    elif wrong == "dtype":
        tensors["layer.bias"] = tensors["layer.bias"].double()
    elif wrong == "stride":
        tensors["layer.weight"] = tensors["layer.weight"].t()
    elif wrong == "untied":
        tensors["head.weight"] = tensors["head.weight"].clone()
    elif wrong == "device":
        tensors["layer.bias"] = tensors["layer.bias"].to("meta")
    with pytest.raises(IncompatibleUpdate, match=words):
        adapter_for(engine).install(manifest, tensors)
    assert places(engine) == before


def test_the_gpus_of_the_engine_are_drained_whichever_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rl_bridge.engines.vllm import external_storage

    drained: list[tuple[str, int]] = []
    monkeypatch.setattr(
        external_storage,
        "driver_at",
        lambda *which: SimpleNamespace(fence=lambda: drained.append(which)),
    )
    on: Any = [SimpleNamespace(is_cuda=n > 0, device=torch.device("cuda", n)) for n in (2, 1, 0, 2)]
    VLLMCUDAVMMExternalStorageAdapter._wait(on)
    assert drained == [("cuda", 1), ("cuda", 2)]


def test_the_engine_is_drained_before_storages_go_either_way(
    bridge: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, trained = Model(0), Model(1)
    before, seen = places(engine), []

    def look(tensors: Any) -> None:
        assert engine.layer.weight in set(tensors)
        seen.append(places(engine) == before)

    monkeypatch.setattr(VLLMCUDAVMMExternalStorageAdapter, "_wait", staticmethod(look))
    adapter = adapter_for(engine)
    manifest = bridge.publish(trained, weight_version=1)
    adapter.install(manifest, bridge.import_update(manifest))
    assert places(engine) != before
    adapter.undo()
    assert places(engine) == before
    assert seen == [True, False], "before they were exchanged, and before they were given back"


def test_one_name_of_a_tied_parameter_is_enough(bridge: TensorBridge) -> None:
    engine, trained = Model(0), Model(1)
    state = {name: t for name, t in trained.state_dict().items() if name != "head.weight"}
    manifest = bridge.publish(state, weight_version=1)
    adapter_for(engine).install(manifest, bridge.import_update(manifest))
    assert torch.equal(logits(engine), logits(trained))


def test_what_an_update_does_not_hold_stays_where_that_is_allowed(bridge: TensorBridge) -> None:
    engine, trained = Model(0), Model(1)
    before = places(engine)
    adapter = VLLMCUDAVMMExternalStorageAdapter(engine, strict=False, _device="cpu")
    manifest = bridge.publish({"layer.weight": trained.layer.weight}, weight_version=1)
    adapter.install(manifest, bridge.import_update(manifest))
    assert adapter.prove().tensors == 1
    changed = {name for name, place in places(engine).items() if place != before[name]}
    assert changed == {"layer.weight"}
    assert torch.equal(engine.layer.weight, trained.layer.weight)
    adapter.undo()
    assert places(engine) == before
    manifest = bridge.publish({"layer.wait": trained.layer.weight}, weight_version=2)
    with pytest.raises(IncompatibleUpdate, match=r"\['layer\.wait'\] not in the engine"):
        adapter.install(manifest, bridge.import_update(manifest))
    assert places(engine) == before


def test_without_cuda_the_cause_and_the_way_out_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_bridge.engines.vllm import external_storage

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

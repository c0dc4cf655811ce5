"""Models that only vLLM itself can load: reloaded as a whole, proven as far as they can be read.

What fails anywhere on the way leaves the very objects and bytes that were there.
"""

import gc
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.engines.vllm import reload
from rl_bridge.engines.vllm.compat import VLLMCompat
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from tests.engines.drive import Answers, Setting, answers, model_of, start
from tests.engines.matrix import few_of
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer

TIED = Setting(Kind("qwen2", tied=True))
# vLLM's kernel for 8 bits takes no float32 on CPUs with AMX.
WITH_INT8 = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
INT8: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "dynamic": True,
                "symmetric": True,
            },
        }
    },
}
QUANTIZED = ("mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj")


class PlantedError(Exception):
    """What a test planted."""


# ---- engines ------------------------------------------------------------------------------------


def quantized(path: str, home: Path) -> str:
    """The checkpoint with all layers but embedding and head in 8 bits."""
    home.mkdir(parents=True)
    config = json.loads((Path(path) / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    made = {}
    for name, weight in load_file(str(Path(path) / "model.safetensors")).items():
        if "proj" not in name or not name.endswith("weight"):
            made[name] = weight
            continue
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        made[name] = (weight.float() / scale).round().to(torch.int8)
        made[f"{name}_scale"] = scale.to(weight.dtype)
    save_file(made, home / "model.safetensors")
    return str(home)


class Served:
    """An engine, the weights of two versions, and what fresh engines answer."""

    def __init__(self, llm: Any, weights: list[dict[str, torch.Tensor]], fresh: list[Answers]):
        """Take what the fixture started."""
        self.llm, self.weights, self.fresh = llm, weights, fresh
        self.config = llm.llm_engine.vllm_config

    @property
    def model(self) -> Any:
        return model_of(self.llm)

    def adapter(self, **options: Any) -> VLLMReloadAdapter:
        return VLLMReloadAdapter(self.model, self.config, **options)


def serve(paths: list[str], setting: Setting) -> Iterator[Served]:
    with start(setting, paths[1]) as llm:
        second = answers(llm)
    with start(setting, paths[0]) as llm:
        fresh = [answers(llm), second]
        assert fresh[0] != fresh[1], "the versions must differ in what they answer"
        weights = [load_file(str(Path(path) / "model.safetensors")) for path in paths]
        yield Served(llm, weights, fresh)


@pytest.fixture(scope="module", params=[pytest.param("tied", marks=pytest.mark.full), "int8"])
def served(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: Any
) -> Iterator[Served]:
    setting = TIED
    if request.param == "int8":
        setting = Setting(Kind("qwen2", tied=True, dtype=WITH_INT8))
    paths = [checkpoints.path(setting.kind, version) for version in (0, 1)]
    if request.param == "int8":
        home = tmp_path_factory.mktemp("int8")
        paths = [quantized(path, home / str(n)) for n, path in enumerate(paths)]
    yield from serve(paths, setting)


@pytest.fixture
def update(served: Served, trainer: Trainer) -> Iterator[Callable[..., Any]]:
    """Installs weights through an executor; returns its acknowledgement."""
    with make_weight_bridge("shared-memory", source_worker="rollout") as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=served.adapter(), suspicious="off"
        )

        def install(weights: Mapping[str, torch.Tensor]) -> Any:
            executor.update_weights(trainer.publish(weights))
            return executor.last_ack

        yield install
        # Whatever a test installed: the next one begins at version 0.
        install(served.weights[0])
        executor.close()


def state(model: torch.nn.Module) -> dict[str, Any]:
    """Every object that the model's layers hold, and the bytes of every tensor."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in {"_parameters", "_buffers", "_modules", "kv_cache"}:
                found[f"{name}!{key}"] = id(value)
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                assert not tensor.is_meta
                raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
                found[f"{name}.{leaf}"] = (id(tensor), tensor.data_ptr(), raw.numpy().tobytes())
                found[f"{name}.{leaf}!"] = {k: repr(v) for k, v in vars(tensor).items()}
    return found


# ---- it installs --------------------------------------------------------------------------------


def test_a_reloaded_engine_is_a_fresh_one(served: Served, update: Callable[..., Any]) -> None:
    for step in range(1, 7):
        update(served.weights[step % 2])
        assert answers(served.llm) == served.fresh[step % 2], f"update {step}"


def test_a_proof_claims_what_was_read_and_no_more(
    served: Served, update: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rl_bridge"):
        proof = update(served.weights[1]).proof
    if any("scale" in name for name in served.weights[1]):
        assert (proof.method, proof.root) == ("unproven", "")
        assert 0 < proof.tensors < len(served.weights[1])
        layers = [f"model.layers.*.{name}" for name in QUANTIZED]
        told = caplog.records[-1].getMessage().partition("unproven: ")[2]
        assert sorted(told.split(", ")) == sorted(layers)
    else:
        assert proof.method == "digest+canary"
        assert proof.tensors == len(served.weights[1])
        assert "unproven" not in caplog.text


def test_the_other_installer_works_behind_a_reload(
    served: Served, update: Callable[..., Any], trainer: Trainer
) -> None:
    if any("scale" in name for name in served.weights[0]):
        pytest.skip("it refuses quantized models")
    update(served.weights[1])
    manifest = trainer.publish(served.weights[0])
    with make_weight_bridge("shared-memory", source_worker="rollout") as bridge:
        installer = VLLMModelInstaller(served.model, served.config)
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=installer).update_weights(
            manifest
        )
    assert answers(served.llm) == served.fresh[0]


@pytest.fixture
def unlearnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loader computes with what it loads, so that nobody can follow it."""

    def learn(*_: Any, **__: Any) -> Any:
        raise IncompatibleUpdate(f"computed. Install it by {VLLMCompat.elsewhere}")

    monkeypatch.setattr(reload, "learn", learn)


@pytest.mark.usefixtures("unlearnable")
def test_a_loader_that_cannot_be_followed_installs_unproven(
    served: Served, update: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rl_bridge"):
        assert update(served.weights[1]).proof.method == "unproven"
    assert "unproven: Qwen2ForCausalLM" in caplog.text
    assert answers(served.llm) == served.fresh[1]


@pytest.mark.usefixtures("unlearnable")
@pytest.mark.parametrize("part", ["layers.1.mlp.down_proj", "embed_tokens", "model.norm"])
def test_a_layer_that_gets_nothing_is_refused_however_it_is_loaded(
    served: Served, update: Callable[..., Any], part: str
) -> None:
    before = state(served.model)
    weights = {name: t for name, t in served.weights[1].items() if part not in name}
    assert len(weights) < len(served.weights[1])
    with pytest.raises(IncompatibleUpdate, match=re.escape(part)):
        update(weights)
    assert state(served.model) == before
    assert answers(served.llm) == served.fresh[0]


# ---- it can be taken back -----------------------------------------------------------------------


def loader_fails(patch: pytest.MonkeyPatch, served: Served, at: int) -> None:
    """The engine's loader fails when it asks for tensor `at`."""
    kind = type(served.model)
    load = kind.load_weights

    def failing(model: Any, weights: Any) -> Any:
        items = list(weights)
        if any(tensor.is_meta or tensor.dtype in {torch.int32, torch.int64} for _, tensor in items):
            return load(model, iter(items))  # it is only asked where they would go

        def upto() -> Iterator[Any]:
            for index, item in enumerate(items):
                if index == at:
                    raise PlantedError
                yield item

        return load(model, upto())

    patch.setattr(kind, "load_weights", failing)


def finalize_fails(patch: pytest.MonkeyPatch, _: Served, at: int) -> None:
    """vLLM fails behind its `at`-th layer of those that it has to finish."""
    from vllm.model_executor.model_loader.reload import layerwise

    place, calls = layerwise._place_kernel_tensors, [0]

    def failing(*args: Any) -> None:
        place(*args)
        calls[0] += 1
        if calls[0] > at:
            raise PlantedError

    patch.setattr(layerwise, "_place_kernel_tensors", failing)


def processing_fails(patch: pytest.MonkeyPatch, _: Served, at: int) -> None:
    """vLLM fails before it processes layer `at`."""
    from vllm.model_executor.model_loader.reload import layerwise

    materialize, calls = layerwise.materialize_layer, [0]

    def failing(*args: Any) -> None:
        materialize(*args)
        calls[0] += 1
        if calls[0] > at:
            raise PlantedError

    patch.setattr(layerwise, "materialize_layer", failing)


@pytest.mark.parametrize("at", few_of((0, 5, 12), 5))
@pytest.mark.parametrize("fault", [loader_fails, processing_fails, finalize_fails])
def test_what_fails_anywhere_leaves_what_was_there(
    served: Served, update: Callable[..., Any], fault: Callable[..., None], at: int
) -> None:
    before = state(served.model)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, served, at)
        with pytest.raises(PlantedError):
            update(served.weights[1])
    assert state(served.model) == before
    assert answers(served.llm) == served.fresh[0]
    update(served.weights[1])
    assert answers(served.llm) == served.fresh[1]


def test_a_byte_that_changes_behind_the_reload_is_found_and_undone(
    served: Served, update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(served.model)
    original = VLLMReloadAdapter.install

    def damaged(adapter: VLLMReloadAdapter, *args: Any) -> None:
        original(adapter, *args)
        norm = dict(served.model.named_parameters())["model.norm.weight"]
        norm.data.view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(VLLMReloadAdapter, "install", damaged)
    with pytest.raises(ProofFailed, match=r"'model\.norm\.weight'"):
        update(served.weights[1])
    monkeypatch.undo()
    assert state(served.model) == before
    assert answers(served.llm) == served.fresh[0]


def test_updates_that_are_taken_back_keep_no_slot(
    served: Served, update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "prove_reload", lambda *_, **__: 1 / 0)
    gc.disable()  # what is only garbage by then would hide what is held
    try:
        for _ in range(6):
            with pytest.raises(ZeroDivisionError):
                update(served.weights[1])
    finally:
        gc.enable()
    monkeypatch.undo()


def test_a_stale_pack_is_found(
    served: Served, update: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own reload leaves the pack of a tied head as it was.
    monkeypatch.setattr(VLLMReloadAdapter, "_pack_anew", lambda *_: None)
    with pytest.raises(ProofFailed, match="packed weight differ"):
        update(served.weights[1])
    monkeypatch.undo()
    assert answers(served.llm) == served.fresh[0]


# ---- it refuses before it touches ---------------------------------------------------------------


def changed(served: Served, name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    weights = dict(served.weights[1])
    del weights[name]
    return weights if tensor is None else {**weights, name: tensor}


def bigger(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model with twice the neurons: vLLM's loader takes half of them, without a word."""
    mlp = {n: torch.cat([t, t], int("down" in n)) for n, t in weights.items() if ".mlp." in n}
    return {**weights, **mlp}


@pytest.mark.parametrize("wrong", ["shape", "missing", "stranger", "nan", "bigger"])
def test_what_does_not_fit_is_refused_before_vllm_begins(
    served: Served,
    update: Callable[..., Any],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    name = "model.layers.1.self_attn.k_proj.weight"
    bias = "model.layers.1.self_attn.k_proj.bias"
    weights = {
        "shape": lambda: changed(served, name, torch.ones(2, 2).to(served.weights[1][name].dtype)),
        "missing": lambda: changed(served, name, None),
        "stranger": lambda: {**served.weights[1], "model.layers.7.mlp.gate": torch.ones(2)},
        "nan": lambda: changed(served, bias, served.weights[1][bias] * float("nan")),
        "bigger": lambda: bigger(served.weights[1]),
    }[wrong]()
    before = state(served.model)
    monkeypatch.setattr(layerwise, "initialize_layerwise_reload", lambda _: 1 / 0)
    with pytest.raises(IncompatibleUpdate):
        update(weights)
    monkeypatch.undo()
    assert state(served.model) == before
    update(served.weights[1])  # (what was learned for the other one is not taken for it)
    assert answers(served.llm) == served.fresh[1]


def test_a_model_that_does_not_fit_beside_itself_is_refused(
    served: Served, trainer: Trainer
) -> None:
    manifest = trainer.publish(served.weights[1])
    adapter = served.adapter(memory_budget_nbytes=1000)
    with pytest.raises(IncompatibleUpdate, match="memory_budget_nbytes allows 1000"):
        adapter.prepare(manifest, served.weights[1])


def test_a_reload_that_somebody_else_left_half_way_is_refused(
    served: Served, trainer: Trainer
) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(next(served.model.modules()))
    info.load_numel_total = 1
    try:
        with pytest.raises(IncompatibleUpdate, match="reload of vLLM's own"):
            served.adapter().prepare(trainer.publish(served.weights[1]), served.weights[1])
    finally:
        info.reset()

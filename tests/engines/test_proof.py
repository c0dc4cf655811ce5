"""What the engine holds is read, not believed: each layer and each parameter in turn is damaged.

The damage is done behind the exchange, or while a weight is packed; nothing raises by itself. The
proof must say which layer or parameter it is, and the undo must bring the engine back.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge.engines.vllm.compat import repacks
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from tests.engines.drive import Setting, executor_for, model_of
from tests.engines.engines import Bench, bench
from tests.engines.faults import cell, flip_byte, plant, uproot
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References


@pytest.fixture(
    scope="module",
    params=[
        Kind("qwen3", tied=True),
        pytest.param(Kind("qwen2", dtype="bfloat16"), marks=pytest.mark.full),
        Kind("moe"),
    ],
    ids=str,
)
def engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References
) -> Iterator[Bench]:
    with bench(Setting(request.param), checkpoints, references) as made:
        yield made


def damage_each(engine: Bench, point: str) -> list[str]:
    """Damage one after the other until there is none left; the names that were told."""
    named = []
    for nth in range(200):
        engine.trainer.release_all()
        plant(point, nth)
        try:
            engine.update()
        except ProofFailed as error:
            uproot()
            found = re.search(r"(?:layer|parameter) '([\w.]+)'", str(error))
            named.append("" if found is None else found[1])
            engine.check(f"{point} {nth} was not undone")
        else:
            assert nth >= uproot(), f"{point} {nth} was not seen"
            engine.check()
            return named
    pytest.fail(f"{point}: no end of them")


def packed_layers(engine: Bench) -> dict[str, int]:
    """Name -> which packed weight it computes with; tied layers may share one."""
    return {
        name: id(cell(layer.cpu_linear).cell_contents)
        for name, layer in model_of(engine.llm).named_modules()
        if getattr(vars(layer).get("cpu_linear"), "__closure__", None)
    }


@pytest.mark.parametrize("point", ["product", "packed weight", "wrong pack"])
def test_each_packed_layer_that_computes_with_something_else_is_named(
    engine: Bench, point: str
) -> None:
    named = damage_each(engine, point)
    layers = packed_layers(engine)
    assert len(named) >= len(set(layers.values())) >= 5
    assert {layers[name] for name in named} == set(layers.values())


@pytest.mark.parametrize("point", ["wrong experts", "unlike experts"])
def test_each_layer_whose_experts_are_packed_as_something_else_is_named(
    engine: Bench, point: str
) -> None:
    modules = model_of(engine.llm).named_modules()
    experts = [name for name, layer in modules if repacks(layer)]
    assert bool(experts) == (engine.setting.kind.family == "moe")
    named = damage_each(engine, point)
    assert [name.removesuffix(".w13_weight") for name in named] == experts


def test_each_parameter_with_one_wrong_bit_is_named(engine: Bench) -> None:
    named = damage_each(engine, "corrupt")
    parameters = dict(model_of(engine.llm).named_parameters())
    plain = {name for name, parameter in parameters.items() if parameter.numel()}
    assert len(plain) >= 5
    assert sorted(named) == sorted(plain)


def test_each_tensor_that_no_update_writes_is_watched(engine: Bench) -> None:
    named = damage_each(engine, "buffer")
    assert any("rotary" in name for name in named), named


def test_what_an_update_did_not_do_is_not_blamed_on_it(engine: Bench) -> None:
    # A parameter that somebody else wrote to between updates: the next update replaces it.
    engine.update()
    norm = dict(model_of(engine.llm).named_parameters())["model.norm.weight"]
    flip_byte(norm)
    assert engine.answers() != engine.fresh[engine.holds]
    engine.update()
    engine.check()


def test_the_proof_covers_every_byte_and_carries_the_manifests_root(engine: Bench) -> None:
    manifest = engine.update()
    ack = engine.executor.last_ack
    assert ack is not None
    assert ack.proof.root == manifest.root == ack.root
    assert ack.proof.method == "digest+canary"
    assert ack.proof.tensors == len(engine.weights[0])
    assert ack.proof.digested_nbytes + ack.proof.identical_nbytes >= manifest.total_nbytes


def test_bytes_that_go_bad_behind_the_import_are_found_before_the_install(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VLLMModelInstaller._stage

    def spoils(self: Any, plan: Any, tensors: Any, *rest: Any) -> Any:
        # Weights that are packed straight from the imported memory: nobody else reads these.
        name = next(name for name in tensors if "o_proj" in name)
        tensors[name].view(torch.uint8)[0, 0] ^= 1
        return real(self, plan, tensors, *rest)

    manifest = engine.trainer.publish(engine.next())
    with executor_for(engine.llm) as executor:
        monkeypatch.setattr(VLLMModelInstaller, "_stage", spoils)
        with pytest.raises(ProofFailed, match="went bad"):
            executor.update_weights(manifest)
    engine.check()


def test_processing_that_does_nothing_is_not_taken_for_an_install(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    real = UnquantizedLinearMethod.process_weights_after_loading

    def forgets(method: Any, layer: torch.nn.Module) -> None:
        if getattr(layer, "prefix", "").endswith("o_proj"):
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        else:
            real(method, layer)

    manifest = engine.trainer.publish(engine.next())
    with executor_for(engine.llm) as executor:
        monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", forgets)
        with pytest.raises((ProofFailed, IncompatibleUpdate), match="o_proj"):
            executor.update_weights(manifest)
    engine.check()

"""SGLang engines that are refused, by how they were started."""

import pytest

from rl_bridge import TensorBridge, WeightBridgeUnavailableError
from rl_bridge.engines.sglang.engine_adapter import SGLangServing
from tests.installers.test_model_installer import equal, held, loaded, version
from tests.integrations.sglang_engine import (
    Engine,
    engine,
    importing,
    update,
)

__all__ = ["engine"]  # a fixture, for this file, too


@pytest.mark.parametrize(
    "told",
    [
        {"pp_size": 2},
        {"dp_size": 2},
        {"attn_dp_size": 2},  # what SGLang makes of --dp-size 2 --enable-dp-attention
        {"ep_size": 2},
        {"tokenizer_worker_num": 2},
    ],
    ids=lambda told: next(iter(told)),
)
def test_an_engine_of_processes_that_do_not_decide_together_is_refused(
    engine: Engine, trainer: TensorBridge, told: dict[str, int]
) -> None:
    engine.context.told |= told
    with pytest.raises(WeightBridgeUnavailableError, match=f"{next(iter(told))}=2, expected 1"):
        importing(engine).prepare(trainer.publish(version(1), weight_version=1), {})


@pytest.mark.parametrize(
    "told",
    [
        {"speculative_algorithm": "EAGLE"},
        {"enable_torch_compile": True},
    ],
    ids=lambda told: next(iter(told)),
)
def test_an_engine_with_weights_that_no_update_reaches_is_refused(
    engine: Engine, trainer: TensorBridge, told: dict[str, object]
) -> None:
    engine.context.told |= told
    with pytest.raises(WeightBridgeUnavailableError, match="Start it without"):
        importing(engine).prepare(trainer.publish(version(1), weight_version=1), {})


# ---- prefixes that are kept outside of the engine ------------------------------------------------

STORES: list[dict[str, object]] = [
    {"hicache_storage_backend": "file"},
    {"enable_lmcache": True},
    {"enable_flexkv": True},
    {"enable_unified_cache_external_linker": True},
    {"radix_cache_backend": "flexkv"},
]


@pytest.mark.parametrize("store", STORES, ids=lambda store: next(iter(store)))
def test_an_engine_whose_prefixes_outlast_a_flush_is_refused_before_its_install(
    engine: Engine, trainer: TensorBridge, store: dict[str, object]
) -> None:
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    engine.context.told |= store
    with pytest.raises(WeightBridgeUnavailableError, match=next(iter(store))):
        adapter.prepare(manifest, {})
    adapter.abandon()
    engine.context.told |= dict.fromkeys(store)
    update(adapter, manifest)  # it is nothing of the update's
    assert equal(held(engine.model), loaded(1))


def test_a_store_that_is_attached_meanwhile_is_an_update_that_is_undone(
    engine: Engine, trainer: TensorBridge
) -> None:
    before = held(engine.model)
    manifest = trainer.publish(version(1), weight_version=1)
    adapter = importing(engine)
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    engine.context.told |= STORES[0]
    with pytest.raises(WeightBridgeUnavailableError, match="hicache_storage_backend=file"):
        adapter.resume()
    adapter.undo()
    assert equal(held(engine.model), before)
    assert (engine.label, engine.is_paused) == ("user's", False)


def test_prefix_stores_outside_are_allowed_if_prefixes_are_kept(
    engine: Engine, trainer: TensorBridge
) -> None:
    engine.context.told |= STORES[0]
    adapter = importing(engine, serving=SGLangServing(cache="keep"))
    update(adapter, trainer.publish(version(1), weight_version=1))
    assert equal(held(engine.model), loaded(1))

"""Models whose layers keep tensors derived from weights, reloaded by vLLM: all of it is read back.

Multi-head latent attention (MLA) splits and packs a projection when it is loaded, experts are
packed. vLLM's own reload leaves packed experts wrong and fails on MLA where CPUs have AMX.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.vllm import reload
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from tests.engines.drive import PROMPTS, Answers, Setting, answers, executor_for, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.test_reload import PlantedError, Served, loader_fails, state
from tests.engines.trainer import Trainer

# The attention that vLLM takes by itself: that for AMX computes in bf16 alone.
DTYPE = "bfloat16" if torch.cpu._is_amx_tile_supported() else "float32"
REFERENCE = {"attention_config": {"backend": "CPU_MLA"}}
KINDS = {
    "latent": (Kind("deepseek", dtype=DTYPE), {}),
    "latent-reference": (Kind("deepseek"), REFERENCE),
    "experts": (Kind("moe"), {}),
}
FULL = pytest.mark.full


@pytest.fixture(
    scope="module",
    params=[
        "latent",
        pytest.param("latent-reference", marks=FULL),
        pytest.param("experts", marks=FULL),
    ],
)
def served(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Served]:
    kind, options = KINDS[request.param]
    setting = Setting(kind)
    with start(setting, checkpoints.path(kind, 1), **options) as llm:
        second = answers(llm)
    with start(setting, checkpoints.path(kind, 0), **options) as llm:
        fresh = [answers(llm), second]
        assert fresh[0] != fresh[1]
        yield Served(llm, [checkpoints.weights(kind, version) for version in (0, 1)], fresh)


@pytest.fixture
def executor(served: Served, trainer: Trainer) -> Iterator[RolloutExecutor]:
    trainer.release_all()
    with executor_for(served.llm, staging="reload") as made:
        yield made
        made.update_weights(trainer.publish(served.weights[0]))


def attentions(model: torch.nn.Module) -> list[dict[str, Any]]:
    """What the attention of each layer holds beside its module."""
    return [
        {key: id(value) for key, value in vars(layer.impl).items() if key != "kv_cache"}
        for layer in model.modules()
        if hasattr(layer, "impl")
    ]


@pytest.mark.timeout(300)  # engines start
def test_it_is_a_fresh_engine_after_updates_and_failures_and_all_of_it_is_proven(
    served: Served, executor: RolloutExecutor, trainer: Trainer
) -> None:
    for step in range(1, 7):
        weights = served.weights[step % 2]
        if step % 3 == 0:
            before = state(served.model), attentions(served.model)
            for nth in (0, 3):
                served.llm.collective_rpc("plant_fault", args=("canary", nth))
                with pytest.raises(Exception, match="planted"):
                    executor.update_weights(trainer.publish(weights))
                served.llm.collective_rpc("uproot_fault")
            assert (state(served.model), attentions(served.model)) == before
            assert answers(served.llm) == served.fresh[(step - 1) % 2], f"behind a fault, {step}"
        manifest = trainer.publish(weights)
        executor.update_weights(manifest)
        assert answers(served.llm) == served.fresh[step % 2], f"update {step}"
        assert executor.last_ack is not None
        assert executor.last_ack.proof.root == manifest.root


def test_nan_is_refused_before_anything_is_written(
    served: Served, executor: RolloutExecutor, trainer: Trainer
) -> None:
    name = next(name for name in served.weights[1] if "o_proj" in name)
    weight = served.weights[1][name]
    # (The last one is a number, and none any more when it is cast.)
    for damaged in (weight * float("nan"), weight.double() * 1e300):
        with pytest.raises(IncompatibleUpdate, match=rf"{name!r}.* NaN or Inf"):
            executor.update_weights(trainer.publish({**served.weights[1], name: damaged}))
        assert answers(served.llm) == served.fresh[0]


def test_what_was_not_derived_anew_is_found_and_undone(
    served: Served, executor: RolloutExecutor, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = [layer for layer in served.model.modules() if type(layer).__name__ == "MLAAttention"]
    if latent:
        kind: Any = type(latent[0])
        real = kind.process_weights_after_loading
        if (derived := latent[-1]._parameters.get("W_UV")) is not None:
            # It looks at its projection's own memory: a copy does not follow that.
            copied = torch.nn.Parameter(derived.detach().clone(), requires_grad=False)
            latent[-1]._parameters["W_UV"] = copied

        def forgets(layer: Any, dtype: torch.dtype) -> None:
            if layer is not latent[-1]:
                real(layer, dtype)

        monkeypatch.setattr(kind, "process_weights_after_loading", forgets)
    else:  # as vLLM's own reload does: it copies unpacked weights over packed ones
        monkeypatch.setattr(reload, "make_ready", lambda *_: None)
    with pytest.raises(ProofFailed, match="is not what vLLM makes of this version's weights"):
        executor.update_weights(trainer.publish(served.weights[1]))
    monkeypatch.undo()
    assert answers(served.llm) == served.fresh[0]


def test_what_vllm_no_longer_derives_is_found_and_undone(
    served: Served, executor: RolloutExecutor, trainer: Trainer
) -> None:
    latent = [layer for layer in served.model.modules() if type(layer).__name__ == "MLAAttention"]
    if not latent:
        pytest.skip("no latent attention here")
    latent[-1].register_parameter("W_OLD", torch.nn.Parameter(torch.ones(3), requires_grad=False))
    try:
        with pytest.raises(ProofFailed, match="W_OLD"):
            executor.update_weights(trainer.publish(served.weights[1]))
    finally:
        del latent[-1].W_OLD
    assert answers(served.llm) == served.fresh[0]


def test_no_more_than_one_layer_is_assembled_again_at_a_time(
    served: Served, executor: RolloutExecutor, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    alive: list[set[str]] = []
    real = LoadPlan.assemble

    def assemble(plan: LoadPlan, index: int, tensors: Any, memory: torch.Tensor) -> None:
        real(plan, index, tensors, memory)
        made.append((plan.targets[index].users[0].path, weakref.ref(memory)))
        alive.append({path for path, reference in made if reference() is not None})

    monkeypatch.setattr(LoadPlan, "assemble", assemble)
    executor.update_weights(trainer.publish(served.weights[1]))
    assert len({path for path, _ in made}) > 1
    assert all(len(paths) == 1 for paths in alive), alive


def test_what_an_undone_reload_had_loaded_is_in_nobodys_notes(
    served: Served, trainer: Trainer
) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    weights = served.weights[1]
    manifest, adapter, before = trainer.publish(weights), served.adapter(), state(served.model)
    adapter.prepare(manifest, weights)
    with pytest.MonkeyPatch.context() as patch:
        # Of a fused layer, the first half is loaded.
        half = next(index for index, name in enumerate(weights) if "up_proj" in name)
        loader_fails(patch, served, half)
        for _ in range(2):  # the second one begins with what the first one's undo would have done
            with pytest.raises(PlantedError):
                adapter.install(manifest, weights)
    adapter.undo()
    assert not any(get_layerwise_info(layer).loaded_weights for layer in served.model.modules())
    assert state(served.model) == before


def test_latent_attention_is_refused_beside_the_serving_one(
    served: Served, trainer: Trainer
) -> None:
    if not any(type(layer).__name__ == "MLAAttention" for layer in served.model.modules()):
        pytest.skip("no latent attention here")
    with (
        executor_for(served.llm) as staged,
        pytest.raises(IncompatibleUpdate, match="staging='reload'"),
    ):
        staged.update_weights(trainer.publish(served.weights[1]))
    assert answers(served.llm) == served.fresh[0]


def each(llm: Any) -> list[Answers]:
    """Answers one at a time: in bf16 the sums depend on what is computed together."""
    return [answers(llm, (prompt,)) for prompt in PROMPTS]


@FULL
@pytest.mark.timeout(400)
def test_two_ranks_of_latent_attention_are_updated_together(
    checkpoints: Checkpoints, trainer: Trainer
) -> None:
    setting = Setting(Kind("deepseek", dtype=DTYPE), in_process=False, ranks=2)
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    with start(setting, checkpoints.path(setting.kind, 1)) as llm:
        second = each(llm)
    trainer.release_all()
    with (
        start(setting, checkpoints.path(setting.kind, 0)) as llm,
        executor_for(llm, staging="reload") as executor,
    ):
        fresh = [each(llm), second]
        for step in (1, 2, 3):
            for rank in (0, 1):
                llm.collective_rpc("plant_fault", args=("canary", 2, "", rank))
                with pytest.raises(Exception, match=f"rank {rank}: .*planted"):
                    executor.update_weights(trainer.publish(weights[step % 2]))
                llm.collective_rpc("uproot_fault")
                assert each(llm) == fresh[(step - 1) % 2]
            manifest = trainer.publish(weights[step % 2])
            executor.update_weights(manifest)
            assert each(llm) == fresh[step % 2]
            assert executor.last_ack is not None
            assert executor.last_ack.proof.root == manifest.root

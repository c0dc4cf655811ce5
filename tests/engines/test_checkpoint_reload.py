"""Updates that vLLM reloads from files: as whole as another reload can make them."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm.checkpoint_reload import VLLMCheckpointReloadAdapter
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.drive import Setting, answers, model_of, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.test_reload import PlantedError, processing_fails
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("llama"))


@pytest.fixture(scope="module")
def fresh(references: References) -> list[Any]:
    return [references.of(SETTING, version) for version in (0, 1)]


@pytest.fixture(scope="module")
def llm(fresh: list[Any], checkpoints: Checkpoints) -> Iterator[Any]:
    assert fresh[0] != fresh[1]
    with start(SETTING, checkpoints.path(SETTING.kind, 0)) as llm:
        yield llm


@pytest.fixture
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture
def executor(llm: Any, checkpoints: Checkpoints, tmp_path: Path) -> Iterator[RolloutExecutor]:
    initial = checkpoints.path(SETTING.kind, 0)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": initial})
    adapter = VLLMCheckpointReloadAdapter(llm, tmp_path / "versions", checkpoint=initial)
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious="off"
        ) as executor,
    ):
        yield executor


def test_a_reloaded_engine_is_a_fresh_one(
    llm: Any, executor: RolloutExecutor, fresh: Any, weights: Any, trainer: Trainer
) -> None:
    for step in range(1, 6):
        executor.update_weights(trainer.publish(weights[step % 2]))
        assert answers(llm) == fresh[step % 2], f"update {step}"
    assert executor.last_ack is not None
    assert executor.last_ack.proof.method == "unproven"


def test_the_files_of_one_version_are_kept(
    executor: RolloutExecutor, weights: Any, trainer: Trainer, tmp_path: Path
) -> None:
    for step in range(1, 4):
        manifest = trainer.publish(weights[step % 2])
        executor.update_weights(manifest)
        (folder,) = (tmp_path / "versions").iterdir()
        assert manifest.update_id in folder.name


def test_a_worker_that_fails_reloads_the_version_before(
    llm: Any, executor: RolloutExecutor, fresh: Any, weights: Any, trainer: Trainer
) -> None:
    for count, at in enumerate((0, 3, 6, 9, 12, 5)):
        version = count % 2
        other = 1 - version
        with pytest.MonkeyPatch.context() as patch:
            calls = [0]
            _fail_once(patch, at, calls)
            with pytest.raises(PlantedError):
                executor.update_weights(trainer.publish(weights[other]))
        gc.collect()  # the failure's traceback holds the tensors, and these the trainer's slot
        assert answers(llm) == fresh[version]
        assert not any(tensor.is_meta for tensor in model_of(llm).parameters())
        executor.update_weights(trainer.publish(weights[other]))
        assert answers(llm) == fresh[other]


def _fail_once(patch: pytest.MonkeyPatch, at: int, calls: list[int]) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    materialize = layerwise.materialize_layer

    def failing(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == at + 1:
            raise PlantedError
        materialize(*arguments)

    patch.setattr(layerwise, "materialize_layer", failing)


def test_an_engine_that_cannot_go_back_is_torn_until_it_can(
    llm: Any, executor: RolloutExecutor, fresh: Any, weights: Any, trainer: Trainer
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        processing_fails(patch, None, 3)  # type: ignore[arg-type]  # from there on, always
        with pytest.raises(TornEngine):
            executor.update_weights(trainer.publish(weights[1]))
    executor.recover()
    assert answers(llm) == fresh[0]


def test_what_is_not_the_engines_model_is_refused_before_a_file_is_written(
    executor: RolloutExecutor, weights: Any, trainer: Trainer, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong in (
        {**weights[1], name: torch.ones(2, 2)},
        {**weights[1], name: weights[1][name].bfloat16()},
        {**weights[1], "more": torch.ones(1)},
        {key: tensor for key, tensor in weights[1].items() if key != name},
    ):
        with pytest.raises(IncompatibleUpdate, match="not those of the engine's checkpoint"):
            executor.update_weights(trainer.publish(wrong))
    broken = {**weights[1], name: weights[1][name] * float("nan")}
    with pytest.raises(IncompatibleUpdate, match="NaN or Inf"):
        executor.update_weights(trainer.publish(broken))
    assert not list((tmp_path / "versions").iterdir())


def test_a_cache_that_cannot_be_dropped_is_an_update_that_failed(
    llm: Any, executor: RolloutExecutor, fresh: Any, weights: Any, trainer: Trainer
) -> None:
    real, told = llm.reset_prefix_cache, [False]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            llm, "reset_prefix_cache", lambda **options: told.pop() if told else real(**options)
        )
        with pytest.raises(WeightUpdateRejectedError, match="hold cached blocks"):
            executor.update_weights(trainer.publish(weights[1]))
        assert not told
        assert answers(llm) == fresh[0]
        told += [False, False]
        with pytest.raises(TornEngine, match="hold cached blocks"):
            executor.update_weights(trainer.publish(weights[1]))
    executor.recover()
    assert answers(llm) == fresh[0]


def test_an_engine_that_vllm_reloads_wrong_is_refused(llm: Any, tmp_path: Path) -> None:
    config = llm.llm_engine.vllm_config.model_config
    kind = type(config)
    for owner, name, value, told in (
        (config.hf_config, "tie_word_embeddings", True, "tied embeddings"),
        (kind, "use_mla", True, "latent attention"),
        (kind, "get_num_experts", lambda _: 4, "packed experts"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(WeightBridgeUnavailableError, match=f"{told} wrong"):
                VLLMCheckpointReloadAdapter(llm, tmp_path)
    with pytest.raises(WeightBridgeUnavailableError, match="Pass checkpoint="):
        VLLMCheckpointReloadAdapter(llm, tmp_path, checkpoint=tmp_path)
    with pytest.raises(TypeError, match="expected an LLM"):
        VLLMCheckpointReloadAdapter("http://127.0.0.1", tmp_path)

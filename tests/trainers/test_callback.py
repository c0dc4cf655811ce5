"""A real trainer of Hugging Face's with the one callback: the engine follows its steps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.hooks import StepPublisher, weight_sync_callback

SIZES = {
    "vocab_size": 26,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def make_trainer(model: Any, path: Path, **options: Any) -> Any:
    row = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=4,
        learning_rate=0.1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=[row] * 64)


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_follows_each_optimizer_step(tied: bool, tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**SIZES, tie_word_embeddings=tied)
    model = transformers.Qwen2ForCausalLM(config)
    engine = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    manifests: list[WeightUpdateManifest] = []
    with make_weight_bridge("shared-memory") as bridge, make_weight_bridge("shared-memory") as its:
        adapter = ModuleInstallAdapter(engine, mode="copy")
        executor = RolloutExecutor(weight_bridge=its, weight_install_adapter=adapter)

        def send(manifest: WeightUpdateManifest) -> None:
            manifests.append(manifest)
            executor.update_weights(manifest.to_json())
            held = engine.state_dict()
            assert all(torch.equal(held[name], one) for name, one in model.state_dict().items())

        publisher = StepPublisher(bridge, model, send=send, every=2)
        trainer = make_trainer(model, tmp_path, gradient_accumulation_steps=2)
        trainer.add_callback(weight_sync_callback(publisher))
        trainer.train()
        executor.close()
    assert [one.metadata["step"] for one in manifests] == [0, 2, 4]
    assert [one.weight_version for one in manifests] == [0, 1, 2]
    assert not torch.equal(before["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_an_engine_that_refuses_ends_the_training_with_its_error(tmp_path: Path) -> None:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    with make_weight_bridge("shared-memory") as bridge:

        def send(manifest: WeightUpdateManifest) -> None:
            if manifest.weight_version == 1:
                raise ConnectionError("the engine is gone")

        trainer = make_trainer(model, tmp_path)
        trainer.add_callback(weight_sync_callback(StepPublisher(bridge, model, send=send)))
        with pytest.raises(ConnectionError, match="the engine is gone"):
            trainer.train()
        assert trainer.state.global_step == 1

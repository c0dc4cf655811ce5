"""TRL's GRPO trainers on the CPU: real training, real vLLM, each push an update of this library."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge import WeightBridgeError
from rl_bridge.compat.trl import BridgeWeightTransfer, bridged
from rl_bridge.errors import BridgeClosed
from tests.engines.served import Served
from tests.frameworks import tiny

STEPS = 8
AS_TRL_SAMPLES = 5e-3
"""Log-probabilities of the trainer and the engine differ by less, where both have one version."""


def arguments(output: Path, **options: Any) -> dict[str, Any]:
    """What both trainers are configured with."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 32,
        "num_generations": 16,
        "max_steps": STEPS,
        "max_completion_length": tiny.LENGTH,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        **options,
    }


def logged(trainer: Any, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def at_step(number: int, action: Callable[[], object]) -> Any:
    """A callback that does something once, behind a step."""
    from transformers import TrainerCallback

    class Once(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step == number:
                action()

    return Once()


# ---- the contract --------------------------------------------------------------------------------


def test_a_weight_transfer_has_the_methods_of_trls_protocol_as_trl_calls_them() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    asked = [name for name in vars(WeightTransferProtocol) if not name.startswith("_")]
    assert sorted(asked) == [
        "destroy",
        "init_weight_transfer",
        "pause",
        "resume",
        "send_weights",
    ]
    for name in asked:
        theirs = inspect.signature(getattr(WeightTransferProtocol, name)).parameters
        ours = inspect.signature(getattr(BridgeWeightTransfer, name)).parameters
        assert list(ours) == list(theirs), name


def test_a_bridged_trainer_is_trls_class_and_its_generation_is_trls_own_again() -> None:
    import trl.trainer.grpo_trainer as home
    from trl import GRPOTrainer

    kind, before = bridged(GRPOTrainer), home.VLLMGeneration
    assert issubclass(kind, GRPOTrainer)
    assert kind.__name__ == "GRPOTrainer"
    with pytest.raises(TypeError, match="model"):
        kind()
    assert home.VLLMGeneration is before


# ---- with a server -------------------------------------------------------------------------------


def on_server(server: Served, checkpoint: str, output: Path, **more: Any) -> Any:
    """TRL's synchronous trainer; one line differs from TRL's own."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    steps = more.pop("max_steps", STEPS)
    args = GRPOConfig(**arguments(output, beta=0.0, max_steps=steps, **options))
    data = Dataset.from_dict({"prompt": [f"{one} {two}" for one in range(8) for two in range(8)]})
    return bridged(GRPOTrainer)(
        model=checkpoint, reward_funcs=tiny.digits, args=args, train_dataset=data, **more
    )


@pytest.mark.timeout(400)  # the server starts
def test_the_synchronous_trainer_learns_on_a_server_by_counted_versions(
    server: Served, checkpoint: str, tmp_path: Path
) -> None:
    trainer = on_server(server, checkpoint, tmp_path)
    transfer = trainer.vllm_generation.weight_transfer
    try:
        trainer.train()
        rewards = logged(trainer, "reward")
        assert len(rewards) == STEPS
        assert rewards[-1] > rewards[0] + 0.3, rewards
        # The initial weights are version 1; those behind the last step were not asked for.
        ack = transfer.engine.last_ack
        assert ack.weight_version == STEPS
        assert ack.proof.root == ack.root
        assert server.label() == f"{STEPS}@{ack.root}"
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < AS_TRL_SAMPLES
        assert transfer.bridge.published_nbytes > 0
    finally:
        transfer.destroy()


@pytest.mark.timeout(300)
def test_a_refused_update_ends_the_training_and_the_server_serves_the_version_before(
    server: Served, checkpoint: str, tmp_path: Path
) -> None:
    plant = at_step(2, lambda: server.collective_rpc("plant_fault", ["exchange", 3]))
    trainer = on_server(server, checkpoint, tmp_path, callbacks=[plant])
    transfer = trainer.vllm_generation.weight_transfer
    try:
        with pytest.raises(WeightBridgeError, match="planted at call"):
            trainer.train()
        told = server.label()
        assert told == f"2@{transfer.engine.last_ack.root}"
        assert trainer._last_loaded_step == 1
        assert not server.is_paused()
        server.collective_rpc("uproot_fault")
        trainer.vllm_generation.sync_weights()  # the same weights, and nothing is planted
        assert server.label() == f"4@{transfer.engine.last_ack.root}"
    finally:
        server.collective_rpc("uproot_fault")
        transfer.destroy()


@pytest.mark.timeout(300)
def test_adapters_of_peft_are_merged_for_the_update_and_not_for_the_training(
    server: Served, checkpoint: str, tmp_path: Path
) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    trainer = on_server(server, checkpoint, tmp_path, peft_config=lora, max_steps=4)
    transfer = trainer.vllm_generation.weight_transfer
    base = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    before = base.weight.detach().clone()
    try:
        trainer.train()
        assert transfer.engine.active_weight_version == 4
        assert not base.weight.requires_grad
        torch.testing.assert_close(base.weight, before)
        # What the server samples with has the adapters in it: else its log-probabilities differ.
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < AS_TRL_SAMPLES
    finally:
        transfer.destroy()


# ---- asynchronously ------------------------------------------------------------------------------


def asynchronous(
    server: Served, checkpoint: str, output: Path, patch: pytest.MonkeyPatch, **more: Any
) -> tuple[Any, BridgeWeightTransfer]:
    """TRL's asynchronous trainer and its own rollout worker; its two uses of a GPU are replaced."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo import async_grpo_trainer as home

    patch.setattr(home, "get_peak_flops_per_device", lambda *_: None)
    patch.setattr(packing, "_flash_attn", lambda: tiny.Attention)
    options = {"vllm_server_base_url": server.url, "dtype": "float32", "token_budget": 0}
    args = AsyncGRPOConfig(**arguments(output, **options))
    turns = [[{"role": "user", "content": f"{one} {two}"}] for one in range(8) for two in range(8)]
    transfer = BridgeWeightTransfer(server.url)
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        reward_funcs=tiny.digits,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": turns}),
        weight_transfer=transfer,
        **more,
    )
    return trainer, transfer


@pytest.mark.timeout(400)
def test_the_asynchronous_trainers_model_version_is_the_proven_one(
    server: Served, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, transfer = asynchronous(server, checkpoint, tmp_path, monkeypatch)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[-2:]) > sum(rewards[:2]), rewards
    ack = transfer.engine.last_ack
    assert ack is not None
    assert trainer.model_version == STEPS + 1 == ack.weight_version
    assert server.label() == f"{STEPS + 1}@{ack.root}"
    with pytest.raises(BridgeClosed, match="destroyed"):  # TRL has done that
        transfer.send_weights([])


@pytest.mark.timeout(400)
def test_the_asynchronous_trainers_model_version_stays_where_an_update_is_refused(
    server: Served, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        """A rollout worker that is never started: the update before is refused."""

        rollout_buffer = metrics_queue = None
        told: ClassVar[list[int]] = []

        def stop(self) -> None:
            pass

        def update_model_version(self, model_version: int) -> None:
            self.told.append(model_version)

        def check_health(self, stale_after_s: float) -> None:
            pass

    trainer, transfer = asynchronous(
        server, checkpoint, tmp_path, monkeypatch, rollout_worker=Silent()
    )
    trainer._sync_weight()
    assert trainer.model_version == 1
    held, told = transfer.engine.last_ack, server.label()
    assert held is not None
    server.collective_rpc("plant_fault", ["exchange", 3])
    try:
        with pytest.raises(WeightBridgeError, match="planted at call"):
            trainer.train()
    finally:
        server.collective_rpc("uproot_fault")
    assert trainer.model_version == 1
    assert Silent.told == [1]
    assert transfer.engine.last_ack is held
    assert server.label() == told == f"1@{held.root}"
    assert not server.is_paused()


# ---- colocated -----------------------------------------------------------------------------------


@pytest.mark.timeout(400)  # a process that starts an engine
def test_a_colocated_engine_learns_and_keeps_its_version_where_an_update_is_refused(
    checkpoint: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.colocated", checkpoint, str(tmp_path)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text("utf-8"))
    assert told["rewards"][-1] > told["rewards"][0] + 0.3, told
    assert told["version"] == STEPS
    # The engine chose bfloat16, and the update was cast.
    assert told["dtype"] == "torch.bfloat16"
    assert told["difference"] < 10 * AS_TRL_SAMPLES
    assert "NaN or Inf" in told["refused"]
    assert told["behind"] == STEPS
    assert told["answers"][0] == told["answers"][1]

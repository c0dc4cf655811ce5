"""vLLM's flow for trainers with vLLM's own client for Ray: the engine is an actor."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.vllm import RLBridgeTrainerInitInfo

START_S = 240
CALL_S = 60


class Engine:
    """An ``LLM`` behind the methods that vLLM's client calls, and one question."""

    def __init__(self, checkpoint: str) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=checkpoint,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=64,
            weight_transfer_config={"backend": "rl_bridge"},
        )

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self.llm.update_weights(request)

    def finish_weight_update(self) -> None:
        self.llm.finish_weight_update()

    def update_weight_version(self, version: str) -> None:
        self.llm.update_weight_version(version)

    def told(self) -> tuple[str, list[int]]:
        """Its label, and what it answers."""
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache()
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (given,) = self.llm.generate([{"prompt_token_ids": [5, 6]}], greedy, use_tqdm=False)
        return str(self.llm.get_weight_version()), list(given.outputs[0].token_ids)


@pytest.fixture
def actor(checkpoint: str) -> Iterator[Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written into the home directory
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    root = str(Path(__file__).resolve().parents[2])
    variables = {"PYTHONPATH": root, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        yield ray.remote(Engine).remote(checkpoint)
    finally:
        ray.shutdown()


@pytest.mark.timeout(START_S + 120)
def test_vllms_client_for_ray_updates_an_actors_engine(actor: Any, checkpoint: str) -> None:
    import ray
    import transformers
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    _, before = ray.get(actor.told.remote(), timeout=START_S)
    sender = WeightTransferTrainerFactory.trainer_init(
        RLBridgeTrainerInitInfo(rank=0),
        client=RayVLLMWeightSyncClient(actor),
        source=ModuleSource(model),
    )
    try:
        sender.send_weights()
        label, same = ray.get(actor.told.remote(), timeout=CALL_S)
        assert (label, same) == (f"1@{sender.manifest.root}", before)
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        sender.send_weights()
        label, other = ray.get(actor.told.remote(), timeout=CALL_S)
        assert label == f"2@{sender.manifest.root}"
        assert other != before
        with torch.no_grad():
            model.lm_head.weight[3] = float("nan")
        with pytest.raises(WeightUpdateRejectedError, match=r"lm_head\.weight.*NaN or Inf"):
            sender.send_weights()
        assert ray.get(actor.told.remote(), timeout=CALL_S) == (label, other)
    finally:
        sender.shutdown()

"""LoRA adapters of real vLLM engines, version after version: as a fresh engine that reads files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.manifest import AdapterSpec
from rl_bridge.vllm import VLLMEngineAdapter
from tests.engines.drive import Answers, Setting, answers, start
from tests.engines.models import ADAPTER, Checkpoints, Kind

LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
"""What the engines are started with; on a CPU the last slot stays empty."""

SETTINGS = [Setting(Kind("qwen3")), Setting(Kind("qwen3"), in_process=False, ranks=2)]


@dataclass
class Adapted:
    """An engine, a trainer's bridge, and what a fresh engine answers with each adapter."""

    llm: Any
    executor: RolloutExecutor
    bridge: TensorBridge
    fresh: list[Answers]
    """With no adapter, and with each of the two."""
    weights: list[dict[str, torch.Tensor]]
    count: int = 0
    manifests: list[WeightUpdateManifest] = field(default_factory=list)

    def publish(self, number: int, *, name: str = "policy", **changes: Any) -> WeightUpdateManifest:
        self.count += 1
        weights = {**self.weights[number], **changes}
        spec = AdapterSpec.of_peft(name, ADAPTER, [])
        manifest = self.bridge.publish(weights, weight_version=self.count, adapter=spec)
        self.manifests.append(manifest)
        return manifest

    def update(self, number: int, *, name: str = "policy") -> int:
        manifest = self.publish(number, name=name)
        self.executor.update_weights(manifest)
        self.bridge.release(manifest.update_id)
        return manifest.weight_version

    def answers(self, name: str = "policy", version: int | None = None) -> Answers:
        return answers(self.llm, lora_request=self.executor.lora_request(name, version))


@contextmanager
def adapted(setting: Setting, checkpoints: Checkpoints, **options: Any) -> Iterator[Adapted]:
    from vllm.lora.request import LoRARequest

    folders = [checkpoints.adapter(number) for number in (0, 1)]
    options = {**LORA, **options}
    path = checkpoints.path(setting.kind, 0)
    with start(setting, path, **options) as llm:
        requests = [None, *(LoRARequest(f"file{i}", i + 1, p) for i, p in enumerate(folders))]
        fresh = [answers(llm, lora_request=one) for one in requests]
    assert len(set(fresh)) == 3
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    with ExitStack() as stack:
        llm = stack.enter_context(start(setting, path, **options))
        bridge = stack.enter_context(make_weight_bridge("shared-memory", suspicious="off"))
        executor = stack.enter_context(
            RolloutExecutor(
                weight_bridge=stack.enter_context(make_weight_bridge("shared-memory")),
                weight_install_adapter=VLLMEngineAdapter(llm, timeout_s=60.0),
                suspicious="off",
            )
        )
        yield Adapted(llm, executor, bridge, fresh, weights)


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Adapted]:
    with adapted(request.param, checkpoints) as made:
        yield made


def test_every_version_answers_as_a_fresh_engine_that_read_it_from_files(engine: Adapted) -> None:
    for number in (0, 1, 0, 1):
        version = engine.update(number)
        assert engine.answers() == engine.fresh[1 + number]
        assert answers(engine.llm) == engine.fresh[0]
        assert engine.executor.adapter_version("policy") == version
        ack = engine.executor.last_ack
        assert ack is not None
        assert (ack.weight_version, ack.proof.method, ack.proof.root) == (
            version,
            "digest",
            engine.manifests[-1].root,
        )
    assert engine.executor.active_weight_version is None  # of the engine's own weights

"""LoRA adapters of real SGLang engines, version after version: as a fresh engine that reads files."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.manifest import AdapterSpec
from rl_bridge.sglang import SGLangInstallAdapter
from tests.engines.models import ADAPTER, Checkpoints, Kind
from tests.sglang.bench import CALL_S, Answers, Engines, answers_of

LORA = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_loras_per_batch": 4,
    "max_lora_rank": 16,
    "lora_target_modules": ADAPTER["target_modules"],
}

pytestmark = pytest.mark.timeout(600)  # engines start


@dataclass
class Adapted:
    """An engine, a trainer's bridge, and what a fresh engine answers with each adapter."""

    engine: Any
    executor: RolloutExecutor
    bridge: TensorBridge
    fresh: list[Answers]
    """With no adapter, and with each of the two."""
    weights: list[dict[str, torch.Tensor]]
    count: int = 0
    manifests: list[WeightUpdateManifest] = field(default_factory=list)

    def publish(
        self, number: int, changes: Mapping[str, torch.Tensor] | None = None, **config: Any
    ) -> WeightUpdateManifest:
        for earlier in self.manifests[-1:]:
            self.bridge.release(earlier.update_id)
        self.count += 1
        spec = AdapterSpec.of_peft("policy", {**ADAPTER, **config}, [])
        weights = {**self.weights[number], **(changes or {})}
        manifest = self.bridge.publish(weights, weight_version=self.count, adapter=spec)
        self.manifests = [*self.manifests[-1:], manifest]
        return manifest

    def update(self, number: int) -> int:
        manifest = self.publish(number)
        self.executor.update_weights(manifest)
        return manifest.weight_version

    def answers(self, version: int | None = None) -> Answers:
        return answers_of(self.engine, self.executor.lora_request("policy", version))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest, engines: Engines, checkpoints: Checkpoints
) -> Iterator[Adapted]:
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    made = engines.start(Kind("qwen3"), 0, request.param, **LORA)
    fresh = [answers_of(made)]
    for number, folder in enumerate(folders):
        assert made.load_lora_adapter(f"file{number}", folder).success
        fresh.append(answers_of(made, f"file{number}"))
    assert fresh[0] != fresh[1] != fresh[2]
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    made = engines.start(Kind("qwen3"), 0, request.param, **LORA)
    with ExitStack() as stack:
        bridge = stack.enter_context(make_weight_bridge("shared-memory", suspicious="off"))
        executor = stack.enter_context(
            RolloutExecutor(
                weight_bridge=stack.enter_context(make_weight_bridge("shared-memory")),
                weight_install_adapter=SGLangInstallAdapter(made, timeout_s=CALL_S),
                suspicious="off",
            )
        )
        yield Adapted(made, executor, bridge, fresh, weights)


def test_every_version_answers_as_a_fresh_engine_that_read_it_from_files(engine: Adapted) -> None:
    for number in (0, 1, 0, 1):
        version = engine.update(number)
        assert engine.answers() == engine.fresh[1 + number]
        assert answers_of(engine.engine) == engine.fresh[0]
        assert answers_of(engine.engine, "policy") == engine.fresh[1 + number]
        ack = engine.executor.last_ack
        assert ack is not None
        assert (ack.weight_version, ack.proof.method, ack.proof.root) == (
            version,
            "digest",
            engine.manifests[-1].root,
        )

"""More traps, with engines of their own: packed experts, and adapters over a base that changes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.drive import Setting, answers, model_of, start
from tests.engines.engines import bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References


def test_packed_experts_are_right_where_vllms_own_reload_is_wrong(
    checkpoints: Checkpoints, references: References
) -> None:
    setting = Setting(Kind("moe", dtype="bfloat16"))
    with bench(setting, checkpoints, references) as moe:
        moe.update()
        moe.check("updated")
        path = checkpoints.path(setting.kind, 1 - moe.holds)
        moe.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        assert moe.answers() not in moe.fresh  # loaded, and not packed
        for by in ("executor", "vLLM's calls", "executor"):
            moe.update(by)
            moe.check(f"updated by {by} after the reload")


def test_adapters_stay_over_updates_of_their_base(
    checkpoints: Checkpoints, references: References
) -> None:
    from vllm.lora.request import LoRARequest

    kind = Kind("qwen3")
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapters = [LoRARequest(f"a{i}", i + 1, checkpoints.adapter(i)) for i in (0, 1)]
    paths = [checkpoints.path(kind, version) for version in (0, 1)]
    with start(Setting(kind), paths[1], **options) as llm:
        fresh = [answers(llm), *(answers(llm, lora_request=one) for one in adapters)]
    with bench(Setting(kind), checkpoints, references, **options) as based:
        first = [based.answers(), *(answers(based.llm, lora_request=one) for one in adapters)]
        assert len({*fresh, *first}) == 6
        for by in ("executor", "vLLM's calls"):
            for expected in (fresh, first):
                based.update(by)
                assert answers(based.llm) == expected[0], by
                for one, adapted in zip(adapters, expected[1:], strict=True):
                    assert answers(based.llm, lora_request=one) == adapted, (by, one.lora_name)


def test_a_bias_that_vllm_keeps_wider_than_it_is_loaded_is_that_of_a_fresh_engine(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def widened(layer: Any, *args: Any, **options: Any) -> None:
        """What vLLM does on CPUs with AMX, done on any."""
        pack(layer, *args, **options)
        product = layer.cpu_linear
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.to(torch.float32)
            layer.cpu_linear = lambda x, weight, bias: product(
                x, weight, None if bias is None else bias.to(x.dtype)
            )

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", widened)
    setting = Setting(Kind("qwen2", dtype="bfloat16"))
    with bench(setting, checkpoints, References(checkpoints, tmp_path)) as engine:
        biases = [p for n, p in model_of(engine.llm).named_parameters() if n.endswith(".bias")]
        assert {bias.dtype for bias in biases} == {torch.float32}
        for by in ("executor", "vLLM's calls", "executor"):
            engine.update(by)
            engine.check(by)
        ack = engine.executor.last_ack
        assert ack is not None
        assert ack.proof.tensors == len(engine.weights[0])

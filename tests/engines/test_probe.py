"""What `rl-bridge doctor` finds out about a real vLLM."""

import pytest

from rl_bridge.engines.vllm import probe as vllm
from rl_bridge.engines.vllm import transfer_engine


def test_everything_that_needs_no_gpu_works_and_the_rest_says_why() -> None:
    found = {item.name: item for item in vllm.probe()}
    gpu = {"vllm ipc", "vllm nccl", "vllm external storage"}
    assert {name for name, item in found.items() if item.status == "pass"} >= found.keys() - gpu
    assert found.keys() == vllm.FEATURES.keys()
    for name in gpu:
        assert found[name].status == "pass" or "cuda" in found[name].cause.lower()


def test_what_vllm_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.v1.engine.core import EngineCore

    assert vllm.FEATURES["vllm executor"].attempt() is None
    monkeypatch.delattr(EngineCore, "pause_scheduler")
    assert vllm.FEATURES["vllm executor"].attempt() == "vLLM's EngineCore has no pause_scheduler"
    engine = transfer_engine.RLBridgeTransferEngine
    monkeypatch.setattr(engine, "__abstractmethods__", frozenset({"more"}))
    assert "['more']" in str(vllm.FEATURES["vllm backend"].attempt())
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["other"], raising=False)
    assert "and not rl_bridge" in str(vllm.FEATURES["vllm plugin"].attempt())

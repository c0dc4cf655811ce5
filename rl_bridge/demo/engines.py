"""What differs between engines: the model that is trained, and what samples with it.

Nothing else of the demo asks which engine it is, but for what an engine's failure looks like
(`rl_bridge.demo.faults`) and its name on the screen.
"""

import importlib.util
from collections.abc import Callable

from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.learner import LearnerConfig
from rl_bridge.demo.model import ModelConfig, build_model
from rl_bridge.demo.options import Engine
from rl_bridge.demo.policy import Policy
from rl_bridge.demo.qwen import build_qwen
from rl_bridge.demo.sampler import ModuleSampler, Sampler
from rl_bridge.demo.sglang_sampler import SGLangSampler
from rl_bridge.demo.task import SortTask
from rl_bridge.demo.vllm_sampler import VLLMSampler
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.transports.registry import transport_class

__all__ = [
    "build_policy",
    "check_engine",
    "has_processes",
    "learner_config",
    "logprob_tolerance",
    "make_sampler",
    "start_timeout_s",
]

# Engine -> its name for people, the packages that it needs, the extras that have them.
_REAL = {
    Engine.VLLM: ("vLLM", ("vllm", "transformers"), "demo,vllm"),
    Engine.SGLANG: ("SGLang", ("sglang", "transformers"), "demo,sglang"),
    Engine.VLLM_HTTP: (
        "vLLM",
        ("vllm", "transformers", "fastapi", "uvicorn", "httpx", "prometheus_client"),
        "demo,vllm,remote",
    ),
}


def check_engine(engine: str, transport: str) -> None:
    """Find every reason why an engine cannot sample here, without starting it.

    Raises:
        ValueError: no such engine.
        WeightBridgeUnavailableError: it is not installed, or the transport does not reach it.

    """
    if engine not in list(Engine):
        raise ValueError(f"no engine {engine!r} for the demo, expected one of {', '.join(Engine)}")
    if engine == Engine.MODULE:
        return
    name, needed, extras = _REAL[Engine(engine)]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise WeightBridgeUnavailableError(
            f"the demo's engine {engine!r} needs {' and '.join(missing)}, not installed here. "
            f"Install it with: pip install 'rl_bridge[{extras}]'"
        )
    if not transport_class(transport).crosses_processes:
        raise WeightBridgeUnavailableError(
            f"{name} samples in a process of its own, and {transport} does not leave this one. "
            "Take another transport: --transport shared-memory"
        )


def has_processes(engine: str) -> bool:
    """Whether the engine starts processes of its own below the rollout's."""
    return engine == Engine.SGLANG


def start_timeout_s(engine: str) -> float:
    """How long the rollout's process may take to start, on a busy machine with a cold disk."""
    # It imports torch. vLLM also looks at the model, the first time in one more process.
    return 120.0 if engine == Engine.MODULE else 300.0


def build_policy(engine: str, task: SortTask, seed: int) -> Policy:
    """Make what is trained, with random weights from a seed."""
    if engine == Engine.MODULE:
        return build_model(ModelConfig(task=task), seed)
    return build_qwen(task, seed)


def learner_config(engine: str) -> LearnerConfig:
    """Return the settings that learn the task reliably with this engine's model."""
    if engine == Engine.MODULE:
        return LearnerConfig()
    return LearnerConfig(learning_rate=3e-3, epochs=2, entropy_bonus=0.02)


def logprob_tolerance(engine: str) -> float:
    """How far log-probabilities may be apart: only rounding differs; other versions are far away.

    For the module it is one pass against token by token. Real engines also have other kernels, and
    their policy grows sharper, which makes more of the same rounding.
    """
    return 1e-4 if engine == Engine.MODULE else 3e-4


def make_sampler(config: RolloutConfig, *, model_seed: int) -> Sampler:
    """Start the engine with random weights from `model_seed`; it draws from the config's seed."""
    kinds: dict[str, Callable[..., Sampler]] = {
        Engine.VLLM: VLLMSampler,
        Engine.SGLANG: SGLangSampler,
    }
    made = kinds.get(config.engine, ModuleSampler)
    return made(config.task, model_seed=model_seed, seed=config.seed)

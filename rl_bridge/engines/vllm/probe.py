"""What the vLLM of this environment can do for us: see `rl_bridge.engines.probe`."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rl_bridge.cuda.devices import cuda_cause
from rl_bridge.engines import probe as engine_probe
from rl_bridge.engines.probe import TIMEOUT_S, Feature
from rl_bridge.engines.vllm import MINIMUM, VLLM, require
from rl_bridge.engines.vllm.plugin import BACKEND, METHOD, register
from rl_bridge.transports.base import Availability

PACKAGE = VLLM
_CHILD = "from rl_bridge.engines.vllm.probe import look; look()"
_GROUP = "vllm.general_plugins"
# The development routes moved twice.
_ROUTERS = (
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.serve.dev.rlhf.api_router",
    "vllm.entrypoints.serve.rlhf.api_router",
)


def _plugin() -> str | None:
    found = [item for item in metadata.entry_points(group=_GROUP) if item.name == BACKEND]
    if not found:
        return f"no entry point {BACKEND} in the group {_GROUP}"
    found[0].load()
    allowed = require("vllm.envs").VLLM_PLUGINS
    if allowed is not None and BACKEND not in allowed:
        return f"VLLM_PLUGINS allows {allowed}, and not {BACKEND}"
    return None


def _backend() -> str | None:
    register()
    factory: Any = require("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    kind = factory._registry[BACKEND]()  # noqa: SLF001 - as vLLM makes it
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    return f"this vLLM asks its backends for {missing}" if inspect.isabstract(kind) else None


def _executor() -> str | None:
    register()
    wanted = {
        "vllm.v1.worker.worker_base": ("WorkerBase", METHOD),
        "vllm.v1.engine.core": ("EngineCore", "pause_scheduler"),
        "vllm.entrypoints.llm": ("LLM", "collective_rpc"),
        "vllm.v1.engine.async_llm": ("AsyncLLM", "pause_generation"),
    }
    for module, (name, attribute) in wanted.items():
        if not hasattr(getattr(require(module), name), attribute):
            return f"vLLM's {name} has no {attribute}"
    return None


def _server() -> str | None:
    if find_spec("httpx") is None:
        return "httpx is not installed"
    for router in _ROUTERS:
        try:
            importlib.import_module(router)
        except ImportError:
            continue
        return None
    return "this vLLM's server has none of the development routes"


def _labels() -> str | None:
    llm = require("vllm.entrypoints.llm").LLM
    return None if hasattr(llm, "update_weight_version") else "LLM has no update_weight_version"


def _spans() -> str | None:
    found = {item.name for item in fields(require("vllm.outputs").CompletionOutput)}
    return None if "weight_versions" in found else "outputs have no weight_versions"


def _native(module: str) -> Callable[[], str | None]:
    def attempt() -> str | None:
        require(f"vllm.distributed.weight_transfer.{module}")
        return cuda_cause()

    return attempt


_UPGRADE = f"Upgrade vLLM: {PACKAGE.install}."
_CPU = "Use the backend rl_bridge or VLLMEngineAdapter: they need no GPU."

FEATURES: Mapping[str, Feature] = {
    "vllm plugin": Feature(
        "vLLM loads rl_bridge in each of its processes",
        MINIMUM,
        _plugin,
        "Install rl_bridge in the engine's environment; where VLLM_PLUGINS is set, add it there.",
    ),
    "vllm backend": Feature(
        "weight_transfer_config={'backend': 'rl_bridge'}, by vLLM's own calls",
        MINIMUM,
        _backend,
        _UPGRADE,
    ),
    "vllm executor": Feature(
        "VLLMEngineAdapter: LLM and AsyncLLM, in this process, in others, tensor parallel",
        MINIMUM,
        _executor,
        _UPGRADE,
    ),
    "vllm server": Feature(
        "VLLMEngineAdapter with a URL; the server needs VLLM_SERVER_DEV_MODE=1",
        MINIMUM,
        _server,
        f"Install httpx: {PACKAGE.install}.",
    ),
    "vllm version labels": Feature(
        "an engine tells the version that it serves", "0.27.0", _labels, _UPGRADE
    ),
    "vllm version spans": Feature(
        "each output tells which tokens come from which version",
        "0.32.0",
        _spans,
        "Upgrade vLLM: pip install 'vllm>=0.32.0'.",
    ),
    "vllm ipc": Feature(
        "vLLM's own backend ipc, with VLLMIPCWeightUpdateRequestBuilder",
        "0.18.0",
        _native("ipc_engine"),
        _CPU,
    ),
    "vllm nccl": Feature(
        "vLLM's own backend nccl, with VLLMNCCLWeightUpdateRequestBuilder",
        "0.18.0",
        _native("nccl_engine"),
        _CPU,
    ),
    "vllm external storage": Feature(
        "VLLMCUDAVMMExternalStorageAdapter: an engine computes with imported GPU memory",
        MINIMUM,
        cuda_cause,
        _CPU,
    ),
}


def look() -> None:
    """Try every feature in this process, and print the causes as one line of JSON."""
    engine_probe.look(FEATURES)


def probe(*, timeout_s: float = TIMEOUT_S) -> list[Availability]:
    """What works here, one entry for each of `FEATURES`; empty where vLLM is not installed."""
    return engine_probe.probe(VLLM, FEATURES, _CHILD, timeout_s)

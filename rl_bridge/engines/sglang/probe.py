"""What the SGLang of this environment can do for us: see `rl_bridge.engines.probe`."""

from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rl_bridge.engines import probe as engine_probe
from rl_bridge.engines.probe import TIMEOUT_S, Feature
from rl_bridge.engines.sglang import MINIMUM, SGLANG, require
from rl_bridge.engines.sglang.client import REQUESTS
from rl_bridge.engines.sglang.plugin import ANSWERED, GUARDED, NAME, RECEIVED
from rl_bridge.transports.base import Availability

PACKAGE = SGLANG
_CHILD = "from rl_bridge.engines.sglang.probe import look; look()"
_GROUP = "sglang.srt.plugins"


def _plugin() -> str | None:
    """Why SGLang does not load our plugin, or lacks what that hooks."""
    found = [item for item in metadata.entry_points(group=_GROUP) if item.name == NAME]
    if not found:
        return f"no entry point {NAME} in the group {_GROUP}"
    found[0].load()
    allowed = require("sglang.srt.environ").envs.SGLANG_PLUGINS.get()
    if allowed and NAME not in {name.strip() for name in allowed.split(",")}:
        return f"SGLANG_PLUGINS allows {allowed}, and not {NAME}"
    require("sglang.srt.plugins.hook_registry")
    return next(filter(None, map(_missing, (ANSWERED, RECEIVED, *GUARDED))), None)


def _missing(target: str) -> str | None:
    """What is missing of a method that the plugin hooks."""
    path, _, name = target.rpartition(".")
    module, _, kind = path.rpartition(".")
    return None if hasattr(getattr(require(module), kind), name) else f"SGLang has no {kind}.{name}"


def _routes(*names: str) -> Callable[[], str | None]:
    """Which of some control routes is missing, on either side of them."""

    def attempt() -> str | None:
        requests = require("sglang.srt.managers.io_struct")
        manager: Any = require("sglang.srt.managers.tokenizer_manager").TokenizerManager
        for name in names:
            if not hasattr(requests, REQUESTS[name]) or not hasattr(manager, name):
                return f"this SGLang has no route {name}"
        return None

    return attempt


def _server() -> str | None:
    """Why a server cannot be called from here."""
    return "httpx is not installed" if find_spec("httpx") is None else None


def _disk() -> str | None:
    """Why no checkpoint can be written here, or SGLang takes none."""
    if find_spec("safetensors") is None:
        return "safetensors is not installed"
    return _routes("update_weights_from_disk")()


_CONTROL = ("get_weights_by_name", "pause_generation", "continue_generation")
_SESSION = ("begin_weight_update", "end_weight_update")
_GROUP_ROUTES = ("init_weights_update_group", "destroy_weights_update_group")
_UPGRADE = f"Upgrade SGLang: {PACKAGE.install}."

FEATURES: Mapping[str, Feature] = {
    "sglang plugin": Feature(
        "SGLang loads rl_bridge in its scheduler's process",
        MINIMUM,
        _plugin,
        "Install rl_bridge in the engine's environment; where SGLANG_PLUGINS is set, add it there.",
    ),
    "sglang executor": Feature(
        "SGLangInstallAdapter: an Engine, updated by the transport that it shares",
        MINIMUM,
        _routes(*_CONTROL, "update_weight_version"),
        _UPGRADE,
    ),
    "sglang server": Feature(
        "SGLangInstallAdapter with a URL",
        MINIMUM,
        _server,
        "Install it: pip install 'rl-bridge[sglang]'.",
    ),
    "sglang tensor": Feature(
        "route='tensor': a flattened bucket in shared memory, in a session",
        MINIMUM,
        _routes(*_SESSION, "update_weights_from_tensor"),
        _UPGRADE,
    ),
    "sglang distributed": Feature(
        "route='distributed': a flattened bucket over a process group, in a session",
        MINIMUM,
        _routes(*_SESSION, *_GROUP_ROUTES, "update_weights_from_distributed"),
        _UPGRADE,
    ),
    "sglang disk": Feature(
        "route='disk': checkpoints in a folder",
        MINIMUM,
        _disk,
        "Install it: pip install safetensors.",
    ),
}


def look() -> None:
    """Try every feature in this process, and print the causes as one line of JSON."""
    engine_probe.look(FEATURES)


def probe(*, timeout_s: float = TIMEOUT_S) -> list[Availability]:
    """What works here, one entry for each of `FEATURES`; empty where SGLang is not installed."""
    return engine_probe.probe(SGLANG, FEATURES, _CHILD, timeout_s)

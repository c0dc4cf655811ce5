"""What the SGLang of this environment can do for us: asked of SGLang itself, in a child process.

Importing SGLang takes ten seconds and more, and may take a GPU, or the process, along. So a child
does it, and answers in JSON.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.sglang.parts import MINIMUM, require, version
from rl_bridge.integrations.sglang.handles import METHODS
from rl_bridge.integrations.sglang.plugin import ANSWERED, GUARDED, NAME
from rl_bridge.transports.base import Availability

__all__ = ["FEATURES", "INSTALL", "Feature", "look", "probe", "version"]

INSTALL = "pip install 'rl-bridge[sglang]'"
_CHILD = "from rl_bridge.integrations.sglang.probe import look; look()"
_TIMEOUT_S = 180.0
_GROUP = "sglang.srt.plugins"


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that SGLang must have for one of our ways of serving it.

    Attributes:
        purpose: what it is good for.
        attempt: tries it; returns what is missing, or None.
        remedy: what to do where it is blocked.

    """

    purpose: str
    attempt: Callable[[], str | None]
    remedy: str


def _plugin() -> str | None:
    found = [item for item in metadata.entry_points(group=_GROUP) if item.name == NAME]
    if not found:
        return f"no entry point {NAME} in the group {_GROUP}"
    found[0].load()
    allowed = require("sglang.srt.environ").envs.SGLANG_PLUGINS.get()
    if allowed and NAME not in {name.strip() for name in allowed.split(",")}:
        return f"SGLANG_PLUGINS allows {allowed}, and not {NAME}"
    require("sglang.srt.plugins.hook_registry")
    return next(filter(None, map(_missing, (ANSWERED, *GUARDED))), None)


def _missing(target: str) -> str | None:
    """What is missing of a method that the plugin hooks."""
    path, _, name = target.rpartition(".")
    module, _, kind = path.rpartition(".")
    return None if hasattr(getattr(require(module), kind), name) else f"SGLang has no {kind}.{name}"


def _routes(*names: str) -> Callable[[], str | None]:
    def attempt() -> str | None:
        requests = require("sglang.srt.managers.io_struct")
        manager: Any = require("sglang.srt.managers.tokenizer_manager").TokenizerManager
        for name in names:
            request, method = METHODS[name]
            if not hasattr(requests, request) or not hasattr(manager, method):
                return f"this SGLang has no route {name}"
        return None

    return attempt


def _server() -> str | None:
    return "httpx is not installed" if find_spec("httpx") is None else None


def _disk() -> str | None:
    if find_spec("safetensors") is None:
        return "safetensors is not installed"
    return _routes("update_weights_from_disk")()


_CONTROL = ("get_weights_by_name", "pause_generation", "continue_generation")
_SESSION = ("begin_weight_update", "end_weight_update")
_GROUP_ROUTES = ("init_weights_update_group", "destroy_weights_update_group")
_UPGRADE = f"Upgrade SGLang: {INSTALL}."

FEATURES: Mapping[str, Feature] = {
    "sglang plugin": Feature(
        "SGLang loads rl_bridge in its scheduler's process",
        _plugin,
        "Install rl_bridge in the engine's environment; where SGLANG_PLUGINS is set, add it there.",
    ),
    "sglang executor": Feature(
        "SGLangInstallAdapter: an Engine, updated by the transport that it shares",
        _routes(*_CONTROL, "update_weight_version"),
        _UPGRADE,
    ),
    "sglang server": Feature(
        "SGLangInstallAdapter with a URL", _server, "Install it: pip install 'rl-bridge[sglang]'."
    ),
    "sglang tensor": Feature(
        "route='tensor': a flattened bucket in shared memory, in a session",
        _routes(*_SESSION, "update_weights_from_tensor"),
        _UPGRADE,
    ),
    "sglang distributed": Feature(
        "route='distributed': a flattened bucket over a process group, in a session",
        _routes(*_SESSION, *_GROUP_ROUTES, "update_weights_from_distributed"),
        _UPGRADE,
    ),
    "sglang disk": Feature(
        "route='disk': checkpoints in a folder", _disk, "Install it: pip install safetensors."
    ),
}


def look() -> None:
    """Try every feature in this process, and print the causes as one line of JSON."""
    causes: dict[str, str | None] = {}
    for name, feature in FEATURES.items():
        try:
            causes[name] = feature.attempt()
        except WeightBridgeUnavailableError as error:
            causes[name] = str(error).partition(". ")[0]
        except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the answer
            causes[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(causes)}\n")


def probe(*, timeout_s: float = _TIMEOUT_S) -> list[Availability]:
    """What works here, one entry for each of `FEATURES`; empty where SGLang is not installed."""
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
    if _numbers(found) < _numbers(MINIMUM):
        cause = f"SGLang {found} is installed, expected {MINIMUM} or later"
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
        return f"SGLang was not imported within {timeout_s:.0f} s"
    last = child.stdout.strip().rpartition("\n")[2]
    try:
        causes: dict[str, str | None] = json.loads(last)
    except json.JSONDecodeError:
        said = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
        return f"SGLang cannot be imported: {said}"
    return causes


def _numbers(text: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()

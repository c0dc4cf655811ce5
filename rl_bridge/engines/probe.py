"""An inference engine as an installed package: which version it is, and what it can do for us.

An engine is imported where it is used, never when rl_bridge is: whoever has none pays nothing. And
importing one takes ten seconds and more, and may take a GPU, or the process, along. So what it can
do is asked of itself in a process of its own, which answers in JSON.
"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.transports.base import Availability

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class EnginePackage:
    """The package of an engine, which may not be installed."""

    name: str
    module: str
    minimum: str  # the oldest version whose interfaces are the ones used here
    distributions: tuple[str, ...]  # the names under which it is installed

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'rl-bridge[{self.module}]'"

    def version(self) -> str | None:
        """Version that is installed; None where there is none. Imports nothing."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None if find_spec(self.module) is None else "(of unknown version)"

    def require(self, name: str) -> ModuleType:
        """Import a module of the engine.

        Raises:
            WeightBridgeUnavailableError: the engine is missing, or too old to have it.

        """
        try:
            return importlib.import_module(name)
        except ImportError as error:
            found = self.version()
            if found is None:
                msg = f"{self.name} is not installed here ({error}). Install it: {self.install}."
            else:
                msg = (
                    f"{self.name} {found} has no {name} ({error}); expected {self.name} >= "
                    f"{self.minimum}. Upgrade it: {self.install}."
                )
            raise WeightBridgeUnavailableError(msg) from error


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that an engine must have for one of our ways of serving it."""

    purpose: str  # what it is good for
    since: str  # the engine's first version that has it
    attempt: Callable[[], str | None]  # tries it; returns what is missing, or None
    remedy: str  # what to do where it is blocked


def look(features: Mapping[str, Feature]) -> None:
    """Try every feature in this process, and print the causes as one line of JSON."""
    causes: dict[str, str | None] = {}
    for name, feature in features.items():
        try:
            causes[name] = feature.attempt()
        except WeightBridgeUnavailableError as error:
            causes[name] = str(error).partition(". ")[0]
        except Exception as error:  # noqa: BLE001 - whatever the engine raises is the answer
            causes[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(causes)}\n")


def probe(
    package: EnginePackage, features: Mapping[str, Feature], child: str, timeout_s: float
) -> list[Availability]:
    """What works here, one entry for each feature; empty where the engine is not installed."""
    engine, found = package.name, package.version()
    if found is None:
        return []
    causes = _ask(engine, child, timeout_s)
    answers = []
    for name, feature in features.items():
        cause = causes if isinstance(causes, str) else causes.get(name)
        remedy = feature.remedy
        if cause is not None and _numbers(found) and _numbers(found) < _numbers(feature.since):
            cause = f"{engine} {found} is installed, expected {feature.since} or later"
            remedy = f"Upgrade {engine}: {package.install}."
        if cause is None:
            answers.append(Availability(name, "pass"))
        else:
            answers.append(Availability(name, "blocked", cause, remedy))
    return answers


def _ask(engine: str, child: str, timeout_s: float) -> dict[str, str | None] | str:
    """The causes that a child found; a text if it found none because it broke."""
    try:
        ended = subprocess.run(  # noqa: S603 - our own interpreter, our own words
            [sys.executable, "-c", child],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{engine} was not imported within {timeout_s:.0f} s"
    last = ended.stdout.strip().rpartition("\n")[2]
    try:
        causes: dict[str, str | None] = json.loads(last)
    except json.JSONDecodeError:
        said = ended.stderr.strip().rpartition("\n")[2] or f"exit code {ended.returncode}"
        return f"{engine} cannot be imported: {said}"
    return causes


def _numbers(text: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, matched[0].split("."))) if matched else ()

"""`LoRARequest`s as users of vLLM hold them: seen while they live, and refused when they are late.

vLLM loads an adapter that it does not have from its path, within a step; where that fails, the
engine dies. Versions of ours have no path. So a request for one that was dropped must not reach the
engine: `AdapterGate` stands where every request of an ``LLM`` or an ``AsyncLLM`` is entered into
vLLM's table of requests under way. And a version is not dropped while somebody holds a request
object of it, which he may still use: an episode of several turns has no request in between.

A copy (out of a pickle, by ``copy.copy`` or by ``msgspec.structs.replace``) is an object of its
own, which nobody sees: asked too late, it is refused.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from rl_bridge.engines.adapters import PATHS, Resident
from rl_bridge.engines.vllm import require
from rl_bridge.errors import UnknownUpdate

_ATTRIBUTE = "_rl_bridge_gate"


@cache
def plain_kind() -> type[Any]:
    """The ``LoRARequest`` of vLLM."""
    kind: type[Any] = require("vllm.lora.request").LoRARequest
    return kind


@cache
def handed_kind() -> type[Any]:
    """A ``LoRARequest`` that can be watched; it is sent to other processes as a plain one."""

    def reduced(one: Any) -> Any:
        return plain_kind(), (one.lora_name, one.lora_int_id, one.lora_path)

    def equals(one: Any, other: object) -> bool:
        return isinstance(other, plain_kind()) and one.lora_name == other.lora_name

    def hashed(one: Any) -> int:
        return hash(one.lora_name)

    # vLLM's own equality asks for an object of the left one's class, which a plain one is not.
    names = {"__module__": __name__, "__reduce__": reduced}
    names |= {"__eq__": equals, "__hash__": hashed}
    kind: type[Any] = type("HandedRequest", (plain_kind(),), names, weakref=True)
    return kind


class Handed:
    """The request objects that were handed out and are still there."""

    def __init__(self) -> None:
        """Begin with none."""
        # (Not a count: an object may end in any thread, and in the middle of any statement.)
        self._living: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def hand(self, name: str, number: int, path: str) -> Any:
        """A new request object."""
        made = handed_kind()(name, number, path)
        self._living[next(self._numbers)] = made
        return made

    def numbers(self) -> set[int]:
        """Ids of the adapters of those that live."""
        # (The references at once: others are handed out meanwhile, in other threads.)
        living = [one() for one in self._living.valuerefs()]
        return {one.lora_int_id for one in living if one is not None}


class AdapterGate:
    """Which versions of our adapters the requests of one engine may ask for.

    What passes is a plain ``LoRARequest``: an output that is kept, or the batch that an engine in
    this process computed last, does not keep a version.
    """

    def __init__(self, processor: Any) -> None:
        """Stand before `processor`, vLLM's ``OutputProcessor`` of the engine."""
        self._processor, self._enter = processor, processor.add_request
        self._lock = threading.Lock()
        self._offered: dict[str, dict[str, str]] = {}  # adapter -> path -> label
        self._handed = Handed()
        processor.add_request = self._entered

    def offer(self, adapter: str, residents: Sequence[Resident]) -> None:
        """Replace the versions of one adapter; requests that were let in before are entered."""
        with self._lock:
            self._offered[adapter] = {one.path: one.label for one in residents}

    def hand(self, version: Resident) -> Any:
        """A request object for a version."""
        return self._handed.hand(version.own_name, version.number, version.path)

    def held(self) -> frozenset[int]:
        """Ids of the versions of which somebody holds a request object."""
        return frozenset(self._handed.numbers())

    def _entered(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Enter a request into the table of those under way, or refuse it."""
        # One lock for the look and the entry: a version that was taken away in between, and is in
        # no request under way, is dropped.
        with self._lock:
            asked = request.lora_request
            if asked is not None and str(asked.lora_path).startswith(PATHS):
                # (A further part of a request that is under way has what that one has.)
                if request.request_id not in self._processor.request_states:
                    self._check(asked)
                request.lora_request = plain_kind()(
                    asked.lora_name, asked.lora_int_id, asked.lora_path
                )
            return self._enter(request, *args, **kwargs)

    def _check(self, asked: Any) -> None:
        offered = [one for paths in self._offered.values() for one in paths.items()]
        if asked.lora_path not in dict(offered):
            msg = (
                f"adapter {asked.lora_name!r} is not in the engine any more: a version is dropped "
                "when no request has it, and nobody holds what lora_request() gave for it; the "
                f"engine holds {sorted(label for _, label in offered)}. Ask for one of these: by "
                "the executor's lora_request()."
            )
            raise _late_kind()(msg)


@cache
def _late_kind() -> type[UnknownUpdate]:
    """An `UnknownUpdate` that vLLM passes on as the request's own error: it wraps all others."""
    own = getattr(require("vllm.exceptions"), "VLLMClientError", ValueError)
    return type("UnknownAdapter", (UnknownUpdate, own), {"__module__": __name__})


def gate_of(processor: Any) -> AdapterGate:
    """The gate before vLLM's ``OutputProcessor`` of an engine: the same one for all its drivers."""
    made: AdapterGate | None = getattr(processor, _ATTRIBUTE, None)
    if made is None:
        made = AdapterGate(processor)
        setattr(processor, _ATTRIBUTE, made)
    return made

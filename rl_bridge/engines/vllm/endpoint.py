"""Which versions of adapters requests to vLLM can ask for: of an engine here, and of a server.

vLLM loads an adapter that it does not have from its path, within a step; where that fails, the
engine dies. Versions of ours have no path. So a version is dropped from its slot in three steps: it
is offered no more; the requests that got it before are looked for; and only where there is none,
the engine's ranks drop it.

An ``LLM`` and an ``AsyncLLM`` are asked by `LoRARequest`s, which users hold: these are seen while
they live (`Handed`), since an episode of several turns has no request in between, and refused when
they are late, by an `AdapterGate` before vLLM's table of requests under way. A copy (out of a
pickle, by ``copy.copy`` or by ``msgspec.structs.replace``) is an object of its own, which nobody
sees: asked too late, it is refused.

A server's clients ask in the field ``model``: ``policy`` is the version that is active at that
moment, ``policy@7`` that version. A request has a version from the moment in which its name is
looked up in the server's `AdapterTable`, long before the engine hears of it. So each lookup gets an
object of its own, which lives as long as its request. Our routes are an entry point of vLLM's group
``vllm.endpoint_plugins``, which vLLM loads if ``VLLM_PLUGINS`` names it; they exist in development
mode alone, as do those by which the engine's ranks are called.
"""

import itertools
import threading
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rl_bridge.engines.adapters import PATHS, Resident
from rl_bridge.engines.vllm import require
from rl_bridge.errors import UnknownUpdate

PATH = "/rl_bridge/adapters"
"""GET tells the adapters in use, POST says which versions can be asked for and tells the same."""
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
        self.handed = Handed()
        """The request objects that users hold."""
        processor.add_request = self._entered

    def offer(self, adapter: str, residents: Sequence[Resident]) -> None:
        """Replace the versions of one adapter; requests that were let in before are entered."""
        with self._lock:
            self._offered[adapter] = {one.path: one.label for one in residents}

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
            raise _late_kind()(
                f"adapter {asked.lora_name!r} is not in the engine any more: a version is dropped "
                "when no request has it, and nobody holds what lora_request() gave for it; the "
                f"engine holds {sorted(label for _, label in offered)}. Ask for one of these: by "
                "the executor's lora_request()."
            )


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


# ---- a server -----------------------------------------------------------------------------------


def rows_of(residents: Sequence[Resident]) -> list[dict[str, Any]]:
    """Versions as `AdapterTable.offer` takes them, and as they travel to it."""
    return [{"label": one.label, "number": one.number, "path": one.path} for one in residents]


class AdapterTable(dict[str, Any]):
    """The server's table of adapters by name, which knows the requests that have one of ours.

    An entry of ours has its key as its name, by which the server lists it. What a request gets has
    the name of the version.
    """

    def __init__(self, before: Mapping[str, Any], is_model: Callable[[str], bool]) -> None:
        """Begin with those that vLLM has; `is_model` tells names of the models that it serves."""
        super().__init__(before)
        self._ours: dict[str, dict[str, str]] = {}  # adapter -> name -> label of its version
        self._aliases: dict[str, dict[str, str]] = {}  # adapter -> other names, of which version
        self._is_model = is_model
        self._handed = Handed()

    def __getitem__(self, name: str) -> Any:
        """What a request gets."""
        one, label = super().__getitem__(name), self._label_of(name)
        if label is None:
            return one
        return self._handed.hand(label, one.lora_int_id, one.lora_path)

    def _label_of(self, name: str) -> str | None:
        """Label of the version that a name of ours is for."""
        return next((names[name] for names in self._ours.values() if name in names), None)

    def offer(self, adapter: str, active: str | None, residents: list[dict[str, Any]]) -> None:
        """Replace the versions of one adapter.

        Args:
            adapter: its name.
            active: label of the active version.
            residents: label, number and path of each version, as `Resident` has them.

        Raises:
            ValueError: a name is that of another adapter.

        """
        rows = {one["label"]: one for one in residents}
        named = {label: label for label in rows}
        if active is not None:
            named[adapter] = active
        aliases = self._aliases.get(adapter, {})
        named |= {name: label for name, label in aliases.items() if label in rows}
        before = self._ours.get(adapter, {})
        new = {adapter, *named} - before.keys()
        if taken := {name for name in new if name in self or self._is_model(name)}:
            raise ValueError(
                f"the server serves these names already: {sorted(taken)}. Unload them first"
            )
        made = {
            name: plain_kind()(name, rows[label]["number"], rows[label]["path"])
            for name, label in named.items()
        }
        for name in before.keys() - named.keys():
            self.pop(name, None)  # vLLM's own calls may have unloaded it
        self.update(made)
        self._ours[adapter] = named
        self._aliases[adapter] = {name: label for name, label in aliases.items() if name in named}

    def label_at(self, path: str) -> str | None:
        """Label of the version with this path; None if it is not offered."""
        ours = {name: label for names in self._ours.values() for name, label in names.items()}
        found = (ours[name] for name, one in self.items() if name in ours and one.lora_path == path)
        return next(found, None)

    def path_of(self, adapter: str) -> str | None:
        """Path of the version that is active; None if none is offered."""
        active = super().get(adapter)
        return None if active is None else str(active.lora_path)

    def check_alias(self, name: str, adapter: str) -> None:
        """Refuse another name for versions of an adapter.

        Raises:
            ValueError: it is the name of something else.

        """
        is_own = name == adapter or name in self._aliases.get(adapter, {})
        if not is_own and (name in self or self._is_model(name)):
            raise ValueError(f"the server serves {name!r} already. Ask by another name")

    def alias(self, name: str, adapter: str, label: str) -> None:
        """Let clients ask by one more name for a version.

        It stays that version's, until it is given again or the version is dropped.

        Args:
            name: the name; that of the adapter itself changes nothing.
            adapter: of the version.
            label: of the version.

        Raises:
            ValueError: it is the name of something else, or the version is not offered.

        """
        self.check_alias(name, adapter)
        if label not in self._ours.get(adapter, {}):
            raise ValueError(f"version {label!r} is not offered. Install it again")
        if name != adapter:
            one = super().__getitem__(label)
            self[name] = plain_kind()(name, one.lora_int_id, one.lora_path)
            self._ours[adapter][name] = label
            self._aliases[adapter][name] = label

    def unalias(self, name: str) -> str | None:
        """Take a name away that is an older version's; the adapter, if it is the active one's.

        Raises:
            ValueError: it is no name of an adapter that versions are offered of.

        """
        for adapter, aliases in self._aliases.items():
            if name in self and (name == adapter or name in aliases):
                active = self._ours[adapter].get(adapter)
                if name == adapter or active is None or aliases[name] == active:
                    return adapter
                del self[name], aliases[name], self._ours[adapter][name]
                return None
        known = sorted(self._aliases.keys() & self.keys())
        raise ValueError(f"{name!r} was not loaded, expected one of {known}")

    def used(self) -> list[int]:
        """Ids of our adapters that a request has."""
        return sorted(self._handed.numbers())


class AdapterRoutes:
    """The plugin, as vLLM's contract for endpoint plugins has it."""

    name = "rl_bridge"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        """Know no server yet."""
        self._table: AdapterTable | None = None
        self._problem = ""

    def attach_router(self, app: Any) -> None:
        """Add the routes, in development mode."""
        if require("vllm.envs").VLLM_SERVER_DEV_MODE:
            app.add_api_route(PATH, self._get, methods=["GET"])
            app.add_api_route(PATH, self._post, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Count the lookups of adapters from now on."""
        del engine_client
        if getattr(args, "api_server_count", None) not in {None, 1}:
            self._problem = (
                f"the server has {args.api_server_count} processes that take requests, expected "
                "one: each would know its own requests alone. Start it with --api-server-count 1"
            )
            return
        models = state.openai_serving_models
        self._table = AdapterTable(models.lora_requests, models.is_base_model)
        models.lora_requests = self._table

    async def _get(self) -> Any:
        return self._answer(AdapterTable.used)

    async def _post(self, given: dict[str, Any]) -> Any:
        return self._answer(
            lambda table: table.offer(given["adapter"], given["active"], given["residents"])
        )

    def _answer(self, action: Any) -> Any:
        response = require("fastapi.responses").JSONResponse
        if self._table is None:
            return response({"error": self._problem}, status_code=409)
        try:
            action(self._table)
        except (ValueError, KeyError, TypeError) as error:
            return response({"error": str(error)}, status_code=409)
        return response({"used": self._table.used()})

"""The versions of an adapter that requests to SGLang can ask for, in the process that takes them.

SGLang's tokenizer process keeps the adapters by name and counts the requests of each. A request
asks by ``lora_path``: ``policy`` is the version that is active at that moment, ``policy@7`` that
version. A version is dropped from its slot in three steps, since a request for an adapter that the
scheduler does not have ends the engine: its names are taken away here; the requests that got it
before are looked for; and only where there is none, the engine's ranks drop it. Between the lookup
of a name and its count SGLang may wait, so a lookup under way counts for every version.
"""

import json
from collections.abc import Mapping
from typing import Any

from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.sglang import require
from rl_bridge.errors import WeightBridgeError

FRONT = "rl_bridge-front:"
"""Begins the names of the weights that this process answers itself; the rest is a call as JSON."""
_STATE = "_rl_bridge_adapters"


class OfferedAdapters:
    """What one tokenizer process offers."""

    def __init__(self, registry: Any) -> None:
        """Offer nothing yet, beside what SGLang's registry has."""
        self._registry = registry
        self._ours: dict[str, dict[str, Resident]] = {}  # adapter -> name -> version
        self._numbers: dict[str, int] = {}  # SGLang's id -> ours
        self.lookups = 0
        """Lookups of names that are under way."""

    async def offer(self, adapter: str, active: str | None, residents: list[Any]) -> None:
        """Replace the versions of one adapter.

        Args:
            adapter: its name.
            active: label of the active version.
            residents: fields of each version, as `Resident` has them.

        Raises:
            ValueError: a name is that of another adapter.

        """
        versions = [Resident(**one) for one in residents]
        named = {one.label: one for one in versions}
        if active is not None:
            named[adapter] = named[active]
        registry = self._registry
        kind = require("sglang.srt.lora.lora_registry").LoRARef
        counter = require("sglang.srt.utils").ConcurrentCounter
        async with registry._registry_lock.writer_lock:  # noqa: SLF001 - SGLang offers no more
            table, counters = registry._registry, registry._counters  # noqa: SLF001 - as above
            before = self._ours.get(adapter, {})
            if taken := sorted(({adapter, *named} - before.keys()) & table.keys()):
                raise ValueError(
                    f"the engine serves these names already: {taken}. Unload them first"
                )
            for name in before:
                table.pop(name, None)  # SGLang's own calls may have unloaded it
            for name, one in named.items():
                table[name] = kind(one.update_id, name, one.path, True)  # noqa: FBT003 - pinned
                if one.update_id not in counters:
                    counters[one.update_id] = counter()
                self._numbers[one.update_id] = one.number
            self._ours[adapter] = named

    def used(self) -> list[int]:
        """Our ids of the versions that a request has; all of them while a name is looked up."""
        offered = {one.update_id for named in self._ours.values() for one in named.values()}
        counters = self._registry._counters  # noqa: SLF001 - SGLang offers no more
        # (One without a counter was unloaded by SGLang's own calls, which wait for its requests.)
        counts = {uid: counters[uid].value() if uid in counters else 0 for uid in self._numbers}
        for uid, count in counts.items():
            if uid not in offered and not count and not self.lookups:
                counters.pop(uid, None)
                del self._numbers[uid]
        return sorted(n for uid, n in self._numbers.items() if self.lookups or counts[uid])


def offered_by(registry: Any) -> OfferedAdapters:
    """What the process of this registry offers, made with the first call."""
    made: OfferedAdapters | None = getattr(registry, _STATE, None)
    if made is None:
        made = OfferedAdapters(registry)
        setattr(registry, _STATE, made)
    return made


async def acquire(original: Any, registry: Any, names: Any) -> Any:
    """Look a name up as SGLang does it, and count that it is under way."""
    offered = offered_by(registry)
    offered.lookups += 1
    try:
        return await original(registry, names)
    finally:
        offered.lookups -= 1


async def answer_front(registry: Any, text: str) -> str:
    """Do what a driver asks of this process; the answer as JSON. Never raises."""
    try:
        given: Mapping[str, Any] = json.loads(text)
        offered = offered_by(registry)
        if "adapter" in given:
            await offered.offer(given["adapter"], given["active"], given["residents"])
        return json.dumps({"used": offered.used()})
    except (ValueError, KeyError, TypeError, AttributeError, WeightBridgeError) as error:
        return json.dumps({"error": str(error)})

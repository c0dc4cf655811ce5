"""How ranks that are actors of Ray agree on a publication: through one small actor, by text.

It keeps what a store of torch.distributed would keep for them, and opens no port of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from rl_bridge.errors import GroupAborted
from rl_bridge.groups.exchange import Store, StoreExchange, StoreOptions
from rl_bridge.ray.calls import require
from rl_bridge.ray.pairing import Said

# Added to a wait, so that its answer can arrive.
_ANSWER_S = 5.0


class FleetMembership(Said):
    """A trainer's actor in a fleet.

    Attributes:
        fleet: id of the fleet; empty after it left.
        driver: name of its driver, for people.
        take_over: also if another fleet has the actor.
        rank: its rank, counted from 0.
        world_size: how many ranks publish together; 0 for an actor that publishes alone.
        timeout_s: longest wait for the others, in one step of a publication.
        anew: forget earlier versions: another rank has lost its part of them.

    """

    fleet: StrictStr = Field(max_length=64)
    driver: StrictStr = Field(default="", max_length=1024)
    take_over: StrictBool = False
    rank: StrictInt = Field(default=0, ge=0)
    world_size: StrictInt = Field(default=0, ge=0, lt=1 << 20)
    timeout_s: StrictFloat = Field(gt=0, allow_inf_nan=False)
    anew: StrictBool = False


class GroupStore:
    """What the actor runs: keys and texts. It must outlive the ranks, as any store of a group."""

    def __init__(self) -> None:
        """Start empty."""
        self._texts: dict[str, str] = {}
        self._changed = asyncio.Condition()

    async def set(self, key: str, text: str) -> None:
        """Keep a text."""
        async with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    async def get(self, key: str) -> bytes:
        """The text under a key; empty if there is none."""
        return self._texts.get(key, "").encode()

    async def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._texts for key in keys)

    async def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has the expected text, or is new and "" is expected; what it has now."""
        async with self._changed:
            found = self._texts.get(key)
            if found == expected or (found is None and not expected):
                found = self._texts[key] = desired
                self._changed.notify_all()
        return (expected if found is None else found).encode()

    async def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._texts.pop(key, None) is not None

    async def wait_for(
        self, keys: list[str], end: str, timeout_s: float
    ) -> tuple[list[str | None], str | None]:
        """Wait until all keys are there, or the one called `end`, or the time is up.

        Returns the texts, by key, and that of `end`; None for each that is not there.
        """
        async with self._changed:
            ready = self._changed.wait_for(
                lambda: end in self._texts or all(key in self._texts for key in keys)
            )
            with suppress(TimeoutError):  # the answer tells what is missing
                await asyncio.wait_for(ready, timeout_s)
            return [self._texts.get(key) for key in keys], self._texts.get(end)


class _Client:
    """The actor's store, as a rank asks it: each method of a torch store is one of the actor's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._ask, method)

    def _ask(self, method: str, *given: object) -> Any:
        ray = require()
        try:
            return ray.get(getattr(self._actor, method).remote(*given))
        except require("ray.exceptions").RayError as error:
            cause = str(error).strip().partition("\n")[0].rstrip(".")
            raise GroupAborted(
                f"the actor that keeps the group's store is lost: {cause}. Publish a later "
                "version, for which the fleet makes another one."
            ) from error


class RayExchange(StoreExchange):
    """Over an actor that runs `GroupStore`; it also settles how a publication ends."""

    def __init__(self, actor: Any, membership: FleetMembership, *, name: str) -> None:
        """Be a rank.

        Raises:
            ValueError: the rank is none of the group.

        """
        self._client = _Client(actor)
        super().__init__(
            StoreOptions(cast("Store", self._client), name, membership.timeout_s),
            rank=membership.rank,
            world_size=membership.world_size,
        )

    def _wait_for(
        self, step: str, keys: Sequence[str], verdict: str, timeout_s: float
    ) -> tuple[list[str | None], str | None]:
        """Let the actor wait: it answers as soon as there is something to say."""

        def wait() -> Any:
            return self._client.wait_for(keys, verdict, timeout_s)

        found, end = self.rounds.ask(step, wait, timeout_s + _ANSWER_S)
        return found, end

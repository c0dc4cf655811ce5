"""Clean-up after a sync on the trainer's side, in the one order that is safe.

The engines have loaded. Then: delete temporaries, so that nothing refers to shared memory; collect
memory that other processes released; wait for the other ranks, so that none goes on while another
one still sends; wait for the device; free cached blocks; drop the engines' cached prefixes. At the
barrier the ranks tell each other what failed, so that all of them know the same.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import torch

from rl_bridge.errors import GroupAborted, MalformedManifest, describe
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.manifest.canonical import canonical_json, decode_json
from rl_bridge.transports.base import checked_seconds

__all__ = [
    "STEPS",
    "CleanUp",
    "DeviceCalls",
    "cuda_calls",
    "share_json",
]

_LOG = logging.getLogger(__name__)
_MAX_REASON = 2048

STEPS = (
    "delete",
    "ipc_collect",
    "barrier",
    "synchronize",
    "empty_cache",
    "reset_prefix_cache",
)
"""The order. A device's steps are left out if there is none, the barrier with one rank."""


def share_json(
    exchange: GroupExchange, step: str, body: dict[str, object], *, timeout_s: float
) -> list[dict[str, object]]:
    """Give a JSON object and get those of all ranks; nothing is unpickled.

    Raises:
        GroupAborted: not all ranks came in time.
        MalformedManifest: a rank sent no JSON object.

    """
    payload = canonical_json(body).encode("ascii")
    found = []
    for rank, data in enumerate(exchange.gather(step, payload, timeout_s=timeout_s)):
        text = data.decode("ascii", errors="replace")
        value, end = decode_json(text)
        if not isinstance(value, dict) or end != len(text):
            msg = (
                f"rank {rank} sent {text[:80]!r} in step {step!r}, expected a JSON object. Use the "
                "same rl_bridge release on every rank."
            )
            raise MalformedManifest(msg)
        found.append(value)
    return found


def _share_failure(exchange: GroupExchange, failure: str, *, timeout_s: float) -> None:
    """Tell the other ranks what failed here (empty: nothing), and learn what failed there.

    Raises:
        GroupAborted: nothing failed here, and another rank failed or did not come in time.

    """
    body: dict[str, object] = {"failure": failure[:_MAX_REASON]}
    try:
        bodies = share_json(exchange, "outcome", body, timeout_s=timeout_s)
    finally:
        exchange.decide("over")  # a rank that still waits for this sync need not wait any longer
    failed = {
        rank: str(one.get("failure")) for rank, one in enumerate(bodies) if one.get("failure")
    }
    if failed and not failure:
        rank, why = next(iter(failed.items()))
        msg = (
            f"the sync failed on rank {rank}: {why}. This rank's part of it was done. Mend the "
            "cause, then sync again."
        )
        raise GroupAborted(msg, tuple(failed))


class DeviceCalls(Protocol):
    """What the clean-up calls of a device; ``torch.cuda`` has it."""

    def ipc_collect(self) -> None:
        """Free shared memory that nobody uses any more."""

    def synchronize(self) -> None:
        """Wait for all work."""

    def empty_cache(self) -> None:
        """Free cached blocks."""


class CleanUp:
    """Runs the steps after each sync."""

    def __init__(
        self,
        *,
        device: DeviceCalls | None = None,
        exchange: GroupExchange | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Configure.

        Args:
            device: None if the weights lie on the CPU.
            exchange: of the trainer's ranks; None if there is one rank.
            timeout_s: how long a rank waits for the others, their engines' loading included.

        Raises:
            TypeError: a limit that is no number.
            ValueError: one that is not above 0, or beyond all waits.

        """
        self._device = device
        self._exchange = exchange
        self._timeout_s = checked_seconds("timeout_s", timeout_s)

    @asynccontextmanager
    async def around(self, chunks: Iterable[object], client: object) -> AsyncIterator[None]:
        """Run a sync, then the steps, also if the sync failed: then the caller gets its error.

        Args:
            chunks: of the sync.
            client: of the engines, whose cached prefixes are dropped; None for a helping rank.

        """
        if self._exchange is not None:
            self._exchange.begin()
        # A generator that was not read to its end holds a chunk.
        delete = getattr(chunks, "close", lambda: None)
        reset = getattr(client, "reset_prefix_cache", None)
        try:
            yield
        except BaseException as error:
            self.read_out(chunks, error)
            try:
                await self.run(describe(error), delete=delete, reset_prefix_cache=reset)
            except Exception as second:  # noqa: BLE001 - the first failure is what the caller gets
                error.add_note(f"rl_bridge: the clean-up failed, too: {describe(second)}")
            raise
        await self.run("", delete=delete, reset_prefix_cache=reset)

    def read_out(self, chunks: Iterable[object], error: BaseException | None) -> None:
        """After a failure, take part in the remaining gathers of this sync.

        The other ranks wait for this rank's parts of the remaining chunks; without them their
        process group is lost. This does nothing if another rank did not come, or if this rank was
        interrupted.

        Args:
            chunks: that were not read to their end; a list's chunks are no gathers.
            error: what failed; gets a note if the rest could not be read.

        """
        if not isinstance(error, Exception) or isinstance(error, GroupAborted):
            return
        if self._exchange is None or not isinstance(chunks, Iterator):
            return
        try:
            for chunk in chunks:
                del chunk
        except Exception as second:  # noqa: BLE001 - the first failure is what the caller gets
            _LOG.warning("chunks could not be read to their end", exc_info=True)
            error.add_note(f"rl_bridge: its other chunks could not be read: {describe(second)}")

    async def run(
        self,
        failure: str,
        *,
        delete: Callable[[], object],
        reset_prefix_cache: Callable[[], Awaitable[object]] | None = None,
    ) -> tuple[str, ...]:
        """Run all steps, also if one fails; returns the names of those that were run, in order.

        Args:
            failure: what failed in the sync on this rank; empty if nothing did.
            delete: releases temporaries.
            reset_prefix_cache: of the engines, if their installs do not do it.

        Raises:
            GroupAborted: another rank failed, or did not come in time.
            Exception: of the first step that failed, after the others were run.

        """
        device, exchange = self._device, self._exchange
        found: dict[str, Callable[[], object]] = {"delete": delete}
        if device is not None:
            found["ipc_collect"] = device.ipc_collect
            found["synchronize"] = device.synchronize
            found["empty_cache"] = device.empty_cache
        if exchange is not None:
            # In a thread: other ranks wait here for as long as the engines load.
            found["barrier"] = lambda: asyncio.to_thread(
                _share_failure, exchange, failure, timeout_s=self._timeout_s
            )
        if reset_prefix_cache is not None and not failure:
            found["reset_prefix_cache"] = reset_prefix_cache
        done = tuple(name for name in STEPS if name in found)
        failures: list[Exception] = []
        for name in done:
            try:
                result = found[name]()
                if inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001 - the first one is raised after the last step
                failures.append(error)
        for other in failures[1:]:
            failures[0].add_note(f"rl_bridge: clean-up went on, and failed again: {other}")
        if failures:
            raise failures[0]
        return done


def cuda_calls(device: torch.device | str) -> DeviceCalls | None:
    """The calls of one of torch's devices; None for the CPU."""
    return torch.cuda if torch.device(device).type == "cuda" else None

"""Shared by the seams of frameworks: the version that stays published, and many engine servers.

A trainer keeps the version that its engines have proven last (`Standing`). Where there are many
servers (`EngineServers`), the trainer's first rank publishes whole tensors once, and updates every
server from there, all at the same time and in two steps. First each server imports, verifies and
stages the version, and serves on; where one refuses, all of them give it up. Only then each
installs and proves it. A server that fails in this second step keeps the version before, unless it
is torn or lost, and the others have the new one: the error names it, and the next version brings
all that live together again.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rl_bridge.bridge import TensorBridge, make_weight_bridge
from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.errors import (
    EngineLost,
    TornEngine,
    WeightBridgeError,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.installers import TransactionalAdapter
from rl_bridge.manifest import WeightUpdateManifest

__all__ = ["EngineServers", "Standing", "raise_on_all_ranks", "readable", "stage"]

_LOG = logging.getLogger(__name__)

Pairs = Iterable[tuple[str, torch.Tensor]]


def readable(transport: str, pairs: Pairs) -> Pairs:
    """The tensors where `transport` reads them: on the host, unless it carries those of a GPU."""
    is_there = transport.startswith("cuda")
    return ((name, one if is_there else one.cpu()) for name, one in pairs)


class Standing:
    """The version that stays published: the newest one that engines have proven."""

    def __init__(self) -> None:
        """Begin without a version."""
        self._held: str | None = None

    @contextmanager
    def replaced(self, bridge: TensorBridge, manifest: WeightUpdateManifest) -> Iterator[None]:
        """Have engines take a version: if that fails, it is released, else the one before."""
        try:
            yield
        except BaseException:
            bridge.release(manifest.update_id)
            raise
        previous, self._held = self._held, manifest.update_id
        if previous is not None:
            bridge.release(previous)


def stage(executor: TwoPhaseExecutor, manifest: WeightUpdateManifest) -> None:
    """Import and prepare a version, whose bytes are read by the engine's own processes.

    Raises:
        WeightBridgeError: refused, and given up.

    """
    executor.import_weights(manifest, reads=False)
    executor.prepare_weights(manifest)


class EngineServers:
    """The engine servers of one trainer, of which each has an executor in this process."""

    def __init__(self, transport: str) -> None:
        """Configure; no server is called.

        Args:
            transport: which one carries the bytes.

        Raises:
            WeightBridgeUnavailableError: no such transport, or not on this machine.

        """
        self._transport = transport
        self.bridge: TensorBridge = make_weight_bridge(transport, source_worker="trainer")
        self._executors: dict[str, TwoPhaseExecutor] = {}
        self._standing = Standing()

    def connect(self, adapters: Mapping[str, TransactionalAdapter]) -> None:
        """Update these servers from now on, and no others.

        A server that came back under its old URL is another engine: all are connected anew.

        Args:
            adapters: URL of a server -> what installs there.

        """
        self._disconnect()
        for url, adapter in adapters.items():
            self._executors[url] = TwoPhaseExecutor(
                weight_transport=self._transport, weight_install_adapter=adapter
            )

    def update(self, tensors: Pairs, weight_version: int | None = None) -> int:
        """Publish one version, and return when every server has proven it.

        Args:
            tensors: pairs of the checkpoint's name and the whole tensor, read to the end.
            weight_version: None counts on from the last one.

        Returns:
            The version.

        Raises:
            WeightBridgeError: it was not published.
            WeightUpdateRejectedError: a server refused or undid it; the text has which, why, and
                which version the others have.

        """
        manifest = self.bridge.publish(tensors, weight_version=weight_version)
        with self._standing.replaced(self.bridge, manifest):
            self._stage(manifest)
            self._commit(manifest)
        return manifest.weight_version

    def _stage(self, manifest: WeightUpdateManifest) -> None:
        """Have every server stage it; where one refuses, all give it up."""
        failed = self._on_all(lambda executor: stage(executor, manifest))
        if failed:
            why = _told(failed)
            for url in self._executors.keys() - failed.keys():
                try:
                    self._executors[url].abort_weights(manifest, why)
                except Exception:  # noqa: BLE001 - the refusal counts; the next version ends it
                    number = manifest.weight_version
                    _LOG.warning("%s may hold version %d staged", url, number, exc_info=True)
            raise WeightUpdateRejectedError(
                f"version {manifest.weight_version} is refused by {len(failed)} of "
                f"{len(self._executors)} engines, and all keep the version before: {why}"
            ) from next(iter(failed.values()))

    def _commit(self, manifest: WeightUpdateManifest) -> None:
        failed = self._on_all(lambda executor: executor.commit_weights(manifest))
        if failed:
            ended = {
                url: one for url, one in failed.items() if isinstance(one, TornEngine | EngineLost)
            }
            state = "which keep the version before"
            if ended:
                state = f"of which {', '.join(ended)} must be recovered or started anew"
            raise WeightUpdateRejectedError(
                f"version {manifest.weight_version} is not in {len(failed)} of "
                f"{len(self._executors)} engines, {state}; the others have it: {_told(failed)}"
            ) from next(iter((ended or failed).values()))

    def _on_all(self, do: Callable[[TwoPhaseExecutor], object]) -> dict[str, BaseException]:
        """Do it with all servers at once; what it raised, by url."""
        with ThreadPoolExecutor(max(1, len(self._executors))) as threads:
            done = {url: threads.submit(do, one) for url, one in self._executors.items()}
        return {url: error for url, one in done.items() if (error := one.exception())}

    def close(self) -> None:
        """Leave the servers to the next trainer, and release what is published. Idempotent."""
        self._disconnect()
        self.bridge.close()

    def _disconnect(self) -> None:
        while self._executors:
            _, executor = self._executors.popitem()
            with suppress(WeightBridgeError):  # a server that is gone has nothing to be told
                executor.close()


def _told(failed: Mapping[str, BaseException]) -> str:
    return "; ".join(f"{url}: {describe(error)}" for url, error in failed.items())


def raise_on_all_ranks(problem: Exception | None, group: Any = None) -> None:
    """Raise on every rank of the trainer if its first one failed: else they would wait for it.

    Args:
        problem: what failed on this rank; it counts on the first one.
        group: of all ranks over Gloo; None takes the default one, whatever its backend.

    Raises:
        WeightUpdateRejectedError: on the other ranks; on the first one it is `problem` itself.

    """
    device = None if group is not None else torch.accelerator.current_accelerator()
    failed = torch.tensor(int(problem is not None), device=device or "cpu")
    torch.distributed.broadcast(failed, src=0, group=group)
    if problem is not None:
        raise problem
    if failed:
        raise WeightUpdateRejectedError(
            "the update failed in the trainer's first rank, which says why. Start the trainer anew "
            "from its last checkpoint."
        )

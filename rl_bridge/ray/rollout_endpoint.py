"""The rollout's endpoint: an engine that takes manifests as bytes and answers in JSON.

It takes a channel (`join`), and then versions on it (`update`). When it changes to another channel,
the version of the old one stays in the engine until the first version has come by the new one. The
endpoint knows nothing of Ray: it takes and gives bytes and plain values.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_bridge.assembly.wanted import Wanted, WantedLayout
from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import EngineLost, TornEngine, WeightBridgeUnavailableError
from rl_bridge.installers.base import TransactionalAdapter, WeightInstallAdapter
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.ray.calls import RolloutAnswer
from rl_bridge.ray.pairing import EndpointFacts, PairChoice, look_around

_LOG = logging.getLogger(__name__)

Outcome = Literal["acknowledged", "refused", "torn", "unjoined", "status"]


@dataclass(slots=True)
class _Channel:
    """How versions come to the engine."""

    choice: tuple[str, str, Mapping[str, str]]  # transport, group and options
    executor: RolloutExecutor
    bridge: TensorBridge
    before: RolloutExecutor | None  # until the first version: the channel before, closed

    @property
    def holder(self) -> RolloutExecutor:
        """The executor whose version the engine holds."""
        is_new = self.executor.active_weight_version is None and not self.executor.is_torn
        return self.before if is_new and self.before is not None else self.executor

    def failed(self, error: Exception) -> None:
        """After an update that failed: does the engine still hold the version of `before`?

        The engine may be torn, or have been lost or started anew meanwhile.
        """
        if self.executor.is_torn:
            self.before = None
        if self.before is None or self.holder is not self.before:
            return
        held = _held_by(self.executor.weight_install_adapter)
        last = self.before.last_ack
        is_there = held is None or (last is not None and held == {last.update_id})
        if isinstance(error, EngineLost) or not is_there:
            self.before = None

    def close(self) -> None:
        """Release the active version and close the bridge; the engine keeps its bytes."""
        try:
            self.executor.close()
        finally:
            self.bridge.close()


class RolloutEndpoint:
    """Keeps one engine at one version; every method may be called from any thread."""

    def __init__(
        self,
        adapter: Callable[[], WeightInstallAdapter | TransactionalAdapter | None],
        *,
        worker: str = "rollout",
        rank: int = 0,
        node: str = "",
        directories: Sequence[str] = (),
        options: Mapping[str, Mapping[str, object]] | None = None,
        wanted: Callable[[], Wanted | WantedLayout | None] = lambda: None,
    ) -> None:
        """Configure; the engine is not touched before the first version.

        Args:
            adapter: gives how weights get into the engine; asked once for each channel.
            worker: this endpoint's name.
            rank: its rank.
            node: what the cluster calls this machine.
            directories: directories that it may share with the trainer.
            options: transport -> more options for `make_weight_bridge`.
            wanted: gives what it holds of the weights of a group of trainers; asked once for each
                channel. None: all of them, whole.

        """
        self._adapter = adapter
        self._worker = worker
        self._rank = rank
        self._node = node
        self._directories = tuple(directories)
        self._options = {name: dict(given) for name, given in (options or {}).items()}
        self._wanted = wanted
        self._groups: dict[str, str] = {}
        """Update -> root of the group's version that it is, of the last one and the active one."""
        self._channel: _Channel | None = None
        # An actor may run several methods at a time. Methods that only look do not take it.
        self._lock = threading.RLock()

    @property
    def executor(self) -> RolloutExecutor:
        """What keeps the engine at its version.

        Raises:
            WeightBridgeUnavailableError: it has not joined yet.

        """
        channel = self._channel
        if channel is None:
            raise WeightBridgeUnavailableError(
                f"rollout {self._worker!r} has no transport yet. Join it first: "
                "RolloutFleet.join(name, actor)."
            )
        return channel.executor

    def facts(self, publisher: bytes) -> bytes:
        """What this endpoint is, and what it reaches of the publisher's: `EndpointFacts` as JSON.

        Raises:
            MalformedManifest: what is given are not the facts of a publisher's endpoint.

        """
        return look_around(
            node=self._node,
            directories=self._directories,
            publisher=EndpointFacts.from_json(publisher),
        ).to_json()

    @deferred_interrupts()
    def join(self, choice: bytes) -> bytes:
        """Take a channel; the same one again changes nothing. Returns `RolloutAnswer` as JSON.

        If it cannot join, the cause is in the answer, and it keeps the channel and the version that
        it has.
        """
        with self._lock:
            try:
                self._join(PairChoice.from_json(choice))
            except Exception as error:  # noqa: BLE001 - the answer carries it to the caller
                _LOG.warning("rollout %s cannot join", self._worker, exc_info=True)
                return self._answer("refused", error).to_json()
            return self._answer("status").to_json()

    @deferred_interrupts()
    def update(self, manifest: bytes) -> bytes:
        """Install one version, or leave everything as it was. Returns `RolloutAnswer` as JSON.

        Every failure is in the answer, in words: the caller may not have the exception's type.
        """
        with self._lock:
            channel = self._channel
            if channel is None:
                return self._answer("unjoined").to_json()
            try:
                self._install(channel.executor, manifest.decode())
            except Exception as error:  # noqa: BLE001 - the answer carries it to the caller
                _LOG.warning("rollout %s does not install: %s", self._worker, error)
                channel.failed(error)
                is_torn = isinstance(error, TornEngine) or channel.holder.is_torn
                return self._answer("torn" if is_torn else "refused", error).to_json()
            channel.before = None
            return self._answer("acknowledged").to_json()

    def status(self) -> bytes:
        """What the engine holds: `RolloutAnswer` as JSON. Waits for no update."""
        return self._answer("unjoined" if self._channel is None else "status").to_json()

    def check_servable(self) -> int:
        """The version that the engine may answer with. Waits for no update.

        Raises:
            TornEngine: it may not answer.
            EngineLost: it was gone when it was asked last.
            WeightBridgeUnavailableError: it has no verified version yet.

        """
        holder = self._holder or self.executor  # this one raises: it has not joined
        holder.check_servable()
        version = holder.active_weight_version
        if version is None:  # an update in another thread has failed since the look before
            holder.check_servable()
            raise WeightBridgeUnavailableError(
                f"rollout {self._worker!r} loses its version just now. Ask it again."
            )
        return version

    @deferred_interrupts()
    def close(self) -> None:
        """Release the active version and close the bridge; the engine keeps its bytes."""
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()

    @property
    def _holder(self) -> RolloutExecutor | None:
        """The executor whose version the engine holds."""
        return None if (channel := self._channel) is None else channel.holder

    def _install(self, executor: RolloutExecutor, text: str) -> None:
        manifest = WeightUpdateManifest.from_json(text)
        if isinstance(manifest, GroupManifest):
            last = None if self._holder is None else self._holder.last_ack
            held = None if last is None else last.update_id
            self._groups = {one: root for one, root in self._groups.items() if one == held}
            self._groups[manifest.update_id] = manifest.root
        executor.update_weights(manifest)

    def _join(self, chosen: PairChoice) -> None:
        choice = (chosen.transport, chosen.group, chosen.consumer_options)
        if self._channel is not None and self._channel.choice == choice:
            return
        bridge = self._open(chosen)
        try:
            executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=self._adapter())
        except BaseException:
            bridge.close()
            raise
        # Without an adapter the rollout uses the channel's own tensors, which end with the channel.
        holder = None if executor.weight_install_adapter is None else self._holder
        before, self._channel = self._channel, _Channel(choice, executor, bridge, holder)
        _LOG.info("rollout %s joins by %s", self._worker, chosen)
        if before is not None:
            before.close()

    def _open(self, chosen: PairChoice) -> TensorBridge:
        options: dict[str, Any] = {
            **self._options.get(chosen.transport, {}),
            **chosen.consumer_options,
        }
        if chosen.group:
            options["wanted"] = self._wanted()
        return make_weight_bridge(
            chosen.transport, source_worker=self._worker, source_rank=self._rank, **options
        )

    def _answer(self, outcome: Outcome, error: Exception | None = None) -> RolloutAnswer:
        holder = self._holder
        answer = RolloutAnswer(
            worker=self._worker,
            rank=self._rank,
            pid=os.getpid(),
            node=self._node,
            outcome=outcome,
            error="" if error is None else type(error).__name__,
            message="" if error is None else str(error)[:4096],
        )
        return answer if holder is None else answer.of(holder, self._groups)


def _held_by(adapter: object) -> set[str | None] | None:
    """The update that each of an engine's ranks holds; None if its adapter cannot tell."""
    tell = getattr(adapter, "describe", None)
    if tell is None:
        return None
    try:
        replies = tell()
        begun = any(reply["stage"] not in {"idle", "prepared"} for reply in replies)
        return set() if begun else {reply["update_id"] for reply in replies}
    except Exception:  # noqa: BLE001 - logged in full
        _LOG.warning("what an engine holds is not known", exc_info=True)
        return set()

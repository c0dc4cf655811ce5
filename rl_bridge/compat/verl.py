"""verl's checkpoint engine ``rl_bridge``: each sync of weights is a version of this library.

verl imports this module in every process that has a part in the sync, which two lines of its
configuration ask for; the third lets an engine keep the version that an undo goes back to.

    actor_rollout_ref.rollout.checkpoint_engine.backend=rl_bridge
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rl_bridge.compat.verl
    actor_rollout_ref.rollout.free_cache_engine=False

The trainer's first rank publishes, verl's global step is the version. The vLLM servers of verl take
it together: all ranks of all servers verify and stage it, or every server keeps the version before;
then the trainer gives the word, and each server installs and proves it, or undoes it. Other
rollouts of verl read the version once it is verified, and install it by themselves: without proof,
and without undo. Manifests and answers go through a small actor of Ray.

Names are those of verl 0.9.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import torch

from rl_bridge.bridge import TensorBridge, make_weight_bridge
from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.compat.servers import Standing, readable, stage
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    describe,
)
from rl_bridge.manifest import WeightUpdateManifest
from rl_bridge.ray.calls import require
from rl_bridge.ray.group_store import GroupStore

__all__ = ["BridgeCheckpointEngine", "Delivery"]

BACKEND = "rl_bridge"
STAGED, PROVEN, READ = "staged", "proven", "read"
"""Answers of a rollout's process: its engine can install the version; its engine has proven it; the
process has read the version's bytes."""
_FAILED = "failed: "
_LONGER_S = 1e6  # than `_told` waits


async def _told(call: Any, what: str, timeout_s: float) -> Any:
    """An actor's answer. Raises DeadlineExceeded, or EngineLost if the actor is gone."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout_s)
    except TimeoutError as error:
        require().cancel(call)
        raise DeadlineExceeded(
            f"{what} did not come within {timeout_s} s. See the log of the other side's workers; "
            f"engine_kwargs.{BACKEND}.timeout_s is how long to wait."
        ) from error
    except require("ray.exceptions").RayActorError as error:
        raise EngineLost(
            f"{what} will not come: the other side's process ended. Start it anew with verl."
        ) from error


class Delivery:
    """One sync as a rollout's process has it: what `BridgeCheckpointEngine.receive_weights` gives.

    Read it with ``async for``, as verl's rollouts do: the first pair comes when every byte of the
    whole version is verified. Or take `manifest`, stage that, `answer`, wait for the `word`,
    install it, and `answer` once more.

    Attributes:
        engine: the one that it came by.

    """

    def __init__(
        self, engine: "BridgeCheckpointEngine", sync: str, rank: int, mailbox: Any
    ) -> None:
        """Configure; nothing is waited for."""
        self.engine = engine
        self._sync, self._rank, self._mailbox = sync, rank, mailbox

    async def manifest(self) -> WeightUpdateManifest:
        """Wait for the trainer's manifest.

        Raises:
            WeightUpdateRejectedError: the trainer could not publish; the text says why.
            WeightBridgeError: no manifest in time; the trainer's first rank is dead.

        """
        call = self._mailbox.wait_for.remote([f"{self._sync} offer"], "", _LONGER_S)
        (told,), _ = await _told(call, "the trainer's manifest", self.engine.timeout_s)
        text, failure = json.loads(told)
        if failure:
            raise WeightUpdateRejectedError(
                f"the trainer published no version: {failure}. The engine keeps its own."
            )
        return WeightUpdateManifest.from_json(text)

    async def word(self) -> None:
        """Wait until the trainer knows that every rollout can install the version.

        Raises:
            WeightUpdateRejectedError: one cannot; the text says which, and why.
            WeightBridgeError: no word in time; the trainer's first rank is dead.

        """
        call = self._mailbox.wait_for.remote([f"{self._sync} word"], "", _LONGER_S)
        (refusal,), _ = await _told(call, "the trainer's word", self.engine.timeout_s)
        if refusal:
            raise WeightUpdateRejectedError(f"{refusal}. The engine keeps its own.")

    def answer(self, said: str | BaseException) -> None:
        """Tell the trainer how it went: `STAGED`, `PROVEN`, `READ`, or the error."""
        text = said if isinstance(said, str) else f"{_FAILED}{describe(said)}"
        for step in ("staged",) if said == STAGED else ("staged", "done"):
            self._mailbox.set.remote(f"{self._sync} {step} {self._rank}", text)
        if text.startswith(_FAILED):
            self._mailbox.set.remote(f"{self._sync} failed", text)

    async def __aiter__(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Pairs of name and tensor, on the CPU, read-only: valid until the next is asked for."""
        try:
            manifest = await self.manifest()
            bridge = self.engine.bridge
            tensors = await asyncio.to_thread(bridge.import_update, manifest)
            for name in tensors:
                yield name, tensors[name]
            bridge.release(manifest.update_id)
        except BaseException as error:
            self.answer(error)
            raise
        self.answer(READ)


class BridgeCheckpointEngine:
    """One end of verl's sync of weights: in a trainer's rank, or beside a rollout's worker.

    verl makes it, with the options of ``checkpoint_engine.engine_kwargs.rl_bridge``, and calls its
    methods in the order in which they stand here: they are those of verl's ``CheckpointEngine``.
    """

    wire_format = "named_tensors"
    """What verl's own adapters take a `Delivery` for."""

    def __init__(
        self,
        bucket_size: int,
        *,
        is_master: bool = False,
        transport: str = "shared-memory",
        timeout_s: float = 600.0,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Configure; nothing is opened.

        Args:
            bucket_size: of verl; not used, since versions are read where they lie.
            is_master: whether this is the trainer's first rank, which publishes.
            transport: which one carries the bytes.
            timeout_s: how long either side waits for the other one, in each sync.
            engine_options: as `VLLMEngineAdapter` takes them. ``cast`` is True unless given.

        """
        del bucket_size
        self.transport, self.timeout_s = transport, timeout_s
        self.engine_options = {"cast": True, "timeout_s": timeout_s, **(engine_options or {})}
        self._is_master = is_master
        self._mailbox: Any = None
        self._standing = Standing()
        self._sync, self._rank, self._count = "", 0, 0
        self._keys: list[str] = []  # what the mailbox may have of this sync

    @cached_property
    def bridge(self) -> TensorBridge:
        """This end's bridge, made when it is asked for first.

        Raises:
            WeightBridgeUnavailableError: no such transport, or not on this machine.

        """
        name = "trainer" if self._is_master else "rollout"
        return make_weight_bridge(self.transport, source_worker=name)

    def prepare(self) -> dict[str, Any]:
        """Begin a sync: the trainer's first rank says by which actor it talks."""
        if not self._is_master:
            return {"mailbox": None}
        if self._mailbox is None:
            # It belongs to this process: where that dies, Ray ends it, and who waits is told so.
            self._mailbox = require().remote(num_cpus=0)(GroupStore).remote()
        return {"mailbox": self._mailbox}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What each worker is told for this sync: the trainer's ranks, then the rollouts'.

        Args:
            actor_wg_world_size: ranks of the trainer.
            rollout_world_size: workers of all rollouts together.
            metadata: what `prepare` returned, in that order.

        Raises:
            WeightBridgeUnavailableError: not one of the trainer's ranks is the first.

        """
        boxes = [one["mailbox"] for one in metadata[:actor_wg_world_size] if one["mailbox"]]
        if len(boxes) != 1:
            raise WeightBridgeUnavailableError(
                f"{len(boxes)} of {actor_wg_world_size} ranks of the trainer were made with "
                "is_master=True, expected 1. verl does so for its rank 0."
            )
        sync = secrets.token_hex(8)

        def told(size: int) -> dict[str, list[Any]]:
            facts = {"sync": sync, "mailbox": boxes[0], "count": rollout_world_size}
            return {name: [fact] * size for name, fact in facts.items()} | {
                "rank": list(range(size))
            }

        return told(actor_wg_world_size), told(rollout_world_size)

    def init_process_group(self, *, sync: str, mailbox: Any, count: int, rank: int) -> None:
        """Take what `build_topology` has for this worker; nothing is connected."""
        self._sync, self._mailbox, self._count, self._rank = sync, mailbox, count, rank

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish all tensors as one version; return when every rollout's process has answered.

        Every rank of the trainer calls it, and reads its own `weights` to the end, since verl
        gathers in there; the first rank publishes. Where a rollout refuses the version, no vLLM
        server installs it. One that fails as it installs keeps the version before, and others may
        have the new one: the next sync brings all together again.

        Args:
            weights: verl's pairs of the checkpoint's name and the whole tensor.
            global_steps: the version; None counts on from the last one.

        Returns:
            on the first rank, for the trainer's log: the version, and how many engines proved it.

        Raises:
            WeightUpdateRejectedError: it was not published, or a rollout refused or undid it.
            DeadlineExceeded: a rollout did not answer.

        """
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        try:
            manifest = self._published(weights, global_steps)
        except BaseException as error:
            await self._offer("", describe(error))
            raise
        with self._standing.replaced(self.bridge, manifest):
            said = await self._answers(manifest)
        return {
            "rl_bridge/weight_version": manifest.weight_version,
            "rl_bridge/engines_proven": said.count(PROVEN),
        }

    def _published(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None
    ) -> WeightUpdateManifest:
        pairs = iter(weights)
        try:
            return self.bridge.publish(readable(self.transport, pairs), weight_version=version)
        finally:
            for _ in pairs:  # the other ranks take part in its gathers
                pass

    async def _answers(self, manifest: WeightUpdateManifest) -> list[str]:
        """Offer it, and give the word to install it when all rollouts can."""
        await self._offer(manifest.to_json(), "")
        version = f"version {manifest.weight_version}"
        try:
            await self._heard(
                "staged", f"{version} is refused, and no vLLM server installs it, which all keep"
            )
        except BaseException as error:
            await self._say("word", describe(error))
            raise
        await self._say("word", "")
        return await self._heard(
            "done", f"{version} is not in all rollouts, and those that failed keep"
        )

    async def _heard(self, step: str, problem: str) -> list[str]:
        """Ask all rollouts for a step; if one fails, the error begins with `problem`."""
        keys = [f"{self._sync} {step} {rank}" for rank in range(self._count)]
        call = self._mailbox.wait_for.remote(keys, f"{self._sync} failed", _LONGER_S)
        what = f"the answer of all {self._count} rollout workers ({step})"
        answers, _ = await _told(call, what, self.timeout_s)
        said = [one or "" for one in answers]  # empty: it had not answered when another one failed
        failed = [f"worker {at} {one}" for at, one in enumerate(said) if one.startswith(_FAILED)]
        if failed:
            raise WeightUpdateRejectedError(f"{problem} the version before: {'; '.join(failed)}")
        return said

    async def _offer(self, manifest: str, failure: str) -> None:
        """Give the rollouts the manifest's text, or why there is none; forget the sync before."""
        for key in self._keys:
            self._mailbox.delete_key.remote(key)
        answers = [f"{step} {rank}" for step in ("staged", "done") for rank in range(self._count)]
        self._keys = [f"{self._sync} {name}" for name in ("offer", "word", "failed", *answers)]
        await self._say("offer", json.dumps([manifest, failure]))

    async def _say(self, key: str, text: str) -> None:
        call = self._mailbox.set.remote(f"{self._sync} {key}", text)
        await _told(call, "the mailbox's receipt", self.timeout_s)

    def receive_weights(self, global_steps: int | None = None) -> Delivery:
        """What the trainer publishes in this sync, for a rollout's worker; nothing is waited for.

        Args:
            global_steps: of verl; the manifest says which version it is.

        """
        del global_steps
        return Delivery(self, self._sync, self._rank, self._mailbox)

    def finalize(self) -> None:
        """Do nothing: the version that was sent last stays for engines that read it."""


async def _take(
    delivery: Delivery, manifest: WeightUpdateManifest, executor: TwoPhaseExecutor
) -> None:
    """Install a version in an engine, if every rollout can install it."""
    await asyncio.to_thread(stage, executor, manifest)
    delivery.answer(STAGED)
    try:
        await delivery.word()
    except BaseException as error:
        await asyncio.to_thread(executor.abort_weights, manifest, describe(error))
        raise
    await asyncio.to_thread(executor.commit_weights, manifest)


@cache
def _server_adapter() -> type:
    """Verl's adapter of a vLLM server, which takes a `Delivery` as a transaction."""
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    class VLLMServerAdapter(ServerAdapter):  # type: ignore[misc]  # verl has no types here
        _executor: TwoPhaseExecutor | None = None

        def __init__(self, config: Any, *args: Any, **more: Any) -> None:
            if config.checkpoint_engine.backend == BACKEND and config.free_cache_engine:
                raise WeightBridgeUnavailableError(
                    "rollout.free_cache_engine is True: verl's sync then puts the engine into a "
                    "sleep that throws its weights away, and an undo would have nothing to go back "
                    "to. Set actor_rollout_ref.rollout.free_cache_engine=False."
                )
            super().__init__(config, *args, **more)

        async def update_weights(
            self, weights: Any, global_steps: int | None = None, **more: Any
        ) -> Any:
            if not isinstance(weights, Delivery):
                return await super().update_weights(weights, global_steps=global_steps, **more)
            try:
                manifest = await weights.manifest()
                if not self._ensure_server_handle():
                    weights.answer(READ)  # another worker of this engine updates it
                    return None
                if self._executor is None:
                    self._executor = await self._connected(weights.engine)
                await _take(weights, manifest, self._executor)
            except BaseException as error:
                weights.answer(error)
                raise
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
            weights.answer(PROVEN)
            return None

        async def _connected(self, engine: BridgeCheckpointEngine) -> TwoPhaseExecutor:
            told: Awaitable[Any] = self.server_handle.get_server_address.remote()
            address, port = await told
            host = f"[{address}]" if ":" in address else address
            adapter = VLLMEngineAdapter(f"http://{host}:{port}", **engine.engine_options)
            return TwoPhaseExecutor(
                weight_transport=engine.transport, weight_install_adapter=adapter
            )

    return VLLMServerAdapter


def __getattr__(name: str) -> Any:
    # verl looks its adapters up by name when it needs one; only then may vLLM be imported.
    if name == "VLLMServerAdapter":
        return _server_adapter()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout import base

    CheckpointEngineRegistry.register(BACKEND)(BridgeCheckpointEngine)
    # Private: verl has no other way. The class does what verl's does, but for a `Delivery`.
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.VLLMServerAdapter"  # noqa: SLF001


if find_spec("verl") is not None:
    _register()

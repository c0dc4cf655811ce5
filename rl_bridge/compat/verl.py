"""verl's checkpoint engine ``rl_bridge``: each sync of weights is a version of this library.

verl imports this module in every process that has a part in the sync, which two lines of its
configuration ask for; the third lets an engine keep the version that an undo goes back to.

    actor_rollout_ref.rollout.checkpoint_engine.backend=rl_bridge
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rl_bridge.compat.verl
    actor_rollout_ref.rollout.free_cache_engine=False

The trainer's first rank publishes, verl's global step is the version. Each vLLM server of verl then
takes it as a transaction: all of its ranks verify, install and prove it, or it serves the version
before. Other rollouts of verl read the version once it is verified, and install it by themselves:
without proof, and without undo. Manifests and answers go through a small actor of Ray.

Names are those of verl 0.9.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import torch

from rl_bridge.bridge import RolloutExecutor, TensorBridge, make_weight_bridge
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

__all__ = ["BridgeCheckpointEngine", "Delivery"]

BACKEND = "rl_bridge"
PROVEN, READ = "proven", "read"
"""What a rollout's process answers: its engine proved the version, or its bytes were read."""
_FAILED = "failed: "


class _Mailbox:
    """The actor of Ray between a trainer and its rollouts, for one sync at a time.

    It belongs to the process that made it: where the trainer's first rank dies, Ray ends it, and
    who waits for a manifest is told so.
    """

    def __init__(self) -> None:
        self._sync = ""
        self._offer = ("", "")
        self._answers: dict[int, str] = {}
        self._news = asyncio.Condition()

    async def offer(self, sync: str, manifest: str, failure: str) -> None:
        """Take what the trainer has: the manifest's text, or why there is none."""
        async with self._news:
            self._sync, self._offer, self._answers = sync, (manifest, failure), {}
            self._news.notify_all()

    async def offered(self, sync: str) -> tuple[str, str]:
        """Wait for the offer of this sync."""
        async with self._news:
            await self._news.wait_for(lambda: self._sync == sync)
            return self._offer

    async def answer(self, sync: str, rank: int, said: str) -> None:
        """Take a rollout process's answer; one to an earlier sync is dropped."""
        async with self._news:
            if self._sync == sync:
                self._answers[rank] = said
                self._news.notify_all()

    async def answers(self, sync: str, count: int) -> dict[int, str]:
        """Wait for so many answers; those that came, if a later sync has begun or one failed."""

        def is_decided() -> bool:
            said = self._answers.values()
            is_failed = any(one.startswith(_FAILED) for one in said)
            return self._sync != sync or len(said) >= count or is_failed

        async with self._news:
            await self._news.wait_for(is_decided)
            return dict(self._answers) if self._sync == sync else {}


async def _told(call: Any, what: str, timeout_s: float) -> Any:
    """An actor's answer.

    Raises:
        DeadlineExceeded: it did not come in time.
        EngineLost: the actor is gone.

    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(call.future()), timeout_s)
    except TimeoutError as error:
        require().cancel(call)
        msg = (
            f"{what} did not come within {timeout_s} s. See the log of the other side's workers; "
            f"engine_kwargs.{BACKEND}.timeout_s is how long to wait."
        )
        raise DeadlineExceeded(msg) from error
    except require("ray.exceptions").RayActorError as error:
        msg = f"{what} will not come: the other side's process ended. Start it anew with verl."
        raise EngineLost(msg) from error


class Delivery:
    """One sync as a rollout's process has it: what `BridgeCheckpointEngine.receive_weights` gives.

    Read it with ``async for``, as verl's rollouts do: the first pair comes when every byte of the
    whole version is verified. Or take `manifest`, install that, and `answer`.

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
            DeadlineExceeded: no manifest in time.
            EngineLost: the trainer's first rank is dead.
            MalformedManifest: what came is no manifest.

        """
        call = self._mailbox.offered.remote(self._sync)
        text, failure = await _told(call, "the trainer's manifest", self.engine.timeout_s)
        if failure:
            msg = f"the trainer published no version: {failure}. The engine keeps its own."
            raise WeightUpdateRejectedError(msg)
        return WeightUpdateManifest.from_json(text)

    def answer(self, said: str | BaseException) -> None:
        """Tell the trainer how it went: `PROVEN`, `READ`, or the error."""
        text = said if isinstance(said, str) else f"{_FAILED}{describe(said)}"
        self._mailbox.answer.remote(self._sync, self._rank, text)

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
        self._held: str | None = None
        self._sync, self._rank, self._count = "", 0, 0

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
            kind = require().remote(_Mailbox)
            self._mailbox = kind.options(num_cpus=0, max_concurrency=1000).remote()
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
            msg = (
                f"{len(boxes)} of {actor_wg_world_size} ranks of the trainer were made with "
                "is_master=True, expected 1. verl does so for its rank 0."
            )
            raise WeightBridgeUnavailableError(msg)
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
        gathers in there; the first rank publishes. A rollout that fails keeps the version before.
        Others may have the new one, which the next sync brings to all.

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
            call = self._mailbox.offer.remote(self._sync, "", describe(error))
            await _told(call, "the mailbox's receipt", self.timeout_s)
            raise
        try:
            said = await self._answers(manifest)
        except BaseException:
            self.bridge.release(manifest.update_id)
            raise
        previous, self._held = self._held, manifest.update_id
        if previous is not None:
            self.bridge.release(previous)
        return {
            "rl_bridge/weight_version": manifest.weight_version,
            "rl_bridge/engines_proven": said.count(PROVEN),
        }

    def _published(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None
    ) -> WeightUpdateManifest:
        pairs = iter(weights)
        is_there = self.transport.startswith("cuda")
        readable = ((name, one if is_there else one.cpu()) for name, one in pairs)
        try:
            return self.bridge.publish(readable, weight_version=version)
        finally:
            for _ in pairs:  # the other ranks take part in its gathers
                pass

    async def _answers(self, manifest: WeightUpdateManifest) -> list[str]:
        offer = self._mailbox.offer.remote(self._sync, manifest.to_json(), "")
        await _told(offer, "the mailbox's receipt", self.timeout_s)
        call = self._mailbox.answers.remote(self._sync, self._count)
        what = (
            f"the answer of all {self._count} rollout workers to version {manifest.weight_version}"
        )
        said: Mapping[int, str] = await _told(call, what, self.timeout_s)
        failed = [f"worker {rank} {one}" for rank, one in said.items() if one.startswith(_FAILED)]
        if failed or len(said) < self._count:
            why = "; ".join(failed) or "a later sync began before all had answered"
            msg = (
                f"version {manifest.weight_version} is not in all rollouts, and those that failed "
                f"keep the version before: {why}"
            )
            raise WeightUpdateRejectedError(msg)
        return list(said.values())

    def receive_weights(self, global_steps: int | None = None) -> Delivery:
        """What the trainer publishes in this sync, for a rollout's worker; nothing is waited for.

        Args:
            global_steps: of verl; the manifest says which version it is.

        """
        del global_steps
        return Delivery(self, self._sync, self._rank, self._mailbox)

    def finalize(self) -> None:
        """Do nothing: the version that was sent last stays for engines that read it."""


@cache
def _server_adapter() -> type:
    """Verl's adapter of a vLLM server, which takes a `Delivery` as a transaction."""
    from verl.workers.rollout.vllm_rollout import ServerAdapter

    class VLLMServerAdapter(ServerAdapter):  # type: ignore[misc]  # verl has no types here
        _executor: RolloutExecutor | None = None

        def __init__(self, config: Any, *args: Any, **more: Any) -> None:
            if config.checkpoint_engine.backend == BACKEND and config.free_cache_engine:
                msg = (
                    "rollout.free_cache_engine is True: verl's sync then puts the engine into a "
                    "sleep that throws its weights away, and an undo would have nothing to go back "
                    "to. Set actor_rollout_ref.rollout.free_cache_engine=False."
                )
                raise WeightBridgeUnavailableError(msg)
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
                await asyncio.to_thread(self._executor.update_weights, manifest)
            except BaseException as error:
                weights.answer(error)
                raise
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
            weights.answer(PROVEN)
            return None

        async def _connected(self, engine: BridgeCheckpointEngine) -> RolloutExecutor:
            told: Awaitable[Any] = self.server_handle.get_server_address.remote()
            address, port = await told
            host = f"[{address}]" if ":" in address else address
            adapter = VLLMEngineAdapter(f"http://{host}:{port}", **engine.engine_options)
            return RolloutExecutor(
                weight_transport=engine.transport, weight_install_adapter=adapter
            )

    return VLLMServerAdapter


def __getattr__(name: str) -> Any:
    # verl looks its adapters up by name when it needs one; only then may vLLM be imported.
    if name == "VLLMServerAdapter":
        return _server_adapter()
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def _register() -> None:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout import base

    CheckpointEngineRegistry.register(BACKEND)(BridgeCheckpointEngine)
    # Private: verl has no other way. The class does what verl's does, but for a `Delivery`.
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.VLLMServerAdapter"  # noqa: SLF001


if find_spec("verl") is not None:
    _register()

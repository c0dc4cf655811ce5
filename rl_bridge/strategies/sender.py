"""The trainer's half of a transfer: publishes the chunks of a sync as one update, tells engines.

The chunks are read once. The requests to the engines are batches of the update: whole modules,
together up to a threshold. When `send_chunks` returns, every engine behind the client has
installed, proven and acknowledged the update; when it raises, the update is withdrawn, unless a
note on the error says that it stands. Rank 0 sends; the other ranks only take part in gathering.
For engines that share GPUs with the trainer each rank publishes a copy on its own GPU: rank 0
gathers where the copies are, and refuses copies that differ.

After each sync every rank runs a clean-up, in the one order that is safe: delete temporaries, so
that nothing refers to shared memory; collect memory that other processes released; wait for the
other ranks, so that none goes on while another one still sends; wait for the device; free cached
blocks; drop the engines' cached prefixes. At the barrier the ranks tell each other what failed, and
rank 0 tells which version stands: every rank keeps that one, and releases all others.
"""

import asyncio
import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, Self, TypedDict, Unpack, runtime_checkable

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    GroupAborted,
    RanksDisagree,
    UnknownUpdate,
    describe,
)
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.groups.publish import read_messages
from rl_bridge.manifest.canonical import JSONValue, canonical_json, thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.strategies.requests import (
    AbandonedWeightUpdateRequest,
    GPUHandle,
    WeightUpdateRequest,
    columns_of,
)
from rl_bridge.trainers.chunks import (
    DEFAULT_CHUNK_NBYTES,
    WeightChunk,
    batches,
    checked_threshold,
    module_of,
)

_LOG = logging.getLogger(__name__)
_GPU = re.compile(r"^[A-Za-z0-9-]{1,128}$")
_MAX_REASON = 2048


class BatchPlan:
    """Records an update's tensors as their chunks pass, and groups them into batches.

    Modules stay whole, whichever chunks they came in; a module that is larger than the threshold is
    a batch of its own. A tied name travels with the first name of its tensor and adds no bytes.
    """

    def __init__(self, threshold_nbytes: int) -> None:
        """Begin; a batch ends at `threshold_nbytes`."""
        self._threshold_nbytes = threshold_nbytes
        self._items: list[tuple[str, tuple[str, int]]] = []

    def noting(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Pass chunks on, and record what is in them."""
        # Tied names are found by their memory, which stays: the caller keeps all chunks' tensors.
        module_by_tensor: dict[object, str] = {}
        for chunk in chunks:
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
                is_new = tensor.nbytes == 0 or key not in module_by_tensor
                own = chunk.module_name or module_of(name)
                module = own if tensor.nbytes == 0 else module_by_tensor.setdefault(key, own)
                self._items.append((module, (name, tensor.nbytes if is_new else 0)))
            yield chunk

    def cut(self) -> list[tuple[str, ...]]:
        """Names of each batch; an update without tensors has one batch."""
        found = batches(self._items, size_of=lambda item: item[1], limit=self._threshold_nbytes)
        return [tuple(name for name, _ in batch) for _, batch in found] or [()]


@runtime_checkable
class InferenceClient(Protocol):
    """What a sender needs to reach the engines.

    If it has ``reset_prefix_cache()`` too, that is awaited at the end of each sync.
    """

    async def update_named_weights(self, request: WeightUpdateRequest) -> object:
        """Give the request to every engine's loader; raise if one of them raises."""


class CleanUpOptions(TypedDict, total=False):
    """What every sender takes; `WeightTransferSender` says what they mean."""

    device: Any
    exchange: GroupExchange | None
    timeout_s: float


class WeightTransferSender(ABC):
    """Sends one rank's chunks. Every rank of the trainer makes one, and calls it in every sync."""

    _is_sending = True
    """Whether this rank calls the engines."""

    def __init__(
        self,
        *,
        device: Any = None,
        exchange: GroupExchange | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Configure the clean-up after each sync.

        Args:
            device: whose memory is cleaned up, such as ``torch.cuda``; None for weights on the CPU.
            exchange: of the trainer's ranks; None if there is one rank.
            timeout_s: how long a rank waits for the others, their engines' loading included.

        """
        self._device, self._exchange, self._timeout_s = device, exchange, timeout_s
        # The version that rank 0 sent last, as far as this rank knows; None if there is none.
        self._standing: int | None = None

    async def send_chunks(
        self,
        chunks: Iterable[WeightChunk],
        inference_client: InferenceClient,
        *,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
    ) -> WeightUpdateManifest | None:
        """Send all chunks of a sync as one update.

        Args:
            chunks: of whole tensors, such as ``extractor.extract_weights(dtype)``; read once.
            inference_client: reaches the engines.
            weight_version: above the last one; None takes the next.
            metadata: JSON values of your own, for the manifest.
            trainable: names that training changes; those of ``extractor.metadata()`` that are
                trainable, by the names of whole tensors.

        Returns:
            The manifest; None on a rank that publishes nothing.

        Raises:
            GroupAborted: the sync failed on another rank, or that rank is gone.
            Exception: whatever failed, unchanged; the update is withdrawn, unless a note on the
                error says that it stands.

        """
        if self._exchange is not None:
            self._exchange.begin()
        before = self._standing
        try:
            try:
                manifest = await self._send(
                    chunks,
                    inference_client,
                    weight_version=weight_version,
                    metadata=metadata,
                    trainable=trainable,
                )
            except BaseException as error:
                try:
                    await self._clean_up(describe(error), chunks, inference_client)
                except Exception as second:  # noqa: BLE001 - the caller gets the first failure
                    error.add_note(f"rl_bridge: in the clean-up: {describe(second)}")
                raise
            await self._clean_up("", chunks, inference_client)
        except BaseException as error:
            if self._standing != before:
                error.add_note(f"rl_bridge: version {self._standing} was sent and stands.")
            raise
        return manifest

    @abstractmethod
    async def _send(
        self, chunks: Iterable[WeightChunk], client: InferenceClient, **options: Any
    ) -> WeightUpdateManifest | None:
        """This rank's part of a sync, before the clean-up."""

    def close(self) -> None:  # noqa: B027 - not every rank has something to close
        """Release everything; engines keep what they installed. Idempotent."""

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    # ---- the clean-up ---------------------------------------------------------------------------

    async def _clean_up(self, failure: str, chunks: Iterable[object], client: object) -> None:
        """Run all steps, also if one fails: then the first error is raised at the end.

        Args:
            failure: what failed in the sync on this rank; empty if nothing did.
            chunks: a generator that was not read to its end holds one of them.
            client: of the engines.

        """
        device = self._device
        steps: list[Callable[[], object]] = [getattr(chunks, "close", lambda: None)]
        if device is not None:
            steps.append(device.ipc_collect)
        if self._exchange is not None:
            steps.append(partial(self._share_outcome, self._exchange, failure[:_MAX_REASON]))
        if device is not None:
            steps += [device.synchronize, device.empty_cache]
        reset = getattr(client, "reset_prefix_cache", None)
        if reset is not None and self._is_sending and not failure:
            steps.append(reset)
        failures: list[Exception] = []
        for step in steps:
            try:
                result = step()
                if inspect.isawaitable(result):
                    await result
            except Exception as error:  # noqa: BLE001 - the first one is raised after the last step
                failures.append(error)
        for other in failures[1:]:
            failures[0].add_note(f"rl_bridge: clean-up went on, and failed again: {other}")
        if failures:
            raise failures[0]

    async def _share_outcome(self, exchange: GroupExchange, failure: str) -> None:
        """Tell what failed here (empty: nothing); learn what failed elsewhere, and what stands."""

        def share() -> list[dict[str, Any]]:
            try:
                return self._share("outcome", {"failure": failure, "standing": self._standing})
            finally:
                # A rank that comes later need not wait, and learns why.
                exchange.decide(failure or "over")

        # In a thread: other ranks wait here for as long as the engines load.
        bodies = await asyncio.to_thread(share)
        self._keep(bodies[0]["standing"])
        bodies[exchange.rank]["failure"] = ""  # which this rank raises itself
        failed = {rank: one["failure"] for rank, one in enumerate(bodies) if one["failure"]}
        if failed:
            rank, why = next(iter(failed.items()))
            raise GroupAborted(
                f"the sync failed on rank {rank}: {why}. Mend the cause, then sync again.",
                tuple(failed),
            )

    def _share(self, step: str, body: dict[str, object]) -> list[dict[str, Any]]:
        """Give a JSON object and get those of all ranks; nothing is unpickled.

        Raises:
            GroupAborted: not all ranks came in time, one sent no JSON object, or one with an
                ``error``.

        """
        if self._exchange is None:
            return [body]
        payload = canonical_json(body).encode("ascii")
        gathered = self._exchange.gather(step, payload, timeout_s=self._timeout_s)
        return read_messages(step, gathered)

    def _keep(self, version: int | None) -> None:
        """Release all versions but the one that stands."""
        self._standing = version


class HelperTransferSender(WeightTransferSender):
    """A rank that takes part in the collectives of its extractor, and sends nothing itself."""

    _is_sending = False

    async def _send(
        self, chunks: Iterable[WeightChunk], client: InferenceClient, **options: Any
    ) -> None:
        del client, options
        for chunk in chunks:
            del chunk  # free its memory before the next one is gathered


class BridgeTransferSender(WeightTransferSender):
    """Publishes over a bridge.

    Attributes:
        bridge: the trainer's; `close` closes it.

    """

    def __init__(
        self,
        bridge: TensorBridge,
        request_type: type[WeightUpdateRequest],
        *,
        threshold_nbytes: int = DEFAULT_CHUNK_NBYTES,
        **clean_up: Unpack[CleanUpOptions],
    ) -> None:
        """Publish through `bridge`.

        Raises:
            TypeError: a threshold that is no integer.
            ValueError: one below 1.

        """
        super().__init__(**clean_up)
        self.bridge = bridge
        # What this rank has published and not released: one version, and two during a sync.
        self._updates: dict[int, tuple[WeightUpdateManifest, list[WeightUpdateRequest]]] = {}
        self._request_type = request_type
        self._threshold_nbytes = checked_threshold(threshold_nbytes)

    async def _send(
        self, chunks: Iterable[WeightChunk], client: InferenceClient, **options: Any
    ) -> WeightUpdateManifest:
        """Publish, and send the batches one after the other."""
        plan = BatchPlan(self._threshold_nbytes)
        manifest = self._publish(chunks, plan, **options)
        try:
            requests = self._requests(manifest, plan.cut())
            for request in requests:
                await client.update_named_weights(request)
        except BaseException as error:
            await self._withdraw(manifest, error, client)
            raise
        self._updates[manifest.weight_version] = manifest, requests
        if self._is_sending:
            self._keep(manifest.weight_version)
        _LOG.info(
            "version %d: %d bytes in %d batches",
            manifest.weight_version,
            manifest.total_nbytes,
            len(requests),
        )
        return manifest

    async def send_latest(self, inference_client: InferenceClient) -> WeightUpdateManifest:
        """Send the latest update to engines that joined after it; nothing is published.

        Raises:
            UnknownUpdate: there is none yet.
            Exception: whatever failed; the update stays published for the engines that have it.

        """
        if self._standing not in self._updates:
            raise UnknownUpdate("this rank has no update that was sent. Call send_chunks first.")
        manifest, requests = self._updates[self._standing]
        try:
            for request in requests:
                await inference_client.update_named_weights(request)
        except BaseException as error:
            await self._abandon(manifest, error, inference_client)
            raise
        return manifest

    def close(self) -> None:
        """Close the bridge; engines keep what they installed. Idempotent."""
        self._standing, self._updates = None, {}
        self.bridge.close()

    # ---- the steps ------------------------------------------------------------------------------

    def _keep(self, version: int | None) -> None:
        super()._keep(version)
        for other in self._updates.keys() - {version}:
            self.bridge.release(self._updates.pop(other)[0].update_id)

    def _next_version(self) -> int:
        last = self.bridge.publisher.last_version
        return 0 if last is None else last + 1

    def _publish(
        self, chunks: Iterable[WeightChunk], plan: BatchPlan, **options: Any
    ) -> WeightUpdateManifest:
        try:
            if options["weight_version"] is None:
                options["weight_version"] = self._next_version()
            return self.bridge.publish(plan.noting(chunks), **options)
        except Exception as error:
            self._read_out(chunks, error)
            raise

    def _read_out(self, chunks: Iterable[object], error: BaseException) -> None:
        """After a failure, take part in the remaining gathers of this sync.

        The other ranks wait for this rank's parts of the remaining chunks; without them their
        process group is lost. A gather that broke off itself has ended the chunks: then this does
        nothing, and the other ranks wait until the deadline of their process group.
        """
        if self._exchange is None or not isinstance(chunks, Iterator):  # a list gathers nothing
            return
        try:
            for chunk in chunks:
                del chunk
        except Exception as second:  # noqa: BLE001 - the first failure is what the caller gets
            _LOG.warning("chunks could not be read to their end", exc_info=True)
            error.add_note(f"rl_bridge: its other chunks could not be read: {describe(second)}")

    def _requests(
        self, manifest: WeightUpdateManifest, batches: Sequence[tuple[str, ...]]
    ) -> list[WeightUpdateRequest]:
        return [
            self._request_type(
                update_id=manifest.update_id,
                weight_version=manifest.weight_version,
                batch=index,
                num_batches=len(batches),
                manifest=manifest.to_json() if index == 0 else None,
                **columns_of(manifest, names),
                **self._more_fields(manifest, names, index),
            )
            for index, names in enumerate(batches)
        ]

    def _more_fields(
        self, manifest: WeightUpdateManifest, names: tuple[str, ...], index: int
    ) -> dict[str, Any]:
        """Fields that only this kind of request has."""
        del manifest, names, index
        return {}

    async def _withdraw(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        """Tell the engines that no more requests come, and withdraw the update."""
        try:
            await self._abandon(manifest, error, client)
        finally:
            self.bridge.release(manifest.update_id)
            error.add_note(
                f"rl_bridge: version {manifest.weight_version} is withdrawn; engines that did not "
                "install it hold what they held before."
            )

    async def _abandon(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        request = AbandonedWeightUpdateRequest(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            reason=describe(error)[:_MAX_REASON],
        )
        try:
            await client.update_named_weights(request)
        except Exception as second:  # noqa: BLE001 - the first failure is what the caller gets
            error.add_note(f"rl_bridge: engines could not be told that it ended: {second}")


def merge_handles(bodies: Sequence[dict[str, object]]) -> tuple[GPUHandle, ...]:
    """One handle for each GPU, from each rank's description of its copy.

    Raises:
        RanksDisagree: the copies are of different content or versions.
        WeightManifestValidationError: a manifest is none.

    """
    found: dict[str, GPUHandle] = {}
    first: WeightUpdateManifest | None = None
    for rank, body in enumerate(bodies):
        gpu, text = body.get("gpu"), body.get("manifest")
        if not isinstance(gpu, str) or _GPU.match(gpu) is None or not isinstance(text, str):
            raise RanksDisagree(
                f"rank {rank} names GPU {gpu!r}, expected its UUID and a manifest. Use the same "
                "rl_bridge release on every rank."
            )
        manifest = WeightUpdateManifest.from_json(text)
        first = first or manifest
        this, that = ((one.weight_version, one.root, one.total_nbytes) for one in (manifest, first))
        if this != that:
            raise RanksDisagree(
                f"rank {rank} has version {this[0]} with root {this[1]} on GPU {gpu}, expected "
                f"version {that[0]} with root {that[1]}, as rank 0. See to it that every "
                "rank gathers the same weights, then publish a later version."
            )
        # Two ranks on one GPU hold the same bytes there: engines read the first one's copy.
        found.setdefault(
            gpu,
            GPUHandle(
                gpu=gpu,
                handle=canonical_json(thaw(manifest.handle)),
                manifest=manifest.to_json(layout=manifest.layout_digest != first.layout_digest),
            ),
        )
    return tuple(found.values())


class CudaIpcTransferSender(BridgeTransferSender):
    """Publishes whole weights on each rank's GPU; rank 0 tells the engines where each copy is."""

    def __init__(
        self,
        bridge: TensorBridge,
        request_type: type[WeightUpdateRequest],
        *,
        gpu: str,
        threshold_nbytes: int = DEFAULT_CHUNK_NBYTES,
        **clean_up: Unpack[CleanUpOptions],
    ) -> None:
        """Publish through `bridge`."""
        super().__init__(bridge, request_type, threshold_nbytes=threshold_nbytes, **clean_up)
        self._gpu = gpu
        self._handles: tuple[GPUHandle, ...] = ()
        self._is_sending = self._exchange is None or self._exchange.rank == 0

    def _agreed_version(self) -> int:
        """The next version, the same on every rank, also if one of them failed before."""
        with self._reporting("version"):
            version = self._next_version()
        bodies = self._share("version", {"version": version})
        found = [body.get("version") for body in bodies]
        if not all(isinstance(one, int) and one >= 0 for one in found):
            raise RanksDisagree(
                f"the ranks are at versions {found}, expected a number of each. Use the same "
                "rl_bridge release on every rank."
            )
        return max(one for one in found if isinstance(one, int))

    def _publish(
        self, chunks: Iterable[WeightChunk], plan: BatchPlan, **options: Any
    ) -> WeightUpdateManifest:
        if options["weight_version"] is None:
            # Before any rank gathers: if this fails on one of them, none does.
            options["weight_version"] = self._agreed_version()
        with self._reporting("handles"):
            manifest = super()._publish(chunks, plan, **options)
        try:
            bodies = self._share("handles", {"gpu": self._gpu, "manifest": manifest.to_json()})
            self._handles = merge_handles(bodies)
        except BaseException:
            self.bridge.release(manifest.update_id)
            raise
        return manifest

    @contextmanager
    def _reporting(self, step: str) -> Iterator[None]:
        """Tell the other ranks, which wait in `step`, what fails on this one."""
        try:
            yield
        except Exception as error:
            with suppress(GroupAborted):  # which this very message causes, on every rank
                self._share(step, {"error": describe(error)})
            raise

    def _requests(self, manifest: WeightUpdateManifest, batches: Any) -> list[WeightUpdateRequest]:
        return super()._requests(manifest, batches) if self._is_sending else []

    async def _abandon(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        if self._is_sending:
            await super()._abandon(manifest, error, client)

    def _more_fields(
        self, manifest: WeightUpdateManifest, names: tuple[str, ...], index: int
    ) -> dict[str, Any]:
        handles = self._handles
        if index > 0:
            handles = tuple(GPUHandle(gpu=one.gpu, handle=one.handle) for one in handles)
        table = manifest.table
        return {"handles": handles, "offsets": [table.offsets[table.rows[name]] for name in names]}

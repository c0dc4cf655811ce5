"""The trainer's half of a transfer: publishes the chunks of a sync as one update, tells engines.

The chunks are read once. When `send_chunks` returns, every engine behind the client has installed,
proven and acknowledged the update; when it raises, the update is withdrawn.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transfer.batching import BatchPlan, Layout
from rl_bridge.bridge.transfer.clean_up import CleanUp
from rl_bridge.bridge.transfer.outcome import Outcome
from rl_bridge.bridge.transfer.requests import AbandonedWeightUpdateRequest, WeightUpdateRequest
from rl_bridge.errors import UnknownUpdate
from rl_bridge.extractors.chunks import DEFAULT_CHUNK_NBYTES, WeightChunk, checked_threshold
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "BridgeTransferSender",
    "HelperTransferSender",
    "InferenceClient",
    "WeightTransferSender",
]

_LOG = logging.getLogger(__name__)


@runtime_checkable
class InferenceClient(Protocol):
    """What a sender needs of whoever reaches the engines.

    One that has ``reset_prefix_cache()`` as well is asked for it at the end of each sync.
    """

    async def update_named_weights(self, request: WeightUpdateRequest) -> object:
        """Hand the request to every engine's loader; raise where one of them raises."""


class WeightTransferSender(ABC):
    """Sends one rank's chunks. Every rank of the trainer makes one, and calls it in every sync."""

    @abstractmethod
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
            trainable: names that training changes, such as ``extractor.trainable_names()``.

        Returns:
            The manifest; None on a rank that publishes nothing.

        Raises:
            Exception: whatever failed, unchanged; the update is withdrawn.

        """

    def close(self) -> None:  # noqa: B027 - not every rank has something to close
        """Let go of everything; engines keep what they installed. Idempotent."""

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()


class HelperTransferSender(WeightTransferSender):
    """A rank that takes part in the collectives of its extractor, and sends nothing itself."""

    def __init__(self, clean_up: CleanUp) -> None:
        """Wait for the sending rank with `clean_up`."""
        self._clean_up = clean_up

    async def send_chunks(
        self,
        chunks: Iterable[WeightChunk],
        inference_client: InferenceClient,
        *,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
    ) -> WeightUpdateManifest | None:
        """Go through the chunks, and wait for what became of the sync.

        Raises:
            GroupAborted: it failed on the sending rank, or that rank is gone.

        """
        del inference_client, weight_version, metadata, trainable
        async with _Ending(self._clean_up, chunks, client=None):
            for chunk in chunks:
                del chunk  # its memory goes before the next one is gathered
        return None


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
        clean_up: CleanUp | None = None,
    ) -> None:
        """Publish through `bridge`.

        Args:
            bridge: this rank's, which nobody else publishes with.
            request_type: what the engines are sent.
            threshold_nbytes: bytes of a batch; a module that is larger goes alone.
            clean_up: what follows each sync; None for one rank on a CPU.

        Raises:
            TypeError: a threshold that is no integer.
            ValueError: one below 1.

        """
        self.bridge = bridge
        self._request_type = request_type
        self._threshold_nbytes = checked_threshold(threshold_nbytes)
        self._clean_up = clean_up or CleanUp()
        self._latest: tuple[WeightUpdateManifest, list[WeightUpdateRequest]] | None = None

    async def send_chunks(
        self,
        chunks: Iterable[WeightChunk],
        inference_client: InferenceClient,
        *,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
    ) -> WeightUpdateManifest:
        """Publish, and send the batches one after the other. See `WeightTransferSender`."""
        plan = BatchPlan(self._threshold_nbytes)
        published: list[WeightUpdateManifest] = []
        async with _Ending(self._clean_up, chunks, client=inference_client):
            version = self._next_version() if weight_version is None else weight_version
            try:
                published.append(
                    self._publish(
                        plan.noting(chunks),
                        weight_version=version,
                        metadata=metadata,
                        trainable=trainable,
                    )
                )
                requests = self._requests(published[0], plan.cut())
                for request in requests:
                    await inference_client.update_named_weights(request)
            except BaseException as error:
                if published:
                    await self._give_up(published[0], error, inference_client)
                raise
            previous, self._latest = self._latest, (published[0], requests)
            if previous is not None:
                self.bridge.release(previous[0].update_id)
            _LOG.info(
                "version %d: %d bytes in %d batches",
                version,
                published[0].total_nbytes,
                len(requests),
            )
        return published[0]

    async def send_latest(self, inference_client: InferenceClient) -> WeightUpdateManifest:
        """Send the latest update to engines that joined after it; nothing is published.

        Raises:
            UnknownUpdate: there is none yet.
            Exception: whatever failed; the update stays published for the engines that have it.

        """
        if self._latest is None:
            raise UnknownUpdate("no update was sent yet. Call send_chunks first.")
        manifest, requests = self._latest
        try:
            for request in requests:
                await inference_client.update_named_weights(request)
        except BaseException as error:
            await self._tell_of_the_end(manifest, error, inference_client)
            raise
        return manifest

    def close(self) -> None:
        """Close the bridge; engines keep what they installed. Idempotent."""
        self._latest = None
        self.bridge.close()

    # ---- the steps ------------------------------------------------------------------------------

    def _next_version(self) -> int:
        last = self.bridge._publisher_end().last_version  # noqa: SLF001 - the bridge's other half
        return 0 if last is None else last + 1

    def _publish(self, chunks: Iterator[WeightChunk], **options: Any) -> WeightUpdateManifest:
        return self.bridge.publish(chunks, **options)

    def _requests(
        self, manifest: WeightUpdateManifest, batches: Sequence[tuple[str, ...]]
    ) -> list[WeightUpdateRequest]:
        return [
            self._request(
                Layout.of(manifest, names),
                update_id=manifest.update_id,
                weight_version=manifest.weight_version,
                batch=index,
                num_batches=len(batches),
                manifest=manifest.to_json() if index == 0 else None,
            )
            for index, names in enumerate(batches)
        ]

    def _request(self, layout: Layout, **fields: Any) -> WeightUpdateRequest:
        return self._request_type(
            **fields,
            names=layout.names,
            dtypes=layout.dtypes,
            shapes=layout.shapes,
            sizes=layout.sizes,
        )

    async def _give_up(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        """Tell the engines that no more comes, and withdraw the update."""
        try:
            await self._tell_of_the_end(manifest, error, client)
        finally:
            self.bridge.release(manifest.update_id)
            error.add_note(
                f"rl_bridge: version {manifest.weight_version} is withdrawn; engines that did not "
                "install it hold what they held before."
            )

    async def _tell_of_the_end(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        request = AbandonedWeightUpdateRequest(
            update_id=manifest.update_id,
            weight_version=manifest.weight_version,
            reason=describe(error)[:2048],
        )
        try:
            await client.update_named_weights(request)
        except Exception as second:  # noqa: BLE001 - the first failure is what the caller gets
            error.add_note(f"rl_bridge: engines could not be told that it ended: {second}")


class _Ending:
    """Runs the clean-up behind a sync, whatever became of it."""

    def __init__(
        self, clean_up: CleanUp, chunks: Iterable[WeightChunk], *, client: InferenceClient | None
    ) -> None:
        self._clean_up = clean_up
        self._chunks = chunks
        self._reset = getattr(client, "reset_prefix_cache", None)

    async def __aenter__(self) -> None:
        """Begin."""
        self._clean_up.begin()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Clean up; where the sync failed, that is what the caller gets."""
        outcome = Outcome("" if error is None else describe(error))
        self._clean_up.read_out(self._chunks, error)
        try:
            await self._clean_up.run(outcome, delete=self._delete, reset_prefix_cache=self._reset)
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"rl_bridge: the clean-up failed, too: {describe(second)}")

    def _delete(self) -> None:
        # A generator that was not read to its end still holds a chunk.
        close = getattr(self._chunks, "close", None)
        if callable(close):
            close()

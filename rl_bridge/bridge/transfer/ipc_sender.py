"""The sender for engines that share GPUs with the trainer: every rank publishes on its own GPU."""

from collections.abc import Iterator
from typing import Any

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.bridge.group_exchange import GroupExchange
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.bridge.transfer.batching import Layout
from rl_bridge.bridge.transfer.clean_up import CleanUp
from rl_bridge.bridge.transfer.handle_maps import merge_handles
from rl_bridge.bridge.transfer.outcome import share_json
from rl_bridge.bridge.transfer.requests import GPUHandle, WeightUpdateRequest
from rl_bridge.bridge.transfer.sender import BridgeTransferSender, InferenceClient
from rl_bridge.errors import GroupAborted, RanksDisagree
from rl_bridge.extractors.chunks import DEFAULT_CHUNK_NBYTES, WeightChunk
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["CudaIpcTransferSender"]


class CudaIpcTransferSender(BridgeTransferSender):
    """Publishes whole weights on each rank's GPU; rank 0 tells the engines where each copy is."""

    def __init__(
        self,
        bridge: TensorBridge,
        request_type: type[WeightUpdateRequest],
        *,
        gpu: str,
        exchange: GroupExchange | None = None,
        threshold_nbytes: int = DEFAULT_CHUNK_NBYTES,
        clean_up: CleanUp | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Publish through `bridge`.

        Args:
            bridge: this rank's, of a transport for memory of its GPU.
            request_type: what the engines are sent.
            gpu: UUID of this rank's GPU.
            exchange: of the trainer's ranks; None where there is one.
            threshold_nbytes: bytes of a batch; a module that is larger goes alone.
            clean_up: what follows each sync; None for one rank on a CPU.
            timeout_s: how long a rank waits for the others in one step.

        """
        super().__init__(bridge, request_type, threshold_nbytes=threshold_nbytes, clean_up=clean_up)
        self._gpu = gpu
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._handles: tuple[GPUHandle, ...] = ()
        self._is_sending = exchange is None or exchange.rank == 0

    def _next_version(self) -> int:
        """The next version, the same on every rank, also where one of them failed before."""
        version = super()._next_version()
        if self._exchange is None:
            return version
        bodies = share_json(
            self._exchange, "version", {"version": version}, timeout_s=self._timeout_s
        )
        found = [body.get("version") for body in bodies]
        if not all(isinstance(one, int) and one >= 0 for one in found):
            msg = (
                f"the ranks are at versions {found}, expected a number of each. Use the same "
                "rl_bridge release on every rank."
            )
            raise RanksDisagree(msg)
        return max(one for one in found if isinstance(one, int))

    def _publish(self, chunks: Iterator[WeightChunk], **options: Any) -> WeightUpdateManifest:
        try:
            manifest = super()._publish(chunks, **options)
        except Exception as error:
            self._clean_up.read_out(chunks, error)  # before: the others are still gathering
            self._share({"failure": describe(error)})
            raise
        try:
            bodies = self._share({"gpu": self._gpu, "manifest": manifest.to_json()})
            _require_all(bodies)
            self._handles = merge_handles(bodies)
        except BaseException:
            self.bridge.release(manifest.update_id)
            raise
        return manifest

    def _share(self, body: dict[str, object]) -> list[dict[str, object]]:
        if self._exchange is None:
            return [body]
        return share_json(self._exchange, "handles", body, timeout_s=self._timeout_s)

    def _requests(self, manifest: WeightUpdateManifest, batches: Any) -> list[WeightUpdateRequest]:
        return super()._requests(manifest, batches) if self._is_sending else []

    async def _tell_of_the_end(
        self, manifest: WeightUpdateManifest, error: BaseException, client: InferenceClient
    ) -> None:
        if self._is_sending:
            await super()._tell_of_the_end(manifest, error, client)

    def _request(self, layout: Layout, **fields: Any) -> WeightUpdateRequest:
        handles = self._handles
        if fields["batch"] > 0:
            handles = tuple(GPUHandle(gpu=one.gpu, handle=one.handle) for one in handles)
        return super()._request(layout, **fields, handles=handles, offsets=layout.offsets)


def _require_all(bodies: list[dict[str, object]]) -> None:
    for rank, body in enumerate(bodies):
        if body.get("failure"):
            msg = (
                f"rank {rank} could not publish: {body['failure']}. This rank has withdrawn its "
                "part. Mend the cause, then sync again."
            )
            raise GroupAborted(msg, (rank,))

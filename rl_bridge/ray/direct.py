"""Tensor transports of Ray Direct Transport: Ray makes one in each process.

Importing this module imports Ray: `register_direct_transport` does it when it is called.
Ray's own transports pass references to live tensors. Here each object is published as an update of
its own: sealed when the method returns, released when Ray collects it.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.ray.calls import here

_MANIFEST = "rl_bridge_manifest"
# References that are alive at a time, for each actor that returns tensors.
_MAX_OBJECTS = 64


class DirectTransport(TensorTransportManager):  # type: ignore[misc]  # Ray has no types here
    """One-sided, by shared memory; what arrives is verified before anybody sees it."""

    name: ClassVar[str] = "rl_bridge"
    """What users write: ``@ray.method(tensor_transport="rl_bridge")``."""

    def __init__(self) -> None:
        """Open nothing yet: Ray makes one in the driver too."""
        self._bridge: TensorBridge | None = None
        # An actor may run several methods at a time, and each may return tensors.
        self._lock = threading.Lock()
        self._published: dict[str, str] = {}
        self._num_published = 0

    def tensor_transport_backend(self) -> str:
        """Its name, as Ray writes it."""
        return self.name.upper()

    @staticmethod
    def is_one_sided() -> bool:
        """Whether the source takes no part in the transfer: it does not."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Whether a failed transfer leaves both actors usable: it does."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Whether an actor can do this: where something is missing there, it says so itself."""
        del actor
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: Sequence[torch.Tensor]
    ) -> Any:
        """Seal what a method returned.

        Raises:
            WeightBridgeUnavailableError: not all of it lies on the CPU.
            SlotsExhausted: too many references are alive.

        """
        tensors = {f"{index:06d}": tensor for index, tensor in enumerate(rdt_object)}
        device = rdt_object[0].device.type if rdt_object else "cpu"
        metadata = TensorTransportMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device=device,
        )
        if device != "cpu":
            raise WeightBridgeUnavailableError(
                f"tensor_transport={self.name!r} carries CPU tensors, got one on {device}. "
                "Return it with .cpu(), or use Ray's own transports for GPUs."
            )
        if tensors:
            bridge = self._own_bridge()
            with self._lock:
                self._num_published += 1
                manifest = bridge.publish(tensors, weight_version=self._num_published)
                self._published[obj_id] = manifest.update_id
            # Ray pickles its own class; of ours there are bytes in it.
            vars(metadata)[_MANIFEST] = manifest.to_json().encode()
        return metadata

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> Any:
        """Nothing: the manifest says where the bytes are."""
        del src_actor, dst_actor, backend
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Map or read what was sealed, and verify every byte.

        The tensors are private: writing to one changes this process's own copy. With
        `target_buffers` they are copied there.

        Raises:
            ChecksumMismatch: bytes differ from what was sealed.
            SegmentError: the source is gone, or out of reach: by shared memory, on another machine.
            MalformedManifest: the metadata is not this transport's.

        """
        del communicator_metadata
        if not tensor_transport_metadata.tensor_meta:
            return []
        text = vars(tensor_transport_metadata).get(_MANIFEST)
        if not isinstance(text, bytes):
            raise MalformedManifest(
                f"object {obj_id} came without a manifest of rl_bridge. Use a method "
                f"with tensor_transport={self.name!r}."
            )
        manifest = WeightUpdateManifest.from_json(text.decode())
        bridge = self._own_bridge()
        imported = bridge.import_update(manifest)
        tensors = [imported[name] for name in sorted(imported)]
        # The tensors keep their bytes; what goes is the bridge's own hold.
        bridge.release_imported(manifest.update_id)
        if not target_buffers:
            return tensors
        for target, tensor in zip(target_buffers, tensors, strict=True):
            target.copy_(tensor)
        return list(target_buffers)

    def send_multiple_tensors(
        self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Never called: the receiver reads by itself."""

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        """Release what was sealed for an object; who still holds its tensors keeps them."""
        del tensor_transport_meta, tensors
        update_id = self._published.pop(obj_id, None)
        if update_id is not None and self._bridge is not None:
            self._bridge.release(update_id)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Nothing is left behind by a transfer that failed."""

    def _own_bridge(self) -> TensorBridge:
        with self._lock:
            if self._bridge is None:
                self._bridge = make_weight_bridge(
                    **self._carrier(),
                    source_worker=f"ray-{os.getpid()}",
                    suspicious="off",
                    max_slots=_MAX_OBJECTS,
                )
            return self._bridge

    def _carrier(self) -> dict[str, Any]:
        """Transport and options of the bridge."""
        return {"transport": "shared-memory"}


class DirectTransportAcross(DirectTransport):
    """The same by nixl: receivers on other nodes read it out of the source's memory."""

    name: ClassVar[str] = "rl_bridge_nixl"

    def _carrier(self) -> dict[str, Any]:
        return {"transport": "nixl", "address": here()[1]}

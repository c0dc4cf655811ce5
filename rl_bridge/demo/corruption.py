"""Damage to a published update, where damage really happens: in the memory behind the manifest."""

from rl_bridge.bridge.bridges import TensorBridge
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm

__all__ = ["flip_one_byte"]


def flip_one_byte(bridge: TensorBridge, manifest: WeightUpdateManifest) -> None:
    """Flip the bits of one byte in the middle of an update's largest tensor."""
    end = bridge._publisher_end()._end
    if hasattr(end, "_ring"):
        (address,) = (s.address for s in end._ring._slots if s.update_id == manifest.update_id)
    else:
        address = end.snapshot(manifest.update_id).address
    table = manifest.table
    row = max(range(len(table.names)), key=lambda i: table.nbytes[i])
    where = address + table.offsets[row] + table.nbytes[row] // 2
    byte = vm.tensor_at(where, 1)
    byte ^= 255

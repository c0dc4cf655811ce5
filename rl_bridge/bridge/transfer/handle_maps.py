"""Which GPU has its own copy of an update, and where: gathered from the trainer's ranks, as JSON.

Engines that share GPUs with a trainer open the copy on their own GPU. Each rank publishes one; the
map that rank 0 sends has one entry for each GPU, and is refused where the copies are not the same.
"""

import re
from collections.abc import Sequence

from rl_bridge.bridge.group_exchange import GroupExchange
from rl_bridge.bridge.transfer.outcome import share_json
from rl_bridge.bridge.transfer.requests import GPUHandle
from rl_bridge.errors import RanksDisagree
from rl_bridge.manifest.canonical import canonical_json, thaw
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["gather_handles", "merge_handles"]

_GPU = re.compile(r"^[A-Za-z0-9-]{1,128}$")


def gather_handles(
    manifest: WeightUpdateManifest,
    *,
    gpu: str,
    exchange: GroupExchange | None,
    timeout_s: float,
) -> tuple[GPUHandle, ...]:
    """Gather where every rank's copy of this update is. Every rank calls it.

    Args:
        manifest: of this rank's copy.
        gpu: UUID of the GPU that it lies on.
        exchange: of the trainer's ranks; None where there is one.
        timeout_s: how long this rank waits for the others.

    Raises:
        RanksDisagree: the copies are of different content or versions.
        GroupAborted: not all ranks came in time.

    """
    mine: dict[str, object] = {"gpu": gpu, "manifest": manifest.to_json()}
    bodies = [mine]
    if exchange is not None:
        bodies = share_json(exchange, "handles", mine, timeout_s=timeout_s)
    return merge_handles(bodies)


def merge_handles(bodies: Sequence[dict[str, object]]) -> tuple[GPUHandle, ...]:
    """One handle for each GPU, from what each rank says of its copy.

    Raises:
        RanksDisagree: the copies are of different content or versions.
        WeightManifestValidationError: a manifest is none.

    """
    found: dict[str, GPUHandle] = {}
    first: WeightUpdateManifest | None = None
    for rank, body in enumerate(bodies):
        gpu, text = body.get("gpu"), body.get("manifest")
        if not isinstance(gpu, str) or _GPU.match(gpu) is None or not isinstance(text, str):
            msg = (
                f"rank {rank} names GPU {gpu!r}, expected its UUID and a manifest. Use the same "
                "rl_bridge release on every rank."
            )
            raise RanksDisagree(msg)
        manifest = WeightUpdateManifest.from_json(text)
        first = first or manifest
        this, that = ((one.weight_version, one.root, one.total_nbytes) for one in (manifest, first))
        if this != that:
            msg = (
                f"rank {rank} has version {this[0]} with root {this[1]} on GPU {gpu}, expected "
                f"version {that[0]} with root {that[1]}, as rank 0. See to it that every "
                "rank gathers the same weights, then publish a later version."
            )
            raise RanksDisagree(msg)
        # Two ranks on one GPU hold the same bytes there: the first one's copy serves.
        found.setdefault(
            gpu,
            GPUHandle(
                gpu=gpu,
                handle=canonical_json(thaw(manifest.handle)),
                manifest=manifest.to_json(layout=manifest.layout_digest != first.layout_digest),
            ),
        )
    return tuple(found.values())

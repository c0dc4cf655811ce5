"""Another way in, if ranks cannot read the trainer's memory: the engine's own loader, from a file.

The executor's process imports the update and verifies it. What the ranks hold behind that is proven
all the same: by digests of the parts that each of them takes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_bridge import WeightUpdateManifest, WeightUpdateRejectedError
from rl_bridge.engines import (
    Loader,
    Replies,
    Shard,
    check_covered,
    check_finite,
    parse_shards,
    part_digests,
)

Tensors = Mapping[str, torch.Tensor]


class FileLoader(Loader):
    """Feeds the loader of a small engine through a file."""

    imports = False

    def __init__(self, client: Any, path: Path) -> None:
        self._client, self._path, self._shards = client, path, list[list[Shard]]()

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> Mapping[str, Any]:
        """Refuse what holds no numbers; let the ranks tell which parts of tensors they take."""
        check_finite(tensors, tensors)
        return {"shards": True}

    def prepared(self, manifest: WeightUpdateManifest, replies: Replies) -> None:
        """Note them; every element of the update has to be in one."""
        self._shards = [parse_shards(reply["shards"], manifest) for reply in replies]
        check_covered(manifest, self._shards)

    def load(self, manifest: WeightUpdateManifest, tensors: Tensors) -> Mapping[str, Any]:
        """Let the engine load; what each rank must hold then."""
        parts = [
            part_digests(manifest, tensors, shards, num_threads=None) for shards in self._shards
        ]
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._path)
        text = json.dumps({"driver": self._client.driver, "path": str(self._path)})
        for rank, said in enumerate(self._client.ask_ranks("host:load", text)):
            if said:
                raise WeightUpdateRejectedError(f"rank {rank}: {said}. See the engine's log.")
        return {"parts": [[digest.hex() for digest in each] for each in parts]}

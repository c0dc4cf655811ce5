"""Another way in, if ranks cannot read the trainer's memory: the engine's own loader, from a file.

The executor's process imports the update and verifies it. What the ranks hold after that is proven
all the same: by digests of the parts that each of them takes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_bridge import WeightUpdateManifest, WeightUpdateRejectedError
from rl_bridge.engines import Loader, check_finite

Tensors = Mapping[str, torch.Tensor]


class FileLoader(Loader):
    """Feeds the loader of a small engine through a file."""

    imports = False

    def __init__(self, client: Any, path: Path) -> None:
        self._client, self._path = client, path

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> Mapping[str, Any]:
        """Refuse what holds no numbers."""
        check_finite(tensors, tensors)
        return {}

    def load(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Let the engine load."""
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._path)
        text = json.dumps({"driver": self._client.driver, "path": str(self._path)})
        for rank, said in enumerate(self._client.ask_ranks("host:load", text)):
            if said:
                raise WeightUpdateRejectedError(f"rank {rank}: {said}. See the engine's log.")

"""Which parts of an update's tensors each rank of an engine takes.

The executor's adapter asks once for each layout. Where the engine does not import the update
itself, the digests that the parts must have are made here, of the bytes that the executor verified.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rl_bridge.engines.sglang.cuts import Cut, check_covered, parse_cuts, part_digests
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "Shares",
]


class Shares:
    """What one engine's ranks take."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._table = self._engine = ""
        self._ranks: list[list[Cut]] = []

    def meet(self, engine: str) -> None:
        """Of another engine than before nothing is known."""
        if engine != self._engine:
            self._table, self._engine = "", engine

    def knows(self, manifest: WeightUpdateManifest) -> bool:
        """Whether an update of that layout was seen."""
        return self._table == manifest.table.digest

    def learn(self, manifest: WeightUpdateManifest, ranks: Any) -> None:
        """Note what the ranks said.

        Raises:
            WeightUpdateRejectedError: it cannot be read.
            IncompatibleUpdate: they do not take every element.

        """
        self._table = ""
        found = [parse_cuts(cuts, manifest) for cuts in ranks]
        check_covered(manifest, found)
        self._table, self._ranks = manifest.table.digest, found

    def digests(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> list[list[str]]:
        """What each part must hold, by rank.

        Raises:
            ProofFailed: the executor's bytes are not what the manifest says any more.

        """
        return [
            [digest.hex() for digest in part_digests(manifest, tensors, cuts, num_threads=None)]
            for cuts in self._ranks
        ]

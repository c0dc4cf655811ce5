"""The adapter of an executor that was given none: the imported mapping is what serves."""

from collections.abc import Mapping

import torch

from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["NoEngine"]


class NoEngine(TransactionalAdapter):
    """Installs nowhere; what import verified is the proof."""

    def __init__(self) -> None:
        """Begin without an update."""
        self._proof = InstallProof(method="unproven")

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing can be refused."""

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember what was imported."""
        del tensors
        self._proof = InstallProof(
            method="import",
            root=manifest.root,
            digested_nbytes=manifest.total_nbytes,
            tensors=manifest.tensor_count,
        )

    def prove(self) -> InstallProof:
        """Tell that import read every byte."""
        return self._proof

    def undo(self) -> None:
        """Nothing was changed."""

    def release(self, update_id: str) -> None:
        """Nothing is kept."""

"""An update of which this process only holds the memory: the engine's own processes verify it."""

from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch

from rl_bridge.bridge.records import require_bytes
from rl_bridge.errors import ChecksumMismatch
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.base import Attachment

__all__ = ["UnreadTensors", "require_verified"]


class UnreadTensors(Mapping[str, torch.Tensor]):
    """An imported update that nobody read here: name -> tensor.

    Who asks for a tensor gets a verified one: the first question reads every byte of the update.
    Otherwise it is as `rl_bridge.memory.imported.ImportedTensors`.
    """

    def __init__(self, manifest: WeightUpdateManifest, attachment: Attachment) -> None:
        """Look at what was attached; nothing is read."""
        self._manifest = manifest
        self._attachment = attachment
        self._is_read = False

    def __getitem__(self, name: str) -> torch.Tensor:
        """Make, or find, one tensor.

        Raises:
            ChecksumMismatch: the bytes are not what the manifest says.
            WeightUpdateRejectedError: the update was refused or undone, and its memory given back.

        """
        tensors = self._attachment.tensors
        if name not in tensors.table.rows:
            raise KeyError(name)
        if not self._is_read:
            require_bytes(self._manifest, self._attachment)
            self._is_read = True
        return tensors[name]

    def __contains__(self, name: object) -> bool:
        """Look at the names only."""
        return name in self._attachment.tensors.table.rows

    def __iter__(self) -> Iterator[str]:
        """Go over the names, as those of an imported update."""
        return iter(self._attachment.tensors)

    def __len__(self) -> int:
        """Count the names, tied ones included."""
        return len(self._attachment.tensors)

    def __repr__(self) -> str:
        """Say how many there are rather than printing weights."""
        return repr(self._attachment.tensors)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as all imported tensors.

        Raises:
            TypeError: always.

        """
        self._attachment.tensors.__reduce__()

    def forget(self) -> None:
        """Let go of the memory. See `rl_bridge.memory.imported.ImportedTensors`."""
        self._attachment.tensors.forget()


def require_verified(manifest: WeightUpdateManifest, root: str) -> None:
    """Take an engine's word that its processes verified an update, if it is about this one.

    Raises:
        ChecksumMismatch: it is not.

    """
    if root != manifest.root:
        msg = (
            f"version {manifest.weight_version}: the engine's processes verified root {root!r}, "
            f"expected {manifest.root!r}. Use the same release of rl_bridge in all of them; an "
            "adapter that imports_itself must tell what they verified."
        )
        raise ChecksumMismatch(msg)

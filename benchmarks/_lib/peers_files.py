"""Peers that write a file on /dev/shm and read it back: safetensors and torch.save."""

from collections.abc import Mapping
from pathlib import Path

import torch

from _lib.lanes import BaseConsumer, BasePublisher

__all__ = ["SafetensorsConsumer", "SafetensorsPublisher", "TorchSaveConsumer", "TorchSavePublisher"]


class _FilePublisher(BasePublisher):
    """One file per version under a new name, so that an older mapping keeps its bytes."""

    suffix = ""
    _previous: Path | None = None
    _current: Path | None = None

    def write(self, path: Path) -> None:
        """Write the state dict."""
        raise NotImplementedError

    def publish(self, version: int) -> bytes:
        """Write this version's file and return its path."""
        path = self.context.scratch / f"{type(self).__name__}-{id(self)}-{version}{self.suffix}"
        self._previous, self._current = self._current, path
        self.write(path)
        return str(path).encode()

    def after(self) -> dict[str, float]:
        """Remove the files of this and of the previous version."""
        for path in (self._previous, self._current):
            if path is not None:
                path.unlink(missing_ok=True)
        return {}

    def close(self) -> None:
        """Remove what is left."""
        self.after()


class SafetensorsPublisher(_FilePublisher):
    """``safetensors.torch.save_file``."""

    suffix = ".safetensors"

    def write(self, path: Path) -> None:
        """Write the state dict."""
        from safetensors.torch import save_file

        save_file(self.payload.tensors, path)


class SafetensorsConsumer(BaseConsumer):
    """``safetensors.torch.load_file``."""

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Read the file."""
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = load_file(message.decode())
        return tensors


class TorchSavePublisher(_FilePublisher):
    """``torch.save``."""

    suffix = ".pt"

    def write(self, path: Path) -> None:
        """Write the state dict."""
        torch.save(self.payload.tensors, path)


class TorchSaveConsumer(BaseConsumer):
    """``torch.load`` with ``weights_only=True``, mapped where the option says so."""

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Read the file."""
        tensors: dict[str, torch.Tensor] = torch.load(
            message.decode(), weights_only=True, mmap=bool(self.context.options.get("mmap"))
        )
        return tensors

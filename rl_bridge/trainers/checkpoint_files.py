"""Checkpoints of safetensors as sources: Hugging Face's layout of a model, PEFT's of an adapter.

What is read is whatever the files hold: only a version that travels over a bridge is verified.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.trainers.peft_files import read_peft

__all__ = ["read_checkpoint"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = ("adapter_model.safetensors", "adapter_config.json")


def read_checkpoint(
    directory: str | os.PathLike[str], *, adapter_name: str
) -> tuple[dict[str, torch.Tensor], AdapterSpec | None]:
    """Read the tensors of a checkpoint, to be published.

    Args:
        directory: with an index and the files that it names; or with ``model.safetensors``; or
            with files of safetensors, each tensor in one of them; or with an adapter of PEFT's.
        adapter_name: under which an adapter is published.

    Returns:
        The tensors by name, on the CPU, and what belongs to them if they are an adapter.

    Raises:
        IncompatibleUpdate: the tensors of an adapter are not its pairs.
        MalformedManifest: a file is damaged, or tensors are not where the index has them.
        WeightBridgeUnavailableError: safetensors or a file is missing.

    """
    folder = Path(directory)
    if any((folder / name).exists() for name in _ADAPTER):
        spec, tensors = read_peft(folder, adapter_name)
        return tensors, spec
    index = _read_index(folder / _INDEX)
    found: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(set(index.values())) or _weights_in(folder):
        tensors = _load(folder / file)
        if twice := sorted(tensors.keys() & found.keys()):
            msg = (
                f"tensor {twice[0]!r} is in {where[twice[0]]} and in {file} of {folder}, expected "
                "in one of them. Remove the files that are not of this checkpoint."
            )
            raise MalformedManifest(msg)
        found |= tensors
        where |= dict.fromkeys(tensors, file)
    if index and index != where:
        name = min(
            name for name in index.keys() | where.keys() if index.get(name) != where.get(name)
        )
        msg = (
            f"tensor {name!r} is in {where.get(name, 'no file')} of {folder}, expected in "
            f"{index.get(name, 'none')}, as {_INDEX} says. Write the checkpoint again."
        )
        raise MalformedManifest(msg)
    return found, None


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        safetensors: Any = importlib.import_module("safetensors.torch")
    except ImportError as error:
        msg = f"checkpoints need safetensors ({error}). Install it: pip install safetensors."
        raise WeightBridgeUnavailableError(msg) from error
    try:
        found: dict[str, torch.Tensor] = safetensors.load_file(path)
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror or error}. Copy the checkpoint again."
        raise WeightBridgeUnavailableError(msg) from error
    except Exception as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "SafetensorError":
            raise
        msg = f"{path} is damaged ({error}). Copy the checkpoint again."
        raise MalformedManifest(msg) from error
    return found


def _weights_in(folder: Path) -> list[str]:
    """Names of the files with weights, where no index tells them."""
    if (folder / _WEIGHTS).exists():
        return [_WEIGHTS]
    try:
        found = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
    except OSError as error:
        msg = f"{folder} cannot be read: {error.strerror}. Name the directory of a checkpoint."
        raise WeightBridgeUnavailableError(msg) from error
    if not found:
        msg = (
            f"{folder} has no file of safetensors, expected a checkpoint. Name its directory, or "
            "convert it."
        )
        raise WeightBridgeUnavailableError(msg)
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor -> its file, as the index says; empty if there is no index."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Copy the checkpoint again."
        raise WeightBridgeUnavailableError(msg) from error
    except ValueError as error:
        msg = f"{path} is no JSON ({error}). Copy the checkpoint again."
        raise MalformedManifest(msg) from error
    index = document.get("weight_map") if isinstance(document, dict) else None
    # (Only names of files beside it: a path could lead anywhere.)
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(file, str) and Path(file).name == file for file in index.values())
    ):
        msg = f"{path} has no weight_map of files beside it. Copy the checkpoint again."
        raise MalformedManifest(msg)
    return {str(name): file for name, file in index.items()}

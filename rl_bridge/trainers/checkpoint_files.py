"""Directories of safetensors: Hugging Face's layout of a model, PEFT's of an adapter.

What is read is whatever the files hold: only a version that travels over a bridge is verified. An
adapter is written beside its place and renamed when all of it is on disk, so that nobody meets one
that is half written, also after a crash.
"""

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate, MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.memory.durable import whole_directory, write_durably

__all__ = ["read_checkpoint", "read_peft", "write_peft"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
    if any((folder / name).exists() for name in (_ADAPTER, _ADAPTER_CONFIG)):
        spec, tensors = read_peft(folder, adapter_name)
        return tensors, spec
    index = _read_index(folder / _INDEX)
    found: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(set(index.values())) or _weights_in(folder):
        tensors = _load(folder / file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise MalformedManifest(
                f"tensor {twice[0]!r} is in {where[twice[0]]} and in {file} of {folder}, expected "
                "in one of them. Remove the files that are not of this checkpoint."
            )
        found |= tensors
        where |= dict.fromkeys(tensors, file)
    if index and index != where:
        name = min(
            name for name in index.keys() | where.keys() if index.get(name) != where.get(name)
        )
        raise MalformedManifest(
            f"tensor {name!r} is in {where.get(name, 'no file')} of {folder}, expected in "
            f"{index.get(name, 'none')}, as {_INDEX} says. Write the checkpoint again."
        )
    return found, None


def read_peft(
    directory: str | os.PathLike[str], name: str, *, base_root: str = ""
) -> tuple[AdapterSpec, dict[str, torch.Tensor]]:
    """Read an adapter, to be published: ``bridge.publish(tensors, adapter=spec)``.

    Args:
        directory: as PEFT's ``save_pretrained`` writes it.
        name: under which the adapter is published.
        base_root: root of the base weights that it was trained on; empty if it is not known.

    Returns:
        What belongs to the adapter, and its tensors by PEFT's names, on the CPU.

    Raises:
        IncompatibleUpdate: the tensors are not the pairs of an adapter.
        MalformedManifest: a file is damaged, or no configuration of a LoRA.
        WeightBridgeUnavailableError: safetensors or a file is missing.

    """
    folder = Path(directory)
    tensors, config = _load(folder / _ADAPTER), _read_object(folder / _ADAPTER_CONFIG)
    unscaled = AdapterSpec(name=name, config={}, scaling=1.0)
    modules = [pair.module for pair in unscaled.pairs(_shapes(tensors))]
    return AdapterSpec.of_peft(name, config, modules, base_root=base_root), tensors


def write_peft(
    directory: str | os.PathLike[str], spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write an adapter durably: the whole directory is there, or none.

    Args:
        directory: a new one; its parent must exist.
        spec: such as ``manifest.adapter`` of an update.
        tensors: such as the update imported, under PEFT's names.

    Raises:
        IncompatibleUpdate: no pairs of an adapter; or a module's scaling is another one than PEFT
            would work out of the configuration.
        WeightBridgeUnavailableError: safetensors is missing; the directory exists, or cannot be
            written.

    """
    safetensors = _safetensors()
    for module, theirs in spec.misread(_shapes(tensors)).items():
        raise IncompatibleUpdate(
            f"adapter {spec.name!r}: module {module!r} has scaling {spec.scaling_of(module)}, and "
            f"PEFT would read {theirs} out of its configuration, such as after set_scale(). "
            "Publish it over a bridge, which carries the factor, or write it with the usual "
            "scaling."
        )
    target = Path(directory).absolute()
    if target.exists():
        raise _unwritable(spec, target, "it exists already")
    # (Copies: safetensors refuses tensors that lie in one memory.)
    copies = {name: one.detach().cpu().clone() for name, one in tensors.items()}
    weights = safetensors.save(copies, metadata={"format": "pt"})
    try:
        with whole_directory(target) as made:
            write_durably(made / _ADAPTER, [weights])
            write_durably(made / _ADAPTER_CONFIG, [spec.peft_text()])
    except OSError as error:
        raise _unwritable(spec, target, error.strerror or str(error)) from error


def _unwritable(spec: AdapterSpec, target: Path, cause: str) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"adapter {spec.name!r} cannot be written to {target}: {cause}. Name a new directory, in "
        "one that can be written to."
    )


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {one: tuple(tensor.shape) for one, tensor in tensors.items()}


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            f"checkpoints need safetensors ({error}). Install it: pip install safetensors."
        ) from error


def _unreadable(path: Path, error: OSError) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{path} cannot be read: {error.strerror or error}. Copy the checkpoint again, or name a "
        "directory that has one."
    )


def _load(path: Path) -> dict[str, torch.Tensor]:
    safetensors = _safetensors()
    try:
        found: dict[str, torch.Tensor] = safetensors.load_file(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "SafetensorError":
            raise
        raise MalformedManifest(
            f"{path} is damaged ({error}). Copy the checkpoint again."
        ) from error
    return found


def _weights_in(folder: Path) -> list[str]:
    """Names of the files with weights, where no index tells them."""
    if (folder / _WEIGHTS).exists():
        return [_WEIGHTS]
    try:
        found = sorted(path.name for path in folder.iterdir() if path.name.endswith(".safetensors"))
    except OSError as error:
        raise _unreadable(folder, error) from error
    if not found:
        raise WeightBridgeUnavailableError(
            f"{folder} has no file of safetensors, expected a checkpoint. Name its directory, or "
            "convert it."
        )
    return found


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise MalformedManifest(
            f"{path} is no JSON ({error}). Copy the checkpoint again."
        ) from error
    if not isinstance(document, dict):
        raise MalformedManifest(
            f"{path} is a {type(document).__name__}, expected an object. Copy the files again."
        )
    return document


def _read_index(path: Path) -> dict[str, str]:
    """Name of a tensor -> its file, as the index says; empty if there is no index."""
    if not path.exists():
        return {}
    index = _read_object(path).get("weight_map")
    # (Only names of files beside it: a path could lead anywhere.)
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(file, str) and Path(file).name == file for file in index.values())
    ):
        raise MalformedManifest(
            f"{path} has no weight_map of files beside it. Copy the checkpoint again."
        )
    return {str(name): file for name, file in index.items()}

"""Adapters as directories of PEFT: ``adapter_model.safetensors`` beside ``adapter_config.json``.

PEFT and engines load such a directory as it is. It is written beside its place and renamed when all
of it is on disk, so that nobody meets one that is half written, also after a crash. What is read
from files is whatever they hold: only a version that travels over a bridge is verified.
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
from rl_bridge.manifest.canonical import thaw
from rl_bridge.memory.durable import whole_directory, write_durably

__all__ = ["read_peft", "write_peft"]

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
    _check_scalings(spec, tensors)
    target = Path(directory).absolute()
    config = json.dumps({**_plain(spec), "inference_mode": True}, indent=2, sort_keys=True)
    if target.exists():
        raise _unwritable(spec, target, "it exists already")
    # (Copies: safetensors refuses tensors that lie in one memory.)
    copies = {name: one.detach().cpu().clone() for name, one in tensors.items()}
    weights = safetensors.save(copies, metadata={"format": "pt"})
    try:
        with whole_directory(target) as made:
            write_durably(made / _WEIGHTS, [weights])
            write_durably(made / _CONFIG, [f"{config}\n".encode()])
    except OSError as error:
        raise _unwritable(spec, target, error.strerror or str(error)) from error


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
    safetensors, folder = _safetensors(), Path(directory)
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = safetensors.load_file(folder / _WEIGHTS)
    except OSError as error:
        msg = (
            f"{folder} cannot be read as an adapter: {error.strerror or error}. Expected "
            f"{_WEIGHTS} and {_CONFIG}: name a directory that PEFT's save_pretrained wrote."
        )
        raise WeightBridgeUnavailableError(msg) from error
    except Exception as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "SafetensorError":
            raise
        msg = f"a file of the adapter in {folder} is damaged ({error}). Write it again."
        raise MalformedManifest(msg) from error
    if not isinstance(config, dict):
        msg = (
            f"{folder / _CONFIG} is a {type(config).__name__}, expected an object. Write it again."
        )
        raise MalformedManifest(msg)
    return AdapterSpec.of_peft(name, config, _modules(name, tensors), base_root=base_root), tensors


def _unwritable(spec: AdapterSpec, target: Path, cause: str) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"adapter {spec.name!r} cannot be written to {target}: {cause}. Name a new directory, in "
        "one that can be written to."
    )


def _modules(name: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    shapes = {one: tuple(tensor.shape) for one, tensor in tensors.items()}
    unscaled = AdapterSpec(name=name, config={}, scaling=1.0)
    return [pair.module for pair in unscaled.pairs(shapes)]


def _plain(spec: AdapterSpec) -> dict[str, Any]:
    config = thaw(spec.config)
    assert isinstance(config, dict)  # as the spec was checked
    return {"peft_type": "LORA", **config}


def _check_scalings(spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse an adapter that PEFT would scale otherwise: its files cannot name the factors."""
    modules = _modules(spec.name, tensors)
    read = AdapterSpec.of_peft(spec.name, _plain(spec), modules)
    for module in modules:
        own, theirs = spec.scaling_of(module), read.scaling_of(module)
        if own != theirs:
            msg = (
                f"adapter {spec.name!r}: module {module!r} has scaling {own}, and PEFT would read "
                f"{theirs} out of its configuration, such as after set_scale(). Publish it over a "
                "bridge, which carries the factor, or write it with the usual scaling."
            )
            raise IncompatibleUpdate(msg)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        msg = f"files of adapters need safetensors ({error}). Install it: pip install safetensors."
        raise WeightBridgeUnavailableError(msg) from error

"""Checkpoints as directories: Hugging Face's layout of a model's weights, PEFT's of an adapter.

Beside tensors, a checkpoint has the files that engines need to load it, such as ``config.json`` and
the tokenizer's. They go along wherever a version is written.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rl_bridge.errors import MalformedManifest, WeightBridgeUnavailableError
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import thaw
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.durable import whole_directory, write_durably
from rl_bridge.transports.files.layout import INDEX, layout_of
from rl_bridge.transports.files.store import (
    GROUP_MANIFEST,
    KEPT,
    LISTS,
    LOCK,
    MANIFEST,
    MARKER,
    FileContent,
)

__all__ = ["ADAPTER_CONFIG", "config_for_peft", "is_config", "require_free", "write_checkpoint"]

_LOG = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
_OWN = frozenset({MARKER, MANIFEST, GROUP_MANIFEST, LISTS, ADAPTER_CONFIG, INDEX, KEPT, LOCK})
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


def is_config(file: str) -> bool:
    """Whether a file goes along with the weights: it is none with weights, and none of ours."""
    return file not in _OWN and not file.startswith(".") and not file.endswith(_WEIGHTS)


def config_for_peft(manifest: WeightUpdateManifest, *, warns: bool = True) -> bytes | None:
    """PEFT's configuration of an adapter; None of no adapter, or if it would be read otherwise.

    Without the file nobody loads the adapter as PEFT's, and scales it wrongly: readers over a
    bridge have the scalings in the manifest.
    """
    spec, table = manifest.adapter, manifest.table
    if spec is None:
        return None
    config = thaw(spec.config)
    assert isinstance(config, dict)  # as the spec was checked
    shapes = {name: table.shapes[row] for name, row in table.rows.items()}
    modules = [pair.module for pair in spec.pairs(shapes)]
    try:
        read = AdapterSpec.of_peft(spec.name, config, modules)
    except MalformedManifest:  # no rank or alpha in it
        read = None
    if read is None or any(read.scaling_of(one) != spec.scaling_of(one) for one in modules):
        if warns:
            _LOG.warning(
                "adapter %s is written without %s: its configuration does not tell its scalings",
                spec.name,
                ADAPTER_CONFIG,
            )
        return None
    whole = {"peft_type": "LORA", **config, "inference_mode": True}
    return json.dumps(whole, indent=2, sort_keys=True).encode()


# ---- writing -------------------------------------------------------------------------------------


def require_free(directory: str | os.PathLike[str]) -> None:
    """See to it that a checkpoint can be written there, before its tensors are read.

    Raises:
        WeightBridgeUnavailableError: the directory has files, or lies in none.

    """
    target = Path(directory).absolute()
    try:
        if target.exists():
            if not target.is_dir():
                raise _unwritable(target, "it is a file, expected a new directory or an empty one")
            if any(target.iterdir()):
                cause = "it is not empty, expected a new directory or an empty one"
                raise _unwritable(target, cause)
        elif not target.parent.is_dir():
            raise _unwritable(target, f"{target.parent} is no directory")
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error


def write_checkpoint(
    directory: str | os.PathLike[str],
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    configs: Mapping[str, bytes],
    file_nbytes: int,
) -> dict[str, int]:
    """Write a version as a checkpoint, with its manifest, durably: all of it is there, or nothing.

    Args:
        directory: a new one, or an empty one; what it lies in must exist.
        manifest: of the version.
        tensors: as they were imported, on any device.
        configs: files that go along, by name.
        file_nbytes: the largest size of a file, unless a tensor is larger.

    Returns:
        The files' names and sizes in bytes.

    Raises:
        WeightBridgeUnavailableError: the directory has files, or cannot be written.

    """
    require_free(directory)
    target = Path(directory).absolute()
    found: dict[str, int] = {}
    try:
        with whole_directory(target) as made:
            for file, pieces in _contents(manifest, tensors, configs, file_nbytes):
                write_durably(made / file, pieces)
                found[file] = sum(len(one) for one in pieces)
    except OSError as error:
        raise _unwritable(target, error.strerror or str(error)) from error
    return found


def _contents(
    manifest: WeightUpdateManifest,
    tensors: Mapping[str, torch.Tensor],
    configs: Mapping[str, bytes],
    file_nbytes: int,
) -> Iterator[FileContent]:
    table = manifest.table
    layout = layout_of(table, file_nbytes, is_adapter=manifest.adapter is not None)
    for file in layout.files:
        yield file.name, [file.header, *(_bytes_of(tensors[table.names[row]]) for row in file.rows)]
    if layout.index:
        yield INDEX, [layout.index.encode()]
    config = config_for_peft(manifest)
    if config is not None:
        yield ADAPTER_CONFIG, [config]
    for name, content in configs.items():
        yield name, [content]
    yield MANIFEST, [manifest.to_json().encode()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's types lack it


def _unwritable(target: Path, cause: str) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"{target} cannot be written: {cause}. Name a new directory, in one that exists and can be "
        "written to."
    )

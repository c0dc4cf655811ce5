"""`VLLMCheckpointReloadAdapter`: hands an update to vLLM as a checkpoint, for it to reload.

The way that needs the least of an engine: no plugin in its workers, only a folder that they can
read. It promises the least, too.
"""

import importlib
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_bridge.engines.load_checks import check_finite
from rl_bridge.engines.vllm.client import LLMHandle
from rl_bridge.engines.vllm.compat import require
from rl_bridge.errors import (
    EngineLost,
    IncompatibleUpdate,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "VLLMCheckpointReloadAdapter",
]

_SHOWN = 5
_HEADER_LIMIT = 100 << 20
# safetensors' own names of dtypes
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}

Kinds = dict[str, tuple[str, tuple[int, ...]]]


class VLLMCheckpointReloadAdapter(TransactionalAdapter):
    """Writes each update as safetensors, and lets all workers reload it by ``reload_weights``.

    Its limits, which `rl_bridge.vllm.VLLMEngineAdapter` does not have:

    * An update must have the names, dtypes and shapes of the checkpoint that the engine was started
      from. That is compared before anything is written.
    * Workers reload in place. The undo is one more reload, of the version before, on all of them;
      what a worker cannot reload leaves the engine torn. Behind a reload that failed, vLLM's notes
      must be cleared first, by a function that engines in other processes take only where
      ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` is set: without it, they are torn then.
    * Nothing of what the workers hold is read: the proof is ``unproven``.
    * vLLM on the CPU does not reload tied embeddings, packed experts and quantized layers rightly,
      and fails on latent attention: such engines are refused.
    * A folder of two versions' size, on all workers' machines; the engine's configuration names it
      afterwards, so it must outlive the engine. What a process that died had written stays there:
      remove it with the engine's end.
    * It sets no version label.
    """

    def __init__(
        self,
        engine: Any,
        directory: str | Path,
        *,
        checkpoint: str | Path | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Look at the engine and its checkpoint.

        Args:
            engine: an ``LLM``, used from the thread that generates.
            directory: where versions are written, best on tmpfs; it is made.
            checkpoint: the folder that the engine was started from; None takes its model's path.
            timeout_s: deadline of each call to the engine.

        Raises:
            TypeError: the engine is no ``LLM``.
            WeightBridgeUnavailableError: safetensors is missing, there is no such folder, or the
                engine is one that vLLM does not reload correctly.

        """
        if not hasattr(engine, "llm_engine"):
            msg = f"engine is a {type(engine).__name__}, expected an LLM. Pass one of these."
            raise TypeError(msg)
        try:
            self._save = importlib.import_module("safetensors.torch").save_file
        except ImportError as error:
            msg = "versions are written as safetensors. Install it: pip install 'rl-bridge[vllm]'."
            raise WeightBridgeUnavailableError(msg) from error
        config = engine.llm_engine.vllm_config
        _check_reloadable(config)
        self._engine = _Reloading(engine, timeout_s)
        self._initial = Path(checkpoint or config.model_config.model)
        self._kinds = _kinds_of(self._initial)
        self._home = Path(directory)
        self._home.mkdir(parents=True, exist_ok=True)
        self._active = self._initial
        self._next: Path | None = None
        self._written: set[Path] = set()  # all that are there, by this process
        self._has_begun = self._is_paused = False

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare with the engine's checkpoint; nothing is written yet.

        Raises:
            IncompatibleUpdate: names, dtypes or shapes differ, or numbers are not finite.

        """
        table = manifest.table
        sent: Kinds = {
            name: (table.dtypes[row], tuple(table.shapes[row])) for name, row in table.rows.items()
        }
        # A tied head is in some trainers' state dicts and in no checkpoint: the other name has it,
        # whichever of the two the update stores it under.
        had = {table.rows[name] for name in sent.keys() & self._kinds.keys()}
        for name in sent.keys() - self._kinds.keys():
            if table.rows[name] in had:
                del sent[name]
        different = sorted(
            name for name in sent.keys() | self._kinds if sent.get(name) != self._kinds.get(name)
        )
        if different:
            name = different[0]
            msg = (
                f"{len(different)} tensors are not those of the engine's checkpoint in "
                f"{self._initial}: {name!r} is {sent.get(name)}, expected {self._kinds.get(name)}; "
                f"{different[:_SHOWN]}. Publish the model that the engine serves."
            )
            raise IncompatibleUpdate(msg)
        check_finite(tensors, self._kinds)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the version, pause, and let all workers reload it.

        Raises:
            OSError: there is no room for the files; nothing was installed.
            EngineLost: the engine is gone.
            Exception: what a worker raised. Call `undo`.

        """
        self.prepare(manifest, tensors)
        # A name of its own: an engine may have this version from a process that died since.
        name = f"v{manifest.weight_version}-{manifest.update_id}-{secrets.token_hex(4)}"
        self._next = folder = self._home / name
        self._written.add(folder)
        folder.mkdir()
        for extra in self._initial.glob("*.json"):
            if not extra.name.endswith(".index.json"):
                shutil.copy(extra, folder)
        # (safetensors refuses tensors that share memory: each name of a tie gets its own.)
        ties = manifest.table.ties
        content = {
            name: tensors[name].clone() if name in ties else tensors[name].contiguous()
            for name in self._kinds
        }
        self._save(content, folder / "model.safetensors", metadata={"format": "pt"})
        # Noted first: an interrupt must not leave it paused. The user's own is not ended.
        self._is_paused = self._is_paused or not self._engine.is_paused()
        self._engine.pause("keep")
        self._has_begun = True
        self._engine.reload(folder)

    def prove(self) -> InstallProof:
        """Say that nothing was read."""
        return InstallProof(method="unproven")

    def resume(self) -> None:
        """Drop what the old weights cached, and let requests go on.

        Raises:
            WeightUpdateRejectedError: requests hold cached blocks.

        """
        self._drop_caches()
        self._go_on()

    def undo(self) -> None:
        """Let all workers reload the version before, and requests go on.

        Raises:
            TornEngine: a worker cannot, or the engine is gone.

        """
        if self._has_begun:
            try:
                self._engine.reload(self._active)
                self._drop_caches()
            except EngineLost as error:
                raise TornEngine(str(error)) from error
            except Exception as error:
                msg = (
                    f"the engine could not go back to {self._active} ({type(error).__name__}: "
                    f"{error}). Call recover(), or start a fresh engine."
                )
                raise TornEngine(msg) from error
            self._has_begun = False
        self._go_on()
        self._next = None
        self._forget_others()

    def commit(self) -> None:
        """Remove the files of all other versions."""
        self._active = self._next or self._active
        self._next, self._has_begun = None, False
        self._forget_others()

    def release(self, update_id: str) -> None:
        """Nothing is kept of an update but its files, which go when the next one is committed."""

    # ---- inside ---------------------------------------------------------------------------------

    def _drop_caches(self) -> None:
        if not self._engine.reset_caches(running=True):
            msg = (
                "requests hold cached blocks of other weights, so the prefix cache cannot be "
                "reset. Try again when a KV connector is done."
            )
            raise WeightUpdateRejectedError(msg)

    def _go_on(self) -> None:
        if self._is_paused:
            self._engine.resume()
            self._is_paused = False

    def _forget_others(self) -> None:
        """Remove all but the active version; no reload is under way that may read one of them."""
        for folder in self._written - {self._active}:
            shutil.rmtree(folder, ignore_errors=True)
            self._written.discard(folder)  # last: what an interrupt cut off is done again


class _Reloading(LLMHandle):
    """An ``LLM``, and vLLM's own reload on all of its workers."""

    def __init__(self, llm: Any, timeout_s: float) -> None:
        """Look at `llm`; nothing is called."""
        super().__init__(llm, timeout_s)
        self._is_half_way = False

    def reload(self, folder: Path) -> None:
        """Reload what is in a folder, behind what an earlier one that failed left."""

        def load() -> None:
            if self._is_half_way:
                self._llm.collective_rpc(_abort_reload)
            self._is_half_way = True
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            self._is_half_way = False

        # Without a deadline inside: vLLM would give up and take the late answers for the next ones.
        self._do("reload its weights", load)


def _abort_reload(worker: Any) -> None:
    """Put the tensors that layers compute with back, old or new, and forget what was buffered.

    Without this, vLLM takes a part that comes again for one that was missing, and finishes layers
    with memory that nobody wrote.
    """
    layerwise: Any = require("vllm.model_executor.model_loader.reload.layerwise")
    for layer in worker.model_runner.get_model().modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - vLLM has no other way
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def _check_reloadable(config: Any) -> None:
    """Refuse what vLLM reloads without an error and wrong, or cannot reload."""
    if getattr(config.device_config, "device_type", "") != "cpu":
        return
    reason, model = "", config.model_config
    if getattr(model.hf_config, "tie_word_embeddings", False):
        reason = "tied embeddings"
    elif model.quantization is not None:
        reason = f"{model.quantization} layers"
    elif model.use_mla:
        reason = "latent attention"
    elif model.get_num_experts() > 0:
        reason = "packed experts"
    if reason:
        msg = (
            f"vLLM's own reload leaves {reason} wrong on the CPU, without an error, or fails. Use "
            "VLLMEngineAdapter, or VLLMReloadAdapter in the worker."
        )
        raise WeightBridgeUnavailableError(msg)


def _kinds_of(folder: Path) -> Kinds:
    """Names, dtypes and shapes of a checkpoint, from the headers of its files."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        msg = (
            f"{folder} is no folder with .safetensors files, so updates cannot be compared with "
            "the engine's checkpoint. Pass checkpoint=, the folder that it was started from."
        )
        raise WeightBridgeUnavailableError(msg)
    kinds: Kinds = {}
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _HEADER_LIMIT:
                msg = f"{file} has a header of {length} bytes. Restore the checkpoint."
                raise WeightBridgeUnavailableError(msg)
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
                kinds[name] = dtype, tuple(entry["shape"])
    return kinds

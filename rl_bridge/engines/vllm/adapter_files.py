"""`VLLMAdapterFiles`: versions of adapters into a vLLM server by files and its own route.

For a server that does not have rl_bridge. The executor reads and verifies an update; it is written
as a directory of PEFT that the server sees, and loaded by ``/v1/load_lora_adapter``. Each version
has a name of its own. It is never loaded in place, where vLLM would load it again at every step and
use the keys and values that the version before had cached. The ranks are not read back, so every
acknowledgement says ``unproven``.

A directory is left where it is when its version is unloaded: vLLM forgets adapters that were not
used for a while, and reads the files again for a request that has one still; if they are gone, the
engine ends.
"""

import copy
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl_bridge.engines.adapters import Resident, require_plain
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.engines.rpc import Server
from rl_bridge.engines.vllm import VLLM
from rl_bridge.errors import (
    IncompatibleUpdate,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.trainers.checkpoint_files import write_peft

__all__ = ["VLLMAdapterFiles"]

_LOG = logging.getLogger(__name__)

_LOAD, _UNLOAD = "v1/load_lora_adapter", "v1/unload_lora_adapter"
_KEPT_VERSIONS = 2


class VLLMAdapterFiles(TransactionalAdapter):
    """Brings versions of LoRA adapters, and nothing else, into a vLLM server by its URL.

    The server is started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``. Its clients send
    ``executor.lora_request(name)``, such as ``policy@7``, as ``model``.
    """

    def __init__(self, url: str, directory: str | Path, *, timeout_s: float = 600.0) -> None:
        """Configure; nothing is sent.

        Args:
            url: of the server.
            directory: where versions are written; the server must see it under the same path.
            timeout_s: deadline of each call to the server.

        Raises:
            ValueError: a text that is no URL.
            WeightBridgeUnavailableError: no httpx.

        """
        self._server = Server(url, timeout_s, install=VLLM.install, health="health")
        self._directory, self._timeout_s = Path(directory).absolute(), timeout_s
        self._name = ""  # of the adapter; this one is for all of them
        self._staged: tuple[Resident, WeightUpdateManifest] | None = None
        self._residents: list[Resident] = []  # the newest first

    def for_adapter(self, name: str) -> "VLLMAdapterFiles":
        """What brings versions of one adapter. See `TransactionalAdapter`."""
        made = copy.copy(self)
        made._name, made._residents = name, []  # noqa: SLF001 - one of its own kind
        return made

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse a model's weights, and what is no plain LoRA. See `TransactionalAdapter`."""
        spec = manifest.adapter
        if spec is None:
            raise IncompatibleUpdate(
                f"version {manifest.weight_version} holds a model's weights, expected an adapter, "
                "and nothing else. Publish it with adapter=, or use VLLMEngineAdapter."
            )
        require_plain(spec, spec.others(tensors))
        check_finite(tensors, tensors)
        self._staged = Resident.beside(self._residents, manifest), manifest

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the version, and have the server load it under its own name."""
        if self._staged is None:
            self.prepare(manifest, tensors)
        assert self._staged is not None and manifest.adapter is not None  # noqa: PT018 - set just now
        version, _ = self._staged
        folder = self._folder(version)
        write_peft(folder, manifest.adapter, tensors)
        self._call(_LOAD, lora_name=version.own_name, lora_path=str(folder))

    def prove(self) -> InstallProof:
        """Say that nothing was read back."""
        count = 0 if self._staged is None else self._staged[1].tensor_count
        return InstallProof(method="unproven", tensors=count, staging="beside")

    def undo(self) -> None:
        """Have the server forget the version that was not committed."""
        staged, self._staged = self._staged, None
        if staged is not None:
            self._call(_UNLOAD, lora_name=staged[0].own_name, may_lack=True)
            # (Nobody was told the name. If it stays, the next attempt says that it is there.)
            shutil.rmtree(self._folder(staged[0]), ignore_errors=True)

    def abandon(self) -> None:
        """Nothing was written."""
        self._staged = None

    def commit(self) -> None:
        """Requests ask for the version from now on; all but the one before it are unloaded."""
        if self._staged is not None:
            self._residents.insert(0, self._staged[0])
            self._staged = None
        while len(self._residents) > _KEPT_VERSIONS:
            old = self._residents.pop()
            try:
                self._call(_UNLOAD, lora_name=old.own_name, may_lack=True)
            except WeightBridgeError:  # the new version stands all the same
                _LOG.exception("adapter %s was not unloaded", old.own_name)

    def drop_versions(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - vLLM waits itself
        """Have the server forget all versions. See `TransactionalAdapter`."""
        while self._residents:
            self._call(_UNLOAD, lora_name=self._residents[-1].own_name, may_lack=True)
            self._residents.pop()

    def lora_request(self, version: int | None) -> str:
        """The name of a resident version; None is the active one.

        Raises:
            UnknownUpdate: the server was not given it, or not any more.

        """
        for one in self._residents:
            if version in {None, one.weight_version}:
                return one.own_name
        raise UnknownUpdate(
            f"the server does not hold version {version} of adapter {self._name!r}, expected one "
            f"of {[one.weight_version for one in self._residents]}. Install it with update_weights."
        )

    def release(self, update_id: str) -> None:
        """The server has files of its own."""

    def leave(self) -> None:
        """Close the connections."""
        if not self._name:
            self._server.close()

    def _folder(self, version: Resident) -> Path:
        return self._directory / version.own_name

    def _call(self, path: str, *, may_lack: bool = False, **body: Any) -> None:
        doing = f"answer /{path}"
        reply = self._server.send("POST", path, doing, self._timeout_s, json=body)
        codes = self._server.codes
        is_unknown = reply.status_code == codes.NOT_FOUND
        if reply.is_success or (may_lack and is_unknown):
            return
        if is_unknown and "lora_name" not in reply.text and "adapter" not in reply.text:
            raise WeightBridgeUnavailableError(
                f"the server at {self._server} has no route /{path}. Start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and --enable-lora."
            )
        raise WeightBridgeUnavailableError(
            f"the server at {self._server} answered /{path} for {body['lora_name']} with status "
            f"{reply.status_code}: {reply.text[:300]}. See its log; it must see the directory "
            "under the same path."
        )

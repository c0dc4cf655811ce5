"""The bridges of an engine's rank, by which it imports updates itself; and options for them."""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rl_bridge.assembly.wanted import ReadScope
from rl_bridge.bridge.arguments import check_options
from rl_bridge.bridge.bridges import GroupBridge, make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import MalformedManifest
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.group import GROUP
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.registry import canonical_name, transport_class
from rl_bridge.transports.wire.tls import files_of

TransportOptions = Mapping[str, Mapping[str, object]]
"""Name of a transport -> what the ranks' bridges of that transport are made with."""

_WHO = {"source_worker", "source_rank"}
# Options that name a folder.
_FOLDERS = {"directory", "state_dir"}


def checked_transports(given: TransportOptions | None) -> dict[str, dict[str, Any]]:
    """Options of transports as they travel to an engine: plain JSON.

    Raises:
        TypeError: an option that the transport does not have, or one that is no JSON.
        ValueError: a value that it cannot have.
        WeightBridgeUnavailableError: no transport has that name.

    """
    plain: dict[str, dict[str, Any]] = {}
    for given_name, options in (given or {}).items():
        name = canonical_name(given_name)
        if taken := _WHO & options.keys():
            names = " and ".join(sorted(taken))
            raise TypeError(
                f"transports[{name!r}]: each rank has its own {names}, expected none. Leave it out."
            )
        # (Files for TLS are on the ranks' machine, and perhaps not on this one.)
        check_options(transport_class(name), options.keys() & {"tls"})
        files = files_of(options.get("tls"))
        here: dict[str, Any] = {key: value for key, value in options.items() if key != "tls"}
        make_weight_bridge(name, **here).close()  # opens nothing
        # (Of another process's working directory, a relative path would name another folder.)
        plain[name] = {
            key: str(Path(value).absolute())
            if isinstance(value, os.PathLike) or (key in _FOLDERS and isinstance(value, str))
            else value
            for key, value in here.items()
        }
        if files is not None:
            plain[name]["tls"] = files.plain()
        try:
            canonical_json(plain[name])
        except (TypeError, MalformedManifest) as error:
            raise TypeError(
                f"transports[{name!r}]: expected texts, numbers, booleans and mappings of them, "
                "which travel to the engine as JSON. Leave out what its ranks cannot be told so."
            ) from error
    return plain


class EngineBridges:
    """One bridge for each transport that updates came by."""

    def __init__(self, worker: str) -> None:
        """Begin with none."""
        self._worker = worker
        self._options: TransportOptions = {}
        self._made: dict[str, TensorBridge] = {}

    def configure(self, transports: TransportOptions) -> None:
        """From here on, make them with these options. Nothing may be under way by them."""
        wanted = {canonical_name(name): dict(options) for name, options in transports.items()}
        if wanted == self._options:
            return
        others = [one for one in self._made if self._options.get(one) != wanted.get(one)]
        ended = [self._made.pop(one) for one in others]
        self._options = wanted
        _close(ended)

    def of(self, manifest: WeightUpdateManifest, rank: int) -> TensorBridge:
        """The bridge that imports this update on that rank."""
        bridge = self._made.get(manifest.transport)
        if bridge is None:
            options: dict[str, Any] = {"source_worker": self._worker, "source_rank": rank}
            if manifest.transport == GROUP:
                bridge = GroupBridge(transports=self._options, **options)
            else:
                options |= self._options.get(manifest.transport, {})
                bridge = make_weight_bridge(manifest.transport, **options)
            self._made[manifest.transport] = bridge
        return bridge

    def bring(
        self, manifest: WeightUpdateManifest, rank: int, scope: ReadScope
    ) -> tuple[WeightUpdateManifest, Mapping[str, torch.Tensor]]:
        """Import what a rank reads of an update.

        Returns:
            The manifest of what was imported, and the tensors: of a group, what was assembled of
            its parts; else the update itself.

        """
        tensors = self.of(manifest, rank).consumer.import_update(manifest, scope=scope)
        return tensors.manifest or manifest, tensors

    def made(self, manifest: WeightUpdateManifest) -> TensorBridge | None:
        """The bridge that imported it, if one did."""
        return self._made.get(manifest.transport)

    def close(self) -> None:
        """Close all of them."""
        made, self._made = self._made, {}
        _close(made.values())


def _close(bridges: Iterable[TensorBridge]) -> None:
    with ExitStack() as stack:  # all of them, whatever one says
        for bridge in bridges:
            stack.callback(bridge.close)

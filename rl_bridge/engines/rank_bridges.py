"""The bridges of an engine's rank, by which it imports updates itself; and options for them."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    MalformedManifest,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    describe,
)
from rl_bridge.groups.bridge import GROUP
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.lifecycle import State
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.registry import canonical_name

__all__ = [
    "EngineBridges",
    "TransportOptions",
    "acknowledge",
    "checked_transports",
    "release_update",
]

TransportOptions = Mapping[str, Mapping[str, object]]
"""Name of a transport -> what the ranks' bridges of that transport are made with."""

_WHO = {"source_worker", "source_rank"}
# Options that name a folder.
_FOLDERS = {"directory", "state_dir"}


def checked_transports(given: TransportOptions | None) -> dict[str, dict[str, Any]]:
    """Options of transports as they travel to an engine: plain JSON.

    Raises:
        TypeError: no mapping; an option that the transport does not have, or one that is no JSON.
        ValueError: a value that it cannot have; one transport by two of its names.
        WeightBridgeUnavailableError: no transport has that name.

    """
    plain: dict[str, dict[str, Any]] = {}
    for given_name, options in _checked_mapping("transports", given or {}).items():
        name = canonical_name(given_name)
        _checked_mapping(f"transports[{name!r}]", options)
        if taken := _WHO & options.keys():
            names = " and ".join(sorted(taken))
            msg = (
                f"transports[{name!r}]: each rank has its own {names}, expected none. Leave it out."
            )
            raise TypeError(msg)
        make_weight_bridge(name, **options).close()  # opens nothing
        if name in plain:
            raise ValueError(f"transports has {name!r} by two names. Give its options once.")
        # (Of another process's working directory, a relative path would name another folder.)
        plain[name] = {
            key: str(Path(value).absolute())
            if isinstance(value, os.PathLike) or (key in _FOLDERS and isinstance(value, str))
            else value
            for key, value in options.items()
        }
        try:
            canonical_json(plain[name])
        except (TypeError, MalformedManifest) as error:
            msg = (
                f"transports[{name!r}]: expected texts, numbers, booleans and mappings of them, "
                "which travel to the engine as JSON. Leave out what its ranks cannot be told so."
            )
            raise TypeError(msg) from error
    return plain


def _checked_mapping(what: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        msg = f"{what}: expected a mapping of names, got {given!r}. Give name -> value, as a dict."
        raise TypeError(msg)
    return given


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
        if manifest.transport == GROUP:
            msg = (
                f"version {manifest.weight_version} was assembled of a group's parts, in the "
                "memory of the process that did it, and the engine's workers read updates by "
                "themselves. Publish what was assembled there once more, by shared-memory, for the "
                "engine; or publish whole tensors."
            )
            raise WeightBridgeUnavailableError(msg)
        bridge = self._made.get(manifest.transport)
        if bridge is None:
            options: dict[str, Any] = {"source_worker": self._worker, "source_rank": rank}
            options |= self._options.get(manifest.transport, {})
            bridge = make_weight_bridge(manifest.transport, **options)
            self._made[manifest.transport] = bridge
        return bridge

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


# ---- What the ranks of any engine do at the end of an update: tell its trainer, and let go of it.

_LOG = logging.getLogger(__name__)


def acknowledge(
    bridge: TensorBridge,
    manifest: WeightUpdateManifest,
    proof: InstallProof,
    timings_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Tell the trainer that its update is active here; where that fails, the answer says so.

    Called again for the same update, it is not told twice.
    """
    try:
        if bridge.active_update_id != manifest.update_id:
            evidence, timings = proof.to_dict(), dict(timings_ms)
            bridge.acknowledge(manifest.update_id, proof=evidence, timings_ms=timings)
    except WeightBridgeError as error:
        # Other ranks have committed: there is no way back, and none is needed.
        _LOG.exception("version %d is active, but its trainer is not told", manifest.weight_version)
        return {"not_told": describe(error)}
    finally:
        # The model has memory of its own: the trainer's slot is free for the next version.
        bridge.release_imported(manifest.update_id)
    return {}


def release_update(
    bridge: TensorBridge | None,
    manifest: WeightUpdateManifest,
    reason: str | None,
    installer: TransactionalAdapter | None,
) -> None:
    """End an update that is over here, and release what it took, whatever its trainer's side says.

    Args:
        bridge: that imported it; None: another process did.
        manifest: the update.
        reason: why it is never let in again; None: nothing is wrong with it, and it may come again.
        installer: of the model that it was staged for.

    """
    steps: list[Callable[[], object]] = [] if installer is None else [installer.abandon]
    if bridge is not None:
        state = bridge.consumer.state(manifest.update_id)
        if reason is not None and state in {State.IMPORTED, State.VERIFIED}:
            # (Else the import failed: the bridge knows whether that may be tried again.)
            steps.append(lambda: bridge.reject(manifest.update_id, reason))
        steps.append(lambda: bridge.release_imported(manifest.update_id))
    for step in steps:
        try:
            step()
        except Exception:  # noqa: BLE001 - logged in full
            # The model is as it should be, and the trainer's slot must not wait for what failed.
            _LOG.exception("version %d could not be let go of", manifest.weight_version)

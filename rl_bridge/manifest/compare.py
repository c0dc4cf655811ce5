"""The no-op and wrong-payload detector (G11): compare an update with the one before it.

A trainer that publishes the frozen base, forgets to merge an adapter, or casts to a narrower dtype
sends a perfectly valid update. Once digests exist, seeing that costs nothing. Narrower is every
dtype that lacks numbers which the one before it had, at the same width too: float16 after bfloat16.
"""

import logging
from enum import StrEnum
from typing import NoReturn

import numpy as np

from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest.digest import DIGEST_NBYTES, digests_differ
from rl_bridge.manifest.dtypes import narrows
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable

_LOG = logging.getLogger(__name__)
_SHOWN = 5


class Policy(StrEnum):
    """What to do about a finding; any other word is a `ValueError` that names these."""

    OFF = "off"
    WARN = "warn"
    REJECT = "reject"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        expected = ", ".join(repr(str(policy)) for policy in cls)
        raise ValueError(f"suspicious={value!r} is no policy, expected one of {expected}.")


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def look_for_suspicion(
    policy: Policy,
    previous: WeightUpdateManifest | None,
    update: WeightUpdateManifest,
    *,
    is_part: bool = False,
) -> None:
    """Log what is suspicious about an update, such as that it changes nothing.

    Args:
        policy: what to do then.
        previous: the update before, of the same kind; None before the first.
        update: the update.
        is_part: it is one rank's part of a group, which may well stay as it is.

    Raises:
        SuspiciousUpdate: there is something, and the policy is to reject.

    """
    if policy is Policy.OFF:
        return
    findings = compare(previous, update, is_part=is_part)
    for finding in findings:
        _LOG.warning("suspicious update: %s", finding)
    if findings and policy is Policy.REJECT:
        raise SuspiciousUpdate("; ".join(findings))


def compare(
    previous: WeightUpdateManifest | None, update: WeightUpdateManifest, *, is_part: bool = False
) -> list[str]:
    """What is suspicious about `update` coming after `previous`; see `look_for_suspicion`."""
    if isinstance(previous, GroupManifest) and isinstance(update, GroupManifest):
        return _compare_groups(previous, update)
    if previous is None or isinstance(previous, GroupManifest) or isinstance(update, GroupManifest):
        return []
    version = _versions(previous, update)
    findings = []
    if not is_part:
        if update.root == previous.root:
            return [_no_change(previous, update)]
        findings = _of_trainable(version, _unchanged_trainable(previous, update))
    names = _narrowed(previous.table, update.table)
    if names:
        changes = tuple(
            f"{name} ({_dtype(previous.table, name)} to {_dtype(update.table, name)})"
            for name in names
        )
        findings.append(
            f"{version} narrows the dtype of {len(names)} tensors: {_some(changes)}. "
            "Publish them as they were, or start a new publisher for the new wire dtype."
        )
    return findings


def _compare_groups(previous: GroupManifest, update: GroupManifest) -> list[str]:
    # Only groups of one layout are compared: elsewhere digests say nothing about changes.
    if previous.layout_digest != update.layout_digest:
        return []
    if update.root == previous.root:
        return [_no_change(previous, update)]
    kept = ~digests_differ(previous.digests, update.digests) & update.layout.trainable
    names = tuple(update.layout.names[place] for place in np.flatnonzero(kept).tolist())
    return _of_trainable(_versions(previous, update), names)


def _versions(previous: WeightUpdateManifest, update: WeightUpdateManifest) -> str:
    return f"version {update.weight_version} (after {previous.weight_version})"


def _no_change(previous: WeightUpdateManifest, update: WeightUpdateManifest) -> str:
    return (
        f"{_versions(previous, update)} changes nothing: both have root {update.root}. Did the "
        "optimizer step, and is this the model that it stepped on?"
    )


def _of_trainable(version: str, unchanged: tuple[str, ...]) -> list[str]:
    if not unchanged:
        return []
    message = (
        f"{version}: {len(unchanged)} trainable tensors did not change: {_some(unchanged)}. Are "
        "these the trained weights, or the frozen base?"
    )
    return [message]


def _unchanged_trainable(
    previous: WeightUpdateManifest, update: WeightUpdateManifest
) -> tuple[str, ...]:
    table = update.table
    if table.trainable is None:
        return ()
    if previous.table.digest == table.digest:
        same = ~digests_differ(previous.digests, update.digests)
        same &= np.frombuffer(table.trainable.encode(), np.uint8) == ord("1")
        # An empty tensor cannot change.
        same &= table.nbytes_column > 0
        return tuple(table.names[row] for row in np.flatnonzero(same).tolist())
    return tuple(
        name
        for row, name in enumerate(table.names)
        if table.trainable[row] == "1"
        and table.nbytes[row]
        and name in previous.tensors
        and previous.tensors[name].checksum == update.tensors[name].checksum
    )


def _narrowed(before: TensorTable, after: TensorTable) -> tuple[str, ...]:
    """Names whose dtype in `after` lacks numbers that the one in `before` has."""
    if before.dtypes == after.dtypes and before.names == after.names:
        return ()
    return tuple(
        name
        for name, row in after.rows.items()
        if name in before.rows and narrows(_dtype(before, name), after.dtypes[row])
    )


def _dtype(table: TensorTable, name: str) -> str:
    return table.dtypes[table.rows[name]]


def mismatch(manifest: WeightUpdateManifest, found: bytes) -> str:
    """Say which bytes differ, given the digests (16 bytes per tensor) of those that arrived."""
    table = manifest.table
    rows = np.flatnonzero(digests_differ(manifest.digests, found)).tolist()
    row = rows[0]
    here = slice(row * DIGEST_NBYTES, (row + 1) * DIGEST_NBYTES)
    return (
        f"tensor checksum mismatch for {table.names[row]!r} in version {manifest.weight_version}: "
        f"expected {manifest.digests[here].hex()}, got {found[here].hex()} "
        f"({len(rows)} of {len(table.names)} tensors differ). The update is corrupt or was "
        "overwritten, or the trainer changed it while it was published: publish again."
    )

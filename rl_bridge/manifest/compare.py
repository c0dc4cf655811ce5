"""The no-op and wrong-payload detector (G11): is an update what its run's updates have been so far?

A trainer that publishes the frozen base, a copy that nobody refreshes, or only half of its layers
sends a perfectly valid update. Once digests exist, seeing that costs nothing. What is usual differs
from run to run, and from tensor to tensor: a norm near 1 stays the same in bfloat16 for thousands
of steps. So a tensor is only expected to change if it is large and changed in each of the last
updates, and an update is judged as a whole.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest.digest import DIGEST_NBYTES, digests_differ
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable

_LOG = logging.getLogger(__name__)
_SHOWN = 5
_USUAL = 4
"""A tensor that changed in so many updates in a row is expected to change in the next one."""
_LONG = 8
"""So many updates in a row may pass before any trainable tensor is expected to have changed."""
_LARGE_NBYTES = 4096
"""In a smaller tensor, a small step may well be lost in the rounding of every number."""
_SHARE = 1 / 8
"""Of the trained bytes: tensors with more than that do not fall silent together in a sound run."""
_MAX_STREAMS = 256
_MAX_ROOTS = 1024

_Flags = npt.NDArray[np.bool_]
_Counts = npt.NDArray[np.int64]


class Policy(StrEnum):
    """What to do about a finding."""

    OFF = "off"
    WARN = "warn"
    REJECT = "reject"


def checked_policy(option: str, value: object) -> Policy:
    """Check what an option says is to be done about findings."""
    if not isinstance(value, str) or value not in set(Policy):
        expected = ", ".join(repr(str(policy)) for policy in Policy)
        raise ValueError(f"{option}={value!r} is no policy, expected one of {expected}.")
    return Policy(value)


def some(names: tuple[str, ...]) -> str:
    """The first few of these names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(slots=True)
class _Stream:
    """What the updates of one model, or of one adapter, have been so far.

    Attributes:
        latest: the update that was noted last.
        num_idle: so many updates in a row, this one among them, changed nothing.
        is_old: it has the weights of an earlier one.
        roots: root -> version, of the first update and of the last ones.
        runs: by tensor: in how many of the last updates in a row it changed; below 0, in how many
            it did not. Empty before the second update of a layout.
        has_changed: by tensor: any update changed it.
        is_told: by tensor: it fell silent, and somebody was told.
        compared: the id of the update that was compared last, and which tensors it changes.

    """

    latest: WeightUpdateManifest
    num_idle: int = 0
    is_old: bool = False
    roots: OrderedDict[str, int] = field(default_factory=OrderedDict)
    runs: _Counts = field(default_factory=lambda: np.zeros(0, np.int64))
    has_changed: _Flags = field(default_factory=lambda: np.zeros(0, bool))
    is_told: _Flags = field(default_factory=lambda: np.zeros(0, bool))
    compared: tuple[str, _Flags | None] = ("", None)

    def changed(self, update: WeightUpdateManifest) -> _Flags | None:
        """Which tensors the update changes: compared once, to be judged and to be noted."""
        if self.compared[0] != update.update_id:
            self.compared = (update.update_id, _changed(self.latest, update))
        return self.compared[1]

    def add_root(self, update: WeightUpdateManifest) -> None:
        """Note the root of an update; beyond a bound, that of the second oldest is forgotten."""
        self.roots.setdefault(update.root, update.weight_version)
        if len(self.roots) > _MAX_ROOTS:
            first = self.roots.popitem(last=False)
            self.roots.popitem(last=False)
            self.roots[first[0]] = first[1]
            self.roots.move_to_end(first[0], last=False)


class Watch:
    """Knows the updates of a run, one stream for each adapter and one for the model itself.

    An update is judged before it is published (or installed), and noted once it is.

    Attributes:
        is_on: whether there is a policy; else nothing is looked for or remembered.

    """

    def __init__(self, policy: Policy = Policy.WARN) -> None:
        """Know no update yet.

        Args:
            policy: off: nothing is looked for. Warn: findings are logged. Reject: an update with a
                finding is refused.

        """
        self._policy, self.is_on = policy, policy is not Policy.OFF
        self._streams: OrderedDict[str, _Stream] = OrderedDict()

    def judge(self, update: WeightUpdateManifest, *, logs: bool = True) -> None:
        """Log what is suspicious about an update, or refuse it.

        Args:
            update: comes next.
            logs: False where another rank of its group logs the same.

        """
        if not self.is_on:
            return
        before = self._streams.get(_key(update))
        if before is None or before.latest.update_id == update.update_id:
            return
        if before.latest.publisher_id != update.publisher_id:
            return  # another run may begin with what the engine holds
        changed = before.changed(update)
        is_idle = _is_idle(before.latest, update, changed)
        findings = []
        # Once in a row; before anything was learned, the first one is usual: a warm-up begins with
        # a learning rate of 0. (No refusal by default: a version that engines refused, or that was
        # undone, may well be published once more under a new number.)
        is_told = before.num_idle > 0 if len(before.runs) else before.num_idle != 1
        if is_idle and (self._policy is Policy.REJECT or not is_told):
            findings.append(_idle(before.latest, update))
        if not is_idle and update.root in before.roots and not before.is_old:
            findings.append(_old(update, before.roots[update.root]))
        if not is_idle and changed is not None:
            findings += _fallen_silent(before, update, _silent(before, update, changed))
        if other := _other_dtypes(before.latest.table, update.table):
            findings.append(_retyped(before.latest, update, other))
        if findings and self._policy is Policy.REJECT:
            raise SuspiciousUpdate(" ".join(findings))
        for finding in findings if logs else ():
            _LOG.warning("suspicious update: %s", finding)

    def note(self, update: WeightUpdateManifest) -> None:
        """Remember an update that was published; without a policy there is nothing to remember."""
        if not self.is_on:
            return
        key = _key(update)
        before = self._streams.get(key)
        if before is None or before.latest.publisher_id != update.publisher_id:
            before = self._streams[key] = _Stream(update)
        elif before.latest.update_id != update.update_id:
            self._add(before, update)
        before.add_root(update)
        self._streams.move_to_end(key)
        while len(self._streams) > _MAX_STREAMS:
            self._streams.popitem(last=False)

    @staticmethod
    def _add(stream: _Stream, update: WeightUpdateManifest) -> None:
        changed = stream.changed(update)
        is_idle = _is_idle(stream.latest, update, changed)
        stream.num_idle = stream.num_idle + 1 if is_idle else 0
        stream.is_old = not is_idle and update.root in stream.roots
        if changed is None:
            stream.runs = np.zeros(0, np.int64)
        elif not is_idle:  # else it says nothing about any of the tensors
            if not len(stream.runs):
                stream.runs = np.zeros(len(changed), np.int64)
                stream.has_changed = stream.is_told = np.zeros(len(changed), bool)
            stream.is_told = (stream.is_told | _silent(stream, update, changed)) & ~changed
            runs = stream.runs
            stream.runs = np.where(changed, runs.clip(min=0) + 1, runs.clip(max=0) - 1)
            stream.has_changed = stream.has_changed | changed
        stream.latest = update


def _key(update: WeightUpdateManifest) -> str:
    return "" if update.adapter is None else update.adapter.name


# ---- what is compared ----------------------------------------------------------------------------


def _changed(previous: WeightUpdateManifest, update: WeightUpdateManifest) -> _Flags | None:
    """Which tensors differ; None where the two have other names, shapes or dtypes."""
    if isinstance(previous, GroupManifest) and isinstance(update, GroupManifest):
        # Across layouts of a group, digests say nothing about changes.
        is_alike = previous.layout_digest == update.layout_digest
    else:
        old, new = previous.table, update.table
        is_alike = type(previous) is type(update) and (
            old.digest == new.digest
            or (old.names, old.dtypes, old.shapes) == (new.names, new.dtypes, new.shapes)
        )
    return digests_differ(previous.digests, update.digests) if is_alike else None


def _trainable(update: WeightUpdateManifest) -> _Flags | None:
    """Which tensors were declared trainable and are not empty; None where there is no such one."""
    if isinstance(update, GroupManifest):
        flags = update.layout.trainable
    elif update.table.trainable is None:
        return None
    else:
        flags = np.frombuffer(update.table.trainable.encode(), np.uint8) == ord("1")
        flags &= update.table.nbytes_column > 0
    return flags if flags.any() else None


def _is_idle(
    previous: WeightUpdateManifest, update: WeightUpdateManifest, changed: _Flags | None
) -> bool:
    """Whether nothing that is trained differs."""
    if update.root == previous.root:
        return True
    trainable = _trainable(update)
    return changed is not None and trainable is not None and not (changed & trainable).any()


def _other_dtypes(before: TensorTable, after: TensorTable) -> tuple[str, ...]:
    """Tensors that both have, and not in one dtype: name, old and new dtype."""
    if before.dtypes == after.dtypes and before.names == after.names:
        return ()
    return tuple(
        f"{name} ({before.dtypes[before.rows[name]]} to {after.dtypes[row]})"
        for name, row in after.rows.items()
        if name in before.rows and before.dtypes[before.rows[name]] != after.dtypes[row]
    )


def _silent(stream: _Stream, update: WeightUpdateManifest, changed: _Flags) -> _Flags:
    """Tensors that are expected to change and did not, if they are a large share; else none."""
    none = np.zeros(len(changed), bool)
    if not len(stream.runs):
        return none
    sizes, trained = update.table.nbytes_column, _trainable(update)
    silent = stream.runs >= _USUAL
    if trained is None:
        trained = stream.has_changed
    else:  # one that was not declared may well be frozen
        silent |= (stream.runs <= 1 - _LONG) & ~stream.is_told
    silent &= trained & ~changed & (sizes >= _LARGE_NBYTES)
    return silent if sizes[silent].sum() > _SHARE * sizes[trained].sum() else none


# ---- what is said --------------------------------------------------------------------------------


def _versions(previous: WeightUpdateManifest, update: WeightUpdateManifest) -> str:
    return f"version {update.weight_version} (after {previous.weight_version})"


def _idle(previous: WeightUpdateManifest, update: WeightUpdateManifest) -> str:
    return (
        f"{_versions(previous, update)} changes nothing that is trained: root {update.root}, "
        "expected other weights after each step of the optimizer. Look whether it steps (no "
        "gradient, a learning rate of 0, a skipped step) on the model that is published, and "
        "whether its copy for the engines is made anew."
    )


def _old(update: WeightUpdateManifest, version: int) -> str:
    return (
        f"version {update.weight_version} has the weights of version {version} once more. Is it a "
        "stale copy, or the frozen base in place of the trained weights?"
    )


def _retyped(
    previous: WeightUpdateManifest, update: WeightUpdateManifest, names: tuple[str, ...]
) -> str:
    return (
        f"{_versions(previous, update)} has another dtype for {len(names)} tensors: {some(names)}. "
        "Publish them as they were, or start a new publisher for the new dtype."
    )


def _fallen_silent(before: _Stream, update: WeightUpdateManifest, silent: _Flags) -> list[str]:
    if not silent.any():
        return []
    sizes, trained = update.table.nbytes_column, _trainable(update)
    share = sizes[silent].sum() / sizes[before.has_changed if trained is None else trained].sum()
    names = update.layout.names if isinstance(update, GroupManifest) else update.table.names
    rows = sorted(np.flatnonzero(silent).tolist(), key=lambda row: -int(sizes[row]))
    found = some(tuple(names[row] for row in rows))
    told = (
        f"{_versions(before.latest, update)}: {len(rows)} tensors with {share:.0%} of the trained "
        f"bytes did not change: {found}. They did in each of the {_USUAL} updates before, or have "
        f"not in {_LONG}. Are these the trained weights, or a stale copy of some?"
    )
    return [told]


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

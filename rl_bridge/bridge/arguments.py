"""What users hand to a bridge: checked where it arrives, and brought to one form."""

import inspect
import operator
import os
import re
from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch

from rl_bridge.assembly.wanted import Wanted, WantedLayout
from rl_bridge.errors import BridgeClosed, ForeignTransport, MalformedManifest, did_you_mean
from rl_bridge.installers.base import require_plain
from rl_bridge.lifecycle import Observer
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.group import GROUP, GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.trainers.state_dict import Source
from rl_bridge.transports.base import Transport

UpdateRef = str | WeightUpdateManifest
"""What names an update: its id, its manifest, or the manifest's JSON text."""

_MAX_RANK = 2**63 - 1
_ID = re.compile("[0-9a-f]{32}")

# Every bridge takes these, whatever its transport.
_OWN_OPTIONS = (
    *("nonfinite", "observer", "source_rank", "source_worker", "state_dir", "suspicious", "wanted"),
)


def as_update(given: object, *, caller: str) -> UpdateRef:
    """Read what names an update: an id or a manifest; JSON text becomes the manifest it is.

    Raises:
        MalformedManifest: it is neither.
        WeightManifestValidationError: text that begins like a manifest and is none.

    """
    if isinstance(given, WeightUpdateManifest):
        return given
    if isinstance(given, str) and given.startswith("{"):
        return WeightUpdateManifest.from_json(given)
    if isinstance(given, str) and _ID.fullmatch(given):
        return given
    what = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    raise MalformedManifest(
        f"{caller} got {what}, expected an update's id or its manifest. Pass "
        "what publish returned, or its update_id."
    )


def update_id_of(given: object, *, caller: str) -> str:
    """The id of an update that `given` names.

    Raises:
        MalformedManifest: it names none.
        WeightManifestValidationError: text that begins like a manifest and is none.

    """
    update = as_update(given, caller=caller)
    return update if isinstance(update, str) else update.update_id


def checked_worker(source_worker: object) -> str:
    """Check a worker's name."""
    if not isinstance(source_worker, str):
        kind = type(source_worker).__name__
        raise TypeError(f"source_worker is a {kind}, expected a name such as 'trainer-0'.")
    return source_worker


def checked_observer(observer: Observer | None) -> Observer | None:
    """Check what is called with transitions."""
    if observer is not None:
        require_plain(observer, "observer")
    return observer


def checked_rank(source_rank: object) -> int:
    """Check a worker's rank; integers of any library's are taken."""
    try:
        rank = -1 if isinstance(source_rank, bool) else operator.index(source_rank)  # type: ignore[arg-type]  # that is what is tried
    except TypeError as error:
        raise TypeError(f"source_rank={source_rank!r}: expected an int of 0 or more.") from error
    if not 0 <= rank <= _MAX_RANK:
        raise ValueError(
            f"source_rank={source_rank!r}: expected an int of 0 or more, and below 2**63."
        )
    return rank


def checked_state_dir(state_dir: object) -> str | os.PathLike[str] | None:
    """Check a publisher's state directory; nothing is looked up yet."""
    if state_dir is None or isinstance(state_dir, str | os.PathLike):
        return state_dir
    raise TypeError(f"state_dir={state_dir!r}: expected the path of a directory, or None.")


def checked_wanted(given: object) -> Wanted | WantedLayout | None:
    """Check what is wanted of a version of several parts."""
    if given is None or isinstance(given, WantedLayout) or callable(given):
        return given
    raise TypeError(
        f"wanted={given!r}: expected what `parallel` or `everything` give, or a layout."
    )


def check_options(kind: type[Transport], options: Collection[str]) -> None:
    """Check the names of a transport's options."""
    known = _option_names(kind)
    unknown = [name for name in options if known is not None and name not in known]
    for name in unknown:
        hint = did_you_mean(name, [*(known or ()), *_OWN_OPTIONS])
        raise TypeError(
            f"{name!r} is no option of transport {kind.name!r}.{hint} Its options: "
            f"{', '.join(known or ()) or 'none'}; of every bridge: {', '.join(_OWN_OPTIONS)}."
        )


def require_options(kind: type[Transport], options: Collection[str]) -> None:
    """Refuse to make a transport without an option that it cannot do without."""
    for name, parameter in inspect.signature(kind).parameters.items():
        is_required = parameter.default is parameter.empty
        if parameter.kind is parameter.KEYWORD_ONLY and is_required and name not in options:
            raise TypeError(f"transport {kind.name!r} needs its option {name}=.")


def _option_names(kind: type[Transport]) -> list[str] | None:
    """What `create` takes; None if that is unknown."""
    for made_by in (kind.create, kind):
        parameters = inspect.signature(made_by).parameters.values()
        if all(one.kind is not one.VAR_KEYWORD for one in parameters):
            return sorted(one.name for one in parameters if one.kind is not one.VAR_POSITIONAL)
    return None


# ---- Checks that publisher, consumer and executor share.


def require_transport(manifest: WeightUpdateManifest, name: str) -> None:
    """Refuse what another transport carries: its handle means nothing here."""
    if manifest.transport == GROUP:
        what = "is what one reader assembled of several parts, expected what their publishers sent"
        remedy = "Import that: nobody else reads its memory"
        if isinstance(manifest, GroupManifest):
            what, remedy = "lies in the parts of several ranks, expected one part", "Give that"
        raise ForeignTransport(f"version {manifest.weight_version} {what}. {remedy}.")
    if manifest.transport != name:
        several = "; for parts by several transports, import it by rl_bridge.groups.GroupBridge"
        raise ForeignTransport(
            f"version {manifest.weight_version} travels by {manifest.transport!r}, this bridge by "
            f"{name!r}. Use the same transport on both sides"
            f"{several if manifest.weight_layout.world_size > 1 else ''}."
        )


def in_a_child(what: str) -> BridgeClosed:
    """The error for the use of what a parent process made.

    Callers compare process ids before they take any lock: at the fork, another thread of the parent
    may have held it.
    """
    return BridgeClosed(
        f"this {what} belongs to the parent process. Make a new one after the fork."
    )


# ---- bridges of a user's own: structural types, nothing to import or subclass --------------------


@runtime_checkable
class WeightPublisher(Protocol):
    """What a training worker needs of a bridge."""

    def publish(
        self,
        source: Source,
        *,
        weight_version: int,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> WeightUpdateManifest:
        """Publish one complete version."""

    def release(self, update_id: str) -> None:
        """Release an update."""


@runtime_checkable
class WeightConsumer(Protocol):
    """What a rollout worker needs of a bridge."""

    def import_update(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        """Import and verify one complete version."""

    def acknowledge(self, update_id: str) -> None:
        """Say that it is installed."""

    def reject(self, update_id: str, reason: str) -> None:
        """Say that it is not, and why."""

    def release(self, update_id: str) -> None:
        """Release an update."""


@runtime_checkable
class WeightBridge(WeightPublisher, WeightConsumer, Protocol):
    """Both."""

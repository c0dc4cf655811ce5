"""Checks that publisher, consumer and executor share."""

import logging
import os
from collections.abc import Sequence

from rl_bridge.errors import BridgeClosed, ForeignTransport, MalformedManifest, SuspiciousUpdate
from rl_bridge.manifest.compare import Finding, Policy, compare
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "as_manifest",
    "look_for_suspicion",
    "require_own_process",
    "require_transport",
    "tell_of",
]

_LOG = logging.getLogger(__name__)


def as_manifest(given: object, *, caller: str) -> WeightUpdateManifest:
    """Read a manifest that is given as an object or as its JSON text.

    Raises:
        MalformedManifest: it is neither.
        WeightManifestValidationError: its text describes none that could be imported.

    """
    if isinstance(given, str | bytes):
        return WeightUpdateManifest.from_json(given)
    if isinstance(given, WeightUpdateManifest):
        return given
    msg = (
        f"{caller} got a {type(given).__name__}, expected a WeightUpdateManifest or its JSON. Pass "
        "what publish returned, or the text of its to_json()."
    )
    raise MalformedManifest(msg)


def require_transport(manifest: WeightUpdateManifest, name: str) -> None:
    """Refuse what another transport carries: its handle means nothing here.

    Raises:
        ForeignTransport: it is another one's.

    """
    if manifest.transport != name:
        msg = (
            f"version {manifest.weight_version} travels by {manifest.transport!r}, this bridge by "
            f"{name!r}. Use the same transport on both sides."
        )
        raise ForeignTransport(msg)


def require_own_process(pid: int, what: str) -> None:
    """Refuse the use of what a parent process made.

    To be asked before any lock is taken: at the fork, another thread of the parent may have held
    it.

    Raises:
        BridgeClosed: this process is not `pid`.

    """
    if os.getpid() != pid:
        msg = f"this {what} belongs to the parent process. Make a new one after the fork."
        raise BridgeClosed(msg)


def look_for_suspicion(
    policy: Policy,
    previous: WeightUpdateManifest | None,
    manifest: WeightUpdateManifest,
    *,
    is_part: bool = False,
) -> None:
    """Tell of an update that changes nothing, or fewer tensors than its predecessor.

    Args:
        policy: what to do then.
        previous: the update before.
        manifest: the update.
        is_part: it is one rank's part of a group, which may well stay as it is.

    Raises:
        SuspiciousUpdate: there is something to tell, and the policy is to reject.

    """
    if policy is Policy.OFF:
        return
    tell_of(policy, compare(previous, manifest, is_part=is_part))


def tell_of(policy: Policy, findings: Sequence[Finding]) -> None:
    """Log what was found.

    Raises:
        SuspiciousUpdate: there is something, and the policy is to reject.

    """
    if policy is Policy.OFF:
        return
    for finding in findings:
        _LOG.warning("suspicious update: %s", finding.message)
    if findings and policy is Policy.REJECT:
        said = "; ".join(finding.message for finding in findings)
        raise SuspiciousUpdate(said)

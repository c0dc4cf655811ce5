"""Questions to all ranks of an engine, in step: each answer is to the call that was made last."""

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from rl_bridge.bridge.consumer import is_shortage
from rl_bridge.engines.vllm.client import EngineHandle, Replies, failure
from rl_bridge.errors import EngineLost, ProofFailed, WeightBridgeUnavailableError
from rl_bridge.installers.base import InstallProof

__all__ = [
    "Ranks",
    "are_half_way",
    "held_by",
    "joined",
    "refusal_of",
    "require_all",
    "require_alone",
    "verified",
    "version_name",
]

_LOG = logging.getLogger(__name__)


class Ranks:
    """The ranks of one engine."""

    def __init__(self, handle: EngineHandle) -> None:
        """Ask by `handle`; nothing is asked yet."""
        self._handle = handle
        self._calls = 0
        self.driver = secrets.token_hex(8)  # two drivers may have the same update

    def ask(self, verb: str, payload: dict[str, Any]) -> Replies:
        """Ask all ranks; one reply for each, by rank.

        Raises:
            EngineLost: the engine is gone, or its answers are to other calls.
            WeightBridgeError: a rank failed.

        """
        self._calls += 1
        number = f"{self.driver}-{self._calls}"  # another driver counts as this one does
        who = {"call": number, "driver": self.driver}
        replies = self._handle.call(verb, {**payload, **who})
        for reply in replies:
            if reply["call"] != number:
                msg = (
                    f"rank {reply['rank']} answers to call {reply['call']}, expected {number}: "
                    "the engine's replies are out of step. Start a fresh engine and install the "
                    "current version in it before it serves."
                )
                raise EngineLost(msg)
        failed = [reply for reply in replies if not reply["ok"]]
        if failed:
            # Where one failed, the others say that another one did: the cause is told first. And
            # of causes the one that keeps the update from coming again.
            causes = [failure(reply, len(replies)) for reply in failed]
            causes.sort(key=lambda error: ("another rank" in str(error), is_shortage(error)))
            raise causes[0]
        for reply in replies:
            if "not_told" in reply:
                _LOG.warning(
                    "rank %d: its trainer is not told: %s", reply["rank"], reply["not_told"]
                )
        return replies


def refusal_of(error: Exception, held: str) -> str | None:
    """Why no rank lets an update in again that one refused; None where it may come again.

    Args:
        error: that rank's; it is told what the ranks hold: an executor that begins anew knows of no
            version that was installed before.
        held: by the ranks.

    """
    if isinstance(error, EngineLost):
        return None  # (and what the ranks hold is not known)
    error.add_note(f"rl_bridge: the engine's ranks hold {held}.")
    return None if is_shortage(error) else "another rank refused it"


def require_alone(handle: EngineHandle) -> None:
    """Refuse engines whose ranks cannot decide together.

    Raises:
        WeightBridgeUnavailableError: there are replicas.

    """
    degree = handle.data_parallel_size()
    if degree != 1:
        msg = (
            f"the engine has data_parallel_size={degree}, expected 1: its replicas do not "
            "decide together. Use one engine and one executor for each replica."
        )
        raise WeightBridgeUnavailableError(msg)


def require_all(replies: Replies) -> None:
    """Refuse engines of which not all ranks answer: the others would be waited for in a vote.

    Raises:
        WeightBridgeUnavailableError: some are another process's to ask.

    """
    ranks = replies[0]["world_size"]
    if len(replies) != ranks:
        msg = (
            f"{len(replies)} of the engine's ranks answered, expected {ranks}: this process "
            "reaches only some of its workers, as with "
            "distributed_executor_backend='external_launcher'. Let vLLM start all of them: use "
            "'mp' or 'ray'."
        )
        raise WeightBridgeUnavailableError(msg)


def are_half_way(replies: Replies) -> bool:
    """Whether ranks are inside of an update that has to be undone: it is not proven on all."""
    held = {reply["pending"] if reply["exchanged"] else reply["update_id"] for reply in replies}
    is_begun = any(reply["exchanged"] for reply in replies)
    # Of a vote that some ranks did not hear, these are back, and others hold what they have proven.
    return (is_begun and len(held) > 1) or any(
        reply["torn"] or (reply["exchanged"] and not reply["installed"]) for reply in replies
    )


def held_by(replies: Replies, committed: str | None, *, is_undone: bool) -> str | None:
    """The update that all ranks hold; None where it is not the same one, or none.

    Where this driver's own is to be undone, what that leads back to. What another driver left
    half-way is no update's, whichever it began.

    Args:
        replies: what each rank holds.
        committed: what this driver committed last.
        is_undone: whether it is going to undo what it began, proven or not.

    """
    is_mine, is_half_way = any(reply["mine"] for reply in replies), are_half_way(replies)
    if is_half_way and not is_mine:
        return None
    is_kept = not (is_mine and (is_half_way or is_undone))  # proven, to be committed
    found = [r["pending"] if r["exchanged"] and is_kept else r["update_id"] for r in replies]
    return next((one for one in found if one != committed), committed)


def verified(replies: Replies) -> str:
    """Root of what all ranks say that they verified; empty where they do not say the same."""
    roots = {reply.get("verified") for reply in replies}
    root = roots.pop()
    return "" if roots or root is None else str(root)


def joined(proofs: Sequence[dict[str, Any]]) -> InstallProof:
    """One proof of what all ranks found.

    Raises:
        ProofFailed: they do not agree.

    """
    roots = {proof["root"] for proof in proofs}
    if len(roots) > 1:
        roots.discard("")  # of ranks that can read only part of what they hold
    methods = {proof["method"] for proof in proofs}
    if len(roots) != 1:
        msg = (
            f"the ranks hold different weights: roots {sorted(roots)}, expected one. Install "
            "the update again."
        )
        raise ProofFailed(msg)
    return InstallProof(
        method="unproven" if "unproven" in methods else max(methods, key=len),
        root="" if "unproven" in methods else roots.pop(),
        digested_nbytes=sum(proof["digested_nbytes"] for proof in proofs),
        identical_nbytes=sum(proof["identical_nbytes"] for proof in proofs),
        tensors=max(proof["tensors"] for proof in proofs),
    )


def version_name(number: int | None) -> str:
    """What ranks hold, in words."""
    return "the weights that they were started with" if number is None else f"version {number}"

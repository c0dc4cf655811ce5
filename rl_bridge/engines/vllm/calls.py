"""What the executor's adapter asks a worker over vLLM's remote calls: JSON in, JSON out."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rl_bridge.engines.vllm.frames import clear_frames, told
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.errors import WeightUpdateRejectedError
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "answer",
]

_LOG = logging.getLogger(__name__)

Payload = Mapping[str, Any]


def answer(rank: VLLMRank, verb: str, payload: object) -> dict[str, Any]:
    """Do what is asked. Never raises: a failure is an answer, too.

    A rank that raised would leave the answers of those behind it to be taken for the next call's.
    """
    given = payload if isinstance(payload, Mapping) else {}
    reply = {"rank": rank.rank, "call": given.get("call")}
    try:
        if not isinstance(payload, Mapping):
            msg = f"payload is a {type(payload).__name__}, expected an object. Pass one."
            raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - answered like all others
        if verb not in _VERBS:
            msg = f"{verb!r} is no verb of a rank, expected one of {sorted(_VERBS)}."
            raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - as above
        return {"ok": True, **reply, **_VERBS[verb](rank, given)}
    except Exception as error:  # noqa: BLE001 - it is the answer
        _LOG.warning("%s failed", verb, exc_info=True)
        clear_frames(error)
        return {"ok": False, **reply, **told(error)}


def _describe(rank: VLLMRank, given: Payload) -> Payload:
    told = rank.describe()
    pending = told["pending"]
    return {**told, "mine": pending is not None and rank.has(pending, given.get("driver"))}


def _prepare(rank: VLLMRank, given: Payload) -> Payload:
    if not isinstance(given.get("manifest"), str):
        msg = "prepare came without a manifest. Pass its JSON text as 'manifest'."
        raise WeightUpdateRejectedError(msg)
    rank.configure(given.get("options") or {})
    return rank.prepare(WeightUpdateManifest.from_json(given["manifest"]), given.get("driver"))


def _undo(rank: VLLMRank, given: Payload) -> Payload:
    told = rank.undo("undone by the executor", given.get("update_id"), given.get("driver"))
    return {**told, "holds": rank.describe()["update_id"]}


def _abandon(rank: VLLMRank, given: Payload) -> Payload:
    told = rank.undo(_reason(given), given.get("update_id"), given.get("driver"))
    if rank.describe()["pending"] is None:  # else another driver has come, with its own
        _note_pause(rank, given)
    return told


def _forget(rank: VLLMRank, given: Payload) -> Payload:
    rank.forget_staged(_reason(given))
    return {}


def _commit(rank: VLLMRank, given: Payload) -> Payload:
    told = rank.commit(given.get("update_id"), if_installed=bool(given.get("if_installed")))
    now = rank.describe()
    in_model = now["pending"] if now["exchanged"] else now["update_id"]
    told |= {"in_model": in_model, **_note_pause(rank, given)}
    if not (given.get("pauses") or told["left"] or now["pending"]):
        rank.pause_note.clear()  # what another driver had here is over with this
    return told


def _reason(given: Payload) -> str | None:
    reason = given.get("reason")
    return None if reason is None else str(reason)


def _pauses(rank: VLLMRank, given: Payload) -> Payload:
    """Noted right before the engine is paused: whoever finds it paused then knows by whom.

    Without a word the pause of the update is over, or was none of its driver's. Who names the
    update goes on with it, and must not do so with another driver's.
    """
    update_id = given.get("update_id")
    if update_id is not None and not rank.has(update_id, given.get("driver")):
        told = rank.describe()
        held = told["pending"] or told["update_id"] or "none"
        msg = (
            f"update {update_id} is not this driver's here any more, expected it, got {held}: "
            "another driver came in between. Let one driver at a time update an engine, and "
            "publish again."
        )
        raise WeightUpdateRejectedError(msg)
    if given.get("whosever") and not given.get("pauses"):
        rank.pause_note.clear()
    return _note_pause(rank, given)


def _note_pause(rank: VLLMRank, given: Payload) -> Payload:
    if given.get("pauses"):
        rank.pause_note.begin(_driver(given))
        return {"left": 0}
    return {"left": rank.pause_note.end(_driver(given), int(given.get("heard") or 0))}


def _leaves(rank: VLLMRank, given: Payload) -> Payload:
    return {"is_others": rank.pause_note.leave(_driver(given))}


def _driver(given: Payload) -> str:
    return str(given.get("driver") or "")


_VERBS: dict[str, Callable[[VLLMRank, Payload], Payload]] = {
    "describe": _describe,
    "prepare": _prepare,
    "install": lambda rank, given: rank.install(given.get("update_id"), given.get("driver")),
    "undo": _undo,
    "abandon": _abandon,
    "forget": _forget,
    "leaves": _leaves,
    "commit": _commit,
    "pauses": _pauses,
}

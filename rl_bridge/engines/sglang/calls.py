"""What the executor's adapter asks an engine, as it comes over SGLang: JSON in, JSON out.

It comes in by `rl_bridge.engines.sglang.plugin`, between two steps of the model, and to all
ranks of a tensor-parallel engine the same; they answer together.
"""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.engines.sglang import votes
from rl_bridge.engines.sglang.rank import SGLangRank
from rl_bridge.engines.vllm.frames import clear_frames, told
from rl_bridge.errors import WeightUpdateRejectedError

__all__ = [
    "answer",
    "known_rank",
]

_LOG = logging.getLogger(__name__)

Payload = Mapping[str, Any]
Reply = dict[str, Any]

_ATTRIBUTE = "_rl_bridge_rank"
_TIMEOUT_S = 600.0


def known_rank(model: torch.nn.Module) -> SGLangRank | None:
    """The rank whose model this is, if anybody asked for it before."""
    rank: SGLangRank | None = vars(model).get(_ATTRIBUTE)
    return rank


_VERBS: Mapping[str, Callable[[SGLangRank, Payload], Reply]] = {
    "describe": SGLangRank.describe,
    "prepare": SGLangRank.prepare,
    "abandon": SGLangRank.abandon,
    "pauses": SGLangRank.pauses,
    "leaves": SGLangRank.leaves,
    "take_over": SGLangRank.take_over,
    "install": SGLangRank.install,
    "prove": SGLangRank.prove,
    "resume": SGLangRank.resume,
    "flush": SGLangRank.flush,
    "undo": SGLangRank.undo,
    "commit": SGLangRank.commit,
}


def answer(model: torch.nn.Module, flush: Callable[[], bool | None], text: str) -> str:
    """Do what is asked, on all ranks. Never raises: a failure is an answer, too.

    SGLang would end for one, and ranks that did not vote would be waited for by the others.

    Args:
        model: this rank's.
        flush: see `SGLangRank`.
        text: the call.

    """
    reply: Reply = {}
    given: Payload = {}
    rank = known_rank(model)
    try:
        given = _given(text)
        reply["call"] = given.get("call")
        if rank is None:
            rank = vars(model)[_ATTRIBUTE] = SGLangRank(model, flush)
        reply = {**reply, "ok": True, **_VERBS[given["verb"]](rank, given)}
    except Exception as error:  # noqa: BLE001 - it is the answer
        _LOG.warning("a call of rl_bridge failed", exc_info=True)
        reply = {**reply, "ok": False, **told(error)}
        clear_frames(error)
    one = votes.merged(votes.all_reply(reply, float(given.get("timeout_s", _TIMEOUT_S))))
    if rank is not None and given.get("verb") == "prove" and not one["ok"]:
        rank.is_refused(given)
    return json.dumps(one)


def _given(text: str) -> Payload:
    given = json.loads(text)
    if not isinstance(given, dict) or given.get("verb") not in _VERBS:
        msg = f"{text[:80]!r} is no call. Pass an object with a verb of {sorted(_VERBS)}."
        raise WeightUpdateRejectedError(msg)
    return given

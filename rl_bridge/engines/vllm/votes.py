"""The ranks of one engine decide together: all yes, or no.

A rank that cannot ask the others (one died, their group timed out) takes that for a no.
"""

import logging
from typing import Any

import torch

from rl_bridge.engines.vllm.compat import require
from rl_bridge.errors import WeightUpdateRejectedError

__all__ = [
    "all_agree",
    "first_said",
    "group",
    "require_one",
]

_LOG = logging.getLogger(__name__)
_TEXT_NBYTES = 1024


def group() -> Any:
    """The workers of this engine: its tensor and pipeline parallel ranks."""
    state = require("vllm.distributed.parallel_state")
    inner = getattr(state, "_INNER_DP_WORLD", None)
    return inner if inner is not None else state.get_world_group()


def all_agree(*, ok: bool) -> bool:
    """Whether all ranks say yes; each waits for all, as long as vLLM's own groups do."""
    ranks = group()
    if ranks.world_size == 1:
        return ok
    vote = torch.tensor([int(ok)], device="cpu")
    try:
        torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group=ranks.cpu_group)
    except RuntimeError:
        _LOG.exception("rank %d cannot ask the others", ranks.rank_in_group)
        return False
    return bool(vote.item())


def first_said(problem: str, *, echo: tuple[str, ...] = ()) -> str:
    """What the first rank with a cause of its own says; all ranks must ask.

    Args:
        problem: of this rank; empty if it has none.
        echo: how problems begin that only tell of another rank's.

    """
    ranks = group()
    if ranks.world_size == 1:
        return problem
    own = problem
    if problem.startswith(echo):
        own = ""
    elif problem and not problem.startswith("rank "):
        own = f"rank {ranks.rank_in_group}: {problem}"
    try:
        texts = _all_say(own)
    except RuntimeError as error:
        return f"rank {ranks.rank_in_group} cannot ask the others: {error}"
    return next(filter(None, texts), problem)


def require_one(update_id: str, expected: str | None) -> None:
    """Refuse, on all ranks together, what is not one update on all of them; all ranks must ask.

    Args:
        update_id: what this rank would install; empty if that is nothing.
        expected: what the caller means; None if it did not say.

    Raises:
        WeightUpdateRejectedError: the ranks have several updates, or another one.

    """
    try:
        texts = [update_id] if group().world_size == 1 else _all_say(update_id)
    except RuntimeError as error:
        msg = f"rank {group().rank_in_group} cannot ask the others: {error}. Start a fresh engine."
        raise WeightUpdateRejectedError(msg) from error
    if len(set(texts)) > 1:
        msg = (
            f"the ranks were given different updates: {texts}, expected one for all of them. Pass "
            "each rank the same manifest."
        )
        raise WeightUpdateRejectedError(msg)
    if expected is not None and texts[0] != expected:
        msg = (
            f"{_who_holds(texts[0])}, expected update {expected}: another driver came in between. "
            "Let one driver at a time update an engine, and publish again."
        )
        raise WeightUpdateRejectedError(msg)


def _who_holds(update_id: str) -> str:
    return f"update {update_id} is prepared here" if update_id else "no update is prepared here"


def _all_say(text: str) -> list[str]:
    """What every rank says, by rank; all ranks must ask."""
    ranks = group()
    said = torch.zeros(ranks.world_size, _TEXT_NBYTES, dtype=torch.uint8, device="cpu")
    own = text.encode()[:_TEXT_NBYTES]
    mine = torch.tensor(list(own), dtype=torch.uint8, device="cpu")
    said[ranks.rank_in_group, : len(own)] = mine
    torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]

"""The ranks of one engine decide together: all yes, or no.

A rank that cannot ask the others (one died, their group timed out) takes that for a no.
"""

import logging
from typing import Any

import torch

from rl_bridge.installers.vllm.parts import require

__all__ = ["all_agree", "first_said", "group"]

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
    vote = torch.tensor([int(ok)])
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
    said = torch.zeros(ranks.world_size, _TEXT_NBYTES, dtype=torch.uint8)
    own = problem
    if problem.startswith(echo):
        own = ""
    elif problem and not problem.startswith("rank "):
        own = f"rank {ranks.rank_in_group}: {problem}"
    text = own.encode()[:_TEXT_NBYTES]
    said[ranks.rank_in_group, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    try:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
    except RuntimeError as error:
        return f"rank {ranks.rank_in_group} cannot ask the others: {error}"
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in said]
    return next(filter(None, texts), problem)

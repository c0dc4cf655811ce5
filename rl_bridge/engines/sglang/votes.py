"""The ranks of one engine answer together: what one of them refuses, all of them refuse.

SGLang hands each control request to all ranks of an engine, and lets the first one alone reply. So
each tells the others what it would reply, as JSON, and all make the same one answer of it.
"""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_bridge.engines.sglang.compat import require
from rl_bridge.errors import EngineLost, TornEngine

__all__ = [
    "all_reply",
    "merged",
    "this_rank",
    "world_size",
]

Reply = dict[str, Any]


def _ranks() -> Any:
    return require("sglang.srt.runtime_context").get_parallel().tp_group


def world_size() -> int:
    """How many ranks compute one model together."""
    return int(_ranks().world_size)


def this_rank() -> int:
    """Which of them this process is."""
    return int(_ranks().rank_in_group)


def all_reply(reply: Reply, timeout_s: float) -> list[Reply]:
    """What every rank would reply, by rank; all ranks must ask.

    A rank that cannot ask the others (one died, or hangs for `timeout_s`) takes that for a no.
    """
    if world_size() == 1:
        return [reply]
    own = torch.frombuffer(bytearray(json.dumps(reply).encode()), dtype=torch.uint8)
    try:
        sizes = _gathered(torch.tensor([own.numel()], device="cpu"), timeout_s)
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device="cpu")
        room[: own.numel()] = own
        rows = _gathered(room, timeout_s)
    except RuntimeError as error:
        message = (
            f"rank {this_rank()} cannot ask the others: {error}. Start a fresh engine, and install "
            "the current version in it before it serves."
        )
        said = {"ok": False, "type": EngineLost.__name__, "message": message}
        return [{"call": reply.get("call"), **said}]
    texts = [bytes(row[: int(size)].tolist()) for row, size in zip(rows, sizes, strict=True)]
    return [json.loads(text) for text in texts]


def _gathered(own: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
    found = [torch.zeros_like(own) for _ in range(world_size())]
    work = torch.distributed.all_gather(found, own, group=_ranks().cpu_group, async_op=True)
    assert work is not None  # this rank is in the group
    work.wait(dt.timedelta(seconds=timeout_s))
    return found


def merged(replies: Sequence[Reply]) -> Reply:
    """One reply of all ranks': a no if one says no, and of the noes the gravest one."""
    if len(replies) == 1:
        return {"ranks": 1, **replies[0]}
    noes = [(rank, reply) for rank, reply in enumerate(replies) if not reply["ok"]]
    if noes:
        torn = [said for said in noes if said[1]["type"] == TornEngine.__name__]
        rank, said = (torn or noes)[0]
        return {**said, "message": f"rank {rank}: {said['message']}"}
    one: Reply = {"ranks": len(replies)}
    for key in dict.fromkeys(key for reply in replies for key in reply):  # one may say more
        values = [reply.get(key) for reply in replies]
        one[key] = _MERGED.get(key, _first)(values)
    return one


def _first(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None and value != ""), values[0])


def _all_did(values: Sequence[bool | None]) -> bool | None:
    return None if None in values else all(values)


def _unanimous(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ""


def _slowest(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(value.get(name, 0.0) for value in values) for name in values[0]}


def _proofs(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each covers what its rank holds; roots and tensors are the same on all."""
    nbytes = sum(value["digested_nbytes"] for value in values)
    return {**values[0], "digested_nbytes": nbytes}


_MERGED: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "ok": all,
    "begun": any,
    "mine": any,
    "by_sglang": any,
    "stays": any,
    "left": max,
    "flushed": _all_did,
    "timings_ms": _slowest,
    "proof": _proofs,
    "verified": _unanimous,
    "cuts": lambda values: [cuts for [cuts] in values],
}

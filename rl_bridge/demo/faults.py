"""The faults that the demo plants, where it plants them, and what must become of each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from rl_bridge.demo.failures import FaultUnnoticed
from rl_bridge.demo.options import MIN_STEPS, Engine
from rl_bridge.demo.rollout import InstallReply

__all__ = ["Expectation", "Fault", "examine", "plan_faults"]


class Fault(StrEnum):
    """What is done to an update."""

    CORRUPTED = "corrupted"
    """One byte of the published memory is flipped before the rollout looks."""
    STALE = "stale"
    """The manifest of the version before the active one is sent again."""
    HALF_WAY = "half-way install"
    """The engine fails after half of the tensors have been written."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must become of a fault."""

    outcome: Literal["refused", "undone"]
    error: str
    message: str = ""
    """How the error's text begins, where its type alone does not tell."""


_EXPECTED = {
    Fault.CORRUPTED: Expectation("refused", "ChecksumMismatch"),
    Fault.STALE: Expectation("refused", "StaleUpdate"),
    # The engine's own exception comes out as it is, after the undo.
    Fault.HALF_WAY: Expectation("undone", "EngineFault"),
}


# From the processes of real engines it comes as text.
_HALF_WAY_ELSEWHERE = Expectation("undone", "WeightUpdateRejectedError", "EngineFault: ")


def plan_faults(num_steps: int) -> dict[int, Fault]:
    """Say before which step's own update which fault is planted: around the middle."""
    if num_steps < MIN_STEPS:
        raise ValueError(f"{num_steps} steps are too few for the demo, at least {MIN_STEPS}")
    middle, gap = num_steps // 2 + 1, max(1, num_steps // 10)
    return {middle - gap: Fault.CORRUPTED, middle: Fault.STALE, middle + gap: Fault.HALF_WAY}


def examine(
    fault: Fault,
    reply: InstallReply,
    *,
    active_version: int | None,
    engine: str = Engine.MODULE,
) -> Expectation:
    """Return what the fault was expected to lead to, or raise if it led to something else."""
    expected = _EXPECTED[fault]
    if fault is Fault.HALF_WAY and engine != Engine.MODULE:
        expected = _HALF_WAY_ELSEWHERE
    if reply.error != expected.error or not reply.message.startswith(expected.message):
        raise FaultUnnoticed(
            f"the {fault} update should have been {expected.outcome} with {expected.error}, "
            f"the rollout says {reply.error or 'installed'}: {reply.message}"
        )
    if reply.active_version != active_version:
        raise FaultUnnoticed(
            f"the {fault} update was {expected.outcome}, yet the rollout went from version "
            f"{active_version} to {reply.active_version}"
        )
    return expected

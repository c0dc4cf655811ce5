"""A process in which Triton interprets the kernel: it answers the questions of the rig for it."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge.cuda import digest as choice
from rl_bridge.cuda import leaves
from rl_bridge.cuda.digest import DevicePass, kernel_cause
from rl_bridge.cuda.digest_engines import KernelEngine
from rl_bridge.cuda.leaves import LeafTable
from tests.cuda.digest import rig
from tests.cuda.digest.rig import Laid

__all__ = ["Interpreted"]


def _broken_interpreter() -> str | None:
    """Why Triton's interpreter cannot even count here (some do not work with later numpys)."""
    from tests.cuda.digest.loop_kernel import count

    out = torch.zeros(1, dtype=torch.int64)
    try:
        count[(1,)](out, 6)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not of our kernel
        return f"Triton's interpreter does not work here ({type(error).__name__}: {error})"
    return None if out.item() == 3 else f"Triton's interpreter counts to {out.item()}, not 3"


def _look_through_the_language_once() -> None:
    """Have Triton look for what it replaces once for each launch and module.

    It does so at every call of a function within a kernel, which takes most of its time; what it
    replaced for one call is in place for the next.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    found: dict[int, Any] = {}

    def patched(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in found:
            found[module] = patch(function)
        return found[module]

    def launched(*arguments: Any, **options: Any) -> Any:
        found.clear()  # the end of a launch takes back what its beginning has replaced
        return launch(*arguments, **options)

    interpreter._patch_lang = patched
    interpreter.GridExecutor.__call__ = launched


class Interpreted:
    """What a child serves in which Triton interprets: the same questions, asked of the kernel."""

    def __init__(self) -> None:
        # Triton looks when it is imported: nothing in this process has done so yet.
        os.environ["TRITON_INTERPRET"] = "1"
        _look_through_the_language_once()
        self.broken = _broken_interpreter()
        # The tests look themselves; a wrong kernel is to fail them and not to be refused to them.
        choice._CAUSES[torch.device("cpu")] = None

    def lacks(self) -> str | None:
        """Why nothing can be interpreted here, or None."""
        return self.broken

    def ask(self, question: str, arguments: list[Any]) -> Any:
        """Call one of the functions of the rig, by name."""
        return getattr(rig, question)("triton", *arguments)

    def launches(self) -> list[list[list[int]]]:
        """Width and leaves of each launch: aligned sources, odd ones, some in the arena."""
        laid = Laid([300, 5000, 0, 5])
        plan = laid.plan("triton")
        return [
            [[one.width, len(one.rows)] for one in _launched(plan, laid.targets, sources)]
            for sources in (
                laid.sources,
                laid.sources + np.array([0, 4, 0, 1], np.uint64),
                np.where([1, 0, 1, 1], laid.targets, laid.sources),
            )
        ]

    def rows_made(self) -> list[int]:
        """How often rows are laid out, for each of some calls after the plan."""
        made: list[int] = []
        laid = Laid([300, 5000, 0, 5])
        with pytest.MonkeyPatch.context() as patch:
            rows = LeafTable.rows

            def counted(*arguments: Any, **options: Any) -> Any:
                made.append(1)
                return rows(*arguments, **options)

            plan, told, behind = laid.plan("triton"), [], laid.targets + np.uint64(256)
            patch.setattr(LeafTable, "rows", counted)
            calls: list[Callable[[], object]] = [
                lambda: plan.copy_digest(laid.sources, laid.targets),
                lambda: plan.copy_digest(laid.sources, laid.targets),
                # The places in an arena: known, whichever arena it is.
                lambda: plan.digest(laid.targets),
                lambda: plan.digest(behind),
                lambda: plan.digest(laid.sources + np.uint64(1)),
                lambda: plan.digest(laid.sources + np.uint64(2)),
                lambda: plan.digest(laid.sources + np.uint64(1)),
                # Two slots in turn, with one tensor that was gathered into each.
                lambda: plan.copy_digest(_gathered(laid, laid.targets), laid.targets),
                lambda: plan.copy_digest(_gathered(laid, behind), behind),
            ]
            for call in calls:
                made.clear()
                call()
                told.append(len(made))
        return told

    def kept(self) -> int:
        """For how many sets of addresses rows are kept when ten have come."""
        laid = Laid([5])
        plan = laid.plan("triton")
        for shift in range(1, 11):
            plan.digest(laid.sources + np.uint64(shift))
        engine = plan._engine
        assert isinstance(engine, KernelEngine)
        return len(engine._sources._launches)

    def found_out(self, planted: str) -> list[Any]:
        """Why the kernel is left out, if it is, with something wrong in it, and what is taken."""
        with pytest.MonkeyPatch.context() as patch:
            if planted == "wrong key":
                right = leaves.key_words()
                patch.setattr(leaves, "key_words", lambda: right ^ (np.arange(8) == 3))
            elif planted == "no compiler":
                patch.setattr(KernelEngine, "digest", _no_compiler)
            patch.setattr(choice, "_CAUSES", {})
            return [kernel_cause("cpu"), Laid([5]).plan().engine]


def _no_compiler(*_: object) -> None:
    raise RuntimeError("Failed to find C compiler")


def _launched(plan: DevicePass, targets: np.ndarray, sources: np.ndarray) -> list[Any]:
    """The launches of one pack."""
    engine = plan._engine
    assert isinstance(engine, KernelEngine)
    plan.copy_digest(sources, targets)
    return list(engine._packed._launches.values())[-1]


def _gathered(laid: Laid, targets: np.ndarray) -> np.ndarray:
    """Sources of which the first lies in the arena already."""
    sources = laid.sources
    sources[0] = targets[0]
    return sources

"""Ends of `nixl` whose close is cut off by an interrupt: the next call gives back what is left."""

import gc
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from tests.helpers import tracing
from tests.interrupts import InterruptBefore

WEIGHTS = {"w": torch.arange(1000)}


def held() -> set[str]:
    """What this process holds: sockets, descriptors to wake threads, segments, our threads."""
    found = [one.name for one in threading.enumerate() if one.name.startswith("rlb-")]
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        with suppress(OSError):  # the descriptor of this very listing
            found.append(str(Path(f"/proc/self/fd/{entry}").readlink()))
    lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    found += [line.split(maxsplit=5)[-1] for line in lines]
    return {name for name in found if any(mark in name for mark in ("rlb-", "socket", "eventfd"))}


def pair(options: dict[str, Any]) -> tuple[TensorBridge, TensorBridge]:
    """A reader that has read, and its trainer."""
    trainer = make_weight_bridge("nixl", suspicious="off", **options)
    reader = make_weight_bridge("nixl")
    reader.import_update(trainer.publish(WEIGHTS, weight_version=1))
    return reader, trainer


def close_all(*ends: TensorBridge) -> None:
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("options", "stride"),
    [({"serve": "inline"}, 17), ({"in_place": True}, 17), ({"serve": "process"}, 61)],
    ids=["inline", "in place", "process"],
)
def test_a_close_that_was_cut_off_before_any_line_is_made_up_for_by_the_next(
    options: dict[str, Any], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Python swallows inside a finalizer would be kept by the test runner, with all frames.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    close_all(*pair(options))  # what the library and torch keep for good is there behind it
    number, struck = 0, True
    while struck:
        gc.collect()  # else an earlier turn's remains would seem to be there still
        before = held()
        ends = pair(options)
        tracer = InterruptBefore(number)
        with suppress(KeyboardInterrupt), tracing(tracer):
            close_all(*ends)
        struck = tracer.struck
        close_all(*ends)
        # Although all of them live: no finalizer did it.
        assert not held() - before, f"interrupted before line number {number}"
        number += stride
    assert number > 400

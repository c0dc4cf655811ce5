"""What the tests of the lower layers share: manifests, weights, forked children."""

import itertools
import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.errors import DeadlineExceeded
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.digest import DIGEST_NBYTES, text_digest
from rl_bridge.manifest.model import LayoutCache, WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.testing.leaks import Holdings
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.testing.processes import stop_process as stop

__all__ = [
    "assemble",
    "die_before_a_change",
    "forget_layouts",
    "forked",
    "forking",
    "held_before_its_poll",
    "make_manifest",
    "make_table",
    "open_fds",
    "stop",
    "weights",
]


# ---- kills --------------------------------------------------------------------------------------


def die_before_a_change(left: "itertools.count[int]", *others: tuple[Any, str]) -> None:
    """Have this process die at a step of those that change a directory: of a write, half is done.

    Args:
        left: counts down; at 0 it dies.
        others: further methods, each of a class, that are such steps.

    """

    def dying(original: Callable[..., Any], *, halves: bool = False) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if not next(left):
                if halves:
                    half = bytes(given[1][0])
                    os.write(given[0], half[: len(half) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **options)

        return call

    changes = ("fsync", "writev", "replace", "unlink")
    paths = ("rename", "mkdir", "unlink", "symlink_to")
    for owner, name in (*((os, one) for one in changes), *((Path, one) for one in paths), *others):
        setattr(owner, name, dying(getattr(owner, name), halves=name == "writev"))


# ---- manifests ----------------------------------------------------------------------------------


def make_table(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None, **options: Any
) -> TensorTable:
    """A small layout."""
    return TensorTable.pack(
        tensors or {"bias": ("float32", (5,)), "weight": ("bfloat16", (3, 5))}, **options
    )


def make_manifest(table: TensorTable | None = None, **fields: Any) -> WeightUpdateManifest:
    """A manifest with made-up digests: nothing was published."""
    table = table or make_table()
    num = len(table.names) * DIGEST_NBYTES
    known: dict[str, Any] = {
        "update_id": "a" * 32,
        "publisher_id": "b" * 32,
        "source_worker": "trainer",
        "source_rank": 0,
        "weight_version": 3,
        "transport": "shared-memory",
        "created_at": 1_700_000_000.25,
        "digests": bytes(index % 251 for index in range(num)),
        "table": table,
    }
    return WeightUpdateManifest(**{**known, **fields})


def assemble(header: Mapping[str, object], layout: Mapping[str, object] | str | None) -> str:
    """Manifest text from parts that may be wrong; the layout digest is right for the layout.

    None gives compact text. What must not be "corrected" here goes in with the layout as text.
    """
    head = dict(header)
    if layout is None:
        return f'{{"format":"{WeightUpdateManifest.FORMAT}","header":{_dump(head)}}}'
    text = layout if isinstance(layout, str) else canonical_json(dict(layout))
    if "layout_digest" in head:
        head["layout_digest"] = text_digest(text)
    return f'{{"format":"{WeightUpdateManifest.FORMAT}","header":{_dump(head)},"layout":{text}}}'


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@contextmanager
def forget_layouts() -> Iterator[None]:
    """As in a process that has not seen any layout yet."""
    cache = WeightUpdateManifest.known_layouts
    WeightUpdateManifest.known_layouts = LayoutCache(32)
    try:
        yield
    finally:
        WeightUpdateManifest.known_layouts = cache


# ---- tensors ------------------------------------------------------------------------------------


def weights(seed: int = 0, *, width: int = 64) -> dict[str, torch.Tensor]:
    """A small state dict with a matrix, a vector and a counter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(width, width, generator=generator),
        "layer.bias": torch.randn(width, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }


# ---- processes ----------------------------------------------------------------------------------

# A fork in a process with threads: deliberate in tests, and deprecated since Python 3.12.
forking = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def open_fds() -> dict[int, str]:
    """Open descriptors of this process, without those of earlier tests' garbage."""
    return Holdings.now().descriptors


def forked(function: Callable[[], bool]) -> bool:
    """Run `function` in a forked child; whether it came back and said True."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"0"
        try:
            answer = b"1" if function() is True else b"0"
        except BaseException:  # noqa: BLE001 - the parent fails the test
            traceback.print_exc()
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    try:
        until(lambda: _exited(pid), what=f"forked child {pid} comes back")
        return os.read(read, 1) == b"1"
    except DeadlineExceeded:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(read)


def _exited(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


# ---- threads ------------------------------------------------------------------------------------


@contextmanager
def held_before_its_poll(server: Any) -> Iterator[None]:
    """Hold a server's thread where it knows what to wait for, and does not wait yet."""
    is_there, may_go = threading.Event(), threading.Event()
    make_poll = server._make_poll

    def held(timeout_ms: float | None) -> Any:
        found = make_poll(timeout_ms)
        if threading.current_thread() is server._thread:
            server._wake.clear()
            is_there.set()
            may_go.wait(DEADLINE_S)
        return found

    server._make_poll = held
    server._wake.poke()
    try:
        assert is_there.wait(DEADLINE_S)
        yield
    finally:
        server._make_poll = make_poll
        may_go.set()

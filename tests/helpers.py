"""What the tests of the lower layers share: manifests, polls with a deadline, child processes."""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.digest import DIGEST_NBYTES, text_digest
from rl_bridge.manifest.model import FORMAT, WeightUpdateManifest
from rl_bridge.manifest.table import KNOWN_LAYOUTS, TensorTable

__all__ = [
    "DEADLINE_S",
    "HELD",
    "Child",
    "assemble",
    "forget_layouts",
    "forked",
    "make_manifest",
    "make_table",
    "open_fds",
    "raw_bytes",
    "until",
    "weights",
]

DEADLINE_S = 60.0

# Where the functions that a child runs keep what must outlive one call.
HELD: dict[str, Any] = {}


def until(condition: Callable[[], object], *, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fail with `what` after the deadline."""
    pause = threading.Event()
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        pause.wait(0.002)


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
        return f'{{"format":"{FORMAT}","header":{_dump(head)}}}'
    text = layout if isinstance(layout, str) else canonical_json(dict(layout))
    if "layout_digest" in head:
        head["layout_digest"] = text_digest(text)
    return f'{{"format":"{FORMAT}","header":{_dump(head)},"layout":{text}}}'


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@contextmanager
def forget_layouts() -> Iterator[None]:
    """As in a process that has not seen any layout yet."""
    tables = KNOWN_LAYOUTS._tables
    saved = tables.copy()
    tables.clear()
    try:
        yield
    finally:
        tables.clear()
        tables.update(saved)


# ---- tensors ------------------------------------------------------------------------------------


def weights(seed: int = 0, *, width: int = 64) -> dict[str, torch.Tensor]:
    """A small state dict with a matrix, a vector and a counter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(width, width, generator=generator),
        "layer.bias": torch.randn(width, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
    }


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's logical, row-major bytes."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1)
    return bytes(dense.view(torch.uint8).numpy().tobytes()) if dense.numel() else b""


# ---- processes ----------------------------------------------------------------------------------


def open_fds() -> dict[int, str]:
    """Open descriptors of this process and what each points at."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except OSError:
            continue  # the directory's own descriptor, closed by now
    return found


def forked(function: Callable[[], object]) -> bool:
    """Run `function` in a forked child; whether it came back and said something true."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = b"0"
        try:
            answer = b"1" if function() else b"0"
        except BaseException:  # noqa: BLE001 - the parent fails the test
            traceback.print_exc()
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    try:
        until(lambda: _exited(pid), what=f"forked child {pid} comes back")
        return os.read(read, 1) == b"1"
    except AssertionError:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(read)


def _exited(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == pid


class Child:
    """A spawned process that runs functions of test modules, one after the other."""

    def __init__(self) -> None:
        """Start it; it imports what it needs when it is first called."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, function: Callable[..., Any], *args: object) -> None:
        """Start a call; `receive` gives its result."""
        self._pipe.send((function, args))

    def receive(self, *, timeout_s: float = DEADLINE_S) -> Any:
        """The result of the call that was started last; an exception there fails the test here."""
        if not self._pipe.poll(timeout_s):
            self.kill()
            msg = f"the child said nothing for {timeout_s} s"
            raise AssertionError(msg)
        fine, value = self._pipe.recv()
        assert fine, f"in the child:\n{value}"
        return value

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Run a function there and wait for its result."""
        self.send(function, *args)
        return self.receive()

    def wait_for_end(self, *, timeout_s: float = DEADLINE_S) -> int | None:
        """Wait until it ended by itself; its exit code (negative: the signal)."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has cleaned up."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        """Use as a context manager: no child outlives its test."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it: politely first, so that its coverage is written."""
        if self._process.is_alive() and not self._pipe.closed:
            try:
                self._pipe.send(None)
                self._process.join(10)
            except OSError:
                pass
        self.kill()


def _serve(pipe: Connection) -> None:
    while True:
        try:
            job: tuple[Callable[..., Any], Sequence[object]] | None = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        function, args = job
        try:
            answer: tuple[bool, object] = (True, function(*args))
        except BaseException:  # noqa: BLE001 - it travels to the parent as text
            answer = (False, traceback.format_exc())
        pipe.send(answer)

"""Processes of a control plane that are stopped and killed at random moments, and what holds then.

There are a trainer, the process that serves its reads where the transport has one, an engine that
is watched, and a bystander. Somebody other than the watched engine is struck at a random moment of
most updates. After each update the watched engine has to be at one version, byte for byte.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import torch

from rl_bridge.memory.segment import process_start_time
from rl_bridge.testing.peer import Peer, engine_weights, hashes, id_of, sample_weights
from rl_bridge.testing.processes import Child, ChildDied, ChildError, until

__all__ = ["TIMEOUT_S", "Plane"]

TIMEOUT_S = 6.0
"""Of each import."""
_LATEST_STRIKE_S = 0.05
_LONGEST_STOP_S = 1.5
_SETTLED = 20
"""After so many updates the watched engine's process has all that it needs."""
_HOW_OFTEN = 0.6
"""Part of the updates during which somebody is struck."""


class Watched(Peer):
    """An engine that counts what its process holds."""

    def holdings(self) -> dict[str, int]:
        """Numbers of open descriptors, mapped ranges and threads."""
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "threads": threading.active_count(),
        }


def _expected(seed: int) -> dict[str, str]:
    found: dict[str, torch.Tensor] = dict(sample_weights(seed))
    found["layer.0.transposed"] = found["layer.0.transposed"].contiguous()
    return hashes(found)


class Plane:
    """The processes, and a count of what happened to them and by them."""

    def __init__(self, transport: str, *, seed: int = 0) -> None:
        """Start everything."""
        self.transport = transport
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0
        self._stack = ExitStack()
        self._options = {"timeout_s": TIMEOUT_S}
        self._is_at: dict[str, str] | None = None
        with ExitStack() as started:
            started.push(self._stack)
            self.watched = self._start(Watched, "watched", engine_seed=1)
            self._trainer = self._start(Peer, "trainer")
            self._bystander = self._start(Peer, "bystander", engine_seed=1)
            started.pop_all()
        self._last: str | None = None
        self._is_asked = False

    def _start(self, kind: type[Peer], worker: str, **more: Any) -> Child:
        child = Child(
            kind,
            transport_class=self.transport,
            transport_kwargs=self._options,
            worker=worker,
            **more,
        )
        return self._stack.enter_context(child).ready()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """End everything."""
        self._stack.close()

    # ---- strikes --------------------------------------------------------------------------------

    def _servers(self) -> list[int]:
        """The processes that the trainer started."""
        with suppress(OSError):
            tasks = Path(f"/proc/{self._trainer.pid}/task").iterdir()
            return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return []

    def _strike(self) -> threading.Thread | None:
        """Choose whom to strike in this update, and how; it happens from another thread."""
        if self.draw.random() > _HOW_OFTEN:
            return None
        servers = self._servers()
        likely = ["trainer", "bystander", "bystander", *(["server", "server"] if servers else [])]
        whom = self.draw.choice(likely)
        pids = {
            "trainer": [self._trainer.pid],
            "server": servers,
            "bystander": [self._bystander.pid],
        }[whom]
        at_s, stop_s = self.draw.random() * _LATEST_STRIKE_S, self.draw.random() * _LONGEST_STOP_S
        # A serving process that is stopped stays so: its publisher has to notice, and replace it.
        how = self.draw.choice(["kill", "stop"])
        self.counts[f"{how} {whom}"] += 1

        never = threading.Event()

        def strike() -> None:
            never.wait(at_s)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how == "stop" and whom != "server":
                never.wait(stop_s)
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=strike)
        thread.start()
        return thread

    def _revive(self) -> None:
        if not self._trainer.process.is_alive():
            self._trainer = self._start(Peer, "trainer")
            self._last = None
        if not self._bystander.process.is_alive():
            self._bystander = self._start(Peer, "bystander", engine_seed=1)
            self._is_asked = False

    # ---- updates --------------------------------------------------------------------------------

    def update(self, version: int) -> None:
        """Publish a version and install it, while somebody is struck."""
        thread = self._strike()
        try:
            self._update(version)
        finally:
            if thread is not None:
                thread.join()
            self._revive()
            self._check(version)

    def _update(self, version: int) -> None:
        try:
            manifest = self._trainer.call("publish", seed=version, weight_version=version)
        except ChildDied:
            self.counts["the trainer died before it published"] += 1
            return
        self._bystander_too(manifest)
        for _ in range(2):
            start = time.monotonic()
            try:
                self.watched.call("update_weights", manifest=manifest)
            except ChildError as error:
                if "WeightBridgeError" not in error.lineage:
                    raise
                self.counts[f"refused: {error.kind}"] += 1
            else:
                self.counts["installed"] += 1
                self._is_at = _expected(version)
                break
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - start)
        with suppress(ChildDied):
            if self._last is not None:
                self._trainer.call("release", update_id=self._last)
            self._last = id_of(manifest)

    def _bystander_too(self, manifest: str) -> None:
        if self._is_asked:
            with suppress(ChildDied, ChildError):
                self._bystander.answer()
        self._is_asked = False
        with suppress(ChildDied):
            self._bystander.tell("update_weights", manifest=manifest)
            self._is_asked = True

    def _check(self, version: int) -> None:
        found = self.watched.call("engine")
        expected = hashes(engine_weights(1)) if self._is_at is None else self._is_at
        assert found == expected, f"version {version} left other bytes than were reported"

    # ---- the whole run --------------------------------------------------------------------------

    def run(self, versions: Iterable[int]) -> dict[str, Any]:
        """Make these versions; what happened, and how much the watched engine's process grew."""
        servers: set[tuple[int, int | None]] = set()  # by their start, too: numbers come again
        before: dict[str, int] = {}
        num = 0
        for num, version in enumerate(versions, 1):
            servers.update((pid, process_start_time(pid)) for pid in self._servers())
            self.update(version)
            if num <= _SETTLED:
                before = self.watched.call("holdings")
        after = self.watched.call("holdings")
        self._trainer.stop()
        for pid, start in servers:  # one whose trainer was killed while it was stopped
            if process_start_time(pid) == start:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        until(lambda: not any(_is_alive(*one) for one in servers), what="the servers' ends")
        return {
            "transport": self.transport,
            "updates": num,
            "timeout_s": TIMEOUT_S,
            "counts": dict(sorted(self.counts.items())),
            "longest_update_s": round(self.longest_s, 3),
            "grew_by": {name: after[name] - before[name] for name in after},
        }


def _is_alive(pid: int, start: int | None) -> bool:
    return start is not None and process_start_time(pid) == start

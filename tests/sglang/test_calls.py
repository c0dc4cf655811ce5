"""How an ``Engine`` of this process is called: its loop, its deadline."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.testing.processes import until
from tests.helpers import stop
from tests.sglang.bench import Bench, executor_for

WAIT_S = 60


def test_an_engine_whose_loop_runs_in_another_thread_takes_updates(bench: Bench) -> None:
    loop = bench.engine.loop
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    until(loop.is_running, what="the engine's loop runs")
    try:
        with executor_for(bench.engine) as executor:
            bench.update(executor)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
    bench.check()


def test_the_engines_own_loop_must_not_be_blocked(bench: Bench) -> None:
    manifest = bench.trainer.publish(bench.next())
    with executor_for(bench.engine) as executor:

        async def update() -> None:
            executor.update_weights(manifest)

        with pytest.raises(WeightBridgeUnavailableError, match=r"asyncio\.to_thread"):
            bench.engine.loop.run_until_complete(update())
        bench.check()


@contextmanager
def stopped(bench: Bench) -> Iterator[None]:
    """Its scheduler hangs."""
    [scheduler] = [
        child.pid
        for child in multiprocessing.active_children()
        if b"sglang::scheduler" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    ]
    assert scheduler is not None
    stop(scheduler)
    try:
        yield
    finally:
        os.kill(scheduler, signal.SIGCONT)


def test_an_engine_that_hangs_is_told_and_its_late_answers_are_nobody_elses(bench: Bench) -> None:
    with stopped(bench), executor_for(bench.engine, timeout_s=1.0) as executor:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=r"within 1\.0 s"):
                executor.update_weights(bench.trainer.publish(bench.next()))
    with executor_for(bench.engine) as executor:
        bench.update(executor)
    bench.check()


def test_an_engine_without_the_plugin_says_how_to_get_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an engine answers to a name that it does not know.
    monkeypatch.setattr("rl_bridge.engines.sglang.client.call_text", lambda _: "no.weight")
    with (
        executor_for(bench.engine) as executor,
        pytest.raises(WeightBridgeUnavailableError, match="does not have rl_bridge's plugin"),
    ):
        executor.update_weights(bench.trainer.publish(bench.next()))

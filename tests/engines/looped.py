"""An ``AsyncLLM`` in an event loop of its own thread, as servers have it."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rl_bridge.testing.processes import until
from tests.engines.drive import (
    MAX_TOKENS,
    PROMPTS,
    Answers,
    Setting,
    arguments,
    greedy,
    prompts_for,
    read,
)

DEADLINE_S = 120
START_S = 300  # replicas of two ranks are six processes


class Running:
    """One request under way."""

    def __init__(
        self,
        engine: "Looped",
        name: str,
        prompt: Sequence[int],
        tokens: int,
        **options: Any,
    ) -> None:
        """Send it."""
        self.length = 0
        self._future = engine.submit(self._follow(engine, name, prompt, tokens, options))

    async def _follow(
        self,
        engine: "Looped",
        name: str,
        prompt: Sequence[int],
        tokens: int,
        options: dict[str, Any],
    ) -> Any:
        last = None
        (given,) = prompts_for((prompt,))
        async for output in engine.llm.generate(given, greedy(tokens), request_id=name, **options):
            last = output
            self.length = len(output.outputs[0].token_ids)
        return last

    def reach(self, length: int) -> None:
        """Wait until it has that many tokens."""
        until(lambda: self.length >= length or self._future.done(), what=f"{length} tokens")

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return self._future.done()

    def result(self) -> Any:
        """Its last output."""
        return self._future.result(DEADLINE_S)


class Looped:
    """The engine, from another thread."""

    def __init__(self, setting: Setting, path: str, **options: Any) -> None:
        """Start it; options are `AsyncEngineArgs`'s."""
        self.loop = asyncio.new_event_loop()
        self._names = iter(range(1_000_000))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        starts = self.submit(self._start({**arguments(setting, path), **options}))
        self.llm: Any = starts.result(START_S)

    async def _start(self, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Let the loop run it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Let the loop run it, and wait."""
        return self.submit(coroutine).result(DEADLINE_S)

    def ask(
        self,
        prompt: Sequence[int],
        tokens: int = MAX_TOKENS,
        replica: int | None = None,
        **options: Any,
    ) -> Running:
        """Send one request, to one of its replicas if it has several."""
        options = {"data_parallel_rank": replica, **options}
        return Running(self, f"r{next(self._names)}", prompt, tokens, **options)

    def answers(
        self,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        tokens: int = MAX_TOKENS,
        replica: int | None = None,
        **options: Any,
    ) -> Answers:
        """What it answers, computed anew."""
        assert self.run(self.llm.reset_prefix_cache())
        requests = [self.ask(prompt, tokens, replica, **options) for prompt in prompts]
        return read([request.result() for request in requests])

    def close(self) -> None:
        """End engine and loop."""
        self.loop.call_soon_threadsafe(self.llm.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(DEADLINE_S)
        self.loop.close()


@contextmanager
def looped(setting: Setting, path: str, **options: Any) -> Iterator[Looped]:
    """Start it; it ends with the block."""
    engine = Looped(setting, path, **options)
    try:
        yield engine
    finally:
        engine.close()

"""An engine as the executor's adapter sees it: an ``LLM``, an ``AsyncLLM`` or a server's URL.

Each handle does the same few things by what that engine offers: call all workers, pause and resume,
drop cached prefixes, and read and set the label that vLLM puts on outputs.
"""

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from rl_bridge import errors
from rl_bridge.engines.vllm.compat import MINIMUM
from rl_bridge.engines.vllm.plugin import METHOD
from rl_bridge.engines.vllm.threads import in_thread
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)

__all__ = [
    "AsyncLLMHandle",
    "EngineHandle",
    "LLMHandle",
    "PauseMode",
    "failure",
    "lost",
    "no_plugin",
]

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests: they freeze, are waited for, or are aborted."""

Replies = list[dict[str, Any]]

# How often a call under way looks whether its engine is still there.
_LOOK_S = 0.1


class EngineHandle(ABC):
    """One engine, whatever process it is in. Every call has a deadline."""

    def __init__(self, timeout_s: float) -> None:
        """Give every call `timeout_s` seconds."""
        self.timeout_s = timeout_s

    @abstractmethod
    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        """Ask all workers; one reply for each, by rank.

        Raises:
            EngineLost: the engine is gone.
            DeadlineExceeded: it does not answer.
            WeightBridgeUnavailableError: its workers do not have the plugin.

        """

    @abstractmethod
    def data_parallel_size(self) -> int:
        """How many replicas there are behind this engine."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; requests that come meanwhile are queued."""

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever; False where an engine does not tell."""
        return False

    def reset_encoder_cache(self) -> None:  # noqa: B027 - only some have one
        """Drop what was made of images and other media."""

    @abstractmethod
    def reset_caches(self, *, running: bool) -> bool:
        """Drop that and cached prefixes; with `running`, running requests are computed anew, too.

        Returns:
            False if requests hold blocks, so that nothing was dropped.

        """

    @abstractmethod
    def label(self) -> str | None:
        """The version label on outputs; None where this vLLM has none."""

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Set it; where this vLLM has none, nothing happens."""

    def close(self) -> None:  # noqa: B027 - only some have something to close
        """Let go of the connection; the engine goes on."""


def lost(error: BaseException, doing: str) -> EngineLost:
    """The engine is gone: what the caller gets instead of vLLM's own error."""
    return EngineLost(
        f"the engine was lost while it should {doing} ({type(error).__name__}: {error}). Start a "
        "fresh engine and install the current version in it before it serves."
    )


def no_plugin(error: BaseException) -> WeightBridgeUnavailableError:
    """The workers do not know our method."""
    return WeightBridgeUnavailableError(
        f"the engine's workers do not have rl_bridge's plugin ({error}). Install rl_bridge in the "
        f"engine's environment, with vLLM >= {MINIMUM}; where VLLM_PLUGINS is set, add rl_bridge "
        "to it. The engine's log says what it lacks."
    )


def failure(reply: dict[str, Any], ranks: int) -> Exception:
    """A rank's failure, as the exception that it was if that is one of ours."""
    kind = getattr(errors, reply["type"], None)
    where = "" if ranks == 1 else f"rank {reply['rank']}: "
    if isinstance(kind, type) and issubclass(kind, WeightBridgeError):
        try:
            return kind(where + reply["message"])
        except TypeError:
            pass  # it takes more than a text: the general one must do
    return WeightUpdateRejectedError(
        f"{where}{reply['type']}: {reply['message'].rstrip('.')}. The engine's log has the "
        "traceback."
    )


def _is_dead(error: BaseException) -> bool:
    # What vLLM says of a worker that died, by how far its executor has got in noticing it.
    texts = ("Executor failed", "cancelled", "should not be called on follower node")
    return type(error).__name__ in {"EngineDeadError", "EngineGenerateError"} or any(
        text in str(error) for text in texts
    )


class LLMHandle(EngineHandle):
    """An ``LLM`` of this process. Use it from the thread that generates: vLLM's own rule."""

    def __init__(self, llm: Any, timeout_s: float) -> None:
        """Look at `llm`; nothing is called."""
        super().__init__(timeout_s)
        self._llm = llm
        self._last: list[concurrent.futures.Future[Any]] = []  # one, behind the first call

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        """Ask all workers. See `EngineHandle`."""
        arguments = (verb, payload or {})
        # Without a deadline inside: vLLM would give up and take the late answers for the next ones.
        replies: Replies = self._do(verb, lambda: self._llm.collective_rpc(METHOD, args=arguments))
        return replies

    def data_parallel_size(self) -> int:
        """How many replicas there are."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.data_parallel_size)

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling. An in-process engine cannot wait: it steps only in ``generate``."""
        if mode == "wait" and self._is_in_process():
            mode = "keep"  # nothing steps while this thread is here, so there is nothing to await
        if mode == "abort" and self._is_in_process():
            # By the LLM: of what its scheduler aborts it hears nothing, and would wait for it.
            engine = self._llm.llm_engine
            requests = list(engine.output_processor.request_states)
            self._do("abort requests", lambda: engine.abort_request(requests, internal=True))
        try:
            self._utility("pause_scheduler", mode, False)  # noqa: FBT003 - vLLM's own signature
        finally:
            if mode == "wait":  # it ends with the requests, and keeps no other call from its answer
                self._last = []

    def resume(self) -> None:
        """Go on."""
        self._utility("resume_scheduler")

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        return bool(self._utility("is_scheduler_paused"))

    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""
        engine = self._llm.llm_engine
        if hasattr(engine, "reset_encoder_cache"):
            self._do("drop its encoder's cache", engine.reset_encoder_cache)

    def reset_caches(self, *, running: bool) -> bool:
        """Drop that and cached prefixes."""
        self.reset_encoder_cache()
        options = {"reset_running_requests": running, "reset_connector": True}
        return bool(self._do("drop caches", lambda: self._llm.reset_prefix_cache(**options)))

    def label(self) -> str | None:
        """The version label on outputs."""
        get = getattr(self._llm, "get_weight_version", None)
        return None if get is None else str(self._do("tell its label", get))

    def set_label(self, label: str) -> None:
        """Set it."""
        update = getattr(self._llm, "update_weight_version", None)
        if update is not None:
            self._do("set its label", lambda: update(label))

    def _is_in_process(self) -> bool:
        return not hasattr(getattr(self._llm.llm_engine, "engine_core", None), "call_utility")

    def _utility(self, name: str, *arguments: Any) -> Any:
        core = self._llm.llm_engine.engine_core
        if self._is_in_process():
            return self._do(name, lambda: getattr(core.engine_core, name)(*arguments))
        return self._do(name, lambda: core.call_utility(name, *arguments))

    def _do(self, doing: str, action: Callable[[], Any]) -> Any:
        if self._is_in_process() and self._workers() == 1:
            try:
                return action()
            except Exception as error:
                raise _translated(error, doing, self.timeout_s) from error
        return _watched(self._begun(action), doing, self.timeout_s, self._is_dead)

    def _begun(self, action: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
        """Begin a call, not beside one that was given up: its workers may be at it still.

        vLLM's answers come in one queue: two that wait take each other's, and all later ones do.
        """
        end = time.monotonic() + self.timeout_s
        # (What an interrupt kept from beginning never ends.)
        last = [one for one in self._last if not one.cancelled()]
        while concurrent.futures.wait(last, _LOOK_S).not_done:
            if self._is_dead():
                raise lost(RuntimeError("its process ended"), "end an earlier call")
            if time.monotonic() > end:
                msg = (
                    f"the engine is still at an earlier call, {self.timeout_s} s behind the end of "
                    "the wait for it. See its log; give the adapter a longer timeout_s if it was "
                    "only slow."
                )
                raise DeadlineExceeded(msg)
        return in_thread(action, self._note)

    def _note(self, begun: "concurrent.futures.Future[Any]") -> None:
        self._last = [begun]

    def _workers(self) -> int:
        return int(getattr(self._llm.llm_engine.vllm_config.parallel_config, "world_size", 1))

    def _is_dead(self) -> bool:
        core = self._llm.llm_engine.engine_core
        if self._is_in_process():  # the engine is here, its workers may be gone
            return bool(getattr(core.engine_core.model_executor, "is_failed", False))
        return bool(getattr(getattr(core, "resources", None), "engine_dead", False))


class AsyncLLMHandle(EngineHandle):
    """An ``AsyncLLM``, whose event loop runs in another thread than the executor."""

    def __init__(
        self, engine: Any, timeout_s: float, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Take the engine's loop; None takes the running one.

        Raises:
            WeightBridgeUnavailableError: no loop is running here, and none was given.

        """
        super().__init__(timeout_s)
        self._engine = engine
        try:
            self._loop = loop or asyncio.get_running_loop()
        except RuntimeError as error:
            msg = "no event loop runs in this thread. Pass loop=, the one that the engine runs in."
            raise WeightBridgeUnavailableError(msg) from error

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        """Ask all workers. See `EngineHandle`."""
        arguments = (verb, payload or {})
        replies: Replies = self._do(verb, self._engine.collective_rpc(METHOD, None, arguments))
        return replies

    def data_parallel_size(self) -> int:
        """How many replicas there are."""
        return int(self._engine.vllm_config.parallel_config.data_parallel_size)

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling."""
        self._do("pause", self._engine.pause_generation(mode=mode, clear_cache=False))

    def resume(self) -> None:
        """Go on."""
        self._do("resume", self._engine.resume_generation())

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        return bool(self._do("tell whether it is paused", self._engine.is_paused()))

    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""
        if hasattr(self._engine, "reset_encoder_cache"):
            self._do("drop its encoder's cache", self._engine.reset_encoder_cache())

    def reset_caches(self, *, running: bool) -> bool:
        """Drop that and cached prefixes."""
        self.reset_encoder_cache()
        options = {"reset_running_requests": running, "reset_connector": True}
        return bool(self._do("drop caches", self._engine.reset_prefix_cache(**options)))

    def label(self) -> str | None:
        """The version label on outputs."""
        get = getattr(self._engine, "get_weight_version", None)
        return None if get is None else str(self._do("tell its label", get()))

    def set_label(self, label: str) -> None:
        """Set it."""
        update = getattr(self._engine, "update_weight_version", None)
        if update is not None:
            self._do("set its label", update(label))

    def _do(self, doing: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            if asyncio.get_running_loop() is self._loop:
                coroutine.close()
                msg = (
                    "update_weights was called in the engine's own event loop, which it would "
                    "block. Call `await asyncio.to_thread(executor.update_weights, manifest)`."
                )
                raise WeightBridgeUnavailableError(msg)
        except RuntimeError as error:
            if isinstance(error, WeightBridgeUnavailableError):
                raise  # (else no loop runs in this thread, as it should be)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return _watched(
            future, doing, self.timeout_s, lambda: getattr(self._engine, "errored", False)
        )


def _watched(
    future: "concurrent.futures.Future[Any]",
    doing: str,
    timeout_s: float,
    is_dead: Callable[[], bool],
) -> Any:
    """Wait for an answer, within the deadline and as long as there is an engine to give it.

    vLLM's clients wait forever for what an engine was asked before it died.
    """
    end = time.monotonic() + timeout_s
    while not future.done():
        left = end - time.monotonic()
        # (In this order: an answer that came before the death is found below.)
        if (gone := is_dead()) or left <= 0:
            if future.done():
                break
            future.cancel()
            cause = RuntimeError("its process ended") if gone else TimeoutError()
            raise lost(cause, doing) if gone else _translated(cause, doing, timeout_s)
        concurrent.futures.wait([future], min(_LOOK_S, left))
    try:
        return future.result()
    except Exception as error:
        raise _translated(error, doing, timeout_s) from error


def _translated(error: Exception, doing: str, timeout_s: float) -> Exception:
    """What the caller gets for an error of vLLM's: that error, where it is none of these."""
    if isinstance(error, NotImplementedError) or (
        "is not implemented" in str(error) and METHOD in str(error)
    ):
        return no_plugin(error)
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return DeadlineExceeded(
            f"the engine did not {doing} within {timeout_s} s. Look at its log; give the adapter "
            "a longer timeout_s if it was only slow."
        )
    return lost(error, doing) if _is_dead(error) else error

"""A vLLM engine as a driver calls it: an ``LLM``, an ``AsyncLLM`` or a server's URL.

Each client does the same few things by what that engine offers: call all workers, pause and
resume, drop cached prefixes, and read and set the label that vLLM puts on outputs.
"""

import asyncio
import concurrent.futures
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.engines.adapters import AdapterFrontEnd, Resident
from rl_bridge.engines.rpc import (
    Replies,
    Reply,
    Server,
    in_thread,
    lost,
    refuse_own_loop,
    too_late,
    watch,
)
from rl_bridge.engines.vllm import MINIMUM, VLLM
from rl_bridge.engines.vllm.endpoint import PATH as ADAPTERS
from rl_bridge.engines.vllm.endpoint import AdapterGate, gate_of, rows_of
from rl_bridge.engines.vllm.plugin import METHOD
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError

_HELD = "requests hold cached blocks of other weights, or a KV connector is not done"


class VLLMClient(AdapterFrontEnd):
    """What the three kinds of vLLM engines have in common."""

    @abstractmethod
    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""

    @abstractmethod
    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Drop cached prefixes; with `running`, running requests are computed anew, too.

        Returns:
            False if requests hold blocks, so that nothing was dropped.

        """

    @abstractmethod
    def stop(self, mode: str) -> None:
        """Pause the scheduler by one of vLLM's modes."""

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        """Stop scheduling: ``keep`` freezes requests, ``wait`` ends them, ``abort`` aborts them."""
        if mode is None or (undoes and mode == "wait"):
            mode = "keep"
        self.stop(mode)

    def drop_caches(self, policy: str | None) -> str:
        """Drop what other weights cached: ``recompute``, ``reset`` or ``keep``."""
        # What was made of media goes with every policy: vLLM looks it up without a request's salt.
        self.reset_encoder_cache()
        if policy == "keep":
            return ""
        done = self.reset_prefix_cache(running=policy != "reset")
        return "" if done else _HELD


def _no_plugin(said: object) -> WeightBridgeUnavailableError:
    return WeightBridgeUnavailableError(
        f"the engine's workers do not have rl_bridge's plugin ({said}). Install rl_bridge in the "
        f"engine's environment, with vLLM >= {MINIMUM}; where VLLM_PLUGINS is set, add rl_bridge "
        "to it. The engine's log says what it lacks."
    )


# ---- engines of this process --------------------------------------------------------------------


class _LocalClient(VLLMClient):
    """An engine object of this process."""

    def __init__(self, engine: Any, core: Any, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._engine = engine
        self._core = core

    @abstractmethod
    def _do(self, doing: str, action: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        """Do something with the engine, within a deadline; None is the client's own."""

    @abstractmethod
    def _death(self) -> str:
        """Why the engine will not answer any more; empty if it may."""

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask all workers. See `EngineClient`."""

        # Without a deadline inside: vLLM would give up and take the late answers for the next ones.
        def action() -> Any:
            return self._engine.collective_rpc(METHOD, args=(verb, payload))

        replies: Replies = self._do(verb, action, timeout_s=timeout_s)
        return replies

    def replicas(self) -> int:
        """How many data-parallel replicas there are. See `EngineClient`."""
        return int(self._core.vllm_config.parallel_config.data_parallel_size)

    def adapters_in_use(self) -> frozenset[int]:
        """Ids of the LoRA adapters that requests ask for: all of them were sent from here."""
        requests = list(self._core.output_processor.request_states.values())
        asked = [one.lora_request for one in requests]
        return frozenset(one.lora_int_id for one in asked if one is not None)

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """Let requests for these versions pass, and for no others. See `AdapterFrontEnd`."""
        del active  # users ask for a version
        self._gate().offer(adapter, residents)

    def adapters_held(self) -> frozenset[int]:
        """Ids of the adapters that somebody holds a ``LoRARequest`` of."""
        return frozenset(self._gate().handed.numbers())

    def lora_request(self, version: Resident) -> Any:
        """A ``LoRARequest`` whose name is of this version alone, for good.

        vLLM takes requests of one name for the same adapter, and below 0.31 it looks cached
        prefixes up by the name alone.
        """
        return self._gate().handed.hand(version.own_name, version.number, version.path)

    def _gate(self) -> AdapterGate:
        return gate_of(self._core.output_processor)

    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""
        if hasattr(self._core, "reset_encoder_cache"):
            self._do("drop its encoder's cache", self._core.reset_encoder_cache)

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Drop cached prefixes."""
        options = {"reset_running_requests": running, "reset_connector": True}
        return bool(self._do("drop caches", lambda: self._engine.reset_prefix_cache(**options)))

    def label(self) -> str | None:
        """The version label on outputs."""
        get = getattr(self._engine, "get_weight_version", None)
        return None if get is None else str(self._do("tell its label", get))

    def set_label(self, label: str) -> None:
        """Set it."""
        update = getattr(self._engine, "update_weight_version", None)
        if update is not None:
            self._do("set its label", lambda: update(label))

    def _awaited(
        self, future: "concurrent.futures.Future[Any]", doing: str, within_s: float
    ) -> Any:
        """The answer to a call under way, or what the caller gets instead of vLLM's own error."""
        try:
            watch(future, within_s, self._death)
            return future.result()
        except ConnectionError as error:
            future.cancel()
            raise lost(error, doing) from error
        except Exception as error:
            future.cancel()
            raise _translated(error, doing, within_s) from error


class LLMClient(_LocalClient):
    """An ``LLM`` of this process. Use it from the thread that generates: vLLM's own rule."""

    def __init__(self, llm: Any, timeout_s: float = 600.0) -> None:
        """Look at `llm`; nothing is called."""
        super().__init__(llm, llm.llm_engine, timeout_s)
        self._last: concurrent.futures.Future[Any] | None = None  # the call that was begun last

    def stop(self, mode: str) -> None:
        """Pause the scheduler. An in-process engine cannot wait: it steps only in ``generate``."""
        if mode == "wait" and self._is_in_process():
            mode = "keep"  # nothing steps while this thread is here, so there is nothing to await
        if mode == "abort" and self._is_in_process():
            # By the LLM: it does not hear what its scheduler aborts, and would wait for it.
            engine = self._core
            requests = list(engine.output_processor.request_states)
            self._do("abort requests", lambda: engine.abort_request(requests, internal=True))
        try:
            self._utility("pause_scheduler", mode, False)  # noqa: FBT003 - vLLM's own signature
        finally:
            if mode == "wait":  # it ends with the requests, and keeps no other call from its answer
                self._last = None

    def resume(self) -> None:
        """Go on."""
        self._utility("resume_scheduler")

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        return bool(self._utility("is_scheduler_paused"))

    def _is_in_process(self) -> bool:
        return not hasattr(getattr(self._core, "engine_core", None), "call_utility")

    def _utility(self, name: str, *arguments: Any) -> Any:
        core = self._core.engine_core
        if self._is_in_process():
            return self._do(name, lambda: getattr(core.engine_core, name)(*arguments))
        return self._do(name, lambda: core.call_utility(name, *arguments))

    def _do(self, doing: str, action: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        within_s = self.timeout_s if timeout_s is None else timeout_s
        if self._is_in_process() and self._workers() == 1:
            try:
                return action()
            except Exception as error:
                raise _translated(error, doing, within_s) from error
        return self._awaited(self._begun(action, within_s), doing, within_s)

    def _begun(
        self, action: Callable[[], Any], within_s: float
    ) -> "concurrent.futures.Future[Any]":
        """Begin a call, not beside one that was given up: its workers may be at it still.

        vLLM's answers come in one queue: two that wait take each other's, and all later ones do.
        """
        if self._last is not None and not self._last.cancelled():  # else it never began
            try:
                watch(self._last, within_s, self._death)
            except ConnectionError as error:
                raise lost(error, "end an earlier call") from error
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"the engine is still at an earlier call, {within_s} s after the end of the "
                    "wait for it. See its log; give the adapter a longer timeout_s if it was only "
                    "slow."
                ) from error
        self._last = in_thread(action)
        return self._last

    def _workers(self) -> int:
        return int(getattr(self._core.vllm_config.parallel_config, "world_size", 1))

    def _death(self) -> str:
        core = self._core.engine_core
        if self._is_in_process():  # the engine is here, its workers may be gone
            is_dead = getattr(core.engine_core.model_executor, "is_failed", False)
        else:
            is_dead = getattr(getattr(core, "resources", None), "engine_dead", False)
        return "its process ended" if is_dead else ""


class AsyncLLMClient(_LocalClient):
    """An ``AsyncLLM``, whose event loop runs in another thread than the executor."""

    def __init__(
        self,
        engine: Any,
        timeout_s: float = 600.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Take the engine's loop; None takes the running one."""
        super().__init__(engine, engine, timeout_s)
        try:
            self._loop = loop or asyncio.get_running_loop()
        except RuntimeError as error:
            raise WeightBridgeUnavailableError(
                "no event loop runs in this thread. Pass the one that the engine runs in: "
                "rl_bridge.vllm.connect(engine, loop=loop)."
            ) from error

    def stop(self, mode: str) -> None:
        """Pause the scheduler."""
        self._do("pause", lambda: self._engine.pause_generation(mode=mode, clear_cache=False))

    def resume(self) -> None:
        """Go on."""
        self._do("resume", self._engine.resume_generation)

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        return bool(self._do("tell whether it is paused", self._engine.is_paused))

    def _do(self, doing: str, action: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        refuse_own_loop(self._loop)
        within_s = self.timeout_s if timeout_s is None else timeout_s
        future = asyncio.run_coroutine_threadsafe(action(), self._loop)
        return self._awaited(future, doing, within_s)

    def _death(self) -> str:
        return "its process ended" if getattr(self._engine, "errored", False) else ""


def _translated(error: Exception, doing: str, timeout_s: float) -> Exception:
    """What the caller gets for an error of vLLM's: that error, if it is none of these."""
    if isinstance(error, NotImplementedError) or (
        "is not implemented" in str(error) and METHOD in str(error)
    ):
        return _no_plugin(error)
    if isinstance(error, TimeoutError) or "timed out" in str(error):
        return too_late("the engine", doing, timeout_s)
    return lost(error, doing) if _is_dead(error) else error


def _is_dead(error: BaseException) -> bool:
    # What vLLM says of a worker that died, by how far its executor has got in noticing it.
    texts = ("Executor failed", "cancelled", "should not be called on follower node")
    return type(error).__name__ in {"EngineDeadError", "EngineGenerateError"} or any(
        text in str(error) for text in texts
    )


# ---- a server -----------------------------------------------------------------------------------


class ServerClient(VLLMClient):
    """A server on this machine, by its development routes (``VLLM_SERVER_DEV_MODE=1``)."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        """Prepare the connection; nothing is sent."""
        super().__init__(timeout_s)
        self._server = Server(url, timeout_s, install=VLLM.install, health="health")

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask all workers. See `EngineClient`."""
        # Without a deadline inside: vLLM would give up and take the late answers for the next ones.
        body = {"method": METHOD, "args": [verb, payload]}
        told = self._send("POST", "collective_rpc", verb, within_s=timeout_s, json=body)
        replies = told.get("results")
        if not isinstance(replies, list) or not all(isinstance(r, dict) for r in replies or [0]):
            raise self._strange("collective_rpc", told)
        return replies

    def replicas(self) -> int:
        """How many data-parallel replicas there are behind the server. See `EngineClient`."""
        sizes = []
        for flag in ("true", "false"):
            told = self._send("GET", "get_world_size", "tell its size", params={"include_dp": flag})
            size = told.get("world_size")
            if not isinstance(size, int) or size < 1:
                raise self._strange("get_world_size", told)
            sizes.append(size)
        return sizes[0] // sizes[1]

    def stop(self, mode: str) -> None:
        """Pause the scheduler."""
        self._send("POST", "pause", "pause", params={"mode": mode, "clear_cache": "false"})

    def resume(self) -> None:
        """Go on."""
        self._send("POST", "resume", "resume")

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        told = self._send("GET", "is_paused", "tell whether it is paused")
        if not isinstance(told.get("is_paused"), bool):
            raise self._strange("is_paused", told)
        return bool(told["is_paused"])

    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""
        self._send("POST", "reset_encoder_cache", "drop its encoder's cache")

    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Drop cached prefixes. Older servers do not say if they could: taken for a no."""
        flags = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        reply = self._send("POST", "reset_prefix_cache", "drop caches", params=flags)
        return bool(reply.get("success", running))

    def label(self) -> str | None:
        """The version label on outputs."""
        reply = self._send("GET", "weight_info", "tell its label")
        return str(reply["weight_version"]) if "weight_version" in reply else None

    def set_label(self, label: str) -> None:
        """Set it."""
        self._send("POST", "update_weight_version", "set its label", json={"new_version": label})

    def adapters_in_use(self) -> frozenset[int]:
        """Ids of the LoRA adapters that requests have, as our routes in the server count them."""
        return frozenset(self._adapters("GET")["used"])

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """Have the server's clients ask for these versions, and no others."""
        told = rows_of(residents)
        label = None if active is None else active.label
        self._adapters("POST", json={"adapter": adapter, "active": label, "residents": told})

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _adapters(self, method: str, **request: Any) -> dict[str, Any]:
        path = ADAPTERS.removeprefix("/")
        told = self._send(method, path, "tell which adapters are in use", **request)
        if "used" not in told:
            raise self._strange(path, told)
        return told

    def _send(
        self, method: str, path: str, doing: str, *, within_s: float | None = None, **request: Any
    ) -> dict[str, Any]:
        within_s = self.timeout_s if within_s is None else within_s
        reply = self._server.send(method, path, doing, within_s, **request)
        if not reply.is_success:
            raise self._refused(reply, path, doing)
        told = self._server.content(reply) if reply.content else {}
        if isinstance(told, dict):
            return told
        if method == "POST" and path != "collective_rpc":
            return {}  # done, in words of its own
        raise self._strange(path, told)

    def _refused(self, reply: Any, path: str, doing: str) -> Exception:
        """What an answer that is no success stands for."""
        codes, text, server = self._server.codes, reply.text[:500], f"the server at {self._server}"
        if reply.status_code == codes.NOT_FOUND:
            plugin = (
                "VLLM_PLUGINS=rl_bridge, vLLM >= 0.32 and rl_bridge beside it, and "
                if f"/{path}" == ADAPTERS
                else ""
            )
            return WeightBridgeUnavailableError(
                f"{server} has no route /{path}. Start it with {plugin}VLLM_SERVER_DEV_MODE=1 in "
                "its environment, and let nobody else reach it."
            )
        timeouts = {codes.REQUEST_TIMEOUT, codes.GATEWAY_TIMEOUT}
        if reply.status_code in timeouts or "timed out" in text or "TimeoutError" in text:
            return DeadlineExceeded(
                f"{server} did not {doing} in time: it answered with status {reply.status_code}: "
                f"{text}. See its log; what it began may still be done."
            )
        if "is not implemented" in text:
            return _no_plugin(text)
        if "EngineDeadError" in text or "EngineCore encountered an issue" in text:
            return lost(RuntimeError(text), doing)
        return WeightBridgeUnavailableError(
            f"{server} answered /{path} with status {reply.status_code}: {text}. See its log."
        )

    def _strange(self, path: str, told: object) -> WeightBridgeUnavailableError:
        return WeightBridgeUnavailableError(
            f"the server at {self._server} answered /{path} with {str(told)[:200]!r}, which no "
            "vLLM server does. Give the URL of one."
        )


def connect(
    engine: Any, *, timeout_s: float = 600.0, loop: asyncio.AbstractEventLoop | None = None
) -> VLLMClient:
    """The client of an engine, whatever it is; it is not called.

    Args:
        engine: an ``LLM``, an ``AsyncLLM``, a server's URL, or a client.
        timeout_s: deadline of each call.
        loop: of an ``AsyncLLM``; None takes the running one.

    Raises:
        TypeError: it is no engine.
        ValueError: a text that is no URL.
        WeightBridgeUnavailableError: a URL without httpx, an ``AsyncLLM`` without a loop.

    """
    if isinstance(engine, VLLMClient):
        return engine
    if isinstance(engine, str):
        return ServerClient(engine, timeout_s)
    if hasattr(engine, "pause_generation"):
        return AsyncLLMClient(engine, timeout_s, loop)
    if hasattr(engine, "llm_engine"):
        return LLMClient(engine, timeout_s)
    raise TypeError(
        f"engine is a {type(engine).__name__}, expected an LLM, an AsyncLLM or a server's URL "
        "such as 'http://127.0.0.1:8000'. Pass one of these."
    )

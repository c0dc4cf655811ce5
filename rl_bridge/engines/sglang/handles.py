"""An engine as the executor's adapter sees it: an ``Engine`` of this process, or a server's URL.

Both have the same control routes. Each call has a deadline, and what SGLang refuses comes back with
its own words.
"""

import asyncio
import base64
import concurrent.futures
import importlib
import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any, Literal

from rl_bridge import errors
from rl_bridge.engines.sglang.compat import MINIMUM, require
from rl_bridge.engines.sglang.plugin import NAME, call_text, reply_text
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)

__all__ = [
    "METHODS",
    "EngineHandle",
    "PauseMode",
    "handle_of",
]

_LOG = logging.getLogger(__name__)

PauseMode = Literal["retract", "in_place", "abort"]
"""What becomes of running requests: computed anew from their tokens, frozen, or ended."""

Answer = tuple[bool, str]
"""Whether a route did what it was asked, and what it said."""

# Where the loop runs in another thread: how much later than its own deadline it may tell.
_LOOP_S = 5.0

METHODS: Mapping[str, tuple[str, str]] = {
    "get_weights_by_name": ("GetWeightsByNameReqInput", "get_weights_by_name"),
    "pause_generation": ("PauseGenerationReqInput", "pause_generation"),
    "continue_generation": ("ContinueGenerationReqInput", "continue_generation"),
    "update_weight_version": ("UpdateWeightVersionReqInput", "update_weight_version"),
    "begin_weight_update": ("BeginWeightUpdateReqInput", "begin_weight_update"),
    "end_weight_update": ("EndWeightUpdateReqInput", "end_weight_update"),
    "update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "init_weights_update_group": ("InitWeightsUpdateGroupReqInput", "init_weights_update_group"),
    "destroy_weights_update_group": (
        "DestroyWeightsUpdateGroupReqInput",
        "destroy_weights_update_group",
    ),
    "update_weights_from_distributed": (
        "UpdateWeightsFromDistributedReqInput",
        "update_weights_from_distributed",
    ),
    "update_weights_from_disk": ("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
}
"""Route -> its request among SGLang's own, and the method of its tokenizer manager."""


class EngineHandle(ABC):
    """One engine, whatever process it is in.

    Attributes:
        sharing: by which of torch's strategies its process gets shared memory.
        num_ranks: ranks that compute its model together, as its last answer said.
        device: the kind of device that its model is on.
        name: the driver's, by which the engine tells drivers apart.

    """

    sharing = "file_descriptor"
    num_ranks = 1
    device = "cpu"

    def __init__(self, timeout_s: float) -> None:
        """Give every call `timeout_s` seconds."""
        self.timeout_s = timeout_s
        self.name = uuid.uuid4().hex  # drivers that follow each other begin to count anew
        self._calls = 0

    @abstractmethod
    def ask(self, route: str, **body: Any) -> tuple[bool, Any]:
        """Call a control route: whether it succeeded, and its message or content.

        Raises:
            EngineLost: the engine is gone.
            DeadlineExceeded: it does not answer.

        """

    @abstractmethod
    def flush(self) -> Answer:
        """Drop cached prefixes; refused while requests hold some."""

    @abstractmethod
    def label(self) -> str:
        """The version label on outputs."""

    @abstractmethod
    def model_path(self) -> str:
        """The checkpoint that it was started from, or took last from disk."""

    def payload(self, serialized: bytes) -> Any:
        """SGLang's serialized tensors, as this engine takes them."""
        return serialized

    def call(self, verb: str, **given: Any) -> dict[str, Any]:
        """Ask our half in the scheduler's process.

        Raises:
            WeightBridgeUnavailableError: the engine does not have the plugin.
            WeightBridgeError: our half's failure, as the exception that it was.

        """
        self._calls += 1
        number = f"{self.name}-{self._calls}"
        who = {"call": number, "driver": self.name}
        told = {"verb": verb, **who, "timeout_s": self.timeout_s}
        text = json.dumps({**told, **given})
        _, weights = self.ask("get_weights_by_name", name=call_text(text), truncate_size=1)
        said = reply_text(weights)
        if said is None:
            msg = (
                f"the engine answered {str(weights)[:120]!r}: it does not have rl_bridge's plugin. "
                f"Install rl_bridge beside sglang >= {MINIMUM} in the engine's environment; where "
                f"SGLANG_PLUGINS is set, add {NAME} to it."
            )
            raise WeightBridgeUnavailableError(msg)
        reply: dict[str, Any] = json.loads(said)
        if reply.get("call") != number:
            msg = (
                f"the engine answers to call {reply.get('call')}, expected {number}: its "
                "replies are out of step. Start a fresh engine, and install the current version in "
                "it before it serves."
            )
            raise EngineLost(msg)
        if not reply["ok"]:
            raise _failure(reply)
        self.num_ranks = reply["ranks"]
        if "not_told" in reply:
            _LOG.warning("the engine has it, and its trainer is not told: %s", reply["not_told"])
        return reply

    def do(self, route: str, **body: Any) -> None:
        """Call a control route that has to succeed.

        Raises:
            WeightUpdateRejectedError: SGLang refused.

        """
        succeeded, said = self.ask(route, **body)
        if not succeeded:
            msg = f"SGLang refused {route} ({said}). See the engine's log."
            raise WeightUpdateRejectedError(msg)

    def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait."""
        self.do("pause_generation", mode=mode)

    def resume(self) -> None:
        """Go on."""
        self.do("continue_generation", torch_empty_cache=False)

    def set_label(self, label: str) -> None:
        """Set the version label on outputs."""
        self.do("update_weight_version", new_version=label, abort_all_requests=False)

    def close(self) -> None:  # noqa: B027 - only some have something to close
        """Let go of the connection; the engine goes on."""


def _failure(reply: Mapping[str, Any]) -> Exception:
    kind = getattr(errors, str(reply.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, WeightBridgeError):
        try:
            return kind(reply["message"])
        except TypeError:
            pass  # it takes more than a text: the general one must do
    return WeightUpdateRejectedError(
        f"{reply['type']}: {reply['message']}. The engine's log has the traceback."
    )


def _too_late(doing: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the engine did not answer {doing} within {timeout_s} s. Look at its log; give the "
        "adapter a longer timeout_s if it was only slow."
    )


class InProcessHandle(EngineHandle):
    """An ``Engine``, whose event loop is in this process; its scheduler is in another one.

    Where the loop runs in another thread, calls are handed to it; else they run it.
    """

    def __init__(self, engine: Any, timeout_s: float) -> None:
        """Look at `engine`; nothing is called."""
        super().__init__(timeout_s)
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._requests = require("sglang.srt.managers.io_struct")
        self._asked: set[asyncio.Future[Any]] = set()  # a loop keeps no task alive by itself

    def ask(self, route: str, **body: Any) -> tuple[bool, Any]:
        """Call a control route. See `EngineHandle`."""
        request, method = METHODS[route]
        made = getattr(self._requests, request)(**body)
        answered = self._run(getattr(self._manager, method)(made), route)
        if route == "get_weights_by_name":
            return answered is not None, answered
        if isinstance(answered, tuple):
            return bool(answered[0]), str(answered[1])
        return True, ""

    def flush(self) -> Answer:
        """Drop cached prefixes."""
        answered = self._run(self._manager.flush_cache(), "flush_cache")
        return bool(answered.success), str(answered.message)

    def label(self) -> str:
        """The version label on outputs."""
        return str(self._manager.config_value("weight_version"))

    def model_path(self) -> str:
        """The checkpoint that it was started from, or took last."""
        return str(self._manager.model_path)

    def _run(self, coroutine: Coroutine[Any, Any, Any], doing: str) -> Any:
        loop = self._engine.loop
        if _is_running_here(loop):
            coroutine.close()
            msg = (
                "update_weights was called in the engine's own event loop, which it would block. "
                "Call `await asyncio.to_thread(executor.update_weights, manifest)`."
            )
            raise WeightBridgeUnavailableError(msg)
        try:
            if not loop.is_running():
                return loop.run_until_complete(self._within(coroutine))
            future = asyncio.run_coroutine_threadsafe(self._within(coroutine), loop)
            return future.result(self.timeout_s + _LOOP_S)
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise _too_late(doing, self.timeout_s) from error

    async def _within(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        # Not cancelled where it is too late: SGLang would take its late answer for the next call's.
        task = asyncio.ensure_future(coroutine)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return await asyncio.wait_for(asyncio.shield(task), self.timeout_s)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class ServerHandle(EngineHandle):
    """A server by its URL."""

    # Descriptors need the key of a common parent process, and a server has another one: its
    # scheduler would raise where it takes them, and end.
    sharing = "file_system"

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        """Prepare the connection; nothing is sent.

        Raises:
            WeightBridgeUnavailableError: httpx is missing.

        """
        super().__init__(timeout_s)
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            msg = "a server's URL needs httpx. Install it: pip install 'rl-bridge[sglang]'."
            raise WeightBridgeUnavailableError(msg) from error
        self._url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # Not by a proxy: who may update an engine reaches it. And no connection is kept open: the
        # server closes what idles, perhaps just when the next request is sent.
        self._client = self._httpx.Client(
            base_url=self._url,
            timeout=timeout_s,
            headers=headers,
            limits=self._httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def ask(self, route: str, **body: Any) -> tuple[bool, Any]:
        """Call a control route. See `EngineHandle`."""
        reply = self._send("POST", route, json=body)
        if route == "get_weights_by_name":
            return bool(reply.is_success), _content(reply)
        content = _content(reply)
        said = content.get("message", content) if isinstance(content, dict) else content
        return bool(reply.is_success), str(said)

    def flush(self) -> Answer:
        """Drop cached prefixes."""
        reply = self._send("POST", "flush_cache")
        return bool(reply.is_success), reply.text.strip()

    def label(self) -> str:
        """The version label on outputs."""
        return str(self._info()["weight_version"])

    def model_path(self) -> str:
        """The checkpoint that it was started from, or took last."""
        return str(self._info()["model_path"])

    def payload(self, serialized: bytes) -> str:
        """As text: JSON has no bytes."""
        return base64.b64encode(serialized).decode("ascii")

    def close(self) -> None:
        """Close the connection; the server goes on."""
        self._client.close()

    def _info(self) -> Mapping[str, Any]:
        reply = self._send("GET", "model_info")
        content = _content(reply)
        if not isinstance(content, dict) or not {"weight_version", "model_path"} <= content.keys():
            msg = (
                f"the server at {self._url} answered /model_info with {reply.text[:200]!r}, "
                f"expected its version and path. Is it a server of SGLang >= {MINIMUM}?"
            )
            raise WeightBridgeUnavailableError(msg)
        return content

    def _send(self, method: str, route: str, **request: Any) -> Any:
        try:
            reply = self._client.request(method, route, **request)
        except self._httpx.TimeoutException as error:
            raise _too_late(route, self.timeout_s) from error
        except self._httpx.TransportError as error:
            msg = (
                f"the server at {self._url} was lost while it should answer {route} "
                f"({type(error).__name__}: {error}). Start a fresh one, and install the current "
                "version in it before it serves."
            )
            raise EngineLost(msg) from error
        codes = self._httpx.codes
        if reply.status_code in {codes.UNAUTHORIZED, codes.FORBIDDEN, codes.NOT_FOUND}:
            msg = (
                f"the server at {self._url} answered {route} with status {reply.status_code}: "
                f"{reply.text[:200]}. Pass the api_key that it was started with (its admin's, if "
                f"it has one); expected SGLang >= {MINIMUM}."
            )
            raise WeightBridgeUnavailableError(msg)
        return reply


def _content(reply: Any) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text


def handle_of(engine: Any, timeout_s: float, api_key: str | None = None) -> EngineHandle:
    """The handle of an engine, whatever it is.

    Raises:
        TypeError: it is no engine.
        WeightBridgeUnavailableError: a URL without httpx.

    """
    if isinstance(engine, EngineHandle):
        return engine
    if isinstance(engine, str):
        return ServerHandle(engine, timeout_s, api_key)
    if hasattr(engine, "tokenizer_manager") and hasattr(engine, "loop"):
        return InProcessHandle(engine, timeout_s)
    msg = (
        f"engine is a {type(engine).__name__}, expected an Engine of SGLang or a server's URL such "
        "as 'http://127.0.0.1:30000'. Pass one of these."
    )
    raise TypeError(msg)

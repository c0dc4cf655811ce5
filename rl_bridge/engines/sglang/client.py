"""An SGLang engine as a driver calls it: an ``Engine`` of this process, or a server's URL.

Both have the same control routes. Each call has a deadline, and what SGLang refuses comes back in
its own words.
"""

import asyncio
import base64
import json
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_bridge.engines.adapters import AdapterFrontEnd, Resident
from rl_bridge.engines.rpc import (
    Replies,
    Reply,
    Server,
    lost,
    refuse_own_loop,
    too_late,
)
from rl_bridge.engines.sglang import MINIMUM, SGLANG, require
from rl_bridge.engines.sglang.front import FRONT
from rl_bridge.engines.sglang.plugin import NAME, call_text, reply_text
from rl_bridge.errors import WeightBridgeUnavailableError, WeightUpdateRejectedError

Answer = tuple[bool, str]
"""Whether a route did what it was asked, and what it said."""

# How often a call under way looks whether the engine's processes live.
_LOOK_S = 0.25
# If the loop runs in another thread: how much later than its own deadline it may tell.
_LOOP_S = 5.0

REQUESTS: Mapping[str, str] = {
    "get_weights_by_name": "GetWeightsByNameReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
}
"""Route, which is a method of SGLang's tokenizer manager -> its request among SGLang's own."""


class SGLangClient(AdapterFrontEnd):
    """What the two kinds of SGLang engines have in common."""

    sharing = "file_descriptor"  # by which of torch's strategies its process gets shared memory
    num_ranks = 1  # ranks that compute its model together, as its last answer said
    device = "cpu"  # the kind of device that its model is on

    @abstractmethod
    def control(
        self, route: str, *, within_s: float | None = None, **body: Any
    ) -> tuple[bool, Any]:
        """Call a control route: whether it succeeded, and its message or content.

        Raises:
            EngineLost: the engine is gone.
            DeadlineExceeded: it does not answer.

        """

    @abstractmethod
    def flush(self) -> Answer:
        """Drop cached prefixes by SGLang's own route; refused while requests hold some."""

    @abstractmethod
    def model_path(self) -> str:
        """The checkpoint that it was started from, or took last from disk."""

    def payload(self, serialized: bytes) -> Any:
        """SGLang's serialized tensors, as this engine takes them."""
        return serialized

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask the ranks in the schedulers' processes. See `EngineClient`."""
        text = json.dumps({**payload, "verb": verb})
        _, weights = self.control(
            "get_weights_by_name", within_s=timeout_s, name=call_text(text), truncate_size=1
        )
        replies: Replies = self._said(weights)
        self.num_ranks = len(replies)
        self.device = replies[0].get("device", self.device)
        return replies

    def adapters_in_use(self) -> frozenset[int]:
        """Ids of the adapters that requests have, as SGLang counts them. See `AdapterFrontEnd`."""
        return self._front({})

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """Let requests ask for these versions by ``lora_path``. See `AdapterFrontEnd`."""
        label = None if active is None else active.label
        told = [asdict(one) for one in residents]
        self._front({"adapter": adapter, "active": label, "residents": told})

    def _front(self, given: Reply) -> frozenset[int]:
        """Ask the process that takes requests; returns the adapters in use."""
        name = f"{FRONT}{json.dumps(given)}"
        _, weights = self.control("get_weights_by_name", name=name, truncate_size=1)
        told = self._said(weights)
        if "error" in told:
            raise WeightBridgeUnavailableError(
                f"the engine offers no adapters: {told['error']}. See its log."
            )
        return frozenset(told["used"])

    def _said(self, weights: object) -> Any:
        """What our plugin answered as a weight's numbers."""
        said = reply_text(weights)
        if said is None:
            raise WeightBridgeUnavailableError(
                f"the engine answered {str(weights)[:120]!r}: it does not have rl_bridge's plugin. "
                f"Install rl_bridge beside sglang >= {MINIMUM} in the engine's environment; where "
                f"SGLANG_PLUGINS is set, add {NAME} to it."
            )
        return json.loads(said)

    def do(self, route: str, **body: Any) -> None:
        """Call a control route that has to succeed."""
        succeeded, said = self.control(route, **body)
        if not succeeded:
            raise WeightUpdateRejectedError(
                f"SGLang refused {route} ({said}). See the engine's log."
            )

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        """Stop generating; requests are computed anew later (``retract``), frozen, or ended.

        Frozen requests would keep prefixes of what is undone: for an undo they are computed anew.
        """
        if undoes and mode != "abort":
            mode = "retract"
        self.do("pause_generation", mode=mode)

    def resume(self) -> None:
        """Go on."""
        self.do("continue_generation", torch_empty_cache=False)

    def drop_caches(self, policy: str | None) -> str:
        """Drop cached prefixes: ``flush``, or ``keep``."""
        if policy == "keep":
            return ""
        # For an undo, what is stored outside of the engine is no reason to leave it torn.
        flushed = [reply["flushed"] for reply in self.ask("flush", all=policy is not None)]
        if None in flushed:
            # SGLang's own route gives memory back as well, which takes as long as a small update.
            done, said = self.flush()
            return "" if done else said
        return "" if all(flushed) else "requests hold some"

    def set_label(self, label: str) -> None:
        """Set the version label on outputs."""
        self.do("update_weight_version", new_version=label, abort_all_requests=False)


class EngineOfThisProcess(SGLangClient):
    """An ``Engine``, whose event loop is in this process; its schedulers are in others.

    If the loop runs in another thread, calls are handed to it; else they run it.
    """

    def __init__(self, engine: Any, timeout_s: float = 600.0) -> None:
        """Look at `engine`; nothing is called."""
        super().__init__(timeout_s)
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._requests = require("sglang.srt.managers.io_struct")
        self._asked: set[asyncio.Future[Any]] = set()  # a loop keeps no task alive by itself

    def control(
        self, route: str, *, within_s: float | None = None, **body: Any
    ) -> tuple[bool, Any]:
        """Call a control route. See `SGLangClient`."""
        request = getattr(self._requests, REQUESTS[route])(**body)
        answered = self._run(lambda: getattr(self._manager, route)(request), route, within_s)
        if route == "get_weights_by_name":
            return answered is not None, answered
        if isinstance(answered, tuple):
            return bool(answered[0]), str(answered[1])
        return True, ""

    def flush(self) -> Answer:
        """Drop cached prefixes."""
        answered = self._run(self._manager.flush_cache, "flush_cache")
        return bool(answered.success), str(answered.message)

    def label(self) -> str:
        """The version label on outputs."""
        return str(self._manager.config_value("weight_version"))

    def model_path(self) -> str:
        """The checkpoint that it was started from, or took last."""
        return str(self._manager.model_path)

    def _run(
        self,
        action: Callable[[], Coroutine[Any, Any, Any]],
        doing: str,
        within_s: float | None = None,
    ) -> Any:
        loop = self._engine.loop
        within_s = self.timeout_s if within_s is None else within_s
        refuse_own_loop(loop)
        if gone := self._death():
            raise lost(ConnectionError(gone), f"answer {doing}")
        try:
            answered = self._within(action(), within_s)
            if not loop.is_running():
                return loop.run_until_complete(answered)
            future = asyncio.run_coroutine_threadsafe(answered, loop)
            return future.result(within_s + _LOOP_S)
        except TimeoutError as error:
            raise too_late("the engine", f"answer {doing}", within_s) from error
        except ConnectionError as error:
            raise lost(error, f"answer {doing}") from error

    async def _within(self, coroutine: Coroutine[Any, Any, Any], within_s: float) -> Any:
        # Not cancelled if it is too late: SGLang would take its late answer for the next call's.
        task = asyncio.ensure_future(coroutine)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        end = asyncio.get_running_loop().time() + within_s
        while True:
            left = end - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({task}, timeout=max(0.0, min(_LOOK_S, left)))
            if done:
                return task.result()
            gone = self._death()
            if gone or left <= 0:
                raise ConnectionError(gone) if gone else TimeoutError

    def _death(self) -> str:
        """Which of the engine's processes ended; SGLang takes this process along, later."""
        tell = getattr(self._engine, "get_all_child_pids", None)
        ended = [pid for pid in ([] if tell is None else tell()) if _has_ended(pid)]
        return f"its process {ended[0]} ended" if ended else ""


def _has_ended(pid: int) -> bool:
    """Whether a process is certainly over; where that cannot be told, a call has its deadline."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}


class ServerClient(SGLangClient):
    """A server by its URL."""

    # Descriptors need the key of a common parent process, and a server has another one: its
    # scheduler would raise where it takes them, and end.
    sharing = "file_system"

    def __init__(self, url: str, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        """Prepare the connection; nothing is sent."""
        super().__init__(timeout_s)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._server = Server(url, timeout_s, install=SGLANG.install, headers=headers)

    def control(
        self, route: str, *, within_s: float | None = None, **body: Any
    ) -> tuple[bool, Any]:
        """Call a control route. See `SGLangClient`."""
        reply = self._send("POST", route, within_s, json=body)
        content = self._server.content(reply)
        if route == "get_weights_by_name":
            return bool(reply.is_success), content
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
        self._server.close()

    def _info(self) -> Mapping[str, Any]:
        reply = self._send("GET", "model_info")
        content = self._server.content(reply)
        if not isinstance(content, dict) or not {"weight_version", "model_path"} <= content.keys():
            raise WeightBridgeUnavailableError(
                f"the server at {self._server} answered /model_info with {reply.text[:200]!r}, "
                f"expected its version and path. Is it a server of SGLang >= {MINIMUM}?"
            )
        return content

    def _send(self, method: str, route: str, within_s: float | None = None, **request: Any) -> Any:
        within_s = self.timeout_s if within_s is None else within_s
        reply = self._server.send(method, route, f"answer {route}", within_s, **request)
        codes = self._server.codes
        if reply.status_code in {codes.UNAUTHORIZED, codes.FORBIDDEN, codes.NOT_FOUND}:
            raise WeightBridgeUnavailableError(
                f"the server at {self._server} answered {route} with status {reply.status_code}: "
                f"{reply.text[:200]}. Pass the api_key that it was started with (its admin's, if "
                f"it has one); expected SGLang >= {MINIMUM}."
            )
        return reply


def connect(engine: Any, *, timeout_s: float = 600.0, api_key: str | None = None) -> SGLangClient:
    """The client of an engine, whatever it is; it is not called.

    Args:
        engine: an ``Engine``, a server's URL, or a client.
        timeout_s: deadline of each call.
        api_key: of a server that asks for one; its admin's, if it has one.

    Raises:
        TypeError: it is no engine.
        ValueError: a text that is no URL.
        WeightBridgeUnavailableError: a URL without httpx.

    """
    if isinstance(engine, SGLangClient):
        return engine
    if isinstance(engine, str):
        return ServerClient(engine, timeout_s, api_key)
    if hasattr(engine, "tokenizer_manager") and hasattr(engine, "loop"):
        return EngineOfThisProcess(engine, timeout_s)
    raise TypeError(
        f"engine is a {type(engine).__name__}, expected an Engine of SGLang or a server's URL such "
        "as 'http://127.0.0.1:30000'. Pass one of these."
    )

"""A vLLM server, reached over HTTP by its development routes (``VLLM_SERVER_DEV_MODE=1``).

And `handle_of`, which finds the handle for any engine.
"""

import concurrent.futures
import errno
import importlib
import time
from typing import Any

from rl_bridge.engines.vllm.client import (
    AsyncLLMHandle,
    EngineHandle,
    LLMHandle,
    PauseMode,
    Replies,
    lost,
    no_plugin,
)
from rl_bridge.engines.vllm.plugin import METHOD
from rl_bridge.engines.vllm.threads import in_thread
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError

__all__ = [
    "ServerHandle",
    "handle_of",
]

# A call under way asks this often whether the engine lives, and waits so long for the answer.
_LOOK_S = 1.0
_HEALTH_S = 5.0

# What this process may be short of when it opens a connection.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class ServerHandle(EngineHandle):
    """A server on this machine: its workers read the trainer's memory."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Prepare the connection; nothing is sent.

        Raises:
            ValueError: it is no URL.
            WeightBridgeUnavailableError: httpx is missing.

        """
        super().__init__(timeout_s)
        if not url.startswith(("http://", "https://")):
            msg = f"engine={url!r}: expected a server's URL, such as 'http://127.0.0.1:8000'."
            raise ValueError(msg)
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            msg = "a server's URL needs httpx. Install it: pip install 'rl-bridge[vllm]'."
            raise WeightBridgeUnavailableError(msg) from error
        self._url = url.rstrip("/")
        # Not by a proxy: the server is on this machine. And no connection is kept open: the server
        # closes what idles, perhaps just when the next request is sent: that looks like its death.
        limits = self._httpx.Limits(max_keepalive_connections=0)
        self._client, self._looker = (
            self._httpx.Client(base_url=self._url, timeout=timeout, limits=limits, trust_env=False)
            for timeout in (timeout_s, _HEALTH_S)
        )

    def call(self, verb: str, payload: dict[str, Any] | None = None) -> Replies:
        """Ask all workers. See `EngineHandle`."""
        # Without a deadline inside: vLLM would give up and take the late answers for the next ones.
        body = {"method": METHOD, "args": [verb, payload or {}]}
        told = self._post("collective_rpc", verb, json=body)
        replies = told.get("results")
        if not isinstance(replies, list) or not all(isinstance(r, dict) for r in replies or [0]):
            raise self._strange("collective_rpc", told)
        return replies

    def data_parallel_size(self) -> int:
        """How many replicas there are behind the server."""
        sizes = []
        for flag in ("true", "false"):
            told = self._send("GET", "get_world_size", "tell its size", params={"include_dp": flag})
            size = told.get("world_size")
            if not isinstance(size, int) or size < 1:
                raise self._strange("get_world_size", told)
            sizes.append(size)
        return sizes[0] // sizes[1]

    def pause(self, mode: PauseMode) -> None:
        """Stop scheduling."""
        self._post("pause", "pause", params={"mode": mode, "clear_cache": "false"})

    def resume(self) -> None:
        """Go on."""
        self._post("resume", "resume")

    def is_paused(self) -> bool:
        """Whether it is stopped, by whomever."""
        told = self._send("GET", "is_paused", "tell whether it is paused")
        if not isinstance(told.get("is_paused"), bool):
            raise self._strange("is_paused", told)
        return bool(told["is_paused"])

    def reset_encoder_cache(self) -> None:
        """Drop what was made of images and other media."""
        self._post("reset_encoder_cache", "drop its encoder's cache")

    def reset_caches(self, *, running: bool) -> bool:
        """Drop that and cached prefixes. Older servers do not say if they could: taken for a no."""
        self.reset_encoder_cache()
        flags = {"reset_running_requests": str(running).lower(), "reset_external": "true"}
        reply = self._post("reset_prefix_cache", "drop caches", params=flags)
        return bool(reply.get("success", running))

    def label(self) -> str | None:
        """The version label on outputs."""
        reply = self._send("GET", "weight_info", "tell its label")
        return str(reply["weight_version"]) if "weight_version" in reply else None

    def set_label(self, label: str) -> None:
        """Set it."""
        self._post("update_weight_version", "set its label", json={"new_version": label})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._looker.close()

    def _post(self, path: str, doing: str, **request: Any) -> dict[str, Any]:
        return self._send("POST", path, doing, **request)

    def _request(self, doing: str, method: str, path: str, **request: Any) -> Any:
        """Wait for an answer as long as there is an engine to give it: the server would not.

        Raises:
            TimeoutError: it is not all there yet. (httpx waits so long for each of its pieces.)

        """
        end = time.monotonic() + self.timeout_s
        asked = in_thread(lambda: self._client.request(method, path, **request))
        while not concurrent.futures.wait([asked], _LOOK_S).done:
            if self._is_dead() and not asked.done():
                raise lost(RuntimeError("its engine ended"), doing)
            if time.monotonic() > end and not asked.done():
                raise TimeoutError
        return asked.result()

    def _is_dead(self) -> bool:
        try:
            reply = self._looker.get("health")
        except self._httpx.ConnectError as error:
            # Where it shuts down it keeps what is under way. All else is a shortage on this side.
            return _errno(error) in {errno.ECONNREFUSED, errno.ECONNRESET}
        except (self._httpx.TransportError, OSError):
            return False  # busy, or as above; there is a deadline
        return bool(reply.status_code == self._httpx.codes.SERVICE_UNAVAILABLE)

    def _send(self, method: str, path: str, doing: str, **request: Any) -> dict[str, Any]:
        try:
            reply = self._request(doing, method, path, **request)
        except (self._httpx.TimeoutException, TimeoutError) as error:
            msg = (
                f"the server at {self._url} did not {doing} within {self.timeout_s} s. Look at "
                "its log; give the adapter a longer timeout_s if it was only slow."
            )
            raise DeadlineExceeded(msg) from error
        except self._httpx.TransportError as error:
            if isinstance(error, self._httpx.ConnectError) and _errno(error) in _SHORTAGES:
                msg = (
                    f"the server at {self._url} could not be asked to {doing}: {error}. Nothing "
                    "was sent: close files, or raise this process's limits, and try again."
                )
                raise WeightBridgeUnavailableError(msg) from error
            raise lost(error, doing) from error
        self._check_status(reply, path, doing)
        try:
            told = reply.json() if reply.content else {}
        except ValueError:
            told = reply.text
        if isinstance(told, dict):
            return told
        if method == "POST" and path != "collective_rpc":
            return {}  # done, in words of its own
        raise self._strange(path, told)

    def _check_status(self, reply: Any, path: str, doing: str) -> None:
        """Raise what an answer that is no success stands for."""
        if reply.status_code == self._httpx.codes.NOT_FOUND:
            msg = (
                f"the server at {self._url} has no route /{path}. Start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, and let nobody else reach it."
            )
            raise WeightBridgeUnavailableError(msg)
        if not reply.is_success:
            text = reply.text[:500]
            timeouts = {self._httpx.codes.REQUEST_TIMEOUT, self._httpx.codes.GATEWAY_TIMEOUT}
            if reply.status_code in timeouts or "timed out" in text or "TimeoutError" in text:
                msg = (
                    f"the server at {self._url} did not {doing} in time: it answered with status "
                    f"{reply.status_code}: {text}. See its log; what it began may still be done."
                )
                raise DeadlineExceeded(msg)
            if "is not implemented" in text:
                raise no_plugin(RuntimeError(text))
            if "EngineDeadError" in text or "EngineCore encountered an issue" in text:
                raise lost(RuntimeError(text), doing)
            msg = (
                f"the server at {self._url} answered /{path} with status {reply.status_code}: "
                f"{text}. See its log."
            )
            raise WeightBridgeUnavailableError(msg)

    def _strange(self, path: str, told: object) -> WeightBridgeUnavailableError:
        return WeightBridgeUnavailableError(
            f"the server at {self._url} answered /{path} with {str(told)[:200]!r}, which no vLLM "
            "server does. Give the URL of one."
        )


def _errno(error: BaseException) -> int | None:
    """Of the operating system's error behind one of httpx's; None if there is none."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        link = link.__cause__ or link.__context__
    return None


def handle_of(engine: Any, timeout_s: float, loop: Any) -> EngineHandle:
    """The handle of an engine, whatever it is.

    Raises:
        TypeError: it is no engine.
        ValueError: a text that is no URL.

    """
    if isinstance(engine, EngineHandle):
        return engine
    if isinstance(engine, str):
        return ServerHandle(engine, timeout_s)
    if hasattr(engine, "pause_generation"):
        return AsyncLLMHandle(engine, timeout_s, loop)
    if hasattr(engine, "llm_engine"):
        return LLMHandle(engine, timeout_s)
    msg = (
        f"engine is a {type(engine).__name__}, expected an LLM, an AsyncLLM or a server's URL "
        "such as 'http://127.0.0.1:8000'. Pass one of these."
    )
    raise TypeError(msg)

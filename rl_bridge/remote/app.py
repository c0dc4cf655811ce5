"""The side-car as an ASGI application: description, metrics, steps, routes.

Needs the extra ``remote``.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from fastapi.security import APIKeyHeader
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.exceptions import HTTPException

from rl_bridge.bridge.executor import TwoPhaseExecutor, require_two_phase
from rl_bridge.errors import DeadlineExceeded, WeightBridgeError, WeightBridgeUnavailableError
from rl_bridge.manifest.canonical import problem_words
from rl_bridge.remote.answers import MEDIA_TYPE, STATUSES, Problem, Status, UpdateView, http_problem
from rl_bridge.remote.config import SidecarConfig
from rl_bridge.remote.gate import Gate, refusal
from rl_bridge.remote.sidecar import Sidecar
from rl_bridge.remote.signing import SCHEME, read_key
from rl_bridge.remote.state import Ledger, NonceBook, StateDirectory

# ---- the OpenAPI description ---------------------------------------------------------------------

_ABOUT = (
    "Takes weight updates for the engine that it stands beside: import and verify, prepare, then "
    "commit or abort. The bytes do not come by HTTP: the manifest says where they are. Every "
    "request is signed, but for those for /healthz, /readyz, /metrics and this description."
)
_SIGNED = (
    f"`{SCHEME} time=SECONDS,nonce=NONCE,signature=SIGNATURE`: HMAC-SHA256, in hexadecimal digits, "
    "over the lines `rl_bridge.remote/1`, `request`, method, path with query, time, nonce and the "
    "SHA-256 of the body, joined by line feeds."
)


_MANIFEST = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "const": "rl_bridge.manifest/3"},
        "header": {"type": "object"},
        "layout": {"type": "object"},
    },
    "required": ["format", "header"],
}
# FastAPI does not read the body of an update: we do.
_MANIFEST_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _MANIFEST}}}
}
_SIGNATURE = APIKeyHeader(
    name="Authorization", scheme_name="signature", description=_SIGNED, auto_error=False
)
_PROBLEM = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning, "content": _PROBLEM} for status, meaning in STATUSES.items()
}


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Describe the routes, and the problem documents, which are no route's model."""
        document = super().openapi()  # made once: strangers may ask for it
        document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        return document


# ---- metrics for Prometheus, in a registry of their own ------------------------------------------

_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """Counts requests, steps and refusals; reports the engine's version when asked."""

    def __init__(self) -> None:
        """Begin at zero."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rl_bridge_sidecar_requests",
            "Requests answered, by method and status.",
            ["method", "status"],
            registry=registry,
        )
        self._steps = Counter(
            "rl_bridge_sidecar_steps",
            "Steps of updates, by step and outcome.",
            ["step", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rl_bridge_sidecar_step_seconds",
            "How long the steps took.",
            ["step"],
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._phases = Gauge(
            "rl_bridge_update_phase_seconds",
            "Phases of the update that was committed last.",
            ["phase"],
            registry=registry,
        )
        self._version = Gauge(
            "rl_bridge_weight_version",
            "Version that the engine holds; -1 for none.",
            registry=registry,
        )
        self._servable = Gauge(
            "rl_bridge_engine_servable",
            "1 if the engine may answer requests.",
            registry=registry,
        )
        self._torn = Gauge("rl_bridge_engine_torn", "1 if the engine is torn.", registry=registry)

    def answered(self, method: str, status: int) -> None:
        """Count an answer."""
        # Strangers choose the method: each would be a time series of its own.
        known = method if method in {"GET", "POST"} else "other"
        self._requests.labels(known, str(status)).inc()

    def took(self, step: str, seconds: float, outcome: str) -> None:
        """Count a step."""
        self._steps.labels(step, outcome).inc()
        self._seconds.labels(step).observe(seconds)

    def phases(self, timings_ms: Mapping[str, float]) -> None:
        """Note the phases of a committed update."""
        for phase, milliseconds in timings_ms.items():
            self._phases.labels(phase).set(milliseconds / 1e3)

    def text(self, status: Status) -> bytes:
        """The page that Prometheus reads."""
        version = status.active_weight_version
        self._version.set(-1 if version is None else version)
        self._servable.set(status.servable)
        self._torn.set(status.state == "torn")
        return bytes(generate_latest(self._registry))


# ---- the steps -----------------------------------------------------------------------------------

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class _Steps:
    """Takes the steps of one side-car: one at a time, each with a deadline, always in one thread.

    Some engines must be called in one thread only. An update whose next step nobody asks for in
    time is aborted.

    Attributes:
        busy: the step that is under way; None if there is none.

    """

    def __init__(self, sidecar: Sidecar, config: SidecarConfig, metrics: Metrics) -> None:
        self.busy: str | None = None
        self._sidecar, self._config, self._metrics = sidecar, config, metrics
        self._expiry: asyncio.Task[None] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rl-bridge-sidecar")

    async def start(self) -> None:
        """Bring the engine back to where it was."""
        try:
            await self._do("recover", self._sidecar.start)
        except DeadlineExceeded:
            _LOG.exception("the start goes on; until it is over, steps are refused")

    async def take(self, name: str, step: Callable[[], UpdateView]) -> UpdateView:
        """Take a step, or raise at its deadline while it goes on; then wait for the next one.

        Raises:
            WeightBridgeUnavailableError: another one is under way.
            DeadlineExceeded: it is still under way.
            Exception: the step's own.

        """
        try:
            view = await self._do(name, step)
        finally:
            self._stop_waiting()
            update_id = self._sidecar.executor.pending_weight_update_id
            if update_id is not None:
                self._expiry = asyncio.create_task(self._expire(update_id))
        if view.acknowledgement is not None:
            self._metrics.phases(view.acknowledgement.timings_ms)
        return view

    def close(self) -> None:
        """Take no more steps; one that hangs is left to hang."""
        self._stop_waiting()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _do(self, name: str, step: Callable[[], T]) -> T:
        if self.busy is not None:
            raise WeightBridgeUnavailableError(
                f"cannot {name} now: the side-car is busy with {self.busy}. Wait until GET /status "
                "says that it is not, and send it again."
            )
        self.busy = name
        start = time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._pool, step)
        future.add_done_callback(lambda done: self._over(name, start, done))
        timeout_s = self._config.step_timeout_s
        await asyncio.wait([future], timeout=timeout_s)
        if not future.done():
            raise DeadlineExceeded(
                f"the engine did not {name} within {timeout_s:g} s, and may still do it. Ask GET "
                "/status, which says when it is over."
            )
        return future.result()

    def _over(self, name: str, start: float, done: "asyncio.Future[T]") -> None:
        self.busy = None
        if done.cancelled():
            return
        error = done.exception()  # read here, so that a late one is not lost
        if error is not None:
            _LOG.warning("could not %s: %s: %s", name, type(error).__name__, error)
        outcome = "ok" if error is None else type(error).__name__
        step = name.split(maxsplit=1)[0]
        self._metrics.took(step, time.monotonic() - start, outcome)

    def _stop_waiting(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    async def _expire(self, update_id: str) -> None:
        hold_s, is_over = self._config.hold_s, False
        reason = f"no next step came within {hold_s:g} s"
        while not is_over:
            await asyncio.sleep(hold_s)
            try:
                await self._do(
                    f"expire update {update_id}", lambda: self._sidecar.abort(update_id, reason)
                )
                _LOG.warning("update %s is aborted: %s", update_id, reason)
                is_over = True
            except WeightBridgeUnavailableError:
                pass  # busy with it right now, and perhaps nobody waits for the end
            except WeightBridgeError as error:
                _LOG.info("update %s did not expire: %s", update_id, error)
                is_over = True


# ---- the routes ----------------------------------------------------------------------------------

_API_VERSION = "1"

UpdateId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class AbortBody(BaseModel):
    """Why an update is aborted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: Annotated[str, StringConstraints(max_length=1000)] = "its trainer gave it up"


class Health(BaseModel):
    """What a probe gets to read, if it reads more than the status of the answer."""

    ok: Literal[True] = True


def create_app(
    executor: TwoPhaseExecutor,
    *,
    key_file: str | os.PathLike[str],
    state_dir: str | os.PathLike[str],
    config: SidecarConfig | None = None,
) -> Gate:
    """See `rl_bridge.remote.create_app`, which checks first that the extra is installed."""
    require_two_phase(executor)
    config = config or SidecarConfig()
    key = read_key(key_file)
    directory = StateDirectory(state_dir)
    metrics = Metrics()
    try:
        nonces = NonceBook(directory, max_skew_s=config.max_skew_s, now=time.time())
        sidecar = Sidecar(executor, Ledger(directory))
    except BaseException:
        directory.close()
        raise
    steps = _Steps(sidecar, config, metrics)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            await steps.start()
            yield
        finally:
            steps.close()
            directory.close()

    app = _App(
        description=_ABOUT,
        responses=_REFUSALS,
        title="rl_bridge side-car",
        version=_API_VERSION,
        lifespan=lambda _app: lifespan(),
        redoc_url=None,
        docs_url="/docs",
        redirect_slashes=False,  # to where a stranger's Host header says
        separate_input_output_schemas=False,
        # Every other exception reaches the gate, which answers with a problem document.
        exception_handlers={
            RequestValidationError: _not_as_described,
            HTTPException: _not_routed,
        },
    )
    app.include_router(_signed_routes(sidecar, steps))
    app.include_router(_open_routes(sidecar, metrics))
    return Gate(
        app,
        key=key,
        nonces=nonces,
        config=config,
        answered=metrics.answered,
        lifespan=lifespan,
    )


# The docstrings of the routes are in the description.


def _signed_routes(sidecar: Sidecar, steps: _Steps) -> APIRouter:
    # The gate checks the signature; here it is only described.
    router = APIRouter(dependencies=[Security(_SIGNATURE)])

    @router.post("/updates", status_code=201, openapi_extra=_MANIFEST_BODY)
    async def post_update(request: Request) -> UpdateView:
        """Import the update of a manifest and verify every byte; the engine is not asked."""
        text = await request.body()
        return await steps.take("import a manifest", lambda: sidecar.bring(text))

    @router.get("/updates/{update_id}")
    async def get_update(update_id: UpdateId) -> UpdateView:
        """What became of an update."""
        return sidecar.update(update_id)

    @router.post("/updates/{update_id}/prepare")
    async def prepare(update_id: UpdateId) -> UpdateView:
        """Find every reason to refuse the update; the engine serves on, untouched."""
        return await steps.take(f"prepare update {update_id}", lambda: sidecar.prepare(update_id))

    @router.post("/updates/{update_id}/commit")
    async def commit(update_id: UpdateId) -> UpdateView:
        """Install, prove and acknowledge the prepared update, or leave everything as it was."""
        return await steps.take(f"commit update {update_id}", lambda: sidecar.commit(update_id))

    @router.post("/updates/{update_id}/abort")
    async def abort(update_id: UpdateId, body: AbortBody | None = None) -> UpdateView:
        """Abort an update that is not committed; the engine is what it was."""
        reason = (body or AbortBody()).reason
        name = f"abort update {update_id}"
        return await steps.take(name, lambda: sidecar.abort(update_id, reason))

    @router.get("/status")
    async def status() -> Status:
        """Where the engine stands."""
        return sidecar.status().model_copy(update={"busy": steps.busy})

    return router


def _open_routes(sidecar: Sidecar, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether the side-car answers; the engine is not asked."""
        return Health()

    @router.get("/readyz")
    async def readyz() -> Health:
        """Whether the engine may answer requests, as its last step left it; 503 if not."""
        found = sidecar.status()
        if not found.servable:
            raise WeightBridgeUnavailableError(
                f"the engine is {found.state}, expected it to be serving. Send it an update."
            )
        return Health()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def figures() -> Response:
        """Figures for Prometheus."""
        return Response(metrics.text(sidecar.status()), media_type=CONTENT_TYPE_LATEST)

    return router


async def _not_as_described(_request: Request, error: Exception) -> Response:
    found: list[dict[str, Any]] = getattr(error, "errors", list)()
    first = found[0] if found else {}
    where = ".".join(str(part) for part in first.get("loc", ()))
    words = problem_words(first) if first else str(error)
    detail = f"{where}: {words}. See /openapi.json."
    return refusal(http_problem(400, detail))


async def _not_routed(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 500))
    detail = f"{request.method} {request.url.path}: expected what /openapi.json describes."
    answer = refusal(http_problem(status, detail))
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer

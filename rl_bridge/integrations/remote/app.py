"""The side-car's routes, as an ASGI application. Needs the extra ``remote``."""

import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.exceptions import HTTPException

from rl_bridge.bridge.two_phase import TwoPhaseExecutor, require_two_phase
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.integrations.remote.config import SidecarConfig
from rl_bridge.integrations.remote.description import describe_app, manifest_body
from rl_bridge.integrations.remote.durable import StateDirectory
from rl_bridge.integrations.remote.gate import Gate
from rl_bridge.integrations.remote.ledger import Ledger
from rl_bridge.integrations.remote.metrics import CONTENT_TYPE, Metrics
from rl_bridge.integrations.remote.nonces import NonceBook
from rl_bridge.integrations.remote.problems import MEDIA_TYPE, Problem, http_problem
from rl_bridge.integrations.remote.sidecar import Sidecar
from rl_bridge.integrations.remote.signing import read_key
from rl_bridge.integrations.remote.views import Status, UpdateView
from rl_bridge.integrations.remote.waiting import Waiting
from rl_bridge.integrations.remote.worker import Worker

__all__ = ["create_app"]

_LOG = logging.getLogger(__name__)
_API_VERSION = "1"

UpdateId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class AbortBody(BaseModel):
    """Why an update is given up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: Annotated[str, StringConstraints(max_length=1000)] = "its trainer gave it up"


class _Routes:
    """The routes of one side-car."""

    def __init__(self, sidecar: Sidecar, config: SidecarConfig, metrics: Metrics) -> None:
        self._sidecar, self._metrics = sidecar, metrics
        self.worker = Worker(timeout_s=config.step_timeout_s, took=metrics.took)
        self._waiting = Waiting(config.hold_s, self._expire)

    async def post_update(self, request: Request) -> UpdateView:
        """Import the update of a manifest and verify every byte; the engine is not asked."""
        text = await request.body()
        return await self._step("import a manifest", lambda: self._sidecar.bring(text))

    async def get_update(self, update_id: UpdateId) -> UpdateView:
        """What became of an update."""
        return self._sidecar.update(update_id)

    async def prepare(self, update_id: UpdateId) -> UpdateView:
        """Find every reason to refuse the update; the engine serves on, untouched."""
        return await self._step(
            f"prepare update {update_id}", lambda: self._sidecar.prepare(update_id)
        )

    async def commit(self, update_id: UpdateId) -> UpdateView:
        """Install, prove and acknowledge the prepared update, or leave everything as it was."""
        return await self._step(
            f"commit update {update_id}", lambda: self._sidecar.commit(update_id)
        )

    async def abort(self, update_id: UpdateId, body: AbortBody | None = None) -> UpdateView:
        """Give up an update that is not committed; the engine is what it was."""
        reason = (body or AbortBody()).reason
        return await self._step(
            f"abort update {update_id}", lambda: self._sidecar.abort(update_id, reason)
        )

    async def status(self) -> Status:
        """Where the engine stands."""
        return self._sidecar.status().model_copy(update={"busy": self.worker.busy})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self._metrics.text(self._sidecar.status()), media_type=CONTENT_TYPE)

    async def start(self) -> None:
        """Bring the engine back to where it was."""
        try:
            await self.worker.do("recover", self._sidecar.start)
        except DeadlineExceeded:
            _LOG.exception("the start goes on; until it is over, steps are refused")

    def close(self) -> None:
        """Take no more steps."""
        self._waiting.stop()
        self.worker.close()

    async def _step(self, name: str, step: Callable[[], UpdateView]) -> UpdateView:
        try:
            view = await self.worker.do(name, step)
        finally:
            self._waiting.begin(self._sidecar.executor.pending_weight_update_id)
        if view.acknowledgement is not None:
            self._metrics.phases(view.acknowledgement.timings_ms)
        return view

    async def _expire(self, update_id: str, waited_s: float) -> None:
        reason = f"no next step came within {waited_s:g} s"
        name = f"expire update {update_id}"
        await self.worker.do(name, lambda: self._sidecar.abort(update_id, reason))


def create_app(
    executor: TwoPhaseExecutor,
    *,
    key_file: str | os.PathLike[str],
    state_dir: str | os.PathLike[str],
    config: SidecarConfig | None = None,
) -> Gate:
    """Make a side-car around an engine's executor, for any ASGI server with one worker.

    Args:
        executor: the engine's; nobody else updates with it. Stays yours to close.
        key_file: the shared key, at least 32 bytes, mode 0600.
        state_dir: this side-car's own directory; it outlives the process.
        config: limits.

    Raises:
        WeightBridgeUnavailableError: the key's file or the directory cannot be used.
        WeightBridgeError: what an earlier side-car left there is damaged.
        TypeError: an executor that cannot stop between its steps.

    """
    require_two_phase(executor)
    config = config or SidecarConfig()
    key = read_key(key_file)
    directory = StateDirectory(state_dir)
    metrics = Metrics()
    try:
        ledger = Ledger(directory.path)
        nonces = NonceBook(
            directory.path / "nonces.log", max_skew_s=config.max_skew_s, now=time.time()
        )
        routes = _Routes(Sidecar(executor, ledger), config, metrics)
    except BaseException:
        directory.close()
        raise

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        await routes.start()
        try:
            yield
        finally:
            routes.close()
            for held in (nonces, ledger, directory):
                held.close()

    app: Any = FastAPI(
        title="rl_bridge side-car",
        version=_API_VERSION,
        lifespan=lifespan,
        redoc_url=None,
        docs_url="/docs",
        redirect_slashes=False,  # to where a stranger's Host header says
        separate_input_output_schemas=False,
    )
    _route(app, routes)
    app.openapi = cache(lambda: describe_app(app))  # whoever asks for it has no signature
    return Gate(app, key=key, nonces=nonces, config=config, answered=metrics.answered)


def _route(app: Any, routes: _Routes) -> None:
    one = "/updates/{update_id}"
    app.add_api_route(
        "/updates",
        routes.post_update,
        methods=["POST"],
        status_code=201,
        response_model=UpdateView,
        openapi_extra=manifest_body(),
    )
    app.add_api_route(one, routes.get_update, methods=["GET"], response_model=UpdateView)
    for name in ("prepare", "commit", "abort"):
        endpoint = getattr(routes, name)
        app.add_api_route(
            f"{one}/{name}", endpoint, methods=["POST"], response_model=UpdateView, name=name
        )
    app.add_api_route("/status", routes.status, methods=["GET"], response_model=Status)
    app.add_api_route(
        "/metrics",
        routes.metrics,
        methods=["GET"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    app.add_exception_handler(RequestValidationError, _not_as_described)
    app.add_exception_handler(HTTPException, _not_routed)
    # Every other exception goes through to the gate, which puts it into words.


async def _not_as_described(_request: Request, error: Exception) -> Response:
    found: list[dict[str, Any]] = getattr(error, "errors", list)()
    first = found[0] if found else {}
    where = ".".join(str(part) for part in first.get("loc", ()))
    given = repr(first.get("input"))[:80]
    detail = f"{where}: {first.get('msg', error)}, got {given}. See /openapi.json."
    return _answer(http_problem(400, detail))


async def _not_routed(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 500))
    detail = f"{request.method} {request.url.path}: expected what /openapi.json describes."
    answer = _answer(http_problem(status, detail))
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


def _answer(problem: Problem) -> Response:
    return Response(problem.encoded(), status_code=problem.status, media_type=MEDIA_TYPE)

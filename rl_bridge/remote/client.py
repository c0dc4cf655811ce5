"""`RemoteEngine`: an engine behind a side-car, with the methods of a `RolloutExecutor`."""

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from rl_bridge.bridge.arguments import UpdateRef, update_id_of
from rl_bridge.bridge.engine_state import Acknowledgement, InstalledUpdate
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    EngineLost,
    SignatureRefused,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    require_sendable,
)
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.remote.answers import Status, UpdateView, raised_by
from rl_bridge.remote.config import needed
from rl_bridge.remote.signing import ANSWER_HEADER, read_key
from rl_bridge.strategies.receiver import PendingUpdates, WeightLoader, WeightTransferReceiver
from rl_bridge.strategies.requests import AbandonedWeightUpdateRequest, WeightUpdateRequest
from rl_bridge.transports.wire.tls import TLSFiles, load_tls

_MAX_ANSWER_NBYTES: Final = 16 * 1024 * 1024
_SUCCESS: Final = range(200, 300)
View = TypeVar("View", bound=BaseModel)


class RemoteEngine:
    """One engine on another host, or in another process. Not thread-safe.

    Every method that asks the side-car may raise what `status` does, and the steps of an update
    what `update_weights` does, besides what each of them lists.

    Attributes:
        url: of its side-car.
        timeout_s: deadline of each request.
        last_ack: what the last committed update left behind; None before the first.

    """

    def __init__(
        self,
        url: str,
        key_file: str | os.PathLike[str],
        *,
        timeout_s: float = 600.0,
        tls: TLSFiles | Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the connection; nothing is sent.

        Args:
            url: the side-car's, such as ``http://127.0.0.1:8471``.
            key_file: the key that it shares with this client: 32 bytes or more, mode 0600.
            timeout_s: deadline of each request, of the engine's work for it too.
            tls: certificate, key and authority of this side, for a side-car that has some; its
                certificate names the url's host, and the url begins with ``https``.

        Raises:
            ValueError: no URL of a server, or no positive number of seconds.
            WeightBridgeUnavailableError: the key's file or one of `tls` cannot be used, or httpx is
                missing.

        """
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
            raise ValueError(
                f"url is {url!r}, expected one such as 'http://127.0.0.1:8471'. Give that."
            )
        if tls is not None and parts.scheme != "https":
            raise ValueError(f"url is {url!r} and tls= is given, expected https://. Give that.")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s!r}, expected more than 0. Give seconds.")
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.last_ack: Acknowledgement | None = None
        self._key = read_key(key_file)
        self._tls, self._host = load_tls(tls), parts.hostname
        self._httpx = httpx = needed("httpx")
        # No proxy of the environment: it would see the names of the weights. No connection is kept
        # open: a server closes idle ones, perhaps just when a request is sent.
        self._client = httpx.Client(
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            follow_redirects=False,
            verify=True if self._tls is None else self._tls.client,
        )

    # ---- the executor's methods ----------------------------------------------------------------

    def update_weights(self, manifest: WeightUpdateManifest | str | bytes) -> InstalledUpdate:
        """Install one complete version over there, or leave everything as it was.

        Returns:
            The acknowledgement: proof, timings, memory. The tensors are over there: asking for one
            raises `WeightBridgeUnavailableError`.

        Raises:
            WeightBridgeError: refused or undone; the subclass and the text say why.
            TornEngine: install and undo both failed; the engine must not serve.
            EngineLost: the side-car is gone. Its next start brings the engine back.
            DeadlineExceeded: no answer in time; `status` says what became of it.
            CertificateRefused: one side refuses the other's certificate.

        """
        update_id = self.import_weights(manifest).update_id
        self.prepare_weights(update_id)
        return self.commit_weights(update_id)

    def import_weights(self, manifest: WeightUpdateManifest | str | bytes) -> UpdateView:
        """Make the side-car import an update and verify every byte."""
        text = WeightUpdateManifest.of(manifest, caller="import_weights").to_json()
        return self._send("POST", "/updates", UpdateView, text.encode("ascii"))

    def prepare_weights(self, update: UpdateRef) -> UpdateView:
        """Let the engine find every reason to refuse it; it serves on."""
        update_id = update_id_of(update, caller="prepare_weights")
        return self._send("POST", f"/updates/{update_id}/prepare", UpdateView)

    def commit_weights(self, update: UpdateRef) -> InstalledUpdate:
        """Install, prove and acknowledge the prepared update; sent twice it is done once.

        Returns:
            What `update_weights` returns.

        """
        update_id = update_id_of(update, caller="commit_weights")
        view = self._send("POST", f"/updates/{update_id}/commit", UpdateView)
        if view.acknowledgement is None:
            raise WeightBridgeUnavailableError(
                f"the side-car at {self.url} committed version {view.weight_version} and gave "
                "no acknowledgement. Use the same release on both sides."
            )
        self.last_ack = view.acknowledgement
        return InstalledUpdate.of(view.acknowledgement)

    def abort_weights(self, update: UpdateRef, reason: str) -> UpdateView:
        """Abort an update that is not committed."""
        update_id = update_id_of(update, caller="abort_weights")
        body = canonical_json({"reason": reason[:1000]}).encode("ascii")
        return self._send("POST", f"/updates/{update_id}/abort", UpdateView, body)

    def update(self, update: UpdateRef) -> UpdateView:
        """What became of an update.

        Raises:
            UnknownUpdate: the side-car does not know it.

        """
        return self._send("GET", f"/updates/{update_id_of(update, caller='update')}", UpdateView)

    def status(self) -> Status:
        """Where the engine stands.

        Raises:
            EngineLost: the side-car is gone.
            DeadlineExceeded: no answer in time.
            SignatureRefused: another key, or clocks that differ too much.

        """
        return self._send("GET", "/status", Status)

    @property
    def active_weight_version(self) -> int | None:
        """The version that the engine holds: asked for each time."""
        return self.status().active_weight_version

    def check_servable(self) -> None:
        """Check that the engine may answer requests.

        Raises:
            TornEngine: it is torn.
            EngineLost: it is gone, or another one is in its place.
            WeightBridgeUnavailableError: it has no verified version.

        """
        status = self.status()
        if status.state == "torn":
            raise TornEngine(
                f"the engine behind {self.url} is torn. Install a later version in full."
            )
        if status.state == "lost":
            raise EngineLost(
                f"the engine behind {self.url} is not the one that was updated: {status.lost}. See "
                "that it runs, and send it a version: the last one, or a later one."
            )
        if not status.servable:
            why = status.recovery.detail
            raise WeightBridgeUnavailableError(
                f"the engine behind {self.url} has no verified version ({why}). Send it one."
            )

    def close(self) -> None:
        """Close the connection; the engine keeps its version. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close."""
        self.close()

    # ---- requests -------------------------------------------------------------------------------

    def _send(self, method: str, path: str, view: type[View], body: bytes = b"") -> View:
        if self._client.is_closed:
            raise BridgeClosed("this client is closed. Make a new RemoteEngine.")
        headers = {"content-type": "application/json"} if body else {}
        request = self._client.build_request(method, self.url + path, content=body, headers=headers)
        target = request.url.raw_path.decode("latin-1")
        signed = self._key.sign(method, target, body, time=int(time.time()))
        request.headers["authorization"] = signed.header()
        what = f"{method} {path}"
        try:
            status, signature, answer = self._receive(request, what)
        except self._httpx.TimeoutException as error:
            raise self._too_late(what) from error
        except self._httpx.TransportError as error:
            if isinstance(error, self._httpx.ConnectError):
                require_sendable(error, what)
            raise self._lost(what, error) from error
        is_signed = self._key.is_answer(signature, status, signed.nonce, answer)
        if status not in _SUCCESS:
            raise self._refusal(status, answer, is_signed=is_signed)
        if not is_signed:
            raise SignatureRefused(
                f"the answer to {what} is not signed with this client's key: whoever listens at "
                f"{self.url} is not the side-car. Give the side-car's own URL and key file."
            )
        try:
            return view.model_validate_json(answer)
        except ValidationError as error:
            raise WeightBridgeUnavailableError(
                f"the side-car answered {what} with {answer[:200]!r}, expected a {view.__name__}. "
                "Use the same release on both sides."
            ) from error

    def _receive(self, request: Any, what: str) -> tuple[int, str | None, bytes]:
        """Send and read the answer, within the deadline as a whole and a bound of its size."""
        end = time.monotonic() + self.timeout_s
        answer = bytearray()
        response = self._client.send(request, stream=True)
        try:
            for part in response.iter_raw():
                answer += part
                if len(answer) > _MAX_ANSWER_NBYTES:
                    raise WeightBridgeUnavailableError(
                        f"the answer to {what} has more than {_MAX_ANSWER_NBYTES} bytes. Is "
                        f"{self.url} a side-car?"
                    )
                if time.monotonic() > end:
                    raise self._too_late(what)
        finally:
            response.close()
        return response.status_code, response.headers.get(ANSWER_HEADER), bytes(answer)

    def _refusal(self, status: int, answer: bytes, *, is_signed: bool) -> WeightBridgeError:
        error = raised_by(status, answer)
        # A request that is refused for its signature gets an answer without one.
        if not is_signed and not isinstance(error, SignatureRefused | WeightBridgeUnavailableError):
            msg = (
                f"the side-car at {self.url} answered with status {status}, not signed with this "
                f"client's key: {error}. Give the side-car's own URL and key file."
            )
            return SignatureRefused(msg)
        return error

    def _too_late(self, what: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the side-car at {self.url} did not answer {what} within {self.timeout_s:g} s. Ask "
            "its status() what became of it, or give a longer timeout_s."
        )

    def _lost(self, what: str, error: Exception) -> WeightBridgeError:
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, ssl.SSLError) and self._tls is not None:
                return self._tls.refusal(f"the side-car at {self.url}", self._host, link)
            link = link.__cause__ or link.__context__
        return EngineLost(
            f"the side-car at {self.url} is gone, expected an answer to {what}: {error}. Start it "
            "again with the same state directory; its status() says where the engine stands."
        )


# ---- requests of a transfer strategy -------------------------------------------------------------


class RemoteWeightLoader(WeightLoader):
    """Loads into a `RemoteEngine`: an update is one transaction, however many batches it has.

    Batches are checked as they come, and nothing is sent; the last one sends the manifest, and the
    side-car reads the bytes itself. Nothing is pulled from a receiver on this side.

    Attributes:
        engine: as given.

    """

    def __init__(self, engine: RemoteEngine) -> None:
        """Load into `engine`."""
        self.engine = engine
        self._updates = PendingUpdates()

    def check_servable(self) -> None:
        """Tell whether the engine may answer requests.

        Raises:
            WeightBridgeError: it may not, or does not answer.

        """
        self.engine.check_servable()

    async def load_weights(
        self, receiver: WeightTransferReceiver | None, request: WeightUpdateRequest
    ) -> None:
        """Take one batch; with the last one, install the update.

        Args:
            receiver: not used: None will do.
            request: the next batch.

        Raises:
            UnknownUpdate: its first batch never came, or the update ended.
            WeightBridgeError: refused or undone; the engine is at its previous version.

        """
        del receiver  # the bytes do not come through this process
        if isinstance(request, AbandonedWeightUpdateRequest):
            self._updates.abandon(request)
            return
        pending = self._updates.accept(request)
        if pending.is_complete:
            self._updates.finish()
            await asyncio.to_thread(self.engine.update_weights, pending.manifest)

"""TLS: the files that it is made of, what both ends of a connection need, and a connection's bytes.

Both sides show a certificate, and both refuse one that their own `ca` did not sign. Nothing here
knows a socket: a `Session` turns bytes of the network into plain ones and back, so whoever owns the
socket keeps its own limits and deadlines, in the handshake too.
"""

import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from rl_bridge.errors import CertificateRefused, WeightBridgeError, WeightBridgeUnavailableError

_LOG = logging.getLogger(__name__)

_CHUNK: Final = 1 << 16
_RECORDS: Final = frozenset({0x15, 0x16})  # alert, handshake: TLS begins with one of the two
_PLAIN: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST"})
# OpenSSL's numbers for what is wrong with a certificate (x509_vfy.h).
_WRONG: Final = {
    **dict.fromkeys((10,), "it has expired"),
    **dict.fromkeys((9,), "it is not valid yet"),
    **dict.fromkeys((2, 18, 19, 20, 21), "another authority signed it"),
    **dict.fromkeys((62, 64), "it names another host"),
}
_QUIET_S: Final = 5.0
_MAX_REASONS: Final = 64
_MAX_ANSWERS_NBYTES: Final = 1 << 20

_REMEDY: Final = "`rl-bridge certs` makes all that a run needs."


class TLSFiles(BaseModel):
    """One side's certificate and key, and the authority of the run. Read when an end is made.

    A renewed file counts for ends that are made afterwards: bridges, side-cars and their clients.

    Attributes:
        cert: certificate of this side, in PEM, with those between it and `ca` if there are some.
        key: its private key, in PEM, without a password.
        ca: certificates of the authorities that sign the other sides' certificates, in PEM.

    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cert: Path
    key: Path
    ca: Path

    def plain(self) -> dict[str, str]:
        """The absolute paths, as plain JSON, which travels to other processes."""
        return {name: str(path.absolute()) for name, path in self}


class SpeaksPlain(ssl.SSLError):
    """The other side sent something that is no TLS."""


class Session:
    """One connection's TLS, without its socket: bytes go in and come out. Not thread-safe.

    Attributes:
        is_established: whether both sides' certificates were accepted, as this side sees it.
        is_ended: whether the other side said that it sends no more.

    """

    def __init__(self, context: ssl.SSLContext, *, host: str | None = None) -> None:
        """Begin; the side that gives a `host`, whose certificate has to name it, speaks first."""
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._arrived, self._leaving, server_side=host is None, server_hostname=host
        )
        self._has_begun = False
        self._answers_nbytes = 0
        self.is_established = False
        self.is_ended = False
        if host is not None:
            self._shake_hands()

    @property
    def has_leaving(self) -> bool:
        """Whether there are bytes for the other side."""
        return self._leaving.pending > 0

    def take(self) -> bytes:
        """Take bytes for the other side; empty if there are none."""
        data = self._leaving.read(_CHUNK)
        if not self.has_leaving:
            self._answers_nbytes = 0
        return data

    def seal(self, data: bytes) -> None:
        """Make bytes for the other side of plain ones; only once it is established."""
        view = memoryview(data)
        while view:
            view = view[self._object.write(view) :]

    def feed(self, data: bytes, plain: bytearray) -> None:
        """Take bytes of the other side, and append the plain ones that they hold.

        Raises:
            SpeaksPlain: the other side has no TLS.
            ssl.SSLError: a certificate was refused, by either side, or bytes are not what they
                have to be. What there is to `take` says so to the other side.

        """
        if data and not self._has_begun:
            self._has_begun = True
            if data[0] not in _RECORDS:
                raise SpeaksPlain(1, "no TLS")
        self._arrived.write(data)
        before = self._leaving.pending
        try:
            if not self.is_established:
                self._shake_hands()
            while self.is_established and not self.is_ended:
                part = self._object.read(_CHUNK)
                plain += part
                self.is_ended = not part
        except ssl.SSLWantReadError:
            pass  # the rest of a record is on its way
        except ssl.SSLError:
            self.is_established = False  # nothing can be sealed any more
            raise
        self._answers_nbytes += self._leaving.pending - before
        if self._answers_nbytes > _MAX_ANSWERS_NBYTES:
            # It asks for new keys without end, and does not read the answers.
            raise ssl.SSLError(1, "too many answers of TLS wait for it")

    def _shake_hands(self) -> None:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.is_established = True


class TLS:
    """What the two ends of connections need, made of files that were read once.

    Attributes:
        files: as given.
        client: context of the side that connects.

    """

    def __init__(self, files: TLSFiles) -> None:
        """Read the files and check them.

        Raises:
            WeightBridgeUnavailableError: one is missing or is something else, the key is not the
                certificate's, or the certificate is not valid today.

        """
        self.files = files
        for option in ("cert", "key", "ca"):
            path: Path = getattr(files, option)
            try:
                path.open("rb").close()
            except OSError as error:
                raise _unusable(option, path, f"it cannot be read ({error.strerror})") from error
        for option in ("cert", "ca"):
            path = getattr(files, option)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
            except ssl.SSLError as error:
                raise _unusable(option, path, "it holds no certificate in PEM") from error
        # The public functions only show certificates of peers that were accepted.
        self._own: dict[str, Any] = ssl._ssl._test_decode_cert(str(files.cert))  # type: ignore[attr-defined] # noqa: SLF001
        self._check_time()
        self.client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER)
        # Whoever comes again shows its certificate again.
        self._server.num_tickets = 0

    def _context(self, protocol: int) -> ssl.SSLContext:
        context, files = ssl.SSLContext(protocol), self.files
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
        except ssl.SSLError as error:
            what = "it holds no private key in PEM"
            if error.reason == "KEY_VALUES_MISMATCH":
                what = f"it is not the key of the certificate in cert={str(files.cert)!r}"
            raise _unusable("key", files.key, what) from error
        except ValueError as error:
            raise _unusable("key", files.key, "a password is asked for it") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)
        return context

    def _check_time(self) -> None:
        begin, end = (ssl.cert_time_to_seconds(self._own[at]) for at in ("notBefore", "notAfter"))
        if not begin <= time.time() <= end:
            what = "has expired" if time.time() > end else "is not valid yet"
            raise CertificateRefused(
                f"cert={str(self.files.cert)!r} {what}: it is {self._described()}, expected one "
                f"that is valid now. Check this machine's clock, or give a new one: {_REMEDY}"
            )

    def _described(self) -> str:
        own = self._own
        return (
            f"that of {_name(own['subject'])}, signed by {_name(own['issuer'])}, valid from "
            f"{own['notBefore']} to {own['notAfter']}"
        )

    def accept(self) -> Session:
        """Begin a connection that came in."""
        return Session(self._server)

    def connect(self, address: str) -> Session:
        """Begin a connection to an address, which the certificate over there has to name."""
        return Session(self.client, host=address)

    def refusal(self, where: str, address: str, error: ssl.SSLError) -> WeightBridgeError:
        """Put into words why a connection to `where` ended in TLS."""
        reason = _reason(error)
        if isinstance(error, SpeaksPlain) or reason in _PLAIN:
            return unlike(where, has_tls=False)
        if isinstance(error, ssl.SSLCertVerificationError):
            return CertificateRefused(
                f"{where} showed a certificate that this side refuses: {_wrong_with(error)}. "
                f"Expected one that names {address}, is valid now and was signed by "
                f"ca={str(self.files.ca)!r}. Give the other side such a one: {_REMEDY}"
            )
        if _is_of_certificate(reason):
            return CertificateRefused(
                f"{where} refuses this side's certificate ({_said(reason)}). It is "
                f"{self._described()}, of the file {str(self.files.cert)!r}; expected one that is "
                f"valid there now and that the other side's ca= signed. {_REMEDY}"
            )
        return WeightBridgeUnavailableError(
            f"{where} could not agree with this side on TLS 1.3: {error}. Check what listens there."
        )


def files_of(given: object) -> TLSFiles | None:
    """Read the option ``tls=``: `TLSFiles`, a mapping of the same names, or None. Opens no file.

    Raises:
        TypeError: something else.
        ValueError: a mapping with other names or values.

    """
    if isinstance(given, Mapping):
        return TLSFiles.model_validate(dict(given))
    if given is not None and not isinstance(given, TLSFiles):
        raise TypeError(
            f"tls is a {type(given).__name__}, expected TLSFiles(cert=..., key=..., ca=...)."
        )
    return given


def load_tls(given: object) -> TLS | None:
    """Read the option ``tls=``, and the files that it names; raises as `files_of` and `TLS`."""
    files = files_of(given)
    return None if files is None else TLS(files)


def unlike(where: str, *, has_tls: bool) -> WeightBridgeUnavailableError:
    """Make the error for a peer that has TLS while this side has none, or the other way around."""
    has, lacks = (where, "this side") if has_tls else ("this side", where)
    return WeightBridgeUnavailableError(
        f"{has} has tls= and {lacks} has not. Give both sides tls=, or neither."
    )


class RefusalLog:
    """Writes a line about a connection that came in and was refused; of many alike, few.

    Anybody can make such connections, and must not fill a disk with them, nor hide another one.
    """

    def __init__(self) -> None:
        """Start with nothing said."""
        self._said: dict[str, float] = {}
        """Reason -> when it was said last."""

    def say(self, peer: str, reason: str | ssl.SSLError) -> None:
        """Write it, unless that reason was written just now."""
        why = reason if isinstance(reason, str) else _why_refused(reason)
        now = time.monotonic()
        if now < self._said.get(why, -_QUIET_S) + _QUIET_S:
            return
        if len(self._said) >= _MAX_REASONS:
            self._said.clear()
        self._said[why] = now
        _LOG.warning("a connection from %s was refused: %s", peer, why)


def _why_refused(error: ssl.SSLError) -> str:
    """Say why a connection that came in ended in TLS."""
    reason = _reason(error)
    if isinstance(error, SpeaksPlain) or reason in _PLAIN:
        return "this side has tls= and it has not"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {_wrong_with(error)}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it showed no certificate"
    if _is_of_certificate(reason):
        return f"it refuses this side's certificate ({_said(reason)})"
    return f"it could not agree with this side on TLS 1.3 ({reason or error})"


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's name of it; errors that were made in Python have none."""
    return getattr(error, "reason", None) or ""


def _is_of_certificate(reason: str) -> bool:
    return "CERTIFICATE" in reason or reason.endswith("UNKNOWN_CA")


def _said(reason: str) -> str:
    return (reason.partition("ALERT_")[2] or reason).replace("_", " ").lower()


def _wrong_with(error: ssl.SSLError) -> str:
    """What is wrong with a certificate that this side refused, or with what came in its place."""
    what = _WRONG.get(getattr(error, "verify_code", 0), "it is of no use here")
    said = getattr(error, "verify_message", None) or _reason(error) or str(error)
    return f"{what} ({str(said).rstrip('.')})"


def _no_password() -> str:
    raise ValueError("nobody is there to be asked")  # else OpenSSL asks at the terminal, and waits


def _unusable(option: str, path: Path, what: str) -> WeightBridgeUnavailableError:
    expected = "a private key without a password" if option == "key" else "a certificate"
    return WeightBridgeUnavailableError(
        f"{option}={str(path)!r}: {what}, expected {expected} in PEM. Name such a file: {_REMEDY}"
    )


def _name(rows: tuple[tuple[tuple[str, str], ...], ...]) -> str:
    return ", ".join(f"{key}={value}" for row in rows for key, value in row) or "nobody"

"""Signatures of requests to a side-car and of its answers: HMAC-SHA256 with one shared key.

Both directions are signed. A request's signature covers its method, its path with the query, its
time, its nonce and its body; an answer's covers its status, the nonce that it answers and its body.
Nothing is encrypted. Pure, but for `read_key` and `read_secret`.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from rl_bridge.errors import SignatureRefused, WeightBridgeUnavailableError

SCHEME = "RLB-HMAC-SHA256"
ANSWER_HEADER = "rlb-signature"

_PROTOCOL = "rl_bridge.remote/1"
_LEAST_NBYTES = 32
_MOST_NBYTES = 4096
_NONCE_NBYTES = 16
_FORM = re.compile(
    rf"{SCHEME} time=(?P<time>[0-9]{{1,12}}),nonce=(?P<nonce>[0-9a-f]{{32}}),"
    r"signature=(?P<signature>[0-9a-f]{64})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the ``Authorization`` header of a request says.

    Attributes:
        time: seconds since the epoch, by the client's clock.
        nonce: 32 hexadecimal digits, new for each request.
        signature: 64 hexadecimal digits.

    """

    time: int
    nonce: str
    signature: str

    @classmethod
    def parse(cls, header: str | None) -> "Credentials":
        """Read a header; the signature is not checked yet.

        Raises:
            SignatureRefused: it is missing, or has another form.

        """
        match = _FORM.fullmatch(header or "")
        if match is None:
            got = "none" if header is None else f"{header[:24]!r}"
            raise SignatureRefused(
                f"the request's Authorization header is {got}, expected '{SCHEME} time=SECONDS,"
                "nonce=32 hexadecimal digits,signature=64 hexadecimal digits'. Use "
                "rl_bridge.remote.RemoteEngine, which signs."
            )
        return cls(time=int(match["time"]), nonce=match["nonce"], signature=match["signature"])

    def header(self) -> str:
        """The header's value."""
        return f"{SCHEME} time={self.time},nonce={self.nonce},signature={self.signature}"


class Key:
    """A shared key: signs, and compares in constant time. Its bytes are never shown."""

    def __init__(self, secret: bytes) -> None:
        """Take the key's bytes.

        Raises:
            WeightBridgeUnavailableError: too short, or absurdly long.

        """
        if not _LEAST_NBYTES <= len(secret) <= _MOST_NBYTES:
            raise WeightBridgeUnavailableError(
                f"the key has {len(secret)} bytes, expected {_LEAST_NBYTES} to {_MOST_NBYTES}. "
                "Make one: head -c 32 /dev/urandom > KEY; chmod 600 KEY."
            )
        self._secret = secret

    def sign(self, method: str, target: str, body: bytes, *, time: int) -> Credentials:
        """Credentials for one request, with a fresh nonce.

        Args:
            method: such as ``POST``.
            target: the path with its query, as it goes over the wire.
            body: all of it.
            time: seconds since the epoch.

        """
        nonce = secrets.token_hex(_NONCE_NBYTES)
        signature = self._of_request(method, target, body, time, nonce)
        return Credentials(time=time, nonce=nonce, signature=signature)

    def check(self, given: Credentials, method: str, target: str, body: bytes) -> None:
        """Compare a request with what was signed.

        Raises:
            SignatureRefused: the request was changed, or another key signed it.

        """
        expected = self._of_request(method, target, body, given.time, given.nonce)
        if not hmac.compare_digest(expected, given.signature):
            raise SignatureRefused(
                f"the signature of {method} {target} is not the one expected for its method, path, "
                "time, nonce and body. Give both sides the same key file, and let nothing between "
                "them rewrite requests."
            )

    def sign_answer(self, status: int, nonce: str, body: bytes) -> str:
        """The signature of an answer to the request with this nonce."""
        return self._digest("answer", str(status), nonce, hashlib.sha256(body).hexdigest())

    def is_answer(self, signature: str | None, status: int, nonce: str, body: bytes) -> bool:
        """Whether the answer is to this request, and comes from a holder of the key."""
        expected = self.sign_answer(status, nonce, body)
        # As bytes: as text, a stranger's signature would have to be ASCII.
        return hmac.compare_digest(expected.encode(), (signature or "").encode())

    def _of_request(self, method: str, target: str, body: bytes, time: int, nonce: str) -> str:
        digest = hashlib.sha256(body).hexdigest()
        return self._digest("request", method, target, str(time), nonce, digest)

    def _digest(self, *parts: str) -> str:
        # No part has a line break: HTTP does not let one through in a target.
        text = "\n".join((_PROTOCOL, *parts))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def read_key(path: str | os.PathLike[str]) -> Key:
    """Read a key from a file that nobody else can read.

    Args:
        path: a plain file of at least 32 bytes, all of which are the key, with mode 0600 or less.

    Raises:
        WeightBridgeUnavailableError: it cannot be read, others may read it, or it is too short.

    """
    return Key(read_secret(path))


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read a file that nobody else can read.

    Raises:
        WeightBridgeUnavailableError: it cannot be read, or others may read it.

    """
    file = Path(path)
    try:
        # Non-blocking: opening a pipe would wait for its writer.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightBridgeUnavailableError(
            f"the key file {file} cannot be read: {error}. Name the file with the key."
        ) from error
    try:
        _check_key_file(file, os.fstat(fd))
        return os.read(fd, _MOST_NBYTES + 1)
    finally:
        os.close(fd)


def _check_key_file(file: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise WeightBridgeUnavailableError(
            f"the key file {file} is no plain file. Name the file with the key."
        )
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o077:
        raise WeightBridgeUnavailableError(
            f"the key file {file} has mode {mode:04o}: others may read or change it, expected "
            f"0600 or less. Run: chmod 600 {file}; where others had it, make a new key."
        )

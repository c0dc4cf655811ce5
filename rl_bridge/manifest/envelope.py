"""What manifests of both kinds have in common: how their text is split into header and layout.

`rl_bridge.manifest.model` reads one rank's, `rl_bridge.manifest.group` that of a group.
"""

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_bridge.errors import DigestMismatch, LayoutUnknown, MalformedManifest
from rl_bridge.manifest.canonical import JSONValue
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.table import LayoutCache, Named

__all__ = ["LAYOUT_KEY", "Envelope"]

LAYOUT_KEY = ',"layout":'
_WHITE = " \t\r\n"
_REMEDY = "Send what to_json() gave, as it is."

_Layout = TypeVar("_Layout", bound=Named)
_Manifest = TypeVar("_Manifest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope(Generic[_Layout]):
    """One kind of manifest.

    Attributes:
        kind: what messages call it, such as ``manifest``.
        layout: what they call its layout.
        maker: name of the class whose ``to_json`` writes it.
        known: layouts that this process has seen.
        read: makes a layout of its text, and adds it to `known`.

    """

    kind: str
    layout: str
    maker: str
    known: LayoutCache[_Layout]
    read: Callable[[str], _Layout]

    def read_by(self, read: Callable[[str], _Manifest], text: object) -> _Manifest:
        """What `read` makes of the text without the white space behind it.

        Raises:
            MalformedManifest: it is no text, not ASCII, or nests too deep.

        """
        plain = self.ascii_of(text)
        try:
            return read(plain)
        except RecursionError as error:
            # Just below the depth at which decoding gives up, whatever looks at the value does.
            msg = f"the {self.kind} nests too deep. {_REMEDY}"
            raise MalformedManifest(msg) from error

    def ascii_of(self, text: object) -> str:
        """The text without the white space behind it.

        Raises:
            MalformedManifest: it is no text, or not ASCII.

        """
        if not isinstance(text, str | bytes):
            msg = f"from_json got a {type(text).__name__}, expected a {self.kind}'s text. {_REMEDY}"
            raise MalformedManifest(msg)
        try:
            ascii_text = text.decode("ascii") if isinstance(text, bytes) else text
            return ascii_text.encode("ascii").decode().rstrip(_WHITE)
        except UnicodeError as error:
            msg = f"{self.kind} text is not ASCII: {error}. {_REMEDY}"
            raise MalformedManifest(msg) from error

    def digests_of(self, given: JSONValue) -> bytes:
        """The block of digests that the header has as base64.

        Raises:
            MalformedManifest: it is no base64.

        """
        try:
            return base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            msg = f"{self.kind} field digests is no base64 text: {error}. {_REMEDY}"
            raise MalformedManifest(msg) from error

    def layout_of(self, digest: JSONValue, rest: str) -> _Layout:
        """Find the layout by its digest, or parse it from the text behind the header.

        Raises:
            LayoutUnknown: there is none in the text, and this process has not seen it.
            DigestMismatch: it is not the one that the header names.
            MalformedManifest: something else stands there.

        """
        if not isinstance(digest, str):
            msg = f"{self.kind} field layout_digest is missing. {_REMEDY}"
            raise MalformedManifest(msg)
        known = self.known.get(digest)
        if rest == "}":
            if known is None:
                msg = (
                    f"{self.layout} {digest} is unknown in this process. Send one full manifest of "
                    f"this run first: {self.maker}.to_json() with layout=True."
                )
                raise LayoutUnknown(msg)
            return known
        if not rest.startswith(LAYOUT_KEY) or not rest.endswith("}"):
            msg = (
                f"after the {self.kind}'s header stands {rest[:32]!r}, expected its layout or the "
                f"end. {_REMEDY}"
            )
            raise MalformedManifest(msg)
        text = rest[len(LAYOUT_KEY) : -1]
        found = text_digest(text)
        if found != digest:
            msg = (
                f"the {self.layout}'s digest is {found}, the manifest names {digest}. It was "
                "altered: ask the publisher for it again."
            )
            raise DigestMismatch(msg)
        return self.read(text) if known is None else known

"""`WeightUpdateManifest`: the sealed, public record of one complete weight update.

Its JSON has three parts, in this order: ``format``, ``header`` (small, new for every update) and
``layout`` (large, the same for a whole run). Because the layout comes last and is canonical, a
reader that knows the layout digest need not parse it again.
"""

import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    StrictBytes,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_serializer,
    model_validator,
)

from rl_bridge.errors import DigestMismatch, LayoutUnknown, MalformedManifest
from rl_bridge.manifest.canonical import JSONValue, canonical_json, decode_json, freeze, thaw
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.parallel import WeightLayout
from rl_bridge.manifest.table import (
    KNOWN_LAYOUTS,
    LayoutCache,
    Named,
    TensorDescriptor,
    TensorTable,
    collector_paused,
)

__all__ = [
    "FORMAT",
    "LAYOUT_KEY",
    "DescriptorMap",
    "Envelope",
    "WeightUpdateManifest",
]

# ---- What manifests of both kinds have in common: how their text is split into header and layout.
#
# `rl_bridge.manifest.model` reads one rank's, `rl_bridge.manifest.group` that of a group.

LAYOUT_KEY = ',"layout":'
_WHITE = " \t\r\n"
_RESEND = "Send what to_json() gave, as it is."

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
            msg = f"the {self.kind} nests too deep. {_RESEND}"
            raise MalformedManifest(msg) from error

    def ascii_of(self, text: object) -> str:
        """The text without the white space behind it.

        Raises:
            MalformedManifest: it is no text, or not ASCII.

        """
        if not isinstance(text, str | bytes):
            msg = f"from_json got a {type(text).__name__}, expected a {self.kind}'s text. {_RESEND}"
            raise MalformedManifest(msg)
        try:
            ascii_text = text.decode("ascii") if isinstance(text, bytes) else text
            return ascii_text.encode("ascii").decode().rstrip(_WHITE)
        except UnicodeError as error:
            msg = f"{self.kind} text is not ASCII: {error}. {_RESEND}"
            raise MalformedManifest(msg) from error

    def digests_of(self, given: JSONValue) -> bytes:
        """The block of digests that the header has as base64.

        Raises:
            MalformedManifest: it is no base64.

        """
        try:
            return base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            msg = f"{self.kind} field digests is no base64 text: {error}. {_RESEND}"
            raise MalformedManifest(msg) from error

    def layout_of(self, digest: JSONValue, rest: str) -> _Layout:
        """Find the layout by its digest, or parse it from the text behind the header.

        Raises:
            LayoutUnknown: there is none in the text, and this process has not seen it.
            DigestMismatch: it is not the one that the header names.
            MalformedManifest: something else stands there.

        """
        if not isinstance(digest, str):
            msg = f"{self.kind} field layout_digest is missing. {_RESEND}"
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
                f"end. {_RESEND}"
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


# ---- What users see as ``manifest.tensors``: the layout's columns, read as one object per tensor.


class DescriptorMap(Mapping[str, TensorDescriptor]):
    """Name -> `TensorDescriptor`, each made when it is asked for."""

    def __init__(self, table: TensorTable, digests: bytes) -> None:
        """Look at `table` and the digest block; nothing is copied."""
        self._table = table
        self._digests = digests

    def __getitem__(self, name: str) -> TensorDescriptor:
        """Describe one tensor."""
        return self._table.descriptor(name, self._digests)

    def __iter__(self) -> Iterator[str]:
        """Go over the names, stored ones first, each part sorted."""
        return iter(self._table.rows)

    def __len__(self) -> int:
        """Count the names, tied ones included."""
        return len(self._table.rows)

    def __repr__(self) -> str:
        """Say how many there are rather than listing them all."""
        return f"<{len(self)} tensor descriptors>"


# ---- the rest builds on the parts above

FORMAT = "rl_bridge.manifest/1"
_MAX_VERSION = 2**63 - 1
_PREFIX = f'{{"format":"{FORMAT}","header":'
_REMEDY = "Send WeightUpdateManifest.to_json() as it is."

Identifier = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


def _frozen(where: str) -> BeforeValidator:
    return BeforeValidator(lambda value: freeze(value, where=where))


class WeightUpdateManifest(BaseModel):
    """Immutable record of one published update: identity, content digests, and where the bytes are.

    Users get it from ``bridge.publish`` and send `to_json` to the rollout side. It is valid from
    birth: a manifest object that exists has passed every check that needs no weight bytes.

    Attributes:
        update_id: 32 hexadecimal digits, unique.
        publisher_id: 32 hexadecimal digits; versions are ordered within one publisher.
        source_worker: the publishing worker's name.
        source_rank: its rank.
        weight_version: grows with every update of a publisher.
        transport: name of the transport that carries the bytes.
        created_at: seconds since the epoch (wall clock, for people).
        metadata: the user's own JSON values; ``metadata["layout"]`` is always filled.
        handle: where the transport finds the bytes; only that transport reads it.
        digests: 16 bytes per stored tensor, in layout order.
        root: digest over all tensors, 32 hexadecimal digits: equal roots mean equal weights.
        table: the layout part.

    Raises:
        WeightManifestValidationError: the subclass says what is wrong.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    update_id: Identifier
    publisher_id: Identifier
    source_worker: StrictStr
    source_rank: Annotated[StrictInt, Field(ge=0)]
    weight_version: Annotated[StrictInt, Field(ge=0, le=_MAX_VERSION)]
    transport: StrictStr
    created_at: Annotated[StrictFloat, Field(allow_inf_nan=False)] = Field(
        default_factory=time.time
    )
    metadata: Annotated[JSONValue, _frozen("metadata")] = Field(default_factory=dict)
    handle: Annotated[JSONValue, _frozen("handle")] = Field(default_factory=dict)
    digests: StrictBytes
    root: StrictStr = ""
    table: InstanceOf[TensorTable]

    def __init__(self, /, **fields: Any) -> None:
        """Validate `fields`; a wrong type is a `MalformedManifest`, not pydantic's own error."""
        if "format" in fields:
            msg = (
                "these are the parts of a manifest's JSON (format, header, layout), not its "
                "fields. Read the text with WeightUpdateManifest.from_json(text), the parsed "
                "document with WeightUpdateManifest.model_validate(document)."
            )
            raise MalformedManifest(msg)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _malformed(error) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("metadata", "handle"):
            if not isinstance(getattr(self, name), Mapping):
                msg = f"manifest {name} is no mapping. {_REMEDY}"
                raise MalformedManifest(msg)
        layout = self.weight_layout  # kept: whoever looks at it need not read it again
        # `object.__setattr__`: the model is frozen, and it is still being born. What is there is
        # frozen already, and the layout is put beside it.
        written = freeze(layout.to_metadata(), where="metadata.layout", depth=1)
        frozen = MappingProxyType({**self.metadata, "layout": written})
        object.__setattr__(self, "metadata", frozen)
        root = self.table.root_plan.root(self.digests).hex()
        if self.root == "":
            object.__setattr__(self, "root", root)
        elif self.root != root:
            msg = (
                f"version {self.weight_version}: the manifest's root is {self.root}, its digests "
                f"give {root}. The manifest was altered: ask the publisher for it again."
            )
            raise DigestMismatch(msg)
        return self

    # ---- what users read ------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> Mapping[str, Any]:
        """Name -> `TensorDescriptor`, tied names included."""
        return DescriptorMap(self.table, self.digests)

    @property
    def tensor_count(self) -> int:
        """How many tensors the update has, tied names included."""
        return len(self.table.rows)

    @property
    def total_nbytes(self) -> int:
        """Bytes that travel: tied tensors count once."""
        return self.table.total_nbytes

    @property
    def layout_digest(self) -> str:
        """Name of the layout part."""
        return self.table.digest

    @cached_property
    def weight_layout(self) -> WeightLayout:
        """``metadata["layout"]`` as an object."""
        return WeightLayout.from_metadata(self.metadata)

    # ---- JSON -----------------------------------------------------------------------------------

    def header(self) -> dict[str, JSONValue]:
        """Plain JSON form of the update part."""
        digests = base64.b64encode(self.digests).decode("ascii")
        return {**self._header_but_digests(), "digests": digests}

    def _header_text(self) -> str:
        """Canonical JSON of `header`, in half the time where there are many tensors."""
        # The digits of base64 are written as they are; the encoder would look at each of them.
        digests = base64.b64encode(self.digests).decode("ascii")
        # Before the handle, which is next by name, stands a number only.
        before, key, behind = self._short_text.partition('"handle":')
        return f'{before}"digests":"{digests}",{key}{behind}'

    @cached_property
    def _short_text(self) -> str:
        """Canonical JSON of the header but for its digests: written once, and used twice."""
        return canonical_json(self._header_but_digests())

    def _header_but_digests(self) -> dict[str, JSONValue]:
        return {
            "created_at": self.created_at,
            "handle": thaw(self.handle),
            "layout_digest": self.layout_digest,
            "metadata": thaw(self.metadata),
            "publisher_id": self.publisher_id,
            "root": self.root,
            "source_rank": self.source_rank,
            "source_worker": self.source_worker,
            "transport": self.transport,
            "update_id": self.update_id,
            "weight_version": self.weight_version,
        }

    @cached_property
    def header_digest(self) -> bytes:
        """16 bytes over the update part: what a transport keeps beside the bytes that it names."""
        # The root stands for the digests, which it covers: they are long.
        return bytes.fromhex(text_digest(self._short_text))

    @model_serializer(mode="plain")
    def document(self) -> dict[str, Any]:
        """Plain JSON form of the whole; what pydantic's own dumps give."""
        return {"format": FORMAT, "header": self.header(), "layout": self.table.document()}

    def to_json(self, *, layout: bool = True) -> str:
        """Canonical JSON text, ASCII.

        Args:
            layout: False leaves the layout part out. The reader must then have seen the layout
                already, through an earlier full manifest of the same run.

        """
        head = f"{_PREFIX}{self._header_text()}"
        return f"{head}{LAYOUT_KEY}{self.table.text}}}" if layout else f"{head}}}"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, and nothing else: it must be canonical to the byte.

        White space behind it is no part of it: what printed lines and files end with is let go.

        Raises:
            MalformedManifest: not the canonical text of a manifest of this format.
            LayoutUnknown: compact text whose layout this process has not seen.
            WeightManifestValidationError: its other subclasses, one per reason.

        """
        return _ENVELOPE.read_by(cls._read, text)

    @classmethod
    def _read(cls, text: str) -> Self:
        if not text.startswith(_PREFIX):
            msg = (
                f"this is no manifest of format {FORMAT}: it starts with {text[:48]!r}. "
                f"{_REMEDY} Both sides need the same rl_bridge release."
            )
            raise MalformedManifest(msg)
        header, end = decode_json(text, len(_PREFIX))
        if not isinstance(header, dict):
            msg = f"the manifest's header is no JSON object. {_REMEDY}"
            raise MalformedManifest(msg)
        with collector_paused():
            table = _ENVELOPE.layout_of(header.pop("layout_digest", None), text[end:])
            manifest = cls(**_header_fields(header), table=table)
        # Compared with what this manifest writes, not only with the canonical form of what was
        # read: else a loose number or a left-out default would give one manifest two texts.
        if manifest._header_text() != text[len(_PREFIX) : end]:
            msg = f"the manifest's header is not canonical JSON: it was rewritten. {_REMEDY}"
            raise MalformedManifest(msg)
        return manifest

    @model_validator(mode="wrap")
    @classmethod
    def _from_document(cls, value: Any, handler: Any) -> Any:
        # What `document` gives may come back through pydantic (a field of the user's own model).
        if isinstance(value, Mapping) and "format" in value:
            return cls.from_json(_text_of(value))
        return handler(value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with changed fields; unlike pydantic's own, the copy is validated."""
        del deep  # every part is immutable
        changes = dict(update or {})
        if changes.keys() & {"digests", "table"}:
            changes.setdefault("root", "")
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})

    def __copy__(self) -> Self:
        """Give the object itself: every part is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Give the object itself: every part is immutable."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle as canonical JSON: a user's own multiprocessing queues may carry manifests."""
        return (type(self).from_json, (self.to_json(),))

    def __hash__(self) -> int:
        """Hash by identity of the update."""
        return hash((self.update_id, self.root))

    def __repr__(self) -> str:
        """Name the update on one line instead of printing every tensor."""
        return (
            f"<WeightUpdateManifest v{self.weight_version} {self.transport} "
            f"{self.tensor_count} tensors {self.total_nbytes} bytes "
            f"root={self.root[:12]} update={self.update_id[:8]}>"
        )

    __str__ = __repr__


def _malformed(error: ValidationError) -> MalformedManifest:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "manifest"
    given = repr(first.get("input"))[:80]
    return MalformedManifest(f"manifest field {where}: {first['msg']}, got {given}. {_REMEDY}")


def _text_of(document: Mapping[str, Any]) -> str:
    """Write a parsed document as text again, so that there is one way in for both."""
    try:
        return canonical_json(thaw(document))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the manifest's document is no JSON value: {error}. {_REMEDY}"
        raise MalformedManifest(msg) from error


def _header_fields(header: dict[str, JSONValue]) -> dict[str, JSONValue]:
    known = WeightUpdateManifest.model_fields.keys() - {"table"}
    if known != header.keys():
        msg = (
            f"manifest fields {sorted(known - header.keys())} are missing, "
            f"{sorted(header.keys() - known)} are unknown. Send the manifest as it was published."
        )
        raise MalformedManifest(msg)
    header["digests"] = _ENVELOPE.digests_of(header["digests"])
    root = header["root"]
    if not isinstance(root, str) or not root:
        msg = (
            "manifest field root is missing: without it nothing ties the digests together. "
            f"{_REMEDY}"
        )
        raise MalformedManifest(msg)
    return header


def _table_of(text: str) -> TensorTable:
    """Read the layout that is not known yet."""
    document, end = decode_json(text)
    if end != len(text) or not isinstance(document, dict):
        msg = f"the manifest's layout is not canonical JSON: it was rewritten. {_REMEDY}"
        raise MalformedManifest(msg)
    try:
        table = TensorTable(**document)
    except ValidationError as error:
        raise _malformed(error) from error
    # Compared with what this table writes: a loose number, another order or a left-out default
    # would give one layout two texts.
    if table.text != text:
        msg = (
            "the manifest's layout is not canonical JSON, or leaves out fields: it was rewritten "
            "on the way. Send WeightUpdateManifest.to_json() as it is."
        )
        raise MalformedManifest(msg)
    return KNOWN_LAYOUTS.add(table)


_ENVELOPE = Envelope(
    kind="manifest",
    layout="layout",
    maker="WeightUpdateManifest",
    known=KNOWN_LAYOUTS,
    read=_table_of,
)

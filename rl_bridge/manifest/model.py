"""`WeightUpdateManifest`: the sealed, public record of one complete weight update.

Its JSON has three parts, in this order: ``format``, ``header`` (small, new for every update) and
``layout`` (large, the same for a whole run). Because the layout comes last and is canonical, a
reader that knows the layout digest need not parse it again. The record of a group of ranks
(`rl_bridge.manifest.group`) is a kind of this one.

A manifest is valid from birth: an object that exists has passed every check that needs no weight
bytes. It is frozen, and its header's digest lies beside the sealed bytes, so a transport that binds
the header (all built-in ones do) also refuses one whose fields were forced by way of ``__dict__``.
"""

import base64
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import is_
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    StrictBytes,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from rl_bridge.errors import DigestMismatch, LayoutUnknown, MalformedManifest
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import (
    RESEND,
    Frozen,
    FrozenJSON,
    JSONValue,
    canonical_json,
    decode_json,
    malformed,
    thaw,
)
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.parallel import ADAPTER, WeightLayout, with_layout
from rl_bridge.manifest.table import DescriptorMap, Layout, TensorTable

_LAYOUT_KEY = ',"layout":'
_WHITE = " \t\r\n"
# Text of which most is digests: those of 10,000 tensors.
_LONG = 1 << 18
_DIGITS = "_digits"
"""Where a manifest that is being read has the base64 text of its digests until it is compared."""

Identifier = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]
_BASE64 = TypeAdapter(bytes, config=ConfigDict(val_json_bytes="base64"))
_Layout = TypeVar("_Layout", bound=Layout)
_Handle = TypeVar("_Handle", bound=BaseModel)


def _decode_base64(text: JSONValue, what: str) -> bytes:
    """Read base64 of one form: the standard alphabet, padded, no bit set that is of no byte."""
    problem = "expected text of the standard alphabet, padded"
    try:
        # Pydantic reads it six times as fast as the standard library, and another alphabet too.
        if isinstance(text, str) and len(text) % 4 == 0 and not ("-" in text or "_" in text):
            return _BASE64.validate_strings(text)
    except ValidationError as error:
        problem = str(error.errors(include_url=False)[0]["msg"])
    raise MalformedManifest(f"{what} is not canonical base64: {problem}. {RESEND}")


class LayoutCache(Generic[_Layout]):
    """Layouts seen in this process, by digest; the oldest go when there are too many."""

    def __init__(self, limit: int) -> None:
        """Keep at most `limit` layouts."""
        self._limit = limit
        self._layouts: OrderedDict[str, _Layout] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, layout: _Layout) -> _Layout:
        """Remember a layout; returns the equal one that is known already, if there is one."""
        with self._lock:
            known = self._layouts.setdefault(layout.digest, layout)
            self._layouts.move_to_end(layout.digest)
            while len(self._layouts) > self._limit:
                self._layouts.popitem(last=False)
            return known

    def get(self, digest: str) -> _Layout | None:
        """Find a layout, or None."""
        with self._lock:
            layout = self._layouts.get(digest)
            if layout is not None:
                self._layouts.move_to_end(digest)
            return layout


def no_tensors() -> MalformedManifest:
    """The error for an update of one publisher that has no tensors."""
    return MalformedManifest(
        "the update holds no tensors. Publish a model or a non-empty state dict."
    )


class WeightUpdateManifest(Frozen):
    """Immutable record of one published update: identity, content digests, and where the bytes are.

    Users get it from ``bridge.publish`` and send `to_json` to the rollout side. A version that many
    ranks published together has several sealed parts: then it is a `GroupManifest`, which is one
    kind of this, and which `from_json` reads as well.

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
        columns: digest of the column list, 32 hexadecimal digits; empty if the layout has none.
        table: the layout part.

    Raises:
        WeightManifestValidationError: the subclass says what is wrong.

    """

    FORMAT: ClassVar[str] = "rl_bridge.manifest/3"
    KIND: ClassVar[str] = "manifest"
    """What messages call it."""
    LAYOUT_FIELD: ClassVar[str] = "table"
    """The field that holds the layout part."""
    LAYOUT_TYPE: ClassVar[type[Layout]] = TensorTable
    DERIVED: ClassVar[frozenset[str]] = frozenset()
    """Fields that follow from others: the text leaves them out."""
    known_layouts: ClassVar[LayoutCache[Any]] = LayoutCache(32)

    weight_version: Annotated[StrictInt, Field(ge=0, lt=2**63)]
    created_at: Annotated[StrictFloat, Field(allow_inf_nan=False)] = Field(
        default_factory=time.time
    )
    metadata: FrozenJSON = Field(default_factory=dict)
    digests: StrictBytes
    root: StrictStr = ""
    update_id: Identifier
    publisher_id: Identifier
    source_worker: StrictStr
    source_rank: Annotated[StrictInt, Field(ge=0)]
    transport: StrictStr
    handle: FrozenJSON = Field(default_factory=dict)
    columns: Annotated[StrictStr, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    table: InstanceOf[TensorTable]

    def __init__(self, /, **fields: Any) -> None:
        """Validate `fields`; a wrong type is a `MalformedManifest`, not pydantic's own error."""
        if "format" in fields:
            raise MalformedManifest(
                f"these are the parts of a {self.KIND}'s JSON (format, header, layout), not its "
                f"fields. Read the text with {type(self).__name__}.from_json(text), the parsed "
                f"document with {type(self).__name__}.model_validate(document)."
            )
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise malformed(self.KIND, error) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        root = self._layout_part.root_plan.root(self.digests).hex()
        if not self.root:
            self.__dict__["root"] = root  # the model is frozen, and still being made
        elif self.root != root:
            raise DigestMismatch(
                f"version {self.weight_version}: the {self.KIND}'s root is {self.root}, its "
                f"digests give {root}. The {self.KIND} was altered: ask the publisher for it again."
            )
        for name in ("metadata", "handle"):
            if not isinstance(getattr(self, name), Mapping):
                raise MalformedManifest(f"{self.KIND} {name} is no mapping. {RESEND}")
        self._check_fields()
        _ = self.adapter  # checks what an update says of itself as an adapter
        return self

    def _check_fields(self) -> None:
        """Check what concerns this kind alone; the root is the digests' by then."""
        # The model is frozen, and still being made.
        self.__dict__["metadata"], self.__dict__["weight_layout"] = with_layout(self.metadata)
        if not self.table.names and self.weight_layout.world_size == 1:
            raise no_tensors()  # only a rank of a group may hold nothing
        if bool(self.columns) != self.table.columns:
            has, says = ("a", "no") if self.columns else ("no", "a")
            raise MalformedManifest(
                f"the {self.KIND} has {has} digest of a column list, its layout says that there is "
                f"{says} such list. {RESEND}"
            )

    @property
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

    @cached_property
    def weight_layout(self) -> WeightLayout:
        """``metadata["layout"]`` as an object; made together with the manifest."""
        return WeightLayout.from_metadata(self.metadata)

    @property
    def _kind(self) -> str:
        return self.weight_layout.kind

    @cached_property
    def adapter(self) -> AdapterSpec | None:
        """What belongs to the update if it holds an adapter; None if it holds a model's weights."""
        return AdapterSpec.from_metadata(self.metadata) if self._kind == ADAPTER else None

    def parse_handle(self, kind: type[_Handle]) -> _Handle:
        """Read the handle as its transport's own kind.

        Raises:
            MalformedManifest: it is of another kind.

        """
        try:
            return kind.model_validate(thaw(self.handle))
        except ValidationError as error:
            raise malformed(f"update {self.update_id}: handle", error) from error

    @property
    def _layout_part(self) -> Layout:
        layout: Layout = self.__dict__[self.LAYOUT_FIELD]
        return layout

    @property
    def layout_digest(self) -> str:
        """Name of the layout part."""
        return self._layout_part.digest

    def _header_but_digests(self) -> dict[str, JSONValue]:
        """The update part without what is long: its digests, and those of parts.

        Its values may be frozen.
        """
        return {
            "columns": self.columns,
            "created_at": self.created_at,
            "handle": self.handle,
            "layout_digest": self.layout_digest,
            "metadata": self.metadata,
            "publisher_id": self.publisher_id,
            "root": self.root,
            "source_rank": self.source_rank,
            "source_worker": self.source_worker,
            "transport": self.transport,
            "update_id": self.update_id,
            "weight_version": self.weight_version,
        }

    @property
    def header_digest(self) -> bytes:
        """16 bytes over the update part: what a transport keeps beside the bytes that it names."""
        # The root stands for the digests, which it covers: they are long.
        return xxhash.xxh3_128_digest(self._short_text().encode("ascii"))

    def header(self) -> dict[str, JSONValue]:
        """Plain JSON form of the update part."""
        digests = base64.b64encode(self.digests).decode("ascii")
        plain: dict[str, JSONValue] = thaw({**self._header_but_digests(), "digests": digests})
        return plain

    def header_pieces(self) -> Iterator[str]:
        """Canonical JSON of `header`, in pieces: the digests are long, and need not be joined."""
        # The digits of base64 are put in as they are: an encoder would look at each of them. The
        # keys are sorted, and ``digests`` comes behind ``created_at``, which is a number.
        text = self._short_text()
        end = text.index(",", text.index('"created_at":'))
        yield f'{text[:end]},"digests":"'
        # What was read has been canonical base64: who compares it with its text writes it as it is.
        digits = self.__dict__.pop(_DIGITS, None)
        yield base64.b64encode(self.digests).decode("ascii") if digits is None else digits
        yield f'"{text[end:]}'

    def _short_text(self) -> str:
        """Canonical JSON of the header without its digests."""
        # Used three times for each update. Written again if a field is no longer the same object:
        # one that was forced by way of `__dict__` must not keep the header's digest.
        values = [*map(self.__dict__.get, type(self).model_fields)]
        kept = self.__dict__.get("_written")
        if kept is None or not all(map(is_, kept[0], values)):
            kept = self.__dict__["_written"] = (values, canonical_json(self._header_but_digests()))
        text: str = kept[1]
        return text

    @model_serializer(mode="plain")
    def document(self) -> dict[str, Any]:
        """Plain JSON form of the whole; what pydantic's own dumps give."""
        layout = self._layout_part.document()
        return {"format": self.FORMAT, "header": self.header(), "layout": layout}

    @classmethod
    def _prefix(cls) -> str:
        return f'{{"format":"{cls.FORMAT}","header":'

    def to_json(self, *, layout: bool = True) -> str:
        """Canonical JSON text, ASCII.

        Args:
            layout: False leaves the layout part out. The reader must then have seen the layout
                already, through an earlier full manifest of the same run.

        """
        head = f"{self._prefix()}{''.join(self.header_pieces())}"
        return f"{head}{_LAYOUT_KEY}{self._layout_part.text}}}" if layout else f"{head}}}"

    @classmethod
    def is_text(cls, text: object) -> bool:
        """Whether `text` begins like the JSON of a manifest of this kind."""
        return isinstance(text, str) and text.startswith(cls._prefix())

    @classmethod
    def of(cls, given: object, *, caller: str) -> "WeightUpdateManifest":
        """The manifest that is given as an object or as its JSON text.

        Raises:
            MalformedManifest: it is neither.
            WeightManifestValidationError: its text describes none that could be imported.

        """
        if isinstance(given, WeightUpdateManifest):
            return given
        if isinstance(given, str | bytes):
            return cls.from_json(given)
        raise MalformedManifest(
            f"{caller} got a {type(given).__name__}, expected a WeightUpdateManifest or its JSON. "
            "Pass what publish returned, or the text of its to_json(): of a file, "
            "Path(...).read_text()."
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, and nothing else: it must be canonical to the byte.

        White space behind it is ignored: printed lines and files end with some.

        Raises:
            MalformedManifest: not the canonical text of a manifest of this format.
            LayoutUnknown: compact text whose layout this process has not seen.
            WeightManifestValidationError: its other subclasses, one per reason.

        """
        found = cls._ascii(text)
        for kind in cls.__subclasses__():
            if kind.is_text(found):
                return kind.from_json(found)
        if not cls.is_text(found):
            cut = " and was cut off" if cls._prefix().startswith(found) else ""
            raise MalformedManifest(
                f"this is no {cls.KIND} of format {cls.FORMAT}: it starts with {found[:48]!r}"
                f"{cut}. Send what to_json() gave, as it is (of a file its text, "
                "Path(...).read_text()), with the same rl_bridge release on both sides."
            )
        at = len(cls._prefix())
        header, end = decode_json(found, at, has_long_strings=len(found) > _LONG)
        if not isinstance(header, dict):
            raise MalformedManifest(f"the {cls.KIND}'s header is no JSON object. {RESEND}")
        try:
            manifest = cls.of_header(header, found[end:])
            # Compared with what this manifest writes, not only with the canonical form of what was
            # read: a loose number or a default that was left out would give one manifest two texts.
            for piece in manifest.header_pieces():
                if not found.startswith(piece, at):
                    at = -1
                    break
                at += len(piece)
        except RecursionError as error:
            # Just below the depth at which decoding fails, later steps do.
            raise MalformedManifest(f"the {cls.KIND} nests too deep. {RESEND}") from error
        if at != end:
            raise MalformedManifest(
                f"the {cls.KIND}'s header is not canonical JSON: it was rewritten. {RESEND}"
            )
        return manifest

    @classmethod
    def _ascii(cls, text: object) -> str:
        if not isinstance(text, str | bytes):
            given = type(text).__name__
            raise MalformedManifest(
                f"from_json got a {given}, expected a {cls.KIND}'s text. {RESEND}"
            )
        if type(text) is str and text.isascii():  # which takes no time
            return text.rstrip(_WHITE)
        try:
            ascii_text = text.decode("ascii") if isinstance(text, bytes) else text
            return ascii_text.encode("ascii").decode().rstrip(_WHITE)
        except UnicodeError as error:
            raise MalformedManifest(f"{cls.KIND} text is not ASCII: {error}. {RESEND}") from error

    @classmethod
    def of_header(cls, header: dict[str, JSONValue], rest: str) -> Self:
        """Make the manifest of what was read of its header, and the text behind it.

        Raises:
            WeightManifestValidationError: the subclass says what is wrong.

        """
        layout = cls._find_layout(header.pop("layout_digest", None), rest)
        expected = cls.model_fields.keys() - {cls.LAYOUT_FIELD} - cls.DERIVED
        if expected != header.keys():
            raise MalformedManifest(
                f"{cls.KIND} fields {sorted(expected - header.keys())} are missing, "
                f"{sorted(header.keys() - expected)} are unknown. {RESEND}"
            )
        if header["root"] == "":
            raise MalformedManifest(
                f"{cls.KIND} field root is missing: nothing ties the digests together. {RESEND}"
            )
        digits = header["digests"]
        cls._decode_fields(header, layout)
        manifest = cls(**header, **{cls.LAYOUT_FIELD: layout})
        manifest.__dict__[_DIGITS] = digits
        return manifest

    @classmethod
    def _decode_fields(cls, header: dict[str, JSONValue], layout: Any) -> None:
        """Give the header's fields the form that the model takes."""
        del layout
        header["digests"] = _decode_base64(header["digests"], f"{cls.KIND} field digests")

    @classmethod
    def _find_layout(cls, digest: JSONValue, rest: str) -> Layout:
        """Find the layout by its digest, or parse it from the text behind the header."""
        if not isinstance(digest, str):
            raise MalformedManifest(f"{cls.KIND} field layout_digest is missing. {RESEND}")
        known: Layout | None = cls.known_layouts.get(digest)
        if rest == "}":
            if known is None:
                raise LayoutUnknown(
                    f"the {cls.LAYOUT_TYPE.KIND} {digest} is unknown in this process. Send one "
                    f"full manifest of this run first: {cls.__name__}.to_json() with layout=True."
                )
            return known
        if not rest.startswith(_LAYOUT_KEY) or not rest.endswith("}"):
            raise MalformedManifest(
                f"after the {cls.KIND}'s header stands {rest[:32]!r}, expected its layout or the "
                f"end: it was changed or cut off. {RESEND}"
            )
        text = rest[len(_LAYOUT_KEY) : -1]
        found = text_digest(text)
        if found != digest:
            raise DigestMismatch(
                f"the {cls.LAYOUT_TYPE.KIND}'s digest is {found}, the {cls.KIND} names {digest}. "
                "It was altered: ask the publisher for it again."
            )
        if known is None:
            known = cls.known_layouts.add(cls.LAYOUT_TYPE.from_text(text))
        return known

    @model_validator(mode="wrap")
    @classmethod
    def _from_document(cls, value: Any, handler: Any) -> Any:
        # What `document` gives may come back through pydantic (a field of the user's own model).
        if not isinstance(value, Mapping) or "format" not in value:
            return handler(value)
        try:
            text = canonical_json(thaw(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise MalformedManifest(
                f"the {cls.KIND}'s document is no JSON value: {error}. {RESEND}"
            ) from error
        return cls.from_json(text)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with changed fields; unlike pydantic's own, the copy is validated."""
        del deep  # every part is immutable
        changes = dict(update or {})
        if changes.keys() & {"digests", self.LAYOUT_FIELD}:
            changes.setdefault("root", "")
        fields = {name: self.__dict__[name] for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})

    def __copy__(self) -> Self:
        return self  # every part is immutable

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickle as canonical JSON: a user's own multiprocessing queues may carry manifests."""
        return (type(self).from_json, (self.to_json(),))

    def __hash__(self) -> int:
        return hash((self.weight_version, self.root))

    @property
    def _summary(self) -> str:
        """What `repr` says beside the class: enough for one line of a log."""
        return (
            f"{self.transport} {self.tensor_count} tensors {self.total_nbytes} bytes "
            f"root={self.root[:12]} update={self.update_id[:8]}"
        )

    def __repr__(self) -> str:
        """Name the update on one line instead of printing every tensor."""
        return f"<{type(self).__name__} v{self.weight_version} {self._summary}>"

    __str__ = __repr__

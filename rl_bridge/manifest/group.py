"""`GroupManifest`: the record of one version that many ranks published together.

Its JSON has what an update's manifest has, in the same order: ``format``, ``header`` (small, new
for every version; in it the header of each rank's own manifest) and ``layout`` (large, the same for
a whole run, sent once).
"""

import base64
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Self

import xxhash
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
    model_validator,
)

from rl_bridge.errors import DigestMismatch, MalformedManifest, RanksDisagree
from rl_bridge.manifest.canonical import JSONValue, canonical_json, decode_json, freeze, thaw
from rl_bridge.manifest.coverage import WholeTensor
from rl_bridge.manifest.digest import DIGEST_NBYTES, text_digest
from rl_bridge.manifest.group_layout import KNOWN_GROUPS, GroupLayout
from rl_bridge.manifest.model import FORMAT as PART_FORMAT
from rl_bridge.manifest.model import LAYOUT_KEY, Envelope, WeightUpdateManifest
from rl_bridge.manifest.table import KNOWN_LAYOUTS

__all__ = ["FORMAT", "GroupManifest", "group_update_id"]

FORMAT = "rl_bridge.group/1"
_PREFIX = f'{{"format":"{FORMAT}","header":'
_ENVELOPE = Envelope(
    kind="group manifest",
    layout="group layout",
    maker="GroupManifest",
    known=KNOWN_GROUPS,
    read=GroupLayout.from_text,
)
_REMEDY = "Send GroupManifest.to_json() as it is."
_MAX_VERSION = 2**63 - 1

Identifier = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{32}$")]


def group_update_id(parts: Sequence[WeightUpdateManifest]) -> str:
    """The id of the update that these parts make."""
    return xxhash.xxh3_128_hexdigest("".join(part.update_id for part in parts).encode("ascii"))


class GroupManifest(BaseModel):
    """Immutable record of one version of an update group. Valid from birth.

    Attributes:
        update_id: follows from the parts' ids.
        group_id: the publisher id of rank 0: versions are ordered within one group.
        weight_version: the same on every rank.
        created_at: seconds since the epoch (wall clock, for people).
        metadata: the user's own JSON values.
        parts: manifest of each rank's own update, by rank.
        digests: 16 bytes per whole tensor, sorted by name (see `DigestPlan` for what each says).
        root: digest over all of them, 32 hexadecimal digits.
        layout: what the ranks hold; its coverage is proven.

    Raises:
        WeightManifestValidationError: the subclass says what is wrong.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", ignored_types=(cached_property,))

    update_id: Identifier
    group_id: Identifier
    weight_version: Annotated[StrictInt, Field(ge=0, le=_MAX_VERSION)]
    created_at: Annotated[StrictFloat, Field(allow_inf_nan=False)]
    metadata: Annotated[
        JSONValue, BeforeValidator(lambda value: freeze(value, where="metadata"))
    ] = Field(default_factory=dict)
    parts: tuple[InstanceOf[WeightUpdateManifest], ...]
    digests: StrictBytes
    root: StrictStr
    layout: InstanceOf[GroupLayout]

    def __init__(self, /, **fields: Any) -> None:
        """Validate `fields`; a wrong type is a `MalformedManifest`, not pydantic's own error."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "manifest"
            given = repr(first.get("input"))[:80]
            msg = f"group manifest field {where}: {first['msg']}, got {given}. {_REMEDY}"
            raise MalformedManifest(msg) from error

    @classmethod
    def build(
        cls,
        parts: Sequence[WeightUpdateManifest],
        layout: GroupLayout,
        blocks: Sequence[bytes | memoryview | None],
        *,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> Self:
        """Join the parts of one version.

        Args:
            parts: by rank.
            layout: of them.
            blocks: leaf list of each part, checked against its digests; None where it has none.
            metadata: JSON values of the user's own.

        Raises:
            RanksDisagree: on version, world size, or a replica's content.

        """
        digests = layout.digest_plan.compute([part.digests for part in parts], blocks)
        return cls(
            update_id=group_update_id(parts),
            group_id=parts[0].publisher_id,
            weight_version=parts[0].weight_version,
            created_at=parts[0].created_at,
            metadata=dict(metadata or {}),
            parts=tuple(parts),
            digests=digests,
            root=layout.root_plan.root(digests).hex(),
            layout=layout,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not isinstance(self.metadata, Mapping):
            msg = f"group manifest metadata is no mapping. {_REMEDY}"
            raise MalformedManifest(msg)
        self._check_parts()
        self._check_digests()
        return self

    def _check_parts(self) -> None:
        layout, world = self.layout, len(self.parts)
        if world != layout.world_size:
            msg = (
                f"version {self.weight_version}: the group has {world} parts, its layout is of "
                f"{layout.world_size} ranks. {_REMEDY}"
            )
            raise RanksDisagree(msg)
        for rank, part in enumerate(self.parts):
            mine = part.weight_layout
            found = (part.weight_version, mine.rank, mine.world_size)
            if found != (self.weight_version, rank, world):
                msg = (
                    f"rank {rank} of {world} ranks, version {self.weight_version}: its part is of "
                    f"version {found[0]}, rank {found[1]} of {found[2]}. Publish the same version "
                    "from every rank, by rank."
                )
                raise RanksDisagree(msg)
            if part.layout_digest != layout.tables[rank].digest:
                msg = (
                    f"rank {rank}: its part has the layout {part.layout_digest}, the group says "
                    f"{layout.tables[rank].digest}. {_REMEDY}"
                )
                raise DigestMismatch(msg)
        ids = {part.update_id for part in self.parts} | {part.publisher_id for part in self.parts}
        if len(ids) != 2 * world:
            msg = (
                f"version {self.weight_version}: two ranks' parts have the same id. Give each rank "
                "a bridge of its own."
            )
            raise RanksDisagree(msg)
        expected = (group_update_id(self.parts), self.parts[0].publisher_id)
        if (self.update_id, self.group_id) != expected:
            msg = (
                f"version {self.weight_version}: update {self.update_id} of group {self.group_id} "
                f"is not what its parts make, update {expected[0]} of group {expected[1]}. "
                f"{_REMEDY}"
            )
            raise DigestMismatch(msg)

    def _check_digests(self) -> None:
        layout = self.layout
        blocks = [part.digests for part in self.parts]
        name = f"version {self.weight_version}"
        root = layout.root_plan.root(self.digests).hex()
        if root != self.root:
            msg = (
                f"{name}: the group's root is {self.root}, its digests give {root}. It was "
                "altered: ask the publisher for it again."
            )
            raise DigestMismatch(msg)
        unequal = layout.digest_plan.unequal(blocks)
        if unequal:
            first = unequal[0]
            msg = (
                f"{name}: tensor {first.name!r} differs between rank {first.part} and rank "
                f"{first.other_part}, which hold the same range of it as replicas "
                f"({len(unequal)} such tensors). Make the ranks equal before publishing, or name "
                "the ranges that they really hold."
            )
            raise RanksDisagree(msg)
        wrong = layout.digest_plan.differing(blocks, self.digests)
        if wrong:
            tensor = layout.names[wrong[0]]
            msg = (
                f"{name}: the digest of tensor {tensor!r} is not what its parts make "
                f"({len(wrong)} such tensors). It was altered: ask the publisher for it again."
            )
            raise DigestMismatch(msg)

    @property
    def tensors(self) -> Mapping[str, WholeTensor]:
        """Name -> whole tensor."""
        return self.layout.wholes

    @property
    def tensor_count(self) -> int:
        """How many whole tensors."""
        return len(self.layout.names)

    @property
    def total_nbytes(self) -> int:
        """Bytes of the whole tensors."""
        return self.layout.total_nbytes

    @property
    def publisher_id(self) -> str:
        """Whose stream of versions it is of, by the name that an update's manifest has for it."""
        return self.group_id

    @property
    def world_size(self) -> int:
        """How many ranks published."""
        return len(self.parts)

    @property
    def layout_digest(self) -> str:
        """Name of the layout part."""
        return self.layout.digest

    @property
    def is_unsharded_root(self) -> bool:
        """Whether `root` is the root that the same weights have in one unsharded update."""
        return self.layout.digest_plan.is_unsharded

    def whole_digest(self, name: str) -> bytes | None:
        """The digest that a tensor has unsharded; None where only its assembly would tell."""
        place = self.layout.places[name]
        if self.layout.digest_plan.kinds[place] == "cut":
            return None
        return self.digests[place * DIGEST_NBYTES : (place + 1) * DIGEST_NBYTES]

    # ---- JSON -----------------------------------------------------------------------------------

    def header(self) -> dict[str, JSONValue]:
        """Plain JSON form of the update part."""
        return {
            **self._header_but(),
            "digests": base64.b64encode(self.digests).decode("ascii"),
            "parts": [part.header() for part in self.parts],
        }

    def _header_but(self) -> dict[str, JSONValue]:
        """It without what is long: the digests, and the parts."""
        return {
            "created_at": self.created_at,
            "group_id": self.group_id,
            "layout_digest": self.layout_digest,
            "metadata": thaw(self.metadata),
            "root": self.root,
            "update_id": self.update_id,
            "weight_version": self.weight_version,
        }

    @cached_property
    def header_digest(self) -> bytes:
        """16 bytes over the update part: each rank keeps them beside the bytes of its own part."""
        # The roots stand for the digests, which they cover: they are long.
        short = {**self._header_but(), "parts": [part.header_digest.hex() for part in self.parts]}
        return bytes.fromhex(text_digest(canonical_json(short)))

    def to_json(self, *, layout: bool = True) -> str:
        """Canonical JSON text, ASCII.

        Args:
            layout: False leaves the layout part out. The reader must then have seen the layout
                already, through an earlier full manifest of the same run.

        """
        head = f"{_PREFIX}{canonical_json(self.header())}"
        return f"{head}{LAYOUT_KEY}{self.layout.text}}}" if layout else f"{head}}}"

    @classmethod
    def is_text(cls, text: object) -> bool:
        """Whether `text` begins like a group manifest's JSON."""
        return isinstance(text, str) and text.startswith(_PREFIX)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, and nothing else: it must be canonical to the byte.

        Raises:
            MalformedManifest: not the canonical text of a group manifest of this format.
            LayoutUnknown: compact text whose layout this process has not seen.
            WeightManifestValidationError: its other subclasses, one per reason.

        """
        return _ENVELOPE.read_by(cls._read, text)

    @classmethod
    def _read(cls, text: str) -> Self:
        if not cls.is_text(text):
            msg = (
                f"this is no group manifest of format {FORMAT}: it starts with {text[:48]!r}. "
                f"{_REMEDY} Both sides need the same rl_bridge release."
            )
            raise MalformedManifest(msg)
        header, end = decode_json(text, len(_PREFIX))
        known = (cls.model_fields.keys() - {"layout"}) | {"layout_digest"}
        if not isinstance(header, dict) or header.keys() != known:
            msg = f"the group manifest's header has not the fields {sorted(known)}. {_REMEDY}"
            raise MalformedManifest(msg)
        layout = _ENVELOPE.layout_of(header.pop("layout_digest"), text[end:])
        header["parts"] = _read_parts(header["parts"], layout)
        header["digests"] = _ENVELOPE.digests_of(header["digests"])
        manifest = cls(**header, layout=layout)
        if canonical_json(manifest.header()) != text[len(_PREFIX) : end]:
            msg = f"the group manifest's header is not canonical JSON: it was rewritten. {_REMEDY}"
            raise MalformedManifest(msg)
        return manifest

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
            f"<GroupManifest v{self.weight_version} {self.world_size} ranks "
            f"{self.tensor_count} tensors {self.total_nbytes} bytes "
            f"root={self.root[:12]} update={self.update_id[:8]}>"
        )

    __str__ = __repr__


def _read_parts(headers: JSONValue, layout: GroupLayout) -> tuple[WeightUpdateManifest, ...]:
    if not isinstance(headers, list) or len(headers) != layout.world_size:
        msg = f"group manifest field parts is no list of {layout.world_size} headers. {_REMEDY}"
        raise MalformedManifest(msg)
    parts = []
    for header, table in zip(headers, layout.tables, strict=True):
        KNOWN_LAYOUTS.add(table)  # there are fewer kept than a large group has
        text = f'{{"format":"{PART_FORMAT}","header":{canonical_json(header)}}}'
        parts.append(WeightUpdateManifest.from_json(text))
    return tuple(parts)

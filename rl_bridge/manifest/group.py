"""`GroupManifest`: the record of one version that many ranks published together.

It is a `WeightUpdateManifest` whose names, shapes and digests are those of the whole tensors, and
whose bytes lie in several sealed parts: whatever takes a manifest takes either. Its JSON has the
same three parts, in the same order: ``format``, ``header`` (small, new for every version; in it the
header of each rank's own manifest) and ``layout`` (large, the same for a whole run, sent once).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import xxhash
from pydantic import InstanceOf

from rl_bridge.errors import DigestMismatch, MalformedManifest, RanksDisagree
from rl_bridge.manifest.canonical import RESEND, JSONValue, canonical_json
from rl_bridge.manifest.group_layout import GroupLayout
from rl_bridge.manifest.model import LayoutCache, WeightUpdateManifest
from rl_bridge.manifest.table import Layout, TensorTable

GROUP = "group"
"""What stands in place of a transport where each part has its own."""


def group_update_id(parts: Iterable[str]) -> str:
    """The id of the update that parts make, of their ids, by rank."""
    return xxhash.xxh3_128_hexdigest("".join(parts).encode("ascii"))


class GroupManifest(WeightUpdateManifest):
    """Immutable record of one version of an update group.

    Attributes:
        update_id: follows from the parts' ids.
        publisher_id: that of rank 0: versions are ordered within one group.
        source_worker: that of rank 0; `source_rank` is 0.
        weight_version: the same on every rank.
        transport: ``group``: each part says by which transport it travels.
        created_at: seconds since the epoch (wall clock, for people).
        metadata: the user's own JSON values.
        parts: manifest of each rank's own update, by rank.
        digests: 16 bytes per whole tensor, sorted by name (`DigestPlan` says what each means).
        root: digest over all of them, 32 hexadecimal digits.
        layout: what the ranks hold; its coverage is proven.
        table: the whole tensors, as one publisher would lay them out.

    Raises:
        WeightManifestValidationError: the subclass says what is wrong.

    """

    FORMAT: ClassVar[str] = "rl_bridge.group/3"
    KIND: ClassVar[str] = "group manifest"
    LAYOUT_FIELD: ClassVar[str] = "layout"
    LAYOUT_TYPE: ClassVar[type[Layout]] = GroupLayout
    DERIVED: ClassVar[frozenset[str]] = frozenset(
        {"columns", "handle", "source_rank", "source_worker", "table", "transport"}
    )
    known_layouts: ClassVar[LayoutCache[GroupLayout]] = LayoutCache(8)

    parts: tuple[InstanceOf[WeightUpdateManifest], ...]
    layout: InstanceOf[GroupLayout]

    def __init__(self, /, **fields: Any) -> None:
        """Validate `fields`; those that follow from others need not be given."""
        parts, layout = fields.get("parts"), fields.get("layout")
        if isinstance(parts, tuple) and parts and isinstance(parts[0], WeightUpdateManifest):
            fields["source_worker"] = parts[0].source_worker
        if isinstance(layout, GroupLayout):
            fields["table"] = layout.table
        derived = {"source_rank": 0, "transport": GROUP, "handle": {}, "columns": ""}
        super().__init__(**{**fields, **derived})

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
            update_id=group_update_id(part.update_id for part in parts),
            publisher_id=parts[0].publisher_id,
            weight_version=parts[0].weight_version,
            created_at=parts[0].created_at,
            metadata=dict(metadata or {}),
            parts=tuple(parts),
            digests=digests,
            layout=layout,
        )

    def _check_fields(self) -> None:
        self._check_parts()
        self._check_digests()

    def _check_parts(self) -> None:
        layout, world = self.layout, len(self.parts)
        if world != layout.world_size:
            raise RanksDisagree(
                f"version {self.weight_version}: the group has {world} parts, its layout is of "
                f"{layout.world_size} ranks. {RESEND}"
            )
        for rank, part in enumerate(self.parts):
            mine = part.weight_layout
            if mine.kind != self._kind:
                raise RanksDisagree(
                    f"version {self.weight_version}: the part of rank {rank} is of kind "
                    f"{mine.kind!r}, that of rank 0 of kind {self._kind!r}. Publish the same "
                    "adapter from every rank, or the model's weights."
                )
            specs = [one.adapter for one in (self.parts[0], part)]
            if len({spec.digest for spec in specs if spec is not None}) > 1:
                raise RanksDisagree(
                    f"version {self.weight_version}: the part of rank {rank} is of adapter "
                    f"{specs[1]!r:.200}, that of rank 0 of {specs[0]!r:.200}. Publish the same "
                    "adapter, of the same configuration and scaling, from every rank."
                )
            found = (part.weight_version, mine.rank, mine.world_size)
            if found != (self.weight_version, rank, world):
                raise RanksDisagree(
                    f"rank {rank} of {world} ranks, version {self.weight_version}: its part is of "
                    f"version {found[0]}, rank {found[1]} of {found[2]}. Publish the same version "
                    "from every rank, by rank."
                )
            if part.layout_digest != layout.tables[rank].digest:
                raise DigestMismatch(
                    f"rank {rank}: its part has the layout {part.layout_digest}, the group says "
                    f"{layout.tables[rank].digest}. {RESEND}"
                )
        ids = {part.update_id for part in self.parts} | {part.publisher_id for part in self.parts}
        if len(ids) != 2 * world:
            raise RanksDisagree(
                f"version {self.weight_version}: two ranks' parts have the same id. Give each rank "
                "a bridge of its own."
            )
        expected = (
            group_update_id(part.update_id for part in self.parts),
            self.parts[0].publisher_id,
        )
        if (self.update_id, self.publisher_id) != expected:
            raise DigestMismatch(
                f"version {self.weight_version}: update {self.update_id} of {self.publisher_id} "
                f"is not what its parts make, update {expected[0]} of {expected[1]}. "
                f"{RESEND}"
            )

    def _check_digests(self) -> None:
        layout = self.layout
        blocks = [part.digests for part in self.parts]
        name = f"version {self.weight_version}"
        unequal = layout.digest_plan.unequal(blocks)
        if unequal:
            first = unequal[0]
            raise RanksDisagree(
                f"{name}: tensor {first.name!r} differs between rank {first.part} and rank "
                f"{first.other_part}, which hold the same range of it as replicas "
                f"({len(unequal)} such tensors). Make the ranks equal before publishing, or name "
                "the ranges that they really hold."
            )
        wrong = layout.digest_plan.differing(blocks, self.digests)
        if wrong:
            tensor = layout.names[wrong[0]]
            raise DigestMismatch(
                f"{name}: the digest of tensor {tensor!r} is not what its parts make "
                f"({len(wrong)} such tensors). It was altered: ask the publisher for it again."
            )

    @property
    def _kind(self) -> str:
        return self.parts[0].weight_layout.kind

    @property
    def world_size(self) -> int:
        """How many ranks published."""
        return len(self.parts)

    @property
    def is_unsharded_root(self) -> bool:
        """Whether `root` is the root that the same weights have in one unsharded update."""
        return "cut" not in self.layout.digest_plan.kinds

    def _header_but_digests(self) -> dict[str, JSONValue]:
        return {
            "created_at": self.created_at,
            "layout_digest": self.layout_digest,
            "metadata": self.metadata,
            "publisher_id": self.publisher_id,
            "root": self.root,
            "update_id": self.update_id,
            "weight_version": self.weight_version,
        }

    def header(self) -> dict[str, JSONValue]:
        """See `WeightUpdateManifest`."""
        return {**super().header(), "parts": [part.header() for part in self.parts]}

    def header_pieces(self) -> Iterator[str]:
        """See `WeightUpdateManifest`."""
        *before, last = super().header_pieces()
        at = last.rindex(',"publisher_id":')  # behind it no value is the user's own
        yield from before
        yield f'{last[:at]},"parts":['
        for place, part in enumerate(self.parts):
            yield from ("," * bool(place), *part.header_pieces())
        yield f"]{last[at:]}"

    @property
    def header_digest(self) -> bytes:
        """16 bytes over the update part: each rank keeps them beside the bytes of its own part."""
        # The roots stand for the digests, which they cover: they are long.
        digests = [part.header_digest.hex() for part in self.parts]
        text = canonical_json({**self._header_but_digests(), "parts": digests})
        return xxhash.xxh3_128_digest(text.encode("ascii"))

    @classmethod
    def _decode_fields(cls, header: dict[str, JSONValue], layout: GroupLayout) -> None:
        super()._decode_fields(header, layout)
        headers = header["parts"]
        if not isinstance(headers, list) or len(headers) != layout.world_size:
            raise MalformedManifest(
                f"{cls.KIND} field parts is no list of {layout.world_size} headers. {RESEND}"
            )
        header["parts"] = tuple(map(_part, headers, layout.tables))

    @property
    def _summary(self) -> str:
        return (
            f"{self.world_size} ranks {self.tensor_count} tensors {self.total_nbytes} bytes "
            f"root={self.root[:12]} update={self.update_id[:8]}"
        )


def _part(header: JSONValue, table: TensorTable) -> WeightUpdateManifest:
    if not isinstance(header, dict):
        raise MalformedManifest(f"the header of a group's part is no JSON object. {RESEND}")
    # Added for each part: a large group has more layouts than are kept.
    WeightUpdateManifest.known_layouts.add(table)
    return WeightUpdateManifest.of_header(header, "}")

"""What the ranks of an update group tell each other: JSON, read strictly, judged alike by all."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from rl_bridge.bridge.acknowledgement import describe
from rl_bridge.errors import (
    GroupAborted,
    IncompleteCoverage,
    MalformedManifest,
    RanksDisagree,
    ShapeMismatch,
    VersionNotMonotonic,
    WeightManifestValidationError,
)
from rl_bridge.manifest.canonical import canonical_json, decode_json
from rl_bridge.manifest.collector import collector_paused
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.placement import Piece, Placement
from rl_bridge.memory.leaf_packing import checked_block

__all__ = [
    "Hello",
    "Part",
    "check_hellos",
    "check_placements",
    "placements_from",
    "placements_text",
    "read_messages",
]

_REMEDY = "Use the same rl_bridge release on every rank."
_Numbers = tuple[StrictInt, ...]


class _Message(BaseModel):
    """What a rank says in one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, body: Mapping[str, Any], rank: int) -> Self:
        """Read what `rank` said.

        Raises:
            GroupAborted: it is something else.

        """
        try:
            return cls(**body)
        except (ValidationError, TypeError) as error:
            msg = (
                f"rank {rank} said something that is no {cls.__name__.lower()}: "
                f"{str(error)[:400]}. {_REMEDY}"
            )
            raise GroupAborted(msg, (rank,)) from error


class Hello(_Message):
    """What a rank is about to do.

    Attributes:
        rank: which one it is.
        world_size: how many it knows of.
        weight_version: to publish.
        last_version: that it used up.
        placements: name of its placements, by their digest.
        known: name of all ranks' placements that it knows already.

    """

    rank: StrictInt
    world_size: StrictInt
    weight_version: StrictInt
    last_version: StrictInt | None
    placements: StrictStr
    known: StrictStr | None


class Part(_Message):
    """What a rank published.

    Attributes:
        part: text of its manifest; compact where the others know its layout.
        leaves: its leaf list as base64, where a digest may need it.

    """

    part: StrictStr
    leaves: StrictStr | None

    def opened(self, rank: int) -> tuple[WeightUpdateManifest, bytes | None]:
        """The manifest, and the leaf list that makes its digests.

        Raises:
            GroupAborted: one of them is none.

        """
        try:
            part = WeightUpdateManifest.from_json(self.part)
            if self.leaves is None:
                return part, None
            return part, checked_block(part, base64.b64decode(self.leaves, validate=True))
        except (WeightManifestValidationError, ValueError) as error:
            msg = (
                f"the part of rank {rank} cannot be read: {describe(error)}. See to that rank, "
                "then publish a later version."
            )
            raise GroupAborted(msg, (rank,)) from error


def check_hellos(hellos: Sequence[Hello]) -> None:
    """Find out, before anything is published, whether the ranks are about to do the same.

    Raises:
        RanksDisagree: on the world size, their places in it, or the version.
        VersionNotMonotonic: some rank used the version already, or a later one.

    """
    world = len(hellos)
    for place, hello in enumerate(hellos):
        if (hello.rank, hello.world_size) != (place, world):
            msg = (
                f"the group has {world} ranks, and rank {place} says that it is rank {hello.rank} "
                f"of {hello.world_size}. Give every rank the same world_size and its own rank."
            )
            raise RanksDisagree(msg)
    versions = {hello.weight_version for hello in hellos}
    if len(versions) > 1:
        said = {f"rank {hello.rank}": hello.weight_version for hello in hellos}
        msg = (
            f"the ranks publish different versions: {said}. Publish the same weight_version from "
            "every rank."
        )
        raise RanksDisagree(msg)
    version = hellos[0].weight_version
    last = max(hellos, key=lambda hello: -1 if hello.last_version is None else hello.last_version)
    if last.last_version is not None and version <= last.last_version:
        msg = (
            f"weight_version must increase monotonically on every rank: got {version}, rank "
            f"{last.rank} used {last.last_version} already. Publish {last.last_version + 1} or "
            "later, from every rank."
        )
        raise VersionNotMonotonic(msg)


def check_placements(
    rank: int,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    placements: Mapping[str, Placement],
) -> None:
    """Compare a rank's placements with the tensors (name -> dtype, shape) that it has.

    Raises:
        IncompleteCoverage: a tensor without a placement, or the other way round.
        ShapeMismatch: a placement of another dtype or shape.

    """
    strangers = sorted(tensors.keys() ^ placements.keys())
    if strangers:
        lacks = "no placement" if strangers[0] in tensors else "a placement and no content"
        msg = (
            f"rank {rank}: tensor {strangers[0]!r} has {lacks} ({len(strangers)} such tensors). "
            "Give one placement for each tensor that the rank publishes."
        )
        raise IncompleteCoverage(msg)
    for name, (dtype, shape) in tensors.items():
        placement = placements[name]
        if (placement.dtype, tuple(placement.shape)) != (dtype, shape):
            msg = (
                f"rank {rank}: tensor {name!r} is {dtype}{list(shape)}, its placement says "
                f"{placement.dtype}{list(placement.shape)}. Take both from the same tensor."
            )
            raise ShapeMismatch(msg)


# ---- placements as text -------------------------------------------------------------------------


def placements_text(placements: Mapping[str, Placement]) -> str:
    """Canonical JSON of a rank's placements.

    Raises:
        MalformedManifest: numbers that are none.

    """
    try:
        return canonical_json(
            {
                name: [
                    one.dtype,
                    tuple(one.shape),
                    [
                        [
                            *(p.name, tuple(p.global_shape), tuple(p.offset), tuple(p.shape)),
                            *(tuple(p.local_offset), p.is_flat, p.replica),
                        ]
                        for p in one.pieces
                    ],
                ]
                for name, one in placements.items()
            }
        )
    except (TypeError, ValueError, AttributeError) as error:
        msg = (
            f"the placements cannot travel: {error}. Give a mapping of names to Placement, with "
            "plain ints."
        )
        raise MalformedManifest(msg) from error


_PieceRow = tuple[StrictStr, _Numbers, _Numbers, _Numbers, _Numbers, StrictBool, StrictInt]
_DOCUMENT = TypeAdapter(dict[str, tuple[StrictStr, _Numbers, list[_PieceRow]]])


def placements_from(text: str, rank: int, digest: str) -> dict[str, Placement]:
    """Read what `placements_text` wrote on `rank`, which called it `digest`.

    Raises:
        GroupAborted: it is none.

    """
    if not text.isascii() or text_digest(text) != digest:
        msg = f"rank {rank} named other placements than it sent. {_REMEDY}"
        raise GroupAborted(msg, (rank,))
    try:
        with collector_paused():
            document = _DOCUMENT.validate_python(decode_json(text)[0])
            return {
                name: Placement(dtype=dtype, shape=shape, pieces=tuple(map(_piece, rows)))
                for name, (dtype, shape, rows) in document.items()
            }
    except (ValidationError, MalformedManifest) as error:
        msg = f"the placements of rank {rank} cannot be read: {str(error)[:400]}. {_REMEDY}"
        raise GroupAborted(msg, (rank,)) from error


def _piece(row: Any) -> Piece:
    name, global_shape, offset, shape, local_offset, is_flat, replica = row
    return Piece(
        name=name,
        global_shape=global_shape,
        offset=offset,
        shape=shape,
        local_offset=local_offset,
        is_flat=is_flat,
        replica=replica,
    )


# ---- one step -----------------------------------------------------------------------------------


def read_messages(step: str, payloads: Sequence[bytes]) -> list[dict[str, Any]]:
    """Read what every rank said in a step.

    Raises:
        GroupAborted: one of them failed, and says how; or what it said is no JSON object.

    """
    found: list[dict[str, Any]] = []
    failed: dict[int, str] = {}
    for rank, payload in enumerate(payloads):
        try:
            body = json.loads(payload)
        except (ValueError, RecursionError) as error:
            body = {"error": f"what it sent is no JSON: {error}"}
        if not isinstance(body, dict):
            body = {"error": f"what it sent is a {type(body).__name__}"}
        if "error" in body:
            failed[rank] = str(body["error"])
        found.append(body)
    if failed:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
        msg = (
            f"no rank publishes, since in step {step!r} some failed: {reasons}. Every rank has "
            "withdrawn its part. Mend the cause, then publish a later version."
        )
        raise GroupAborted(msg, tuple(failed))
    return found

"""`GroupPublisher`: many ranks publish one version together, all of them or none.

Each rank publishes what it holds through a bridge of its own; nothing is gathered. The steps:

1. hello: version, world size, placements. Before a byte moves, every rank knows that versions grow
   everywhere and that the ranges cover every tensor.
2. parts: each rank publishes its part, and sends its manifest.
3. votes: each rank merges the manifests into the group's, and sends its digest.
4. verdict: the first verdict in the exchange's store holds for all ranks.

If a rank fails or does not come in time, every other rank withdraws its part and names that rank.
The messages are JSON, read strictly, and all ranks judge them alike.
"""

import base64
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from rl_bridge.bridge.arguments import update_id_of
from rl_bridge.bridge.publisher import ConsumerReport, checked_keep, checked_version
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    ChecksumMismatch,
    GroupAborted,
    MalformedManifest,
    RanksDisagree,
    VersionNotMonotonic,
    WeightManifestValidationError,
    describe,
)
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.interrupts import deferred_interrupts
from rl_bridge.manifest.adapter import AdapterSpec
from rl_bridge.manifest.canonical import JSONValue, canonical_json, decode_json, thaw
from rl_bridge.manifest.compare import Watch
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout, require_placed
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Piece, Placement, WeightLayout
from rl_bridge.manifest.table import collector_paused
from rl_bridge.memory.packing import checked_block, checked_dtype, dtype_name, wire_dtype
from rl_bridge.memory.tensors import TensorFacts
from rl_bridge.trainers.base import WeightExtractor
from rl_bridge.trainers.chunks import wire_name
from rl_bridge.trainers.state_dict import Source, named_tensors, trainable_names
from rl_bridge.transports.base import checked_seconds

_LOG = logging.getLogger(__name__)
_COMMIT = "commit"
_REMEDY = "Use the same rl_bridge release on every rank."
_Numbers = tuple[StrictInt, ...]


class _Message(BaseModel):
    """A rank's message in one step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, body: Mapping[str, Any], rank: int) -> Self:
        """Read the message of `rank`."""
        try:
            return cls(**body)
        except (ValidationError, TypeError) as error:
            raise GroupAborted(
                f"rank {rank} sent something that is no {cls.__name__.lower()}: "
                f"{str(error)[:400]}. {_REMEDY}",
                (rank,),
            ) from error


class Hello(_Message):
    """What a rank is about to publish.

    Attributes:
        rank: its rank.
        world_size: number of ranks, as far as it knows.
        weight_version: to publish; None: it was not told one.
        last_version: the last version that it used.
        next_version: the one that it would use then, were it alone.
        placements: digest of its placements.
        known: digest of all ranks' placements that it knows already.

    """

    rank: StrictInt
    world_size: StrictInt
    weight_version: StrictInt | None
    last_version: StrictInt | None
    next_version: StrictInt | None
    placements: StrictStr
    known: StrictStr | None


class Part(_Message):
    """The part that a rank published.

    Attributes:
        part: text of its manifest; compact if the others know its layout.
        leaves: its leaf list as base64, if a digest may need it.

    """

    part: StrictStr
    leaves: StrictStr | None

    def opened(self, rank: int) -> tuple[WeightUpdateManifest, bytes | None]:
        """The manifest, and the leaf list that makes its digests."""
        try:
            part = WeightUpdateManifest.from_json(self.part)
            if self.leaves is None:
                return part, None
            return part, checked_block(part, base64.b64decode(self.leaves, validate=True))
        except (WeightManifestValidationError, ValueError) as error:
            raise GroupAborted(
                f"the part of rank {rank} cannot be read: {describe(error)}. See to that rank, "
                "then publish a later version.",
                (rank,),
            ) from error


def check_hellos(hellos: Sequence[Hello]) -> int:
    """Check, before anything is published, that all ranks publish the same version.

    Returns:
        That version. Where no rank was told one, it is the first that none of them has used.

    """
    world = len(hellos)
    for place, hello in enumerate(hellos):
        if (hello.rank, hello.world_size) != (place, world):
            raise RanksDisagree(
                f"the group has {world} ranks, and rank {place} says that it is rank {hello.rank} "
                f"of {hello.world_size}. Give every rank the same world_size and its own rank."
            )
    versions = {hello.weight_version for hello in hellos}
    if len(versions) > 1:
        said = {f"rank {hello.rank}": hello.weight_version for hello in hellos}
        raise RanksDisagree(
            f"the ranks publish different versions: {said}. Publish the same weight_version from "
            "every rank, or none from all of them: then they count on together."
        )
    version = hellos[0].weight_version
    if version is None:
        return max(hello.next_version or 0 for hello in hellos)
    last = max(hellos, key=lambda hello: -1 if hello.last_version is None else hello.last_version)
    if last.last_version is not None and version <= last.last_version:
        raise VersionNotMonotonic(
            f"weight_version must increase monotonically on every rank: got {version}, rank "
            f"{last.rank} used {last.last_version} already. Publish {last.last_version + 1} or "
            "later, from every rank."
        )
    return version


# ---- placements as text -------------------------------------------------------------------------


_PIECE_FIELDS = tuple(one.name for one in fields(Piece))
_piece_row = attrgetter(*_PIECE_FIELDS)


def placements_text(placements: Mapping[str, Placement]) -> str:
    """Canonical JSON of a rank's placements."""
    try:
        return canonical_json(
            {
                name: [one.dtype, one.shape, list(map(_piece_row, one.pieces))]
                for name, one in placements.items()
            }
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise MalformedManifest(
            f"the placements cannot travel: {error}. Give a mapping of names to Placement, with "
            "plain ints."
        ) from error


_PieceRow = tuple[StrictStr, _Numbers, _Numbers, _Numbers, _Numbers, StrictBool, StrictInt]
_DOCUMENT = TypeAdapter(dict[str, tuple[StrictStr, _Numbers, list[_PieceRow]]])


def placements_from(text: str, rank: int, digest: str) -> dict[str, Placement]:
    """Read what `placements_text` wrote on `rank`, whose hello had this `digest`."""
    if not text.isascii() or text_digest(text) != digest:
        raise GroupAborted(f"rank {rank} named other placements than it sent. {_REMEDY}", (rank,))
    try:
        with collector_paused():
            document = _DOCUMENT.validate_python(decode_json(text)[0])
            return {
                name: Placement(dtype=dtype, shape=shape, pieces=tuple(map(_piece, rows)))
                for name, (dtype, shape, rows) in document.items()
            }
    except (ValidationError, MalformedManifest) as error:
        raise GroupAborted(
            f"the placements of rank {rank} cannot be read: {str(error)[:400]}. {_REMEDY}", (rank,)
        ) from error


def _piece(row: tuple[Any, ...]) -> Piece:
    return Piece(**dict(zip(_PIECE_FIELDS, row, strict=True)))


# ---- one step -----------------------------------------------------------------------------------


def read_messages(step: str, payloads: Sequence[bytes]) -> list[dict[str, Any]]:
    """Read the messages of all ranks in a step."""
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
        raise GroupAborted(
            f"in step {step!r} some ranks failed: {reasons}. Mend the cause, then publish a later "
            "version.",
            tuple(failed),
        )
    return found


# ---- the publisher ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One publication on this rank, and how far it got."""

    give: Callable[[], tuple[Source, Mapping[str, Placement]]]
    version: int | None  # None until the ranks have agreed, if they were not told one
    metadata: Mapping[str, JSONValue]
    trainable: Iterable[str] | None = None
    adapter: AdapterSpec | None = None
    dtype: torch.dtype | None = None
    keep: int | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    flags: frozenset[str] | None = None
    text: str = ""
    part: WeightUpdateManifest | None = None
    voted: GroupManifest | None = None


class _Mine(NamedTuple):
    """A rank's placements, and the tensors that were last compared with them."""

    placements: Mapping[str, Placement]
    dtype: torch.dtype | None
    text: str
    tensors: tuple[tuple[str, ...], TensorFacts] | None = None  # as they were published

    def is_of(self, placements: Mapping[str, Placement], dtype: torch.dtype | None) -> bool:
        """Whether these are the placements, of tensors that travel in that dtype."""
        return self.dtype is dtype and self.placements == placements

    def has_placed(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors that were compared with the placements."""
        if self.tensors is None:
            return False
        names, facts = self.tensors
        return names == tuple(tensors) and facts.hold(list(tensors.values()))


class GroupPublisher:
    """One rank of an update group. Every rank makes one, and all call `publish` together.

    One publication at a time: a rank takes part in the next one when this one is over.
    """

    def __init__(
        self, bridge: TensorBridge, exchange: GroupExchange, *, timeout_s: float = 120.0
    ) -> None:
        """Publish through `bridge`.

        Args:
            bridge: of this rank; any transport. The caller closes it when the run ends.
            exchange: how the ranks talk.
            timeout_s: how long this rank waits for the others in one step, their copying included.

        Raises:
            ValueError: a limit that is not above 0.

        """
        self.bridge = bridge
        self._exchange = exchange
        self._timeout_s = checked_seconds("timeout_s", timeout_s)
        self._mine: _Mine | None = None  # of the last version
        # The placements of all ranks, and the digest by which the ranks name them.
        self._known: str | None = None
        self._placements: list[dict[str, Placement]] = []
        self._layout: GroupLayout | None = None
        self._watch = Watch(bridge.suspicious)

    @deferred_interrupts()
    def publish(
        self,
        source: Source,
        placements: Mapping[str, Placement] | None = None,
        *,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
        trainable: Iterable[str] | None = None,
        adapter: AdapterSpec | None = None,
        dtype: torch.dtype | None = None,
        keep: int | None = None,
    ) -> GroupManifest:
        """Publish this rank's part of one version, when all others publish theirs.

        Args:
            source: this rank's own tensors: an extractor, or what `TensorBridge.publish` takes.
            placements: where each of them lies in the whole tensors; an extractor knows it. Their
                dtypes are those of the tensors as they are given.
            weight_version: the same on every rank, above what any of them used before. None, on all
                of them, takes the first that none of them has used: the ranks agree on it.
            metadata: JSON values of your own; the group's are those of rank 0.
            trainable: as for `TensorBridge.publish`.
            adapter: what belongs to the tensors if they are an adapter; an extractor knows it.
            dtype: as for `TensorBridge.publish`; the same on every rank.
            keep: as for `TensorBridge.publish`: each rank releases its own older parts, when no
                consumer holds them. A version of which one part is released cannot be imported.

        Returns:
            The group's manifest, the same on every rank.

        Raises:
            IncompleteCoverage: a range of a tensor is missing or doubled; nothing was published.
            RanksDisagree: on version, world size, dtypes, shapes, or the content of replicas.
            VersionNotMonotonic: a rank used this version already.
            GroupAborted: a rank failed, died or was late; no rank's part is published.
            SuspiciousUpdate: as `TensorBridge.publish`, judged of the whole group.
            TypeError: placements that are no mapping.
            Exception: this rank's own failure, unchanged; the others get `GroupAborted`.

        """
        given: object = placements
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"placements={given!r}: expected a mapping of names to Placement, or None for an "
                "extractor. A version is given by its name: weight_version=..."
            )
        return self._publish(
            _Run(
                lambda: (source, placements or {}),
                weight_version,
                metadata or {},
                trainable,
                adapter,
                dtype,
                keep,
            )
        )

    @deferred_interrupts()
    def publish_from(
        self,
        give: Callable[[], tuple[Source, Mapping[str, Placement]]],
        *,
        weight_version: int | None = None,
        metadata: Mapping[str, JSONValue] | None = None,
    ) -> GroupManifest:
        """Publish what a function gives: if it raises, the other ranks are told at once.

        Args:
            give: gives source and placements of `publish`.
            weight_version: see `publish`.
            metadata: see `publish`.

        Raises:
            WeightBridgeError: what `publish` raises.
            Exception: what `give` raises, unchanged; the others get `GroupAborted`.

        """
        return self._publish(_Run(give, weight_version, metadata or {}))

    def _publish(self, run: _Run) -> GroupManifest:
        self._exchange.begin()
        try:
            self._agree(run)
            self._commit(run)
        except BaseException as error:
            # The other ranks may know another layout now: the next publication sends all of it.
            self._known, self._layout = None, None
            # Proposing a failure tells it to the other ranks. If this rank had voted, they may have
            # committed already: then the version stands.
            if self._has_ended(error) or run.voted is None:
                if run.part is not None:
                    self.bridge.release(run.part.update_id)
                    error.add_note("rl_bridge: this rank has withdrawn its part.")
                raise
            self._remember(run)
            if not isinstance(error, Exception):
                raise
        self._remember(run)
        assert run.voted is not None
        return run.voted

    def release(self, update_id: str | GroupManifest) -> None:
        """Release this rank's part of an update. Idempotent; unknown ids are ignored.

        Raises:
            MalformedManifest: what is given names no update.

        """
        self.bridge.release(update_id)

    def consumers(self, update_id: str | GroupManifest) -> list[ConsumerReport]:
        """Reports of consumers about an update; each consumer reports to every rank.

        Raises:
            UnknownUpdate: it was not published here.

        """
        asked = update_id_of(update_id, caller="consumers")
        publisher = self.bridge.publisher
        publisher.manifest(publisher.own_id(asked))  # raises if it is unknown
        return self.bridge.holders(asked)

    def assembled_roots(self, update_id: str | GroupManifest) -> dict[str, str]:
        """Wanted layout -> root of what its consumers assembled and acknowledged.

        A tensor that is not cut at leaf boundaries has no known digest of the whole: this compares
        what several consumers assembled of it.

        Raises:
            ChecksumMismatch: consumers that wanted the same have assembled different bytes.
            UnknownUpdate: the update was not published here.

        """
        roots: dict[str, tuple[str, ConsumerReport]] = {}
        for report in self.consumers(update_id):
            proof = report.proof or {}
            wanted, root = proof.get("wanted"), proof.get("assembled_root")
            if not isinstance(wanted, str) or not isinstance(root, str):
                continue
            known, first = roots.setdefault(wanted, (root, report))
            if known != root:
                raise ChecksumMismatch(
                    f"version {report.weight_version}: {first.worker!r} rank {first.rank} and "
                    f"{report.worker!r} rank {report.rank} wanted the same and assembled different "
                    f"bytes, root {known} and {root}. Stop the engines, and publish again."
                )
        return {wanted: root for wanted, (root, _) in roots.items()}

    # ---- the steps ------------------------------------------------------------------------------

    def _agree(self, run: _Run) -> None:
        bodies = self._share("hello", lambda: self._hello(run))
        hellos = [Hello.read(body, rank) for rank, body in enumerate(bodies)]
        run.version = check_hellos(hellos)
        known = text_digest(",".join(one.placements for one in hellos))
        if {one.known for one in hellos} != {known}:
            self._known, self._layout = None, None
            bodies = self._share("placements", lambda: {"placements": run.text})
            self._placements = [
                placements_from(str(body.get("placements")), rank, hellos[rank].placements)
                for rank, body in enumerate(bodies)
            ]
            prove_coverage(held_pieces(self._placements))
        parts = self._share("parts", lambda: self._publish_part(run))
        votes = self._share("votes", lambda: self._vote(run, parts))
        if any(one != votes[0] for one in votes):
            raise RanksDisagree(
                f"version {run.version}: the ranks made different groups of the same parts: "
                f"{votes}. Use the same rl_bridge release on every rank."
            )
        assert run.voted is not None
        self._known, self._layout = known, run.voted.layout

    def _commit(self, run: _Run) -> None:
        verdict = self._exchange.decide(_COMMIT)
        if verdict != _COMMIT:
            raise GroupAborted(
                f"version {run.version}: no rank publishes it, another one ended it: {verdict}. "
                "Mend the cause, then publish a later version."
            )
        assert run.part is not None
        self.bridge.publisher.show_group(run.part.update_id)

    def _share(self, step: str, make: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One step: do it here, report the result to the other ranks, and read their reports."""
        failure: Exception | None = None
        try:
            body = make()
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure, body = error, {"error": describe(error)}
        payload = canonical_json(body).encode("ascii")
        try:
            payloads = self._exchange.gather(step, payload, timeout_s=self._timeout_s)
        except GroupAborted:
            if failure is None:
                raise
            _LOG.warning("the other ranks were not told of a failure in step %r", step)
            payloads = []
        if failure is not None:
            failure.add_note("rl_bridge: no rank of the group publishes this version.")
            try:
                raise failure
            finally:
                del failure  # else its traceback would hold this frame, and this frame it
        return read_messages(step, payloads)

    def _hello(self, run: _Run) -> dict[str, JSONValue]:
        if run.version is not None:
            run.version = checked_version(run.version)
        run.dtype, run.keep = checked_dtype(run.dtype), checked_keep(run.keep)
        source, run.placements = run.give()
        if isinstance(source, WeightExtractor):
            run.placements = run.placements or source.placements()
            run.adapter = run.adapter or source.adapter
        if run.adapter is not None:
            run.metadata = run.adapter.to_metadata(run.metadata)
        run.tensors = named_tensors(source)
        mine = self._mine if self._mine and self._mine.is_of(run.placements, run.dtype) else None
        if mine is None or not mine.has_placed(run.tensors):
            held = {name: (dtype_name(t), tuple(t.shape)) for name, t in run.tensors.items()}
            require_placed(self._exchange.rank, held, run.placements)
            if mine is None:
                placed = {
                    name: replace(one, dtype=wire_name(wire_dtype(tensor.dtype, run.dtype)))
                    for name, one in run.placements.items()
                    for tensor in (run.tensors[name],)
                }
                text = placements_text(placed)
            else:
                text = mine.text
            mine = _Mine(dict(run.placements), run.dtype, text)
        run.flags = trainable_names(source, run.tensors, run.trainable)
        self._mine, run.text = mine, mine.text
        publisher = self.bridge.publisher
        return {
            "rank": self._exchange.rank,
            "world_size": self._exchange.world_size,
            "weight_version": run.version,
            "last_version": publisher.last_version,
            "next_version": publisher.next_version if run.version is None else None,
            "placements": text_digest(run.text),
            "known": self._known,
        }

    def _publish_part(self, run: _Run) -> dict[str, JSONValue]:
        layout = WeightLayout.from_metadata(run.metadata).to_metadata()
        layout |= {"rank": self._exchange.rank, "world_size": self._exchange.world_size}
        publisher = self.bridge.publisher
        publisher.release_older(run.keep, run.adapter)
        run.part = publisher.publish(
            run.tensors,
            run.version,
            metadata={**run.metadata, "layout": layout},
            trainable=run.flags,
            dtype=run.dtype,
            is_part=True,
        )
        if self._mine is not None and self._mine.tensors is None:
            facts = TensorFacts(list(run.tensors.values()))
            self._mine = self._mine._replace(tensors=(tuple(run.tensors), facts))
        return self._part_message(run.part)

    def _part_message(self, mine: WeightUpdateManifest) -> dict[str, JSONValue]:
        layout = self._layout
        is_new = layout is None or layout.tables[self._exchange.rank].digest != mine.layout_digest
        leaves = None
        # If every tensor is whole here, no digest is made of leaves.
        if mine.table.leaves and self._mine is not None and _is_cut(self._mine.placements):
            leaves = base64.b64encode(self.bridge.publisher.leaf_list).decode("ascii")
        return {"part": mine.to_json(layout=is_new), "leaves": leaves}

    def _vote(self, run: _Run, parts: list[dict[str, Any]]) -> dict[str, JSONValue]:
        manifest = self._merge(parts)
        assert run.part is not None
        own = self.bridge.publisher
        # Every rank finds the same, and refuses the same; one of them says it.
        self._watch.judge(manifest, logs=self._exchange.rank == 0)
        # Set before the vote is sent: from then on the other ranks may commit.
        run.voted = manifest
        own.join_group(run.part.update_id, manifest)
        return {
            "update_id": manifest.update_id,
            "root": manifest.root,
            "header": manifest.header_digest.hex(),
        }

    def _merge(self, bodies: list[dict[str, Any]]) -> GroupManifest:
        parts: list[WeightUpdateManifest] = []
        blocks: list[bytes | None] = []
        for rank, body in enumerate(bodies):
            if self._layout is not None:
                WeightUpdateManifest.known_layouts.add(self._layout.tables[rank])
            part, block = Part.read(body, rank).opened(rank)
            parts.append(part)
            blocks.append(block)
        tables = [part.table for part in parts]
        layout = self._layout
        if layout is None or [one.digest for one in layout.tables] != [t.digest for t in tables]:
            with collector_paused():
                layout = GroupLayout.build(tables, self._placements)
            layout = GroupManifest.known_layouts.add(layout)
        metadata = thaw(parts[0].metadata)
        metadata.pop("layout")
        return GroupManifest.build(parts, layout, blocks, metadata=metadata)

    # ---- the end --------------------------------------------------------------------------------

    def _has_ended(self, error: BaseException) -> bool:
        """End the publication for all ranks; False if they have committed it already."""
        try:
            return self._exchange.decide(describe(error)) != _COMMIT
        except GroupAborted:
            _LOG.warning("the other ranks were not told how the publication ended", exc_info=True)
            return True

    def _remember(self, run: _Run) -> None:
        manifest = run.voted
        assert manifest is not None
        self._watch.note(manifest)
        self.bridge.publisher.release_older(run.keep, run.adapter)


def _is_cut(placements: Mapping[str, Placement]) -> bool:
    """Whether a rank holds less than the whole of any tensor."""
    return any(
        piece.is_flat or tuple(piece.shape) != tuple(piece.global_shape)
        for one in placements.values()
        for piece in one.pieces
    )

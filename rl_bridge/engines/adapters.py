"""Adapters in an engine: each one is a stream of versions of its own beside the engine's weights.

The transaction is that of a model's weights (`rl_bridge.engines.driver`, `rl_bridge.engines.rank`):
a session, all ranks or none, proof, undo. What differs is what a version is in the engine. It is
staged in a free place of the engine's, under an id and a path that no other version has: nothing
waits for it, and no request can meet it before all ranks have proven it. Then it is offered to the
engine's front end (`AdapterFrontEnd`), and committed: from then on, new requests ask for it; those
that began under an older version end under that one. An older version stays
*resident* until the engine has no request of it left and its place is wanted:
`AdapterDriver.retire`.
"""

import gc
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank import EngineRank, RankHost, RankInstaller
from rl_bridge.engines.rpc import EngineClient, Replies, Reply
from rl_bridge.engines.serving import ServingOptions
from rl_bridge.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    IncompatibleUpdate,
    ProofFailed,
    SlotsExhausted,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.adapter import AdapterSpec, LoRAPair
from rl_bridge.manifest.compare import mismatch
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.views import ImportedTensors, anonymous_pin

_LOG = logging.getLogger(__name__)
# Between two looks for requests, if the engine has no room for the next version.
_LOOK_S = 0.05
PATHS = "/rl_bridge/"
"""With this begins the path of each version, where an engine asks for one."""
# Ids of ours are above those that people count by hand, and fit into 31 bits.
_FIRST_ID = 1 << 30
_SHOWN = 3

Tensors = Mapping[str, torch.Tensor]

# Fields of PEFT's configuration that make an adapter more, or other, than pairs of matrices.
_VARIANTS = (
    *(
        "bias",
        "use_dora",
        "alora_invocation_tokens",
        "lora_bias",
        "layer_replication",
        "use_qalora",
    ),
    *("trainable_token_indices", "target_parameters", "arrow_config", "kasa_config"),
    *("velora_config", "monteclora_config", "use_bdlora"),
)
# Ways to begin that change the trainer's base weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Resident:
    """A version of an adapter that an engine holds.

    Attributes:
        adapter: its name.
        weight_version: its version.
        update_id: the update that brought it.
        again: how many others of the same number came before it and are still there: a trainer
            that begins anew counts its steps once more.
        base_root: root of the base weights that it names; empty if it names none.

    """

    adapter: str
    weight_version: int
    update_id: str
    again: int = 0
    base_root: str = ""

    @classmethod
    def beside(cls, others: Iterable["Resident"], manifest: WeightUpdateManifest) -> "Resident":
        """The version of an update, in an engine that holds others of the same adapter.

        No other one that is there has its label: engines take requests of one label for requests of
        one adapter.
        """
        spec, version, taken = manifest.adapter, manifest.weight_version, list[int]()
        assert spec is not None  # as it was prepared
        for one in others:
            if one.update_id == manifest.update_id:
                return one
            if one.weight_version == version:
                taken.append(one.again)
        again = max(taken, default=-1) + 1
        return cls(spec.name, version, manifest.update_id, again, spec.base_root)

    @property
    def number(self) -> int:
        """The id by which the engine knows it: the same on all ranks, and of no other version."""
        return _FIRST_ID | int(self.update_id[:8], 16) % _FIRST_ID

    @property
    def label(self) -> str:
        """The name by which clients ask for it, such as ``policy@7``, or ``policy@7.1``.

        A later version may have the label of one that was dropped.
        """
        again = f".{self.again}" if self.again else ""
        return f"{self.adapter}@{self.weight_version}{again}"

    @property
    def own_name(self) -> str:
        """A name that no other version ever gets, such as ``policy@7-`` and the update's id."""
        return f"{self.adapter}@{self.weight_version}-{self.update_id}"

    @property
    def path(self) -> str:
        """Stands for a file of this version, where an engine asks for one; there is none."""
        return f"{PATHS}{self.adapter}/{self.update_id}"


# ---- in a rank -----------------------------------------------------------------------------------


class AdapterInstaller(RankInstaller):
    """Brings versions of one adapter into one rank of an engine. Call it between two steps.

    An engine supplies where a version goes, and how it is read back.
    """

    staging = "beside"

    def __init__(self, base: Callable[[], str]) -> None:
        """Begin without a version; `base` gives the root of the engine's weights, or nothing."""
        self._base = base
        self.residents: dict[str, Resident] = {}
        self.serving: str | None = None
        """The update whose version new requests ask for."""
        self._staged: Resident | None = None
        self._manifest: WeightUpdateManifest | None = None
        # Of the last layout: what copies it, to where, and its pairs.
        self._copies: tuple[str, BytePlan, ImportedTensors] | None = None
        self._pairs: tuple[tuple[str, str], list[LoRAPair], list[str]] | None = None

    # ---- what an engine has of its own ----------------------------------------------------------

    @abstractmethod
    def check(self, spec: AdapterSpec, pairs: Sequence[LoRAPair]) -> None:
        """Refuse what this engine cannot serve, by name.

        Raises:
            IncompatibleUpdate: a module that it does not adapt, a rank that is too large.

        """

    @abstractmethod
    def stage(
        self,
        version: Resident,
        spec: AdapterSpec,
        pairs: Sequence[LoRAPair],
        tensors: ImportedTensors,
    ) -> None:
        """Put a version into a free place; on failure nothing of it is left there.

        Args:
            version: under whose number, label and path.
            spec: what it says of itself.
            pairs: its matrices.
            tensors: a private copy of the update: the same mapping for each version of a layout,
                whose memory is the next version's.

        Raises:
            SlotsExhausted: there is no free place.
            IncompatibleUpdate: numbers that are not finite, as the engine has them.

        """

    @abstractmethod
    def read(self, version: Resident) -> int:
        """Read all of a version's place, and compare it with what the update says.

        Returns:
            Bytes that were read.

        Raises:
            ProofFailed: it holds something else.

        """

    @abstractmethod
    def holds(self, version: Resident) -> bool:
        """Whether the engine knows a version still: others may have dropped it."""

    @abstractmethod
    def drop(self, version: Resident) -> None:
        """Free a version's place; one that is not there is ignored."""

    @abstractmethod
    def free_places(self) -> int:
        """How many more versions the engine has room for."""

    # ---- the steps ------------------------------------------------------------------------------

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Copy, verify and stage a version; no request can ask for it yet.

        Raises:
            IncompatibleUpdate: it is no adapter, or one that this engine cannot serve.
            ChecksumMismatch: the copied bytes are not what was published.
            SlotsExhausted: there is no free place.

        """
        self.abandon()
        spec = manifest.adapter
        if spec is None:
            raise IncompatibleUpdate(
                f"version {manifest.weight_version} holds a model's weights, expected an adapter. "
                "Publish it with adapter=."
            )
        pairs, others = self._paired(spec, manifest.table)
        require_plain(spec, others)
        self._check_own_base(spec.name, spec.base_root)
        if spec.base_root and not self._base():
            _LOG.warning(
                "adapter %s names the root of its base, and that of the engine's weights is not "
                "known before they were updated: it is not compared",
                spec.name,
            )
        self.check(spec, pairs)
        own = self._copied(manifest, tensors)
        version = Resident.beside(self.residents.values(), manifest)
        if manifest.update_id not in self.residents:  # else it comes again, after a loss
            self.stage(version, spec, pairs, own)
        self._staged, self._manifest = version, manifest

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Nothing moves: the version has its place already."""
        if self._staged is None:
            self.prepare(manifest, tensors)
        assert self._staged is not None
        # Again: the engine's weights may have been updated since it was prepared.
        self._check_own_base(self._staged.adapter, self._staged.base_root)

    def check_base(self, root: str) -> None:
        """Refuse base weights that a version does not belong to. See `RankInstaller`."""
        versions = [*self.residents.values(), *([self._staged] if self._staged else [])]
        others = [one for one in versions if one.base_root not in {"", root} and self.holds(one)]
        if others:
            raise IncompatibleUpdate(
                f"the engine has adapter {others[0].label!r}, which belongs to base weights of "
                f"root {others[0].base_root}, and this update's root is {root}: its requests would "
                f"be answered over another base. Call drop_adapter({others[0].adapter!r}), and "
                "publish the weights again, then the adapter for them; or publish the adapter "
                "without base_root."
            )

    def _check_own_base(self, adapter: str, root: str) -> None:
        """Refuse a version that belongs to other base weights than the engine's."""
        base = self._base()
        if root and base and root != base:
            raise IncompatibleUpdate(
                f"adapter {adapter!r} belongs to base weights of root {root}, and the engine holds "
                f"root {base}. Install that base first, or publish for this one."
            )

    def prove(self) -> InstallProof:
        """Read what the engine holds of the version."""
        if self._staged is None or self._manifest is None:
            raise ProofFailed("nothing was staged that could be proven. Call prepare first.")
        return InstallProof(
            method="digest",
            root=self._manifest.root,
            digested_nbytes=self.read(self._staged),
            tensors=self._manifest.tensor_count,
            staging=self.staging,
        )

    def undo(self) -> None:
        """Free the place; the version before serves on."""
        self.abandon()

    def abandon(self) -> None:
        """Free the place of what was staged and not committed."""
        version, self._staged, self._manifest = self._staged, None, None
        if version is not None and version.update_id not in self.residents:
            self.drop(version)

    def commit(self) -> None:
        """New requests ask for the staged version from now on."""
        if self._staged is not None:
            self.residents[self._staged.update_id] = self._staged
            self.serving = self._staged.update_id
        self._staged = self._manifest = None

    def release(self, update_id: str) -> None:
        """The engine has memory of its own."""

    def retire(self, update_ids: Sequence[str], *, ends: bool = False) -> None:
        """Free the places of versions that nobody asks for; the serving one stays, unless it ends.

        With `ends` the engine has no version of the adapter from now on.
        """
        if ends:
            self.abandon()
            self.serving = None
        for update_id in update_ids:
            if update_id != self.serving and (version := self.residents.pop(update_id, None)):
                self.drop(version)

    def facts(self) -> Reply:
        """What `describe` tells beside the update."""
        for one in [one for one in self.residents.values() if not self.holds(one)]:
            _LOG.warning("adapter %s was dropped by something else", one.label)
            del self.residents[one.update_id]
            self.drop(one)
        return {
            "residents": [asdict(one) for one in self.residents.values()],
            "serving": self.serving if self.serving in self.residents else None,
            "free": self.free_places(),
        }

    # ---- inside ---------------------------------------------------------------------------------

    def _paired(
        self, spec: AdapterSpec, table: TensorTable
    ) -> tuple[Sequence[LoRAPair], Sequence[str]]:
        """The adapter's pairs, and the tensors that are of none."""
        key = spec.digest, table.digest
        if self._pairs is None or self._pairs[0] != key:
            shapes = {name: table.shapes[row] for name, row in table.rows.items()}
            self._pairs = key, spec.pairs(shapes), spec.others(shapes)
        return self._pairs[1:]

    def _copied(self, manifest: WeightUpdateManifest, tensors: Tensors) -> ImportedTensors:
        """A private copy, digested in the pass that makes it: nobody writes to it afterwards.

        The imported memory is the trainer's: it may change, and engines scale matrices in place.
        """
        assert isinstance(tensors, ImportedTensors)
        if tensors.device.type != "cpu":
            raise IncompatibleUpdate(
                f"version {manifest.weight_version} arrived on {tensors.device}, where no adapter "
                "is staged from. Publish it in memory of the CPU: over shared-memory or nixl."
            )
        table = manifest.table
        if self._copies is None or self._copies[0] != table.digest:
            own = ImportedTensors(table, anonymous_pin(table.arena_nbytes))
            self._copies = table.digest, BytePlan(table.nbytes_column), own
        _, plan, own = self._copies  # (The same mapping each time: its tensors are made once.)
        found = plan.copy_digest(tensors.addresses, own.addresses)
        if found != manifest.digests:
            raise ChecksumMismatch(mismatch(manifest, found))
        return own


class AdapterHost(RankHost):
    """The same rank of an engine, as one of its LoRA adapters is updated."""

    def __init__(
        self, base: EngineRank, make: Callable[[Callable[[], str]], AdapterInstaller]
    ) -> None:
        """Look at the rank whose weights `base` updates; `make` gets what tells their root."""
        host = base.host
        self.name, self.model, self.group = host.name, host.model, host.group
        self.replica = host.replica
        self._base = base
        self._make = make
        self._installer: AdapterInstaller | None = None

    def make_installer(self, options: Mapping[str, Any]) -> AdapterInstaller:
        """What puts versions into places; one for all options, since it knows the places."""
        del options
        if self._installer is None:
            self._installer = self._make(lambda: self._base.next_root)
        return self._installer

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse what the engine refuses, replicas, and an engine whose weights are changed."""
        self._base.host.check(given)
        if given.get("replicas", 1) != 1:
            raise WeightBridgeUnavailableError(
                "the engine has replicas: adapters are brought into engines of one. Use one."
            )
        if self._base.is_begun:
            raise WeightBridgeUnavailableError(
                "an update of the engine's weights is under way. Try again when it is over."
            )

    def facts(self) -> Reply:
        """What the engine tells, and which versions are resident."""
        return {**self._base.host.facts(), **self.make_installer({}).facts()}

    @property
    def may_sleep(self) -> bool:
        """Whether the engine can put its weights to sleep."""
        return self._base.host.may_sleep

    def forget(self) -> None:
        """The places of all versions are thrown away with the weights."""
        if self._installer is not None:
            self._installer.retire(list(self._installer.residents), ends=True)


# ---- the front end -------------------------------------------------------------------------------


class AdapterFrontEnd(EngineClient):
    """A client that reaches what takes the engine's requests, and so their adapters' versions."""

    def adapters_in_use(self) -> AbstractSet[int]:
        """The engine's ids of the adapters that requests ask for, those that wait included.

        Raises:
            WeightBridgeUnavailableError: the engine does not tell.

        """
        raise WeightBridgeUnavailableError(
            "this engine does not tell which adapters its requests ask for, so versions of an "
            "adapter cannot be kept apart in it. Use one of the engines that its adapter takes."
        )

    def adapters_held(self) -> AbstractSet[int]:
        """Ids of the adapters that somebody holds a request object of, which he may still use."""
        return frozenset()

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        """From now on, requests can ask for these versions of an adapter, and for no other ones.

        Raises:
            WeightBridgeUnavailableError: it cannot be told.

        """

    def lora_request(self, version: Resident) -> Any:
        """What a request names a version by: its label, unless the engine wants an object."""
        return version.label


# ---- the driver ----------------------------------------------------------------------------------


class AdapterClient(EngineClient):
    """An engine as its ranks are asked about one adapter: nothing is paused or dropped for it."""

    def __init__(self, engine: EngineClient, adapter: str) -> None:
        """Ask by another client, whose connection stays its own."""
        super().__init__(engine.timeout_s)
        self._engine = engine
        self._adapter = adapter

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask all ranks. See `EngineClient`."""
        return self._engine.call(verb, {**payload, "adapter": self._adapter}, timeout_s)

    def replicas(self) -> int:
        """How many replicas there are. See `EngineClient`."""
        return self._engine.replicas()

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        """Nothing waits for an adapter."""

    def resume(self) -> None:
        """Nothing waits for an adapter."""

    def drop_caches(self, policy: str | None) -> str:  # noqa: ARG002 - of any policy
        """Nothing: what was cached is kept apart by each version's name and path."""
        return ""


class AdapterDriver(EngineDriver):
    """Installs versions of one adapter into an engine, on all of its ranks or on none.

    Attributes:
        adapter: its name.

    """

    def __init__(self, base: EngineDriver, adapter: str) -> None:
        """Drive the engine whose weights `base` updates, with its options of bridges and versions.

        Raises:
            WeightBridgeUnavailableError: the engine lacks what takes its requests.

        """
        client = base.client
        assert isinstance(client, AdapterFrontEnd)
        client.adapters_in_use()  # which says what it lacks
        super().__init__(
            AdapterClient(client, adapter),
            serving=ServingOptions(None, "keep", None, base.serving.keep),
            options={name: base.options[name] for name in base.options if name == "transports"},
            take_over=base.may_take_over,
        )
        self.adapter = adapter
        self._front_end = client
        # The active version, and all that every rank holds, the newest first: replaced as a whole,
        # since requests are made in other threads, and in the engine's own event loop.
        self._known: tuple[Resident | None, tuple[Resident, ...]] = (None, ())
        self._free = 0
        self._partly: list[str] = []  # updates that only some ranks hold
        self._idle: frozenset[str] = frozenset()  # without a request at the last look
        self._is_ending = False  # a drop of all versions did not end
        client.streams.add(self)
        self._streams = client.streams  # this one, and those of the engine's other adapters

    @property
    def is_offered(self) -> bool:
        """Whether requests can ask for a version. See `TransactionalAdapter`."""
        return self._known[0] is not None

    @property
    def residents(self) -> tuple[Resident, ...]:
        """The versions that every rank held at the last look, the newest first."""
        return self._known[1]

    def resident(self, weight_version: int | None = None) -> Resident:
        """The version that new requests ask for, or another one that is still resident.

        Raises:
            UnknownUpdate: the engine does not hold it.

        """
        active, residents = self._known
        if active is not None and weight_version in {None, active.weight_version}:
            return active
        for one in residents:
            if one.weight_version == weight_version:
                return one
        if self._is_ending:
            raise UnknownUpdate(
                f"adapter {self.adapter!r} is not offered: requests had it still when "
                "drop_adapter() gave up waiting for them. Call drop_adapter() once more; or "
                "recover(), which offers it again."
            )
        held = [one.weight_version for one in residents]
        asked = "any version" if weight_version is None else f"version {weight_version}"
        raise UnknownUpdate(
            f"the engine does not hold {asked} of adapter {self.adapter!r}, expected one of "
            f"{held}. Install it with update_weights, or ask for one that is there."
        )

    def lora_request(self, weight_version: int | None) -> Any:
        """What a request names a resident version by; None is the active one.

        Raises:
            UnknownUpdate: the engine does not hold it.

        """
        return self._front_end.lora_request(self.resident(weight_version))

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Stage the version on all ranks. See `EngineDriver`."""
        try:
            super().prepare(manifest, tensors)
        except SlotsExhausted as error:
            residents = sorted(
                (one for stream in self._streams for one in stream.residents),
                key=lambda one: one.label,
            )
            error.add_note(f"rl_bridge: the places have {[one.label for one in residents]}.")
            held = self._front_end.adapters_held()
            if labels := [one.label for one in residents if one.number in held]:
                error.add_note(
                    f"rl_bridge: {labels} stay as long as somebody holds what lora_request() gave "
                    "for them. Let go of it."
                )
            raise

    def resume(self) -> None:
        """Offer the version, which all ranks have proven. See `EngineDriver`."""
        super().resume()
        self._front_end.offer_adapter(self.adapter, *self._next_known())

    def commit(self) -> None:
        """Let all ranks acknowledge; new requests ask for the version from now on.

        That holds also if a rank does not answer: all have staged and proven it, and the commit is
        made up for with the next call.
        """
        if self._manifest is not None:
            self._known = self._next_known()
            self._partly = [one for one in self._partly if one != self._manifest.update_id]
        super().commit()
        try:
            self._retire_old()
        except Exception:  # noqa: BLE001 - logged in full
            # The version stands; what is left of older ones goes with the next update.
            _LOG.exception("older versions of adapter %s were not dropped", self.adapter)

    def retire(self, keep: int, *, most: int | None = None) -> bool:
        """Free the places of versions that no request is left of, but for the `keep` newest.

        One of which somebody holds a request object stays, too. A version goes if it was without a
        request at the look before as well: an engine's front end forgets a request a moment before
        the engine itself has ended it. It is not offered any more before the last look: a request
        that comes between the two keeps it.

        Args:
            keep: the newest of them stay; 1 or more.
            most: so many go at most, the oldest first; None for all.

        Returns:
            Whether one went.

        """
        used = self._asked_for()
        active, residents = self._known
        others = [one for one in residents if one != active]
        idle = frozenset(one.update_id for one in others if one.number not in used)
        old = [one for one in reversed(residents[keep:]) if one in others]
        ending = [one for one in old if one.update_id in idle & self._idle][:most]
        self._idle = idle
        if ending:
            self._known = active, tuple(one for one in residents if one not in ending)
            self._offer()
            used = self._asked_for()
            ending = [one for one in ending if one.number not in used]
            self._known = active, tuple(one for one in residents if one not in ending)
        gone = [*(one.update_id for one in ending), *self._partly]
        if gone:
            self._client.ask("retire", update_ids=gone)
            self._partly = []
        return bool(gone)

    def _retire_old(self) -> None:
        """Free the places of versions beyond those that are kept.

        There is a second look if the first one was the first that found them without a request: a
        version that was active until now had none before.
        """
        self.retire(self.serving.keep)
        if any(one.update_id in self._idle for one in self.residents[self.serving.keep :]):
            time.sleep(_LOOK_S)
            self.retire(self.serving.keep)

    def _asked_for(self) -> AbstractSet[int]:
        """Ids of the versions that requests have, or may be sent for."""
        return self._front_end.adapters_in_use() | self._front_end.adapters_held()

    def _next_known(self) -> tuple[Resident, tuple[Resident, ...]]:
        """The active version and all residents, as of the next commit."""
        assert self._manifest is not None
        version = Resident.beside(self._known[1], self._manifest)
        return version, (version, *(one for one in self._known[1] if one != version))

    def _undo_on_ranks(self, *, of_other_driver: bool) -> None:
        """Take the version back, when it is not offered any more and no request has it."""
        # Refused if another driver has the engine: what that one offers must stay.
        self._client.ask("retire", update_ids=[])
        self._offer()
        if self._manifest is not None:
            self._wait_until_unused(self._next_known()[1][:1])
        super()._undo_on_ranks(of_other_driver=of_other_driver)

    def finds_versions(self, *, take_over: bool) -> bool:
        """Whether a rank holds a version of the adapter. See `TransactionalAdapter`."""
        if take_over:
            self.take_over()
        else:
            super()._ensure_session()
        self._describe_ranks()
        return bool(self._known[1] or self._partly)

    def drop_versions(self, timeout_s: float | None = None) -> None:
        """Take all versions out of the engine, when no request has one. See `TransactionalAdapter`.

        Raises:
            DeadlineExceeded: requests have one still; none was dropped, and none is offered.

        """
        super()._ensure_session()
        self._describe_ranks()
        (_, residents), self._known = self._known, (None, ())
        self._is_ending = True
        self._offer()
        self._wait_until_unused(residents, timeout_s)
        time.sleep(_LOOK_S)  # a front end may forget a request a moment before its engine does
        gone = [*(one.update_id for one in residents), *self._partly]
        self._client.ask("retire", update_ids=gone, ends=True)
        self._partly, self._is_ending = [], False

    def _wait_until_unused(
        self, versions: Sequence[Resident], timeout_s: float | None = None
    ) -> None:
        """Wait until no request has one of these versions, which are not offered any more."""
        within_s = self._client.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + within_s
        numbers = {one.number: one.label for one in versions}
        while used := numbers.keys() & self._front_end.adapters_in_use():
            if time.monotonic() > end:
                labels = sorted(numbers[one] for one in used)
                raise DeadlineExceeded(
                    f"adapters {labels} are taken back, and requests have them still after "
                    f"{within_s} s. Try again when they have ended: by recover() or "
                    "drop_adapter()."
                )
            time.sleep(_LOOK_S)

    def take_over(self) -> bool:
        """Take the engine, and offer what it holds. See `EngineDriver`.

        Versions beyond those that are kept go, as after an update, where their requests have ended.
        """
        is_new = super().take_over()
        self._offer()
        self._retire_old()
        return is_new

    def _offer(self) -> None:
        self._front_end.offer_adapter(self.adapter, *self._known)

    def _ensure_session(self) -> None:
        super()._ensure_session()
        self._offer()
        if self._free:
            self.retire(len(self._known[1]))  # only a look
        elif not self._free_a_place():
            gc.collect()  # objects that only each other hold, such as of a kept exception's frames
            for _ in range(
                2
            ):  # looks of a loop that find a version idle are never closer than that
                time.sleep(_LOOK_S)
                if self._free_a_place():
                    break

    def _free_a_place(self) -> bool:
        """Have a version go that is not active, of the adapter that has the most of them."""
        # (Of two that have as many, the one that wants the place.)
        streams = sorted(self._streams, key=lambda one: (-len(one.residents), one is not self))
        return any(self.retire(1, most=1) if one is self else one.give_way() for one in streams)

    def give_way(self) -> bool:
        """Free a place for another adapter's next version; returns whether one is free now.

        The active version stays, and so does one that a request has.
        """
        # (What is to be ended or undone is looked at by the call that does it.)
        if self._manifest is not None or self._is_ending or len(self.residents) <= 1:
            return False
        # Another driver that has the adapter by now says itself which of its versions go.
        return self.has_engine() and self.retire(1, most=1)

    def _describe_ranks(self) -> Replies:
        replies = super()._describe_ranks()
        told = [{one["update_id"]: one for one in reply["residents"]} for reply in replies]
        on_all = set.intersection(*(set(one) for one in told))
        serving = replies[0]["serving"]
        # (A rank tells its versions in the order in which they were committed.)
        held = [Resident(**one) for one in reversed(told[0].values()) if one["update_id"] in on_all]
        active = next((one for one in held if one.update_id == serving), None)
        self._known, self._is_ending = (active, tuple(held)), False
        self._partly = sorted(set.union(*(set(one) for one in told)) - on_all)
        self._free = min(reply["free"] for reply in replies)
        return replies


def require_plain(spec: AdapterSpec, others: Sequence[str]) -> None:
    """Refuse what is more, or other, than the sum of pairs over the base that the engine has.

    `others` are the tensors that belong to no pair.
    """
    config = spec.config
    for key in _VARIANTS:
        # (PEFT writes "none" for an adapter to which no biases of the base belong.)
        if config.get(key) and not (key == "bias" and config[key] == "none"):
            raise IncompatibleUpdate(
                f"adapter {spec.name!r} has {key}={config[key]!r:.60}, expected plain LoRA, which "
                "is all that engines are given here. Train it without, or publish merged=True."
            )
    if others:
        raise IncompatibleUpdate(
            f"adapter {spec.name!r} has {len(others)} tensors beside its pairs, such as saved "
            f"modules and biases, which engines do not apply: {list(others)[:_SHOWN]}. Train the "
            "adapter without it, or merge it: publish with merged=True."
        )
    begins = str(config.get("init_lora_weights", "")).lower()
    if begins.startswith(_CHANGES_BASE) and not spec.base_root:
        raise IncompatibleUpdate(
            f"adapter {spec.name!r} begins with init_lora_weights={begins!r}, which changes the "
            "trainer's base weights: over the engine's it would be another sum. Publish the base "
            "as a version of its own, and the adapter with base_root=manifest.root."
        )

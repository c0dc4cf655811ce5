"""What proves an installed version: digests of what the engine holds, in its own layout.

Each part of a parameter must have the digest of what went there: for whole tensors the manifest
says it, for slices and casts it is made of the verified bytes before the install. What an engine
packs away cannot be read back: it is read before it is packed, and its canary answers for it. What
no update writes must not have changed meanwhile.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch

from rl_bridge.bridge.consumer import ImportedShare
from rl_bridge.engines.load_checks import equal_copies
from rl_bridge.engines.load_plan import Fill, LoadPlan, Route
from rl_bridge.engines.shards import (
    check_sources,
    digest_of,
    digests_of,
    shard_routes,
    told_digest,
    verify_again,
)
from rl_bridge.engines.skeleton import Target
from rl_bridge.engines.staging import Assembled, Staged, TensorChange
from rl_bridge.errors import ProofFailed, TornEngine
from rl_bridge.installers.base import InstallProof
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.tensors import TensorFacts


class _Part(NamedTuple):
    """Part of a parameter, the step that wrote it, and the digest that it must have."""

    step: Route
    tensor: torch.Tensor
    expected: bytes


class Evidence:
    """What must be found in an engine that holds one update."""

    def __init__(
        self, manifest: WeightUpdateManifest, plan: LoadPlan, *, num_threads: int | None
    ) -> None:
        """Begin with nothing found; nothing of the engine is read."""
        self._manifest = manifest
        self._plan = plan
        self._num_threads = num_threads
        # What parts must hold, each in the dtype in which the engine keeps it.
        self._expected: dict[tuple[Route, torch.dtype], bytes] = {}
        self._made_of: set[str] = set()  # tensors of the update that expectations were made of
        self._rows: dict[int, bytes] = {}
        # Position of a target that was packed -> bytes that were read of it, or lent to it.
        self._packed: dict[int, int] = {}
        self._borrowed: dict[int, int] = {}
        # What the engine made of parameters: it has no digest in any manifest.
        self._processed: dict[str, TensorChange] = {}
        self._derived: dict[str, bytes] = {}

    # ---- before the install ---------------------------------------------------------------------

    def expect(self, parts: Sequence[bytes]) -> None:
        """Note what the parts of tensors must hold, in the order of `shard_routes`."""
        routes = shard_routes(self._plan)
        if len(parts) != len(routes):
            raise ProofFailed(
                f"{len(parts)} digests of parts came, expected {len(routes)}. Install the same "
                "version of rl_bridge in the engine's environment and in the executor's."
            )
        keys = ((route, self._plan.dtypes[route.source]) for route in routes)
        self._expected = dict(zip(keys, parts, strict=True))

    def expect_of(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Note what parts must hold: as verified leaves tell it, or made of the imported bytes."""
        wanted: list[tuple[Route, torch.dtype]] = []
        for route, dtypes in self._plan.untold:
            given = self._plan.dtypes[route.source]
            if isinstance(tensors, ImportedShare) and dtypes == {given}:
                told = told_digest(tensors, route)
                if told is not None:
                    self._expected[route, given] = told
                    continue
            wanted += [(route, one) for one in dtypes if not (route.is_whole and one == given)]

        def made() -> Iterator[torch.Tensor]:
            for route, dtype in wanted:
                loaded = route.source_view.of(tensors[route.source])
                yield loaded.to(self._plan.targets[route.target].meta.dtype).to(dtype)

        found = digests_of(made(), num_threads=self._num_threads)
        self._expected |= dict(zip(wanted, found, strict=True))
        self._made_of = {route.source for route, _ in wanted}

    def add(self, assembled: Assembled) -> None:
        """Look at a parameter that is packed away next: later it cannot be read."""
        index = assembled.index
        if not (self._plan.targets[index].is_consumed or assembled.replaced):
            return
        if assembled.borrowed:
            self._borrowed[index] = assembled.tensor.nbytes
            for step in self._plan.routes_to[index]:
                self._rows[self._row(step)] = digest_of(self._manifest, step.source)
            return
        self._packed[index] = self._compare(self._parts(index, assembled.tensor))

    def seal(
        self,
        tensors: Mapping[str, torch.Tensor],
        staged: Staged | None,
        unread: AbstractSet[str] = frozenset(),
    ) -> None:
        """Look at what expectations were made of, and note what the engine made of parameters.

        A share is verified once more as a whole, but for tensors of `unread` whose parameters were
        compared with it before they were packed. (Of `unread` only what was made was looked at, and
        not the imported numbers.)
        """
        made_of = self._made_of | self._lent()
        if isinstance(tensors, ImportedShare):
            routes = self._plan.routes
            made_of |= {route.source for route in routes if route.target not in self._packed}
            verify_again(tensors, made_of | (self._plan.taken - unread))
        else:
            check_sources(self._manifest, tensors, sorted(made_of), num_threads=self._num_threads)
        if staged is not None:
            self._check_complete(staged)
            self.note(staged)

    def note(self, staged: Staged) -> None:
        """Note what the engine made of parameters, before anything of that is installed."""
        processed = [change for change in staged.tensors if change.index is None]
        self._processed |= {change.name: change for change in processed}
        tensors = {change.name: change.fresh for change in processed}
        for name, digest in self._digests({**tensors, **_attributes(staged)}).items():
            before = self._derived.setdefault(name, digest)  # a version may be made twice
            if digest != before:
                raise ProofFailed(_text(name, "what was made before", digest, before))

    def _lent(self) -> set[str]:
        """Names of the tensors that were packed right out of the update's own memory."""
        return {step.source for index in self._borrowed for step in self._plan.routes_to[index]}

    # ---- after it -------------------------------------------------------------------------------

    def check_lent(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Look once more at what was packed right out of `tensors`: the pack cannot be read.

        A tensor that is good now was good when it was packed.
        """
        check_sources(self._manifest, tensors, sorted(self._lent()), num_threads=self._num_threads)

    def check(self, staged: Staged | None) -> InstallProof:
        """Read what the engine holds."""
        if not self._expected:
            self.expect(())  # which is right where nothing is cut up
        nbytes = self._check_parameters()
        if staged is not None:
            self._check_complete(staged)
            nbytes += self._check_staged(staged)
        has_canaries = staged is not None and bool(staged.canaries)
        return InstallProof(
            method="digest+canary" if has_canaries else "digest",
            root=self._root(),
            digested_nbytes=nbytes + sum(self._packed.values()),
            identical_nbytes=sum(self._borrowed.values()),
            tensors=sum(row in self._rows for row in self._manifest.table.rows.values()),
        )

    def _check_parameters(self) -> int:
        """Compare what the engine keeps as it was loaded; returns how many bytes that is."""
        processed = {id(change.live) for change in self._processed.values()}
        parts: list[_Part] = []
        for index in self._plan.steps:
            target = self._plan.targets[index]
            if target.is_consumed or id(target.live) in processed:
                continue
            parts += self._parts(index, target.serving())
        for fill in self._plan.fills:
            target = self._plan.targets[fill.target]
            if not (target.is_consumed or id(target.live) in processed):
                _check_padding(target, fill)
        return self._compare(parts)

    def _check_staged(self, staged: Staged) -> int:
        """Compare what the engine made of parameters; returns how many bytes that is."""
        for attribute in staged.attributes:
            if vars(attribute.module).get(attribute.key) is not attribute.value:
                raise ProofFailed(
                    f"layer {attribute.path!r}: its {attribute.key} is not the one that was made "
                    "for this version. Install the update again."
                )
        tensors = {name: change.live for name, change in self._processed.items()}
        for name, digest in self._digests({**tensors, **_attributes(staged)}).items():
            if digest != self._derived[name]:
                raise ProofFailed(_text(name, "what was staged", digest, self._derived[name]))
        answered: set[tuple[int, int]] = set()
        for canary in staged.canaries:
            canary.check(answered)
        return sum(change.live.nbytes for change in self._processed.values())

    # ---- inside ---------------------------------------------------------------------------------

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        found = digests_of(tensors.values(), num_threads=self._num_threads)
        return dict(zip(tensors, found, strict=True))

    def _check_complete(self, staged: Staged) -> None:
        """Each layer that an update writes to gets other memory, or a pack that answers for it."""
        changed = {id(change.live) for change in staged.tensors}
        asked = {id(canary.module) for canary in staged.canaries} | {*map(id, staged.compared)}
        for index in self._plan.steps:
            target = self._plan.targets[index]
            for user in target.users:
                live = user.live
                if id(live) in changed or (target.is_consumed and id(user.module) in asked):
                    continue
                if live is not None and not live.numel() and not target.meta.numel():
                    continue
                raise ProofFailed(
                    f"parameter {user.name!r}: the engine's processing left no trace of this "
                    "version in its layer. Start a fresh engine from the checkpoint."
                )

    def _row(self, step: Route) -> int:
        return self._manifest.table.rows[step.source]

    def _parts(self, index: int, memory: torch.Tensor) -> list[_Part]:
        parts = []
        for step in self._plan.routes_to[index]:
            if step.is_whole and self._plan.dtypes[step.source] == memory.dtype:
                expected = digest_of(self._manifest, step.source)
            else:
                expected = self._expected[step, memory.dtype]
            view = step.target_view
            part = memory if view.is_all_of(memory) else view.of(memory)
            parts.append(_Part(step, part, expected))
        return parts

    def _compare(self, parts: Sequence[_Part]) -> int:
        found = digests_of((part.tensor for part in parts), num_threads=self._num_threads)
        version = self._manifest.weight_version
        for part, digest in zip(parts, found, strict=True):
            if digest != part.expected:
                what = f"tensor {part.step.source!r} of version {version}"
                name = self._plan.targets[part.step.target].name
                raise ProofFailed(_text(name, what, digest, part.expected))
            # The digest of a slice proved that it is the slice of this verified tensor.
            self._rows[self._row(part.step)] = digest_of(self._manifest, part.step.source)
        return sum(part.tensor.numel() * part.tensor.element_size() for part in parts)

    def _root(self) -> str:
        rows = self._manifest.table.rows
        for name, other in equal_copies(self._plan, self._manifest).items():
            if rows[other] in self._rows:
                self._rows[rows[name]] = self._rows[rows[other]]
        every = range(len(self._manifest.table.names))
        digests = [self._rows.get(row, b"\0" * DIGEST_NBYTES) for row in every]
        return self._manifest.table.root_plan.root(b"".join(digests)).hex()


class Untouched:
    """The parameters and buffers that no update writes: they must stay as they are."""

    def __init__(
        self,
        every: Mapping[str, torch.Tensor],
        written: Iterable[torch.Tensor],
        *,
        num_threads: int | None,
    ) -> None:
        """Digest them as they are now."""
        mine = {id(tensor): tensor for tensor in written}
        others = {
            name: tensor
            for name, tensor in every.items()
            if id(tensor) not in mine and tensor.numel() and not tensor.is_meta
        }
        # By storage: where a parameter is written in place, its views change with it.
        storages = {_storage(tensor) for tensor in mine.values()} if others else set()
        self._num_threads = num_threads
        self._tensors = {
            name: tensor for name, tensor in others.items() if _storage(tensor) not in storages
        }
        self._digests = self._read()

    def _read(self) -> list[bytes]:
        return digests_of(self._tensors.values(), num_threads=self._num_threads)

    def check(self) -> None:
        """Look again."""
        for name, before, now in zip(self._tensors, self._digests, self._read(), strict=True):
            if before != now:
                raise ProofFailed(_text(name, "what it was before the install", now, before))


class Places:
    """Which tensor objects a model has, and in which memory: an undo must lead back to them."""

    def __init__(self, model: torch.nn.Module, every: Mapping[str, torch.Tensor]) -> None:
        """Note them as they are now."""
        self._model = model
        self._before = {name: id(tensor) for name, tensor in every.items()}
        self._facts = TensorFacts(list(every.values()))

    def check(self) -> None:
        """Look again."""
        every, before = dict(tensors_of(self._model)), self._before
        now = {name: id(tensor) for name, tensor in every.items()}
        lost = sorted(name for name in now.keys() | before if now.get(name) != before.get(name))
        if not lost:
            tensors = [every[name] for name in before]
            lost = [list(before)[place] for place in self._facts.moved(tensors)]
        if lost:
            raise TornEngine(
                f"undo failed: the engine's tensor {lost[0]!r} is not the one that was there "
                "before the install. Call recover(), or start a fresh engine."
            )


def _check_padding(target: Target, fill: Fill) -> None:
    if not (fill.target_view.of(target.serving()) == fill.value).all():
        raise ProofFailed(
            f"parameter {target.name!r}: its padding is not {fill.value}. Install the update "
            "again; if that fails too, something else writes to the engine."
        )


def _attributes(staged: Staged) -> dict[str, torch.Tensor]:
    """Tensors that layers compute with instead of parameters."""
    return {
        f"{attribute.path}.{attribute.key}": attribute.value
        for attribute in staged.attributes
        if isinstance(attribute.value, torch.Tensor)
    }


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a model, by full name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _text(name: str, what: str, found: bytes, expected: bytes) -> str:
    return (
        f"parameter {name!r} of the engine does not hold {what}: digest {found.hex()}, expected "
        f"{expected.hex()}. Install the update again; if that fails too, something else writes to "
        "the engine."
    )

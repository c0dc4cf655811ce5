"""An engine's weights as memory: where each tensor is, what it holds, and how to put it back.

Works on any mapping of names to tensors, usually a module's state dict. Used by every installer
whose engine lives in this process.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from operator import is_

import numpy as np
import torch

from rl_bridge.cuda.devices import place_of
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine, WeightBridgeError
from rl_bridge.installers.base import Engine, InstallProof, checked_engine
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import TensorTable, collector_paused
from rl_bridge.memory.packing import dtype_name, raw_elements
from rl_bridge.memory.passes import Addresses
from rl_bridge.memory.places import Pass, Place
from rl_bridge.memory.tensors import ModuleState, TensorFacts, plain_state, tensor_key
from rl_bridge.memory.views import ImportedTensors

# ---- Whether an update's layout fits an engine's tensors: names, shapes, dtypes, plain memory.

_SHOWN = 5
# What wrappers put before the names of what they wrap, and what to publish instead.
_COMPILED = "_orig_mod."  # also inside of a name
_WRAPPERS = {
    _COMPILED: "torch.compile puts '_orig_mod.' before the names: hand over the module that was "
    "compiled (compiled._orig_mod) on both sides",
    "module.": "DistributedDataParallel and DataParallel put 'module.' before the names: hand over "
    "the module that was wrapped (wrapped.module)",
    "base_model.model.": "peft puts 'base_model.model.' before the names: call "
    "model.merge_adapter() and publish StateDictExtractor(model).local(), which has the names of "
    'the model itself, or pass it adapters="only" or "base"',
}


def check_fit(
    table: TensorTable, tensors: Mapping[str, torch.Tensor], place: Place, *, strict: bool
) -> list[str]:
    """Compare a layout with the engine's tensors (name -> tensor).

    Args:
        table: the layout.
        tensors: the engine's.
        place: where they must lie.
        strict: whether the layout has to cover every engine tensor.

    Returns:
        Names of the engine that the layout does not hold; empty where that is allowed. They are
        covered if the layout holds their tensor under another name.

    """
    unknown = [name for name in table.rows if name not in tensors]
    missing = [name for name in tensors if name not in table.rows] if strict else []
    if unknown:
        raise IncompatibleUpdate(names_differ(unknown, missing))
    rows, shapes, dtypes = table.rows, table.shapes, table.dtypes
    for name, row in rows.items():
        tensor = tensors[name]
        reason = place.not_plain(tensor)
        if reason is not None:
            raise IncompatibleUpdate(
                f"tensor {name!r} of the engine {reason}. This installer writes plain memory of "
                "one device. "
                "Write an adapter of its own, with install and release, for any other engine."
            )
        if tensor.shape != shapes[row] or dtype_name(tensor) != dtypes[row]:
            raise IncompatibleUpdate(
                f"tensor {name!r}: the engine has {dtype_name(tensor)}{list(tensor.shape)}, the "
                f"update {dtypes[row]}{list(shapes[row])}. Publish in the engine's shape and dtype."
            )
        if not tensor.is_contiguous() and any(
            step == 0 < dim - 1 for step, dim in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise IncompatibleUpdate(
                f"tensor {name!r} of the engine is expanded: several of its elements are one in "
                "memory. Give the engine a contiguous() copy."
            )
    return missing


def names_differ(unknown: Sequence[str], missing: Sequence[str]) -> str:
    """Say which names only the update has, and which only the engine, with the remedy."""
    parts = []
    if unknown:
        parts.append(f"it holds {len(unknown)} tensors that the engine has not {unknown[:_SHOWN]}")
    if missing:
        parts.append(f"the engine has {len(missing)} that it does not hold {missing[:_SHOWN]}")
    remedy = "Publish what the engine's own state dict names"
    if hint := prefix_hint([*unknown, *missing]):
        remedy = hint.rstrip(".")
    elif not unknown:
        remedy += ", or say strict=False if the rest never changes"
    return f"the update does not fit the engine: {', and '.join(parts)}. {remedy}."


# ---- the rest builds on the parts above


def named_engine_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Name -> live tensor (tied names included): parameters and persistent buffers."""
    if isinstance(engine, torch.nn.Module):
        plain = plain_state(engine)
        if plain is not None:
            return plain
        found = engine.state_dict(keep_vars=True)
        return {name: item for name, item in found.items() if isinstance(item, torch.Tensor)}
    return dict(engine)


def prefix_hint(names: Sequence[str]) -> str:
    """Say which wrapper's prefix some names carry, as a sentence; empty if none does."""
    for prefix, hint in _WRAPPERS.items():
        if any(name.startswith(prefix) for name in names):
            return f"{hint}."
    return f"{_WRAPPERS[_COMPILED]}." if any(_COMPILED in name for name in names) else ""


@dataclass(frozen=True, slots=True)
class Binding:
    """An update's layout matched with an engine's tensors: one target per distinct engine tensor.

    Attributes:
        table: the layout.
        names: engine name of each target.
        tensors: the live tensors.
        rows: layout row that each target takes its bytes from.
        addresses: where each target lies, uint64.
        plan: the pass over the targets.
        place: where they lie.
        strided: targets that are not contiguous: torch copies them.
        facts: what `every_tensor` was when it was matched.
        complex_tensors: those that could become lazy conjugates of the same memory.
        engine: name -> tensor of the whole engine, as it was then.
        every_name: all names of the layout, also those that share an engine tensor's memory, and
            names of the engine that are covered because the layout holds their tensor.
        every_tensor: the live tensor objects under these names.
        every_row: the layout rows that they take their bytes from.
        tied: pairs of names that are one tensor of the engine and two of the layout: they need
            equal bytes. Of each pair, the second takes the bytes of the first.

    """

    table: TensorTable
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    rows: np.ndarray
    addresses: Addresses
    plan: Pass
    place: Place
    strided: tuple[int, ...]
    facts: TensorFacts
    complex_tensors: tuple[torch.Tensor, ...]
    engine: Mapping[str, torch.Tensor]
    every_name: tuple[str, ...]
    every_tensor: tuple[torch.Tensor, ...]
    every_row: np.ndarray
    tied: tuple[tuple[str, str], ...]

    def require_equal(self, manifest: WeightUpdateManifest) -> None:
        """Make sure that an update holds the same bytes for names that the engine ties."""
        rows, digests = self.table.rows, manifest.digests
        for one, other in self.tied:
            if _rows(digests, [rows[one]]) != _rows(digests, [rows[other]]):
                raise IncompatibleUpdate(
                    f"the engine ties {one!r} and {other!r}, the update holds different weights "
                    "for them: the second would overwrite the first. Tie them on the trainer's "
                    "side too."
                )

    def reads_as_stored(self) -> bool:
        """Whether no tensor is a lazy conjugate or negative: it would read otherwise than it is."""
        return not (
            any(map(torch.Tensor.is_neg, self.every_tensor))
            or any(map(torch.Tensor.is_conj, self.complex_tensors))
        )

    def is_as_matched(self) -> bool:
        """Whether its tensors are the views that they were when matched, and read as stored."""
        return self.facts.hold_unnegated(self.every_tensor) and not any(
            map(torch.Tensor.is_conj, self.complex_tensors)
        )

    def is_at(self, places: Addresses) -> bool:
        """Whether each tensor lay, contiguous, at its row's place when it was matched."""
        sizes = self.table.nbytes_column[self.rows]
        return not self.strided and not ((self.addresses != places[self.rows]) & (sizes > 0)).any()

    def holds_objects(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the engine (name -> tensor) still has these tensor objects under these names."""
        engine = self.engine
        # In the order of last time, which is the rule, nothing needs to be looked up.
        if tensors is engine or (
            list(tensors) == list(engine) and all(map(is_, tensors.values(), engine.values()))
        ):
            return True
        return all(map(is_, map(tensors.get, self.every_name), self.every_tensor))


class EngineMemory:
    """The weights of an engine in this process."""

    def __init__(
        self,
        engine: Engine,
        *,
        strict: bool = True,
        rebinds: bool = False,
        num_threads: int | None = None,
    ) -> None:
        """Look at an engine; its tensors are looked up anew whenever they may have moved.

        Args:
            engine: what is updated.
            strict: False allows engine tensors that an update does not hold.
            rebinds: the engine's tensor objects will get other storages: then only one object under
                two names is a tie, and two objects over the same memory are not.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.

        """
        self.engine = engine
        self.num_threads = num_threads
        self._strict, self._rebinds = strict, rebinds
        self._binding: Binding | None = None
        self._state = ModuleState(engine) if isinstance(engine, torch.nn.Module) else None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> live tensor."""
        if self._state is not None:
            return self._state.tensors()
        return named_engine_tensors(self.engine)

    def bind_update(self, manifest: WeightUpdateManifest) -> Binding:
        """Match an update with the engine, as `bind` its layout, and look at what it ties.

        Raises:
            IncompatibleUpdate: as `bind`; or different bytes for names that the engine ties.

        """
        bound = self.bind(manifest.table)
        bound.require_equal(manifest)
        return bound

    def bind(self, table: TensorTable) -> Binding:
        """Match an update's layout with the engine, or say why it does not fit.

        Raises:
            IncompatibleUpdate: names, shapes or dtypes differ.

        """
        tensors = self.tensors()
        bound = self._binding
        if (
            bound is not None
            and bound.table.digest == table.digest
            and len(tensors) == len(bound.engine)
            and bound.holds_objects(tensors)
            and bound.facts.hold(bound.every_tensor)
        ):
            return bound
        if self._state is None:
            checked_engine(self.engine)
        with collector_paused():
            self._binding = _matched(table, tensors, strict=self._strict, rebinds=self._rebinds)
        return self._binding

    def moved(self, bound: Binding, places: Addresses) -> None:
        """Take note that the engine's tensors were proven to lie at their rows' `places` now."""
        if bound is self._binding:
            facts = TensorFacts(bound.every_tensor)
            self._binding = replace(bound, addresses=places[bound.rows], strided=(), facts=facts)

    def put_back(self, bound: Binding) -> None:
        """Bring names, tensor objects and views back to what they were when they were matched.

        An install leaves them alone; whatever else changed them must not outlive its undo.
        """
        tensors = self.tensors()
        for name, owner in zip(bound.every_name, bound.every_tensor, strict=True):
            if tensors.get(name) is not owner:
                put_back(self.engine, name, owner)
        if not bound.facts.hold(bound.every_tensor):
            lost = bound.facts.restore(bound.every_tensor)
            if lost:
                raise TornEngine(
                    f"undo failed: tensor {bound.every_name[lost[0]]!r} of the engine was moved to "
                    "other memory during the install. Load the engine's weights anew, or restart "
                    "it."
                )

    def write(self, bound: Binding, source: Addresses) -> None:
        """Copy into the engine from `source`: addresses of the layout's rows, row-major bytes."""
        origins = source[bound.rows]
        targets = bound.addresses
        if bound.strided:
            targets = targets.copy()
            with torch.no_grad():
                for index in bound.strided:
                    elements = raw_elements(bound.tensors[index])
                    nbytes = elements.numel() * elements.element_size()
                    raw = bound.place.bytes_at(int(origins[index]), nbytes)
                    elements.copy_(raw.view(elements.dtype).view(elements.shape))
                    targets[index] = origins[index]  # equal addresses: nothing left to copy
        bound.plan.copy(origins, targets, num_threads=self.num_threads)

    def rewrite(self, manifest: WeightUpdateManifest, tensors: ImportedTensors) -> None:
        """Bring the published bytes of an earlier version back, and see that they are there."""
        bound = self.bind(manifest.table)
        view = tensors.pin.view
        if view is not None:
            # What the user wrote into his view of that version must not come back with it.
            view.refresh(tensors.pin.address, tensors.pin.nbytes)
        self.write(bound, tensors.addresses)
        try:
            self.prove(bound, manifest)
        except WeightBridgeError as error:
            raise TornEngine(
                f"undo failed, although version {manifest.weight_version} was copied back: {error}"
            ) from error

    def digests(self, bound: Binding) -> bytes:
        """Digest what the engine holds now: 16 bytes per target, read from its own memory."""
        sources = bound.addresses
        keep = []
        if bound.strided:
            sources = sources.copy()
            for index in bound.strided:
                dense = raw_elements(bound.tensors[index]).contiguous()
                keep.append(dense)
                sources[index] = dense.data_ptr()
        return bound.plan.digest(sources, num_threads=self.num_threads)

    def prove(self, bound: Binding, manifest: WeightUpdateManifest) -> InstallProof:
        """Compare what the engine holds, wherever its tensors are now, with a manifest."""
        if not (bound.holds_objects(self.tensors()) and bound.is_as_matched()):
            raise ProofFailed(
                f"version {manifest.weight_version}: the engine's tensors moved during the "
                "install. Nothing else may change them during an update: see quiesce=."
            )
        found = self.digests(bound)
        expected = _rows(manifest.digests, bound.rows)
        if found != expected:
            raise differs(manifest, bound.names, found, expected)
        return InstallProof(
            method="digest",
            root=manifest.root,
            digested_nbytes=bound.plan.total_nbytes,
            tensors=len(manifest.table.rows),
        )


def _rows(digests: bytes, rows: np.ndarray | list[int]) -> bytes:
    picked: np.ndarray = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)[rows]
    return bytes(picked.tobytes())


def differs(
    manifest: WeightUpdateManifest, names: Sequence[str], found: bytes, expected: bytes
) -> ProofFailed:
    """The error for the first of some tensors whose digests in the engine are not as expected."""
    starts = range(0, len(expected), DIGEST_NBYTES)
    index, start = next(
        (index, start)
        for index, start in enumerate(starts)
        if found[start : start + DIGEST_NBYTES] != expected[start : start + DIGEST_NBYTES]
    )
    here = slice(start, start + DIGEST_NBYTES)
    return ProofFailed(
        f"the engine does not hold version {manifest.weight_version}: tensor {names[index]!r} is "
        f"{found[here].hex()}, expected {expected[here].hex()}. Nothing else may write to the "
        "engine during an update: see quiesce=."
    )


def _matched(
    table: TensorTable, tensors: Mapping[str, torch.Tensor], *, strict: bool, rebinds: bool
) -> Binding:
    place = place_of(map(tensors.__getitem__, filter(tensors.__contains__, table.rows)))
    missing = check_fit(table, tensors, place, strict=strict)
    rows, tied = dict(table.rows), []
    targets: dict[object, tuple[str, int]] = {}
    for name, row in table.rows.items():
        tensor = tensors[name]
        key: object = id(tensor)
        if not rebinds:
            key = tensor_key(tensor) if tensor.numel() else name
        elif tensor.is_inference():
            raise IncompatibleUpdate(
                f"tensor {name!r} of the engine is an inference tensor. Use mode='copy'."
            )
        earlier = targets.setdefault(key, (name, row))
        if earlier[1] != row:
            tied.append((earlier[0], name))
            rows[name] = earlier[1]
    for name in missing:
        tensor = tensors[name]
        if rebinds or place.not_plain(tensor) is None:
            covering = targets.get(id(tensor) if rebinds else tensor_key(tensor))
            if covering is not None:
                rows[name] = covering[1]
    lacking = [name for name in missing if name not in rows]
    if lacking:
        raise IncompatibleUpdate(names_differ([], lacking))
    every = tuple(map(tensors.__getitem__, rows))
    names = tuple(name for name, _ in targets.values())
    target_rows = np.array([row for _, row in targets.values()], np.int64)
    found = tuple(tensors[name] for name in names)
    return Binding(
        table=table,
        names=names,
        tensors=found,
        rows=target_rows,
        addresses=np.array([tensor.data_ptr() for tensor in found], np.uint64),
        plan=place.plan(table.nbytes_column[target_rows]),
        place=place,
        strided=tuple(i for i, tensor in enumerate(found) if not tensor.is_contiguous()),
        facts=TensorFacts(every),
        complex_tensors=tuple(tensor for tensor in every if tensor.is_complex()),
        engine=tensors,
        every_name=tuple(rows),
        every_tensor=every,
        every_row=np.fromiter(rows.values(), np.int64, len(rows)),
        tied=tuple(tied),
    )


def put_back(engine: Engine, name: str, tensor: torch.Tensor, *, persistent: bool = True) -> None:
    """Put a tensor object back under its name, if the engine lets us."""
    if isinstance(engine, torch.nn.Module):
        path, _, leaf = name.rpartition(".")
        owner = engine.get_submodule(path)
        if isinstance(tensor, torch.nn.Parameter):
            setattr(owner, leaf, tensor)  # torch takes out whatever else has that name
        elif leaf in dict(owner.named_buffers(recurse=False)):
            setattr(owner, leaf, tensor)
        else:
            if hasattr(owner, leaf):
                delattr(owner, leaf)
            owner.register_buffer(leaf, tensor, persistent=persistent)
    elif isinstance(engine, MutableMapping):
        engine[name] = tensor


def take_out(engine: Engine, name: str) -> None:
    """Take a tensor out that was not there before."""
    if isinstance(engine, torch.nn.Module):
        path, _, leaf = name.rpartition(".")
        delattr(engine.get_submodule(path), leaf)
    elif isinstance(engine, MutableMapping):
        engine.pop(name, None)

"""`SimpleAdapter`: for an engine that can read and load one tensor, and shows no more of itself.

Whatever the engine does with a tensor (renames, fuses, transposes, keeps it elsewhere), its `read`
gives back what its `load` was given. That suffices for a refusal before anything changes, for an
undo to the byte, and for a proof that read every byte.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import numpy as np
import torch

from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine
from rl_bridge.installers.base import (
    InstallProof,
    Quiesce,
    TransactionalAdapter,
    require_done,
    require_plain,
)
from rl_bridge.installers.engine_memory import differs, names_differ
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import dtype_name, raw_elements
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.tensors import not_plain


class SimpleAdapter(TransactionalAdapter):
    """Installs tensor by tensor, by two functions of the engine's.

    Before an install every tensor is read and copied aside, which takes the memory of the weights
    once more until the update is acknowledged. The undo loads the copies where the engine holds
    something else, and reads them back. What the engine wrote over its version since that was
    installed does not come back: there, the copy is of the version.
    """

    def __init__(
        self,
        read: Callable[[str], torch.Tensor],
        load: Callable[[str, torch.Tensor], object],
        *,
        names: Iterable[str] | None = None,
        quiesce: Quiesce = nullcontext,
    ) -> None:
        """Install by `read` and `load`; neither is called yet.

        Args:
            read: gives the tensor of a name, in the trainer's shape and dtype, on any device; it
                may be the engine's own memory. A KeyError says that there is none of that name.
            load: takes a tensor of the same form under a name. It must not keep the tensor, which
                is the published memory: it copies.
            names: of all tensors that the engine has, as the trainer calls them. None: those of the
                first version, which later ones have to have, too.
            quiesce: gives a context in which the engine does not run; entered around every install
                and undo.

        Raises:
            TypeError: what is no function, or a coroutine function.

        """
        for function, what in ((read, "read"), (load, "load"), (quiesce, "quiesce")):
            require_plain(function, what)
        self._read, self._load = read, load
        self._names = None if names is None else frozenset(names)
        self._quiesce = quiesce
        self._before: dict[str, torch.Tensor] | None = None
        self._installed: tuple[WeightUpdateManifest, Mapping[str, torch.Tensor]] | None = None
        self._active: tuple[WeightUpdateManifest, Mapping[str, torch.Tensor]] | None = None

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare names, shapes and dtypes, and copy the engine aside.

        Raises:
            IncompatibleUpdate: they differ, or `read` gave something that is no tensor.

        """
        del tensors
        table = manifest.table
        # After an undo that failed the engine is a mixture, so what was copied before stays.
        known = self._names if self._before is None else self._before.keys()
        if known is not None and table.rows.keys() != known:
            unknown, missing = sorted(table.rows.keys() - known), sorted(known - table.rows.keys())
            raise IncompatibleUpdate(names_differ(unknown, missing))
        before = {}
        for name, row in table.rows.items():
            held = self._held(name)
            if (dtype_name(held), held.shape) != (table.dtypes[row], table.shapes[row]):
                raise IncompatibleUpdate(_differs_in_form(manifest, name, held))
            if self._before is None:
                before[name] = self._as_published(name, _copied(held))
        if self._before is None:
            self._before = before

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load every tensor."""
        self._installed = manifest, tensors
        with self._quiesce():
            for name, tensor in tensors.items():
                self._give(name, tensor)

    def prove(self) -> InstallProof:
        """Read every tensor, and compare its bytes with what was published.

        Raises:
            ProofFailed: the engine holds something else.

        """
        assert self._installed is not None, "prove follows install"
        manifest = self._installed[0]
        table, nbytes = manifest.table, 0
        for name, row in table.rows.items():
            held = self._held(name)
            if (dtype_name(held), held.shape) != (table.dtypes[row], table.shapes[row]):
                raise ProofFailed(_differs_in_form(manifest, name, held))
            found, at = _digest(held), DIGEST_NBYTES * row
            if found != (expected := manifest.digests[at : at + DIGEST_NBYTES]):
                raise differs(manifest, [name], found, expected)
            nbytes += held.numel() * held.element_size()
        return InstallProof(
            method="digest", root=manifest.root, digested_nbytes=nbytes, tensors=len(table.rows)
        )

    def undo(self) -> None:
        """Load the copies where the engine holds something else, and see that they are back.

        Raises:
            TornEngine: one does not come back.

        """
        before = self._before or {}
        # An engine that never came to rest lost nothing, and need not rest now.
        if all(self._holds(name, copy) for name, copy in before.items()):
            self._end()
            return
        with self._quiesce():
            for name, copy in before.items():
                if not self._holds(name, copy):
                    self._give(name, copy)
                if not self._holds(name, copy):
                    raise TornEngine(
                        f"undo failed: tensor {name!r} does not take back what was there before. "
                        "See that read() gives what load() was given, and restart the engine."
                    )
        self._end()

    def abandon(self) -> None:
        """Forget the copies, unless an earlier install still has to be undone."""
        if self._installed is None:
            self._end()

    def commit(self) -> None:
        """Forget the copies: no undo needs them."""
        if self._installed is not None:
            self._active = self._installed
            self._names = frozenset(self._active[0].table.rows)
        self._end()

    def release(self, update_id: str) -> None:
        """Forget a version that was active."""
        if self._active is not None and self._active[0].update_id == update_id:
            self._active = None

    def _end(self) -> None:
        self._before = self._installed = None

    def _as_published(self, name: str, copy: torch.Tensor) -> torch.Tensor:
        """What an undo brings back: the engine's tensor, or its version's if that is another."""
        if self._active is None:
            return copy
        manifest, tensors = self._active
        at = DIGEST_NBYTES * manifest.table.rows[name]
        published = manifest.digests[at : at + DIGEST_NBYTES]
        if _digest(copy) == published:
            return copy
        # Its user may have written to the mapping: then nobody has the version any more.
        kept = _copied(tensors[name])
        return kept if _digest(kept) == published else copy

    def _holds(self, name: str, copy: torch.Tensor) -> bool:
        return _state(self._held(name)) == _state(copy)

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        require_done(self._load(name, tensor), "load")

    def _held(self, name: str) -> torch.Tensor:
        """What the engine holds, detached, as it is stored."""
        try:
            held: object = self._read(name)
        except KeyError as error:
            raise IncompatibleUpdate(
                f"the engine has no tensor {name!r}: read() raised {error!r}. {_NAMES}"
            ) from error
        require_done(held, "read")
        reason = f"is a {type(held).__name__}"
        if isinstance(held, torch.Tensor):
            device = torch.device("cpu") if held.is_meta else held.device
            wrong = not_plain(held, device, takes_lazy_views=True)
            if wrong is None:
                return held.detach().resolve_conj().resolve_neg()
            reason = wrong
        raise IncompatibleUpdate(
            f"what read({name!r}) returned {reason}, expected a dense tensor. Let it return one."
        )


_NAMES = "Publish what the engine runs, or let read() and load() translate the names."


def _differs_in_form(manifest: WeightUpdateManifest, name: str, held: torch.Tensor) -> str:
    table, row = manifest.table, manifest.table.rows[name]
    return (
        f"version {manifest.weight_version}, tensor {name!r}: the engine has "
        f"{dtype_name(held)}{list(held.shape)}, the update {table.dtypes[row]}"
        f"{list(table.shapes[row])}. Publish in the engine's shape and dtype, or let read() and "
        "load() convert."
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    raw_elements(copy).copy_(raw_elements(tensor))  # every bit, whatever it means
    return copy


def _state(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, _digest(tensor)


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of a tensor's elements, row after row, as a manifest has it."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = _copied(tensor)
    plan = BytePlan(np.array([tensor.numel() * tensor.element_size()], np.uint64))
    return plan.digest(np.array([tensor.data_ptr()], np.uint64))

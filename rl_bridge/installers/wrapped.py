"""Adapters of the user's own that have ``install`` and ``release`` and perhaps other verbs.

Such an adapter is wrapped into the transaction as far as its engine can be seen. What it holds in
an attribute named ``engine`` (an ``nn.Module`` or a dict of tensors), ``model`` or ``module`` (an
``nn.Module``) is its engine: that is copied aside before each install, restored on failure, and
read for the proof. No other attribute is looked at: it may be a staging buffer, a draft model or a
skeleton. An adapter that shows no engine is undone by installing the retained previous version
through it once more, and what cannot be promised is logged when it is wrapped.
"""

import inspect
import logging
from collections.abc import Mapping
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import torch

from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine
from rl_bridge.installers.base import (
    Engine,
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
    kind_of,
    require_done,
    require_plain,
)
from rl_bridge.installers.engine_memory import EngineMemory
from rl_bridge.installers.snapshot import Snapshot, every_engine_tensor
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.passes import checked_threads
from rl_bridge.memory.views import ImportedTensors

_LOG = logging.getLogger(__name__)

Version = tuple[WeightUpdateManifest, Mapping[str, torch.Tensor]]

# Where an adapter declares its engine. Two of the others are not clear beside each other.
_FIRST, _OTHERS = "engine", ("model", "module")
_SHOW_IT = (
    "Keep it in an attribute named 'engine' (an nn.Module or a dict of tensors), or 'model' or "
    "'module' (an nn.Module; not two different ones)"
)


def _declared(adapter: object) -> tuple[str, Engine | None]:
    """The engine that an adapter declares by an attribute, or None; and that attribute's name.

    ``engine`` decides if it is there: an ``nn.Module`` or a dict of tensors. Else ``model`` or
    ``module``, if it is an ``nn.Module``; two different ones are none.
    """
    engine = _attribute(adapter, _FIRST)
    if engine is not None:
        return _FIRST, engine if _is_module(engine) or _is_dict_of_tensors(engine) else None
    found = {name: _attribute(adapter, name) for name in _OTHERS}
    modules = {name: item for name, item in found.items() if _is_module(item)}
    if len(set(map(id, modules.values()))) != 1:
        return "", None
    return modules.popitem()


def _attribute(adapter: object, name: str) -> Any:
    """What an adapter holds under a name; nothing is computed for it, as a property would."""
    item = inspect.getattr_static(adapter, name, None)
    return getattr(adapter, name, None) if isinstance(item, MemberDescriptorType) else item


def _is_module(item: object) -> bool:
    return isinstance(item, torch.nn.Module) and any(
        True for _ in chain(item.parameters(), item.buffers())
    )


def _is_dict_of_tensors(item: object) -> bool:
    return (
        isinstance(item, dict)
        and bool(item)
        and all(isinstance(tensor, torch.Tensor) for tensor in item.values())
    )


class WrappedAdapter(TransactionalAdapter):
    """Makes a transaction of an adapter that has only some of its verbs."""

    def __init__(
        self,
        adapter: WeightInstallAdapter,
        *,
        initial: Version | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Wrap `adapter`; whatever it has of prepare, prove, undo and commit is used.

        Args:
            adapter: the user's.
            initial: the engine's weights before the first update, for the undo of that one.
            num_threads: threads that copy aside, restore and digest; None takes the usable cores,
                at most 8.

        """
        self.adapter = adapter
        self._num_threads = num_threads
        self._name = ""
        self._memory: EngineMemory | None = None
        self._look()
        self._previous: Version | None = initial
        self._proven: EngineMemory | None = None  # of the engine that got the previous version
        self._pending: Version | None = None
        self._fitted = False  # the engine's tensors were those of the pending version
        self._copied: tuple[Snapshot, str, Engine] | None = None  # with the attribute and engine
        self._written: set[str] = set()  # tensors that installs since the last commit brought
        self._warn()

    def _look(self) -> None:
        """Look up the engine: an adapter may load, or replace, it at any time."""
        self._name, engine = _declared(self.adapter)
        if engine is None:
            self._memory = None
        elif self._memory is None or engine is not self._memory.engine:
            self._memory = EngineMemory(engine, strict=False, num_threads=self._num_threads)

    def _warn(self) -> None:
        """Log what cannot be promised of an engine that cannot be seen."""
        limits = []
        if self._memory is None and not self._has("prove"):
            limits.append("acknowledgements carry no proof (add prove())")
        if self._memory is None and not self._has("undo"):
            limits.append(
                "an undo installs the previous version through it again, unchecked (add undo())"
            )
            if self._previous is None:
                limits.append(
                    "a first install that fails leaves it torn (pass initial_weights= to "
                    "RolloutExecutor)"
                )
        if limits:
            _LOG.warning(
                "adapter %s: its engine cannot be seen, so %s. %s.",
                type(self.adapter).__name__,
                "; ".join(limits),
                _SHOW_IT,
            )

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the adapter refuse, and copy its engine aside."""
        self._call("prepare", manifest, tensors)
        self._look()
        self._fitted = self._fits(manifest)
        if not self._has("undo") and self._pending is None:
            # (While an update is pending, the engine may be a mixture.)
            self._copied = None
            if self._memory is not None and self._could_hold(self._memory.engine, manifest):
                engine = self._memory.engine
                copy = Snapshot(engine, num_threads=self._num_threads)
                self._copied = (copy, self._name, engine)
        self._pending = (manifest, tensors)

    def _could_hold(self, engine: Engine, manifest: WeightUpdateManifest) -> bool:
        """Whether what can be seen may be the engine: by its names, or, if fused, by its bytes.

        A small head or an adapter's own table is not the engine, and putting it back would undo
        nothing.
        """
        if self._fitted:
            return True
        tensors = every_engine_tensor(engine)
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if held >= manifest.total_nbytes:
            return True
        _LOG.warning(
            "adapter %s: the tensors that it shows are not the engine of version %d, so they are "
            "neither proven nor restored. %s, or add prove() and undo().",
            type(self.adapter).__name__,
            manifest.weight_version,
            _SHOW_IT,
        )
        return False

    def _fits(self, manifest: WeightUpdateManifest) -> bool:
        """Whether the engine's tensors are, name by name, those of the update."""
        if self._memory is None:
            return False
        try:
            self._memory.bind_update(manifest)
        except IncompatibleUpdate:
            return False
        return True

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Install through the adapter."""
        self._pending = (manifest, tensors)
        self._written.update(manifest.table.rows)
        self._install(manifest, tensors)

    def prove(self) -> InstallProof:
        """Ask the adapter, or read its engine."""
        if self._has("prove"):
            proof = self._call("prove")
            if isinstance(proof, InstallProof):
                return proof
        self._look()
        if self._memory is None or self._pending is None:
            return InstallProof(method="unproven")
        manifest = self._pending[0]
        try:
            bound = self._memory.bind_update(manifest)
        except IncompatibleUpdate as error:
            if self._fitted:
                raise ProofFailed(
                    f"the engine could hold version {manifest.weight_version} before the install "
                    f"and cannot now: {error}"
                ) from error
            # The adapter renames or fuses: what it installed has no counterpart to compare with.
            _LOG.warning("version %d is not proven: %s", manifest.weight_version, error)
            return InstallProof(method="unproven")
        return self._memory.prove(bound, manifest)

    def undo(self) -> None:
        """Undo through the adapter, from the copy, or by installing the previous version again."""
        if self._pending is None:
            return
        if self._has("undo"):
            self._call("undo")
        elif self._copied is not None:
            copy, name, engine = self._copied
            copy.restore()
            if _attribute(self.adapter, name) is not engine:
                setattr(self.adapter, name, engine)  # the install replaced it
            self._bring_published_back()
        elif self._previous is not None:
            self._require_covered(self._previous[0])
            self._require_unwritten(*self._previous)
            self._install(*self._previous)
        else:
            raise TornEngine(
                "the first install failed and cannot be undone: the adapter's engine cannot be "
                f"seen. Pass initial_weights= to RolloutExecutor. {_SHOW_IT}, or add undo()."
            )
        self._end()

    def _require_covered(self, previous: WeightUpdateManifest) -> None:
        """Make sure that installing the previous version replaces whatever was written since."""
        missing = sorted(self._written - previous.table.rows.keys())
        if missing:
            raise TornEngine(
                f"the undo would install version {previous.weight_version} again, which does not "
                f"have {missing[0]!r} ({len(missing)} tensors of the failed update). Publish "
                f"whole versions, or add undo() to the adapter. {_SHOW_IT}."
            )

    def _require_unwritten(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Make sure that the previous version is still what was imported: its user may write it."""
        if not isinstance(tensors, ImportedTensors):
            return
        if tensors.pin.view is not None:
            tensors.pin.view.refresh(tensors.pin.address, tensors.pin.nbytes)
        plan = tensors.pin.place.plan(manifest.table.nbytes_column)
        if plan.digest(tensors.addresses, num_threads=self._num_threads) != manifest.digests:
            raise TornEngine(
                f"the undo needs version {manifest.weight_version}, and somebody wrote into its "
                "tensors. Do not write to what update_weights returns, or add undo() to the "
                "adapter."
            )

    def _end(self) -> None:
        self._pending = self._copied = None
        self._written.clear()

    def _bring_published_back(self) -> None:
        """What the engine wrote over its version before the install must not come back as that.

        That can be done if the engine's tensors are those of the update, name by name, and its
        version lies in a published segment still. An engine that was replaced since is its user's.
        """
        if self._previous is None or self._memory is None or self._proven is not self._memory:
            return
        manifest, tensors = self._previous
        if not isinstance(tensors, ImportedTensors) or tensors.held is None:
            return
        if tensors.pin.view is not None and self._fits(manifest):
            self._memory.rewrite(manifest, tensors)

    def abandon(self) -> None:
        """Forget what was prepared, unless an earlier install still has to be undone."""
        if not self._written:
            self._end()
        self._call("abandon")

    def commit(self) -> None:
        """Keep the version that the next undo goes back to."""
        if self._pending is not None:
            self._previous, self._proven = self._pending, self._memory
        self._end()
        # Last: if it raises, this update is committed here all the same.
        try:
            self._call("commit")
        except Exception:
            if self._has("undo"):
                raise  # its undo then leads elsewhere
            _LOG.exception("adapter %s: its commit failed", type(self.adapter).__name__)

    def release(self, update_id: str) -> None:
        """Have the adapter release what it keeps for an update."""
        known = self._previous
        # A torn engine still needs it; it goes with the next commit.
        if known is not None and known[0].update_id == update_id and self._pending is None:
            self._previous = None
        self._call("release", update_id)

    def _install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        require_done(self.adapter.install(manifest, tensors), self._called("install"))

    def _called(self, verb: str) -> str:
        return f"{type(self.adapter).__name__}.{verb}"

    def _has(self, verb: str) -> bool:
        return _has(self.adapter, verb)

    def _call(self, verb: str, *arguments: object) -> Any:
        if not self._has(verb):
            return None
        answer = getattr(self.adapter, verb)(*arguments)
        require_done(answer, self._called(verb))
        return answer


def _has(adapter: object, verb: str) -> bool:
    return callable(getattr(adapter, verb, None))


# What is called of an adapter that has only some of the verbs, and what of the others.
_OF_ANY = ("prepare", "install", "prove", "undo", "abandon", "commit", "release")
_OF_ALL = [name for name, item in vars(TransactionalAdapter).items() if inspect.isfunction(item)]
_ASKED = [name for name, item in vars(TransactionalAdapter).items() if isinstance(item, property)]


def _require_verb(adapter: object, verb: str) -> None:
    """Make sure that a method can be called as it will be: in an undo it would be too late."""
    method, what = getattr(adapter, verb), f"{type(adapter).__name__}.{verb}"
    require_plain(method, f"weight_install_adapter: {what}")
    _self, *given = inspect.signature(getattr(TransactionalAdapter, verb)).parameters.values()
    by_name = [one.name for one in given if one.kind is one.KEYWORD_ONLY]
    try:
        inspect.signature(method).bind(
            *given[: len(given) - len(by_name)], **dict.fromkeys(by_name)
        )
    except ValueError:
        pass  # written in C: Python cannot tell
    except TypeError as error:
        told = ", ".join(one.name for one in given)
        raise TypeError(
            f"{what} cannot be called with ({told}): {error}. Give it these parameters."
        ) from None


def as_transactional(
    adapter: WeightInstallAdapter | TransactionalAdapter,
    *,
    initial: Version | None = None,
    num_threads: int | None = None,
) -> TransactionalAdapter:
    """The adapter itself where it is transactional, else wrapped.

    Raises:
        TypeError: an adapter that cannot install or release, or a method of it that cannot be
            called as it will be, or is a coroutine's.
        ValueError: less than one thread.

    """
    checked_threads(num_threads)
    lacking = [verb for verb in ("install", "release") if not _has(adapter, verb)]
    if lacking or isinstance(adapter, type):
        raise TypeError(
            f"weight_install_adapter: got {kind_of(adapter)}, which has no "
            f"{' and no '.join(lacking) or 'engine yet'}, expected an adapter. For a module or a "
            "dict of tensors of this process that is ModuleInstallAdapter(engine); one of your own "
            "needs install(manifest, tensors) and release(update_id)."
        )
    for verb in _OF_ALL if isinstance(adapter, TransactionalAdapter) else _OF_ANY:
        if _has(adapter, verb):
            _require_verb(adapter, verb)
    if not isinstance(adapter, TransactionalAdapter):
        return WrappedAdapter(adapter, initial=initial, num_threads=num_threads)
    for name in _ASKED:
        given = inspect.getattr_static(type(adapter), name)
        if inspect.isfunction(given) or isinstance(given, staticmethod | classmethod):
            raise TypeError(
                f"weight_install_adapter: {type(adapter).__name__}.{name} is a method, expected a "
                "property or a value: asked without a call, it would be true. Write @property "
                "above it."
            )
    return adapter

"""The seam between an imported update and an engine.

An adapter's life during one update: ``prepare`` (refuse before byte 0) -> ``install`` -> ``prove``
-> ``resume`` (let the engine serve it) -> ``commit``, and ``undo`` after any failure before that.
`RolloutExecutor` drives it. Adapters that have only ``install`` and ``release`` are wrapped by
`rl_bridge.installers.wrapped`. What an adapter is given is looked at when it is made: mistakes come
out before any update.
"""

import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from rl_bridge.errors import IncompatibleUpdate, UnknownUpdate
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.tensors import not_plain

Engine = torch.nn.Module | Mapping[str, torch.Tensor]
Quiesce = Callable[[], AbstractContextManager[object]]


@runtime_checkable
class WeightInstallAdapter(Protocol):
    """The least that an adapter is: install a complete update, and release one."""

    def install(
        self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]
    ) -> object:
        """Put all tensors into the engine."""

    def release(self, update_id: str) -> None:
        """Release what was kept for an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallProof:
    """What was found in the engine after an install.

    Attributes:
        method: how it was found: ``digest`` (every byte read in the engine), ``digest+canary`` (the
            same, and of weights that were packed away, products), ``identity`` (the engine's
            tensors are views of the mapping that was verified), ``import`` (no engine: the verified
            mapping itself), ``unproven`` (the adapter shows nothing of its engine).
        root: the root of what the engine holds; empty only where unproven.
        digested_nbytes: bytes read and digested in the engine.
        identical_nbytes: bytes shown to be the verified ones, without reading them again.
        tensors: how many tensors of the update it covers.
        staging: where an engine made the version: ``beside`` the serving one, or ``through``: right
            in its memory; empty if there is no such choice.

    """

    method: str
    root: str = ""
    digested_nbytes: int = 0
    identical_nbytes: int = 0
    tensors: int = 0
    staging: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form, as the acknowledgement carries it."""
        return asdict(self)


class TransactionalAdapter(ABC):
    """An adapter that can be undone and proven."""

    @property
    def imports_itself(self) -> bool:
        """Whether the engine's own processes import each update, and verify it in `prepare`.

        Then `RolloutExecutor.update_weights` leases an update and does not read its bytes. Every
        process of the engine must verify all bytes that it installs before it stages them, and
        `verified_root` must tell of all of them.
        """
        return False

    @property
    def verified_root(self) -> str:
        """Only where it `imports_itself`: root of what all of them verified in the last `prepare`.

        Empty where not all of them said the same: an executor that did not read the update itself
        then refuses it.
        """
        return ""

    @abstractmethod
    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Find every reason to refuse before a byte of the engine changes.

        Raises:
            IncompatibleUpdate: names, shapes or dtypes do not fit, or memory does not suffice.

        """

    @abstractmethod
    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put all tensors into the engine; any exception leads to `undo`."""

    @abstractmethod
    def prove(self) -> InstallProof:
        """Read what the engine really holds.

        Raises:
            ProofFailed: it is not the update that was installed.

        """

    def resume(self) -> None:  # noqa: B027 - not every engine waits for something
        """The install is proven: let the engine serve it. Any exception leads to `undo`."""

    @property
    def phases_ms(self) -> Mapping[str, float]:
        """Phase -> milliseconds, of phases inside of `prepare`, `install` and `resume`.

        The acknowledgement lists them apart, and the time of a step without them. Where an
        adapter `imports_itself`, ``verify`` is inside of `prepare`, whatever else it has then too.
        """
        return {}

    @abstractmethod
    def undo(self) -> None:
        """Bring the engine back to the byte to what it held before `install`.

        After an undo that failed, that is what it held before the first of the installs since the
        last `commit`: neither `prepare` nor `install` may take a torn engine for a state to go
        back to. Called without anything to undo, it does nothing.

        Raises:
            TornEngine: it could not be brought back.

        """

    def abandon(self) -> None:  # noqa: B027 - not every adapter keeps something after `prepare`
        """`prepare` was called, and `install` will not be: the update was refused.

        Forget what `prepare` noted, so that a later `undo` does not go back to it. Called while an
        earlier install is neither undone nor committed, what that one's undo needs must stay.
        """

    def commit(self) -> None:  # noqa: B027 - not every adapter keeps something for undo
        """The update is acknowledged: what `undo` would have needed may go.

        Called again where it failed. As long as it fails, an install that fails leaves the engine
        torn: its undo may lead back to before this update.
        """

    def take_over(self) -> bool:
        """Take the engine from another driver of it, and end what that one left half-way.

        Called by `RolloutExecutor.recover`, torn or not.

        Returns:
            Whether the engine has changed hands, or is another one than this adapter knew: the
            executor then holds no version, and is not torn.

        """
        return False

    def leave(self) -> None:  # noqa: B027 - not every engine has several drivers
        """The executor is closed: another driver may have the engine."""

    @property
    def is_overtaken(self) -> bool:
        """Whether the engine holds something else than what this adapter committed last.

        As it was seen last: another driver's version, or none, where it was started anew. It is
        asked after a refusal, an undo and `take_over`; then the executor holds no version.
        """
        return False

    @property
    def is_offered(self) -> bool:
        """Whether requests can ask for what was installed last, where it is a LoRA adapter.

        They cannot after a `drop_versions` that did not end. `take_over` offers it again.
        """
        return True

    def for_adapter(self, name: str) -> "TransactionalAdapter":
        """What brings versions of a LoRA adapter of that name into the engine, beside its weights.

        Raises:
            IncompatibleUpdate: the engine takes a model's weights only.

        """
        raise IncompatibleUpdate(
            f"the update holds LoRA adapter {name!r}, and a {type(self).__name__} installs a "
            "model's weights, expected an engine that applies adapters. Publish it merged into "
            "the model's weights: merged=True."
        )

    def drop_versions(self, timeout_s: float | None = None) -> None:  # noqa: B027 - most have nothing to drop
        """Take all versions out of the engine, where it is a LoRA adapter that this installs.

        Args:
            timeout_s: seconds that requests which have one are waited for; None for the engine's.

        Raises:
            DeadlineExceeded: requests have one still; none was dropped.

        """

    def has_engine(self) -> bool:
        """Whether the engine is this adapter's, and no other driver's; the engine is asked."""
        return False

    @property
    def may_sleep(self) -> bool:
        """Whether the engine can go to sleep by calls of its own, and lose what it holds by that.

        `has_engine` is asked then before the engine is said to be servable.
        """
        return False

    def finds_versions(self, *, take_over: bool) -> bool:  # noqa: ARG002 - most find nothing
        """Whether the engine holds versions of the LoRA adapter that this installs, of any driver.

        Args:
            take_over: the engine's versions are taken from another driver that has them.

        Raises:
            SessionRefused: another driver has them, and they are not taken over.

        """
        return False

    def lora_request(self, version: int | None) -> Any:
        """What requests name a version by, where it is a LoRA adapter that this installs.

        Raises:
            UnknownUpdate: the engine does not hold it.

        """
        raise UnknownUpdate(
            f"{type(self).__name__} knows of no version {version} that requests could name. Use an "
            "adapter of an engine that applies LoRA."
        )

    @abstractmethod
    def release(self, update_id: str) -> None:
        """Release what was kept for an update. Unknown ids are ignored."""


# ---- what an adapter is given --------------------------------------------------------------------


def checked_engine(engine: object) -> Engine:
    """The engine as it was given."""
    if isinstance(engine, torch.nn.Module):
        return engine
    what = kind_of(engine)
    if isinstance(engine, Mapping):
        strange = (name for name, item in engine.items() if not isinstance(item, torch.Tensor))
        name = next(strange, None)
        if name is None:
            return engine
        what = f"engine[{name!r}], which is {kind_of(engine[name])}"
    raise TypeError(
        f"engine: got {what}, expected an nn.Module or a dict of tensors. Pass the module that it "
        "runs; an engine that is none, or is elsewhere, needs an adapter of its own, with install "
        "and release."
    )


def require_plain(function: object, what: str) -> None:
    """Refuse what is no function, or returns before it did anything: async def, a generator."""
    if not callable(function):
        raise TypeError(f"{what}: got {kind_of(function)}, expected a function.")
    called: object = function
    if not inspect.isroutine(function) and not isinstance(function, functools.partial):
        called = getattr(type(function), "__call__", function)  # noqa: B004 - to look at it
    kinds = {
        "async def": inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called),
        "a generator": inspect.isgeneratorfunction(called),
    }
    for kind, is_one in kinds.items():
        if is_one:
            raise TypeError(
                f"{what} is {kind}, expected a plain function: a call of it would do nothing. "
                f"{_AWAIT_INSIDE}"
            )


def require_done(answer: object, what: str) -> None:
    """Refuse what a plain function returned, if somebody would have to await it: nobody does."""
    if not inspect.isawaitable(answer):
        return
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns later, far from here, that it was never awaited
    raise TypeError(
        f"{what} returned a {type(answer).__name__}, which nothing awaits, expected that all is "
        f"done when it returns. {_AWAIT_INSIDE}"
    )


_AWAIT_INSIDE = (
    "Wait inside of it for what is asynchronous, such as by "
    "asyncio.run_coroutine_threadsafe(...).result(timeout), or by asyncio.run(...) where no event "
    "loop runs in this thread."
)


def kind_of(item: object) -> str:
    """How a message calls what was given in the place of something else."""
    if isinstance(item, type):
        return f"the class {item.__name__}"
    return "None" if item is None else f"a {type(item).__name__}"


# ---- other tensors over the same memory ----------------------------------------------------------


def require_owned(engine: Mapping[str, torch.Tensor], mode: str) -> None:
    """Refuse a dict whose tensors are somebody else's: giving them other storages updates nobody.

    ``module.state_dict()`` gives new tensors over the module's memory, and slices of a fused weight
    are such tensors as well. What runs is the other one, which would stay at the old weights.
    """
    together: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, tensor in engine.items():
        if tensor.numel() and not_plain(tensor) is None:  # whatever else is refused with its update
            storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - its only identity
            together.setdefault(storage, {})[id(tensor)] = (name, tensor)
    alone, alone_base = _ALONE
    for looking in together.values():
        name, tensor = next(iter(looking.values()))
        # A base that only its views keep alive is looked at by nobody.
        bases = {
            id(view._base): _references_to_base(view)  # noqa: SLF001 - torch has no public name
            for _, view in looking.values()
            if view._base is not None  # noqa: SLF001
        }
        known = len(looking) - 1
        known += sum(n <= alone_base for base, n in bases.items() if base not in looking)
        if _looking_at(tensor) - known > alone:
            raise ValueError(
                f"engine: mode {mode!r} gives each tensor other memory, and at that of {name!r} a "
                "tensor outside of the dict looks too: it would keep the old weights. (A dict from "
                "module.state_dict(), or of slices of a fused weight, is only a view of the "
                "engine.) Pass the module itself, or the very tensors that the engine runs on, or "
                "use mode='copy'."
            )


def _looking_at(tensor: torch.Tensor) -> int:
    """How many tensors look at a tensor's storage, and a constant."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001
    return count


def _references_to_base(view: torch.Tensor) -> int:
    return sys.getrefcount(view._base)  # noqa: SLF001


def _measure_alone() -> tuple[int, int]:
    """Both numbers where nobody else looks: they depend on Python's and torch's versions."""
    with torch.inference_mode(mode=False):  # in which views have no base
        view = torch.empty(2, device="cpu")[:1]
        return _looking_at(torch.empty(1, device="cpu")), _references_to_base(view)


_ALONE = _measure_alone()

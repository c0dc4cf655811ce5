"""The seam between an imported update and an engine.

An adapter's life during one update: ``prepare`` (refuse before byte 0) -> ``install`` -> ``prove``
-> ``resume`` (let the engine serve it) -> ``commit``, and ``undo`` after any failure before that.
`RolloutExecutor` drives it. Adapters that have only ``install`` and ``release`` are wrapped by
`rl_bridge.installers.wrapped`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from rl_bridge.manifest.model import WeightUpdateManifest


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

    """

    method: str
    root: str = ""
    digested_nbytes: int = 0
    identical_nbytes: int = 0
    tensors: int = 0

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
        asked behind a refusal, an undo and `take_over`; then the executor holds no version.
        """
        return False

    @abstractmethod
    def release(self, update_id: str) -> None:
        """Release what was kept for an update. Unknown ids are ignored."""


def checked_threads(num_threads: int | None) -> int | None:
    """The number as it was given; None stands for the usable cores.

    Raises:
        ValueError: it is no number of threads.

    """
    if num_threads is None or (type(num_threads) is int and num_threads >= 1):
        return num_threads
    msg = f"num_threads {num_threads!r}: expected an int of 1 or more, or None for the usable cores"
    raise ValueError(msg)

"""What `EngineSuite` asks of an engine's ranks, in their own processes: faults, and what they hold.

An engine's tests bring `in_rank` into each rank's process, by whatever way the engine has to call a
function there. Texts go in and come out, JSON on both sides.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_bridge.engines.rank import EngineRank, known_rank
from rl_bridge.installers.engine_memory import named_engine_tensors

FAULT = "planted in a rank"
"""What each planted failure says."""

_installer_of: Any = vars(EngineRank)["installer"]


def in_rank(model: torch.nn.Module, text: str) -> str:
    """Do in a rank's process what the suite asks: plant a fault, uproot it, or tell the contents.

    Args:
        model: the rank's.
        text: what is asked.

    """
    given = json.loads(text)
    return json.dumps(_ASKED[given.pop("ask")](model, **given))


def _contents(model: torch.nn.Module) -> dict[str, str]:
    """Digest of each tensor that the model has, by name."""
    return {name: _digest(tensor) for name, tensor in named_engine_tensors(model).items()}


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()


def _uproot(_: torch.nn.Module) -> None:
    vars_of: Any = EngineRank
    vars_of.installer = _installer_of


def _plant(_: torch.nn.Module, step: str, fault: str, rank: int) -> None:
    """Let a step of one rank's installer fail, each time that it is taken.

    Args:
        step: a method of `TransactionalAdapter`.
        fault: one of `FAULTS`.
        rank: whose.

    """

    def faulty(owner: EngineRank) -> Any:
        made = _installer_of.fget(owner)
        return _Faulty(made, owner, step, fault) if owner.host.rank == rank else made

    patched: Any = EngineRank
    patched.installer = property(faulty)


class _Faulty:
    """An installer of which one step goes wrong."""

    def __init__(self, inner: Any, owner: EngineRank, step: str, fault: str) -> None:
        self._inner = inner
        # An engine that is fed by its own loader has `begin` instead of `install`.
        self._steps = {step, "begin"} if step == "install" else {step}
        self._fail: Callable[[], None] = lambda: FAULTS[fault](owner.host.model)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._steps:
            return found

        def goes_wrong(*given: Any) -> Any:
            self._fail()
            return found(*given)

        return goes_wrong


def _take_back(model: torch.nn.Module, rank: int) -> None:
    """Let one rank alone undo its update, as one does that heard a vote for a no."""
    mine = known_rank(model)
    if mine is not None and mine.host.rank == rank:
        mine.undo("it took the vote for a no")


def _open(model: torch.nn.Module, rank: int, epoch: int) -> None:
    """Let one rank alone hear of a session, as if its driver died while it opened it."""
    mine = known_rank(model)
    if mine is not None and mine.host.rank == rank:
        mine.session.open("lost", "somebody lost", epoch, take_over=True)


def _raise(_: torch.nn.Module) -> None:
    raise RuntimeError(FAULT)


def _run_short(_: torch.nn.Module) -> None:
    raise MemoryError(FAULT)


def _die(_: torch.nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _damage(model: torch.nn.Module) -> None:
    """Turn one bit of the first weight around."""
    weight = next(one for one in model.parameters() if one.numel() > 1 and one.is_contiguous())
    weight.detach().reshape(-1).view(torch.uint8)[-1] ^= 1


FAULTS: Mapping[str, Callable[[torch.nn.Module], None]] = {
    "raises": _raise,
    "runs short": _run_short,
    "dies": _die,
    "damages": _damage,
}
"""What goes wrong right before a step: it raises, has no memory, dies, or a byte changes."""

_ASKED: Mapping[str, Callable[..., Any]] = {
    "contents": _contents,
    "open": _open,
    "plant": _plant,
    "take back": _take_back,
    "uproot": _uproot,
}

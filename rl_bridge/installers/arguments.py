"""What an adapter is given, looked at when it is made: mistakes come out before any update."""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from rl_bridge.memory.tensors import not_plain

Engine = torch.nn.Module | Mapping[str, torch.Tensor]
Quiesce = Callable[[], AbstractContextManager[object]]


def checked_engine(engine: object) -> Engine:
    """The engine as it was given.

    Raises:
        TypeError: it is neither a module nor a mapping of names to tensors.

    """
    if isinstance(engine, torch.nn.Module):
        return engine
    if not isinstance(engine, Mapping):
        msg = (
            f"engine: got {_kind(engine)}, expected an nn.Module or a dict of tensors. Pass the "
            "module that it runs; an engine that is none, or is elsewhere, needs an adapter of its "
            "own, with install and release."
        )
        raise TypeError(msg)
    if set(map(type, engine.values())) <= {torch.Tensor, torch.nn.Parameter}:
        return engine
    for name, item in engine.items():
        if isinstance(item, torch.Tensor):
            continue
        remedy = "Leave it out of the dict."
        if isinstance(item, Mapping):
            remedy = f"Pass the dict of tensors itself, such as engine[{name!r}]."
        elif hasattr(item, "__array_interface__"):
            remedy = "Make it a tensor: torch.from_numpy(array), with mode='copy'."
        msg = f"engine[{name!r}]: got {_kind(item)}, expected a tensor. {remedy}"
        raise TypeError(msg)
    return engine


def checked_quiesce(quiesce: Quiesce) -> Quiesce:
    """The function as it was given.

    Raises:
        TypeError: it cannot be called without arguments, such as a context manager or a lock.

    """
    if callable(quiesce):
        try:
            inspect.signature(quiesce).bind()
        except TypeError:  # an instance of torch.no_grad() can be called, as a decorator
            pass
        except ValueError:
            return quiesce  # written in C: Python cannot tell
        else:
            return quiesce
    msg = (
        f"quiesce: got {_kind(quiesce)}, expected a function without arguments that returns a "
        "context manager. Pass one that makes it anew each time, such as lambda: lock."
    )
    raise TypeError(msg)


def require_plain(method: object, what: str) -> None:
    """Refuse a method that returns before it has done anything: a coroutine's, or a generator.

    Raises:
        TypeError: it is one.

    """
    kinds = {
        "async def": inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method),
        "a generator": inspect.isgeneratorfunction(method),
    }
    for kind, is_one in kinds.items():
        if is_one:
            msg = (
                f"{what} is {kind}, expected a plain function: a call of it would do nothing. "
                "Wait inside of it for what is asynchronous, such as by "
                "asyncio.run_coroutine_threadsafe(...).result(timeout)."
            )
            raise TypeError(msg)


def _kind(item: object) -> str:
    if isinstance(item, type):
        return f"the class {item.__name__}"
    return "None" if item is None else f"a {type(item).__name__}"


# ---- other tensors over the same memory ----------------------------------------------------------


def require_owned(engine: Mapping[str, torch.Tensor], mode: str) -> None:
    """Refuse a dict whose tensors are somebody else's: giving them other storages updates nobody.

    ``module.state_dict()`` gives new tensors over the module's memory, and slices of a fused weight
    are such tensors as well. What runs is the other one, which would stay at the old weights.

    Raises:
        ValueError: a tensor outside of the dict looks at the same memory.

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
            msg = (
                f"engine: mode {mode!r} gives each tensor other memory, and at that of {name!r} a "
                "tensor outside of the dict looks too: it would keep the old weights. (A dict from "
                "module.state_dict(), or of slices of a fused weight, is only a view of the "
                "engine.) Pass the module itself, or the very tensors that the engine runs on, or "
                "use mode='copy'."
            )
            raise ValueError(msg)


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

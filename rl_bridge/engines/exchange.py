"""The exchange of a staged version for the serving one, and back."""

import logging
import sys

import torch

from rl_bridge.engines.staging import AttributeChange, Staged, TensorChange

__all__ = [
    "Exchange",
    "Freed",
    "is_alone",
    "is_looked_at",
]

_LOG = logging.getLogger(__name__)
_ABSENT = object()

Freed = tuple[list[tuple[TensorChange, torch.Tensor]], list[tuple[AttributeChange, object]]]
"""What the version before had: memory, each with its change, and what layers computed with."""


class Exchange:
    """Exchanges, and remembers what was there: the oldest state since the last `forget`.

    A parameter gets other memory where only it looks at its own; else it is written in place, so
    that views, captured graphs and whoever else knows its address follow. Each step is noted before
    it is taken: an interrupt at any line can be undone.
    """

    def __init__(self) -> None:
        """Begin with nothing exchanged."""
        self._tensors: list[tuple[TensorChange, torch.Tensor, bool]] = []
        self._attributes: list[tuple[AttributeChange, object]] = []

    @property
    def is_begun(self) -> bool:
        """Whether anything may have been exchanged since the last `undo` or `forget`."""
        return bool(self._tensors or self._attributes)

    def apply(self, staged: Staged) -> None:
        """Exchange everything that was staged."""
        for change in staged.tensors:
            if is_alone(change.live):
                self._tensors.append((change, change.live.data, True))
                change.live.data = change.fresh
            else:
                self._tensors.append((change, change.live.detach().clone(), False))
                change.live.data.copy_(change.fresh)
        for attribute in staged.attributes:
            state = vars(attribute.module)
            self._attributes.append((attribute, state.get(attribute.key, _ABSENT)))
            state[attribute.key] = attribute.value

    def undo(self) -> None:
        """Exchange back, the last step first. May be called again after an interrupt.

        Whoever took a view of what was exchanged meanwhile looks at the refused version from then
        on: nobody can turn it, so its memory stays as it is, and the log names the parameter.
        """
        while self._attributes:
            attribute, before = self._attributes[-1]
            if before is _ABSENT:
                vars(attribute.module).pop(attribute.key, None)
            else:
                vars(attribute.module)[attribute.key] = before
            self._attributes.pop()
        while self._tensors:
            change, memory, rebound = self._tensors[-1]
            if rebound:
                change.live.data = memory
            else:
                change.live.data.copy_(memory)
            self._tensors.pop()
            if rebound and not is_alone(change.fresh):
                _LOG.warning(
                    "parameter %r: somebody took a view of it between an install and its undo. "
                    "The view shows the version that was undone: take it again.",
                    change.name,
                )

    def forget(self) -> Freed:
        """The exchange stands; returns what it freed and the next update can use.

        Of a parameter that was written in place, that is the memory that was staged for it.
        """
        tensors, self._tensors = self._tensors, []
        attributes, self._attributes = self._attributes, []
        return (
            [(change, memory if rebound else change.fresh) for change, memory, rebound in tensors],
            attributes,
        )


def is_alone(live: torch.Tensor) -> bool:
    """Whether nobody but this parameter looks at its memory, as far as torch counts.

    On an accelerator a captured graph knows the address, which nobody counts; nor does anybody
    count the processes that map shared memory.
    """
    if live.device.type != "cpu" or live.is_shared():  # type: ignore[no-untyped-call]  # torch has no types here
        return False
    return not is_looked_at(live)


def is_looked_at(tensor: torch.Tensor) -> bool:
    """Whether torch knows of anybody who looks at a tensor's memory beside that tensor."""
    return _looking_at(tensor) > _ALONE


def _looking_at(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001 - torch has no public name
    # Tensors, and whoever keeps the storage itself: they share one object of Python's.
    return count + sys.getrefcount(storage)


_ALONE = _looking_at(torch.nn.Parameter(torch.empty(1, device="cpu"), requires_grad=False))

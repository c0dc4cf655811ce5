"""The exchange of a staged version for the serving one, and back."""

from typing import Any

import torch

from rl_bridge.installers.vllm.staging import Staged, TensorChange

__all__ = ["Exchange"]

_ABSENT = object()


class Exchange:
    """Exchanges, and remembers what was there: the oldest state since the last `forget`.

    Each step is noted before it is taken, so that an interrupt at any line can be undone.
    """

    def __init__(self) -> None:
        """Begin with nothing exchanged."""
        self._tensors: list[tuple[TensorChange, torch.Tensor]] = []
        self._attributes: list[tuple[dict[str, Any], str, object]] = []

    @property
    def is_begun(self) -> bool:
        """Whether anything may have been exchanged since the last `undo` or `forget`."""
        return bool(self._tensors or self._attributes)

    def apply(self, staged: Staged) -> None:
        """Exchange everything that was staged."""
        for change in staged.tensors:
            if _rebinds(change.live):
                self._tensors.append((change, change.live.data))
                change.live.data = change.fresh
            else:
                self._tensors.append((change, change.live.detach().clone()))
                change.live.data.copy_(change.fresh)
        for attribute in staged.attributes:
            state = vars(attribute.module)
            self._attributes.append((state, attribute.key, state.get(attribute.key, _ABSENT)))
            state[attribute.key] = attribute.value

    def undo(self) -> None:
        """Exchange back, the last step first. May be called again after an interrupt."""
        while self._attributes:
            state, key, before = self._attributes[-1]
            if before is _ABSENT:
                state.pop(key, None)
            else:
                state[key] = before
            self._attributes.pop()
        while self._tensors:
            change, before = self._tensors[-1]
            assert isinstance(before, torch.Tensor)
            if _rebinds(change.live):
                change.live.data = before
            else:
                change.live.data.copy_(before)
            self._tensors.pop()

    def forget(self) -> list[tuple[TensorChange, torch.Tensor]]:
        """The exchange stands; returns the memory that it freed, each with its change."""
        freed, self._tensors, self._attributes = self._tensors, [], []
        return [(change, memory) for change, memory in freed if _rebinds(change.live)]


def _rebinds(live: torch.Tensor) -> bool:
    """Whether a parameter may get other memory: not where captured graphs know its address."""
    return live.device.type == "cpu"

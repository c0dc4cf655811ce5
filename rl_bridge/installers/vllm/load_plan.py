"""What an engine's loader does with the tensors of an update: copies of parts to parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rl_bridge.installers.vllm.skeleton import Target

__all__ = ["Fill", "Kinds", "LoadPlan", "Route", "View"]

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name -> dtype, shape, of an update's tensors."""


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor: shape and strides in elements, offset in elements from its start."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Look at that part."""
        return torch.as_strided(
            tensor, self.shape, self.stride, tensor.storage_offset() + self.offset
        )

    def once(self) -> "View":
        """The same part, without the dimensions in which it repeats itself."""
        shape = (1 if step == 0 else dim for dim, step in zip(self.shape, self.stride, strict=True))
        return View(tuple(shape), self.stride, self.offset)

    @property
    def numel(self) -> int:
        """Count its elements."""
        return torch.Size(self.shape).numel()

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in memory as in the row-major order of its shape."""
        expected = 1
        for dim, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if dim != 1 and step != expected:
                return False
            expected *= dim
        return True


@dataclass(frozen=True, slots=True)
class Route:
    """Part of a tensor of the update -> part of a parameter."""

    source: str
    source_view: View
    target: int
    target_view: View
    is_whole: bool
    """Whether the part is the tensor: all of it, in order."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A number -> part of a parameter: padding."""

    value: float
    target: int
    target_view: View


@dataclass(slots=True)
class LoadPlan:
    """What a loader does with the tensors of one layout.

    Attributes:
        targets: the parameters that it writes and those that it does not.
        steps: position of a target -> what is written into it, in the loader's order.
        landed: names of the tensors that go anywhere.
        computed: positions of the targets that the loader computes; they have no steps.
        buffers: full names of the buffers that it loads.
        mixed: names of the tensors of which computed targets and buffers are made.

    """

    targets: Sequence[Target]
    steps: dict[int, list[Route | Fill]] = field(default_factory=dict)
    landed: frozenset[str] = frozenset()
    computed: frozenset[int] = frozenset()
    buffers: frozenset[str] = frozenset()
    mixed: frozenset[str] = frozenset()

    def routes(self) -> Iterator[Route]:
        """Go over all copies."""
        for steps in self.steps.values():
            yield from (step for step in steps if isinstance(step, Route))

    def unfollowed(self) -> frozenset[str]:
        """Full names of the parameters and buffers whose content the steps do not tell."""
        users = (user for index in self.computed for user in self.targets[index].users)
        return self.buffers.union(user.name for user in users)

    def padding(self, index: int) -> int:
        """Elements of a parameter that its loader fills with a number."""
        steps = self.steps[index]
        return sum(step.target_view.numel for step in steps if isinstance(step, Fill))

    def assemble(
        self, index: int, tensors: Mapping[str, torch.Tensor], memory: torch.Tensor
    ) -> None:
        """Write one parameter into `memory`, which has the target's shape and strides."""
        for step in self.steps[index]:
            part = step.target_view.of(memory)
            if isinstance(step, Fill):
                part.fill_(step.value)
            else:
                part.copy_(step.source_view.of(tensors[step.source]))

"""The ways to hand over weights that the benchmark compares, each as a publisher and a consumer.

A lane is a pair of classes, one for the trainer's process and one for the engine's. The two sides
know each other only through bytes: the publisher's ``hello`` once, then one message per update.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from _lib.copying import copy_tensors
from _lib.payload import Payload, PayloadSpec

__all__ = ["Consumer", "LaneContext", "LaneSpec", "Publisher", "Resident", "load_side"]


class Resident:
    """The engine's own parameters: allocated and touched once, filled by every load."""

    def __init__(self, spec: PayloadSpec) -> None:
        """Remember the shapes; nothing is allocated before the first load."""
        self._spec = spec
        self.tensors: dict[str, torch.Tensor] = {}

    def allocate(self) -> None:
        """Make the parameters and touch every page."""
        if not self.tensors:
            for name in self._spec.names():
                shape = (self._spec.rows, self._spec.cols)
                self.tensors[name] = torch.zeros(*shape, dtype=torch.bfloat16)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor into the parameter of its name."""
        names = list(self.tensors)
        copy_tensors([self.tensors[name] for name in names], [tensors[name] for name in names])

    def free(self) -> None:
        """Give the memory back."""
        self.tensors.clear()


@dataclass(slots=True, kw_only=True)
class LaneContext:
    """What one side of a lane is given."""

    spec: PayloadSpec
    payload: Payload | None
    resident: Resident | None
    queue: Any
    scratch: Path
    timeout_s: float
    options: dict[str, Any] = field(default_factory=dict)


class Publisher(Protocol):
    """The trainer's side of a lane."""

    def hello(self) -> bytes:
        """Return what the consumer needs once."""

    def fill(self, version: int) -> None:
        """Rewrite the source (not timed)."""

    def publish(self, version: int) -> bytes:
        """Hand the source over (timed) and return the message for the consumer."""

    def after(self) -> dict[str, float]:
        """Clean up once the consumer is done; may time baselines and return them in seconds."""

    def close(self) -> None:
        """Give everything back."""


class Consumer(Protocol):
    """The engine's side of a lane."""

    loads_itself: bool

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Return tensors that can be read (timed)."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Bring the tensors into the engine's parameters (timed) and return those."""

    def after(self) -> dict[str, float]:
        """Drop what was received; may time baselines and return them in seconds."""

    def close(self) -> None:
        """Give everything back."""


class BasePublisher:
    """Defaults: the shared source, nothing to clean up."""

    def __init__(self, context: LaneContext) -> None:
        """Keep the context."""
        self.context = context
        self._payload = context.payload

    @property
    def payload(self) -> Payload:
        """Return the live state dict; only the trainer has one."""
        if self._payload is None:
            msg = "a publisher needs the trainer's payload"
            raise TypeError(msg)
        return self._payload

    def hello(self) -> bytes:
        """Return what the consumer needs once."""
        return b""

    def fill(self, version: int) -> None:
        """Rewrite the source (not timed)."""
        self.payload.advance_to(version)

    def after(self) -> dict[str, float]:
        """Clean up once the consumer is done."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class BaseConsumer:
    """Defaults: load by copying into the resident parameters, nothing to clean up."""

    loads_itself = False

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Keep the context; subclasses read ``hello``."""
        del hello
        self.context = context

    def load(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy into the engine's resident parameters and return them."""
        resident = self.context.resident
        if resident is None:
            msg = "a consumer needs the engine's resident parameters"
            raise TypeError(msg)
        resident.load(tensors)
        return resident.tensors

    def after(self) -> dict[str, float]:
        """Drop what was received."""
        return {}

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """One row of the comparison, described so that either process can build its side."""

    name: str
    title: str
    module: str
    publisher: str = "LanePublisher"
    consumer: str = "LaneConsumer"
    verified: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    spec: PayloadSpec | None = None
    requires: str | None = None
    install_hint: str = ""


def load_side(spec: LaneSpec, side: str) -> Any:
    """Return the class that plays ``side`` ("publisher" or "consumer") of a lane."""
    module = importlib.import_module(spec.module)
    return getattr(module, spec.publisher if side == "publisher" else spec.consumer)

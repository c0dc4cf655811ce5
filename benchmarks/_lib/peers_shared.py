"""Peers on shared memory: torch.multiprocessing, one segment per tensor, and a bare arena."""

import json
import mmap
import os
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory

import torch

from _lib.copying import copy_tensors, torch_threads
from _lib.lanes import BaseConsumer, BasePublisher, LaneContext
from _lib.payload import Payload

__all__ = [
    "ArenaConsumer",
    "ArenaPublisher",
    "QueueConsumer",
    "QueuePublisher",
    "SegmentConsumer",
    "SegmentPublisher",
]

_ALIGNMENT = 4096


class QueuePublisher(BasePublisher):
    """``torch.multiprocessing.Queue``: the live tensors themselves, or a clone of each."""

    def __init__(self, context: LaneContext) -> None:
        """Make a source of its own: torch moves what is sent into shared memory for good."""
        super().__init__(context)
        self._clone = bool(context.options.get("clone"))
        if not self._clone:
            self._payload = Payload.build(context.spec, shared=True)

    def publish(self, version: int) -> bytes:
        """Put the tensors on the queue."""
        tensors = self.payload.tensors
        if self._clone:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.context.queue.put((version, tensors))
        return str(version).encode()


class QueueConsumer(BaseConsumer):
    """Takes the tensors from the queue."""

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the announced version."""
        version, tensors = self.context.queue.get(timeout=self.context.timeout_s)
        if version != int(message):
            msg = f"queue delivered version {version}, expected {int(message)}"
            raise ValueError(msg)
        result: dict[str, torch.Tensor] = tensors
        return result


def _segment_tensor(segment: SharedMemory, context: LaneContext) -> torch.Tensor:
    """Return the tensor that lies in ``segment`` (whose size may be rounded up)."""
    spec = context.spec
    words = torch.frombuffer(segment.buf, dtype=torch.bfloat16, count=spec.numel)
    return words.view(spec.rows, spec.cols)


class _Segments:
    """Segments with the tensors in them, closed in the order that Python demands."""

    def __init__(self, segments: list[SharedMemory], context: LaneContext) -> None:
        """Make one tensor per segment."""
        self.segments = segments
        self.tensors = [_segment_tensor(segment, context) for segment in segments]

    def close(self, *, unlink: bool) -> None:
        """Drop the tensors, then the mappings, then (as the owner) the names."""
        self.tensors.clear()
        for segment in self.segments:
            segment.close()
            if unlink:
                segment.unlink()
        self.segments.clear()


class SegmentPublisher(BasePublisher):
    """One ``SharedMemory`` per tensor: made once and reused, or made anew for every update."""

    def __init__(self, context: LaneContext) -> None:
        """Make the segments if they are to be reused."""
        super().__init__(context)
        self._fresh = bool(context.options.get("fresh"))
        self._held: list[_Segments] = [] if self._fresh else [self._make()]

    def _make(self) -> _Segments:
        nbytes = self.context.spec.tensor_nbytes
        count = self.context.spec.num_tensors
        return _Segments(
            [SharedMemory(create=True, size=nbytes) for _ in range(count)], self.context
        )

    def hello(self) -> bytes:
        """Name the reused segments."""
        return b"" if self._fresh else self._names()

    def _names(self) -> bytes:
        return json.dumps([segment.name for segment in self._held[-1].segments]).encode()

    def publish(self, version: int) -> bytes:
        """Copy each tensor into its segment and name the segments if they are new."""
        if self._fresh:
            self._held.append(self._make())
        copy_tensors(self._held[-1].tensors, list(self.payload.tensors.values()))
        return self._names() if self._fresh else str(version).encode()

    def after(self) -> dict[str, float]:
        """Remove segments that were made for one update."""
        if self._fresh:
            self.close()
        return {}

    def close(self) -> None:
        """Remove every segment."""
        while self._held:
            self._held.pop().close(unlink=True)


class SegmentConsumer(BaseConsumer):
    """Attaches to the segments, once or for every update."""

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Attach to reused segments."""
        super().__init__(context, hello)
        self._fresh = not hello
        self._held = [] if self._fresh else [self._attach(hello)]

    def _attach(self, names: bytes) -> _Segments:
        segments = [SharedMemory(name=name) for name in json.loads(names)]
        return _Segments(segments, self.context)

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Return the tensors in the segments."""
        if self._fresh:
            self._held.append(self._attach(message))
        return dict(zip(self.context.spec.names(), self._held[-1].tensors, strict=True))

    def after(self) -> dict[str, float]:
        """Let go of segments that were made for one update."""
        if self._fresh:
            self.close()
        return {}

    def close(self) -> None:
        """Let go of every segment."""
        while self._held:
            self._held.pop().close(unlink=False)


def _arena_tensors(mapping: mmap.mmap, context: LaneContext) -> list[torch.Tensor]:
    spec = context.spec
    stride = -(-spec.tensor_nbytes // _ALIGNMENT) * _ALIGNMENT
    return [
        torch.frombuffer(
            mapping, dtype=torch.bfloat16, count=spec.numel, offset=index * stride
        ).view(spec.rows, spec.cols)
        for index in range(spec.num_tensors)
    ]


def _arena_nbytes(context: LaneContext) -> int:
    stride = -(-context.spec.tensor_nbytes // _ALIGNMENT) * _ALIGNMENT
    return stride * context.spec.num_tensors


class ArenaPublisher(BasePublisher):
    """One shared file, mapped and touched once: a bare copy, no digest, no lease, one buffer."""

    def __init__(self, context: LaneContext) -> None:
        """Make the arena and touch every page."""
        super().__init__(context)
        self._path = context.scratch / f"arena-{os.getpid()}-{id(self)}"
        nbytes = _arena_nbytes(context)
        with self._path.open("xb+") as file:
            os.ftruncate(file.fileno(), nbytes)
            self._mapping = mmap.mmap(file.fileno(), nbytes)
        self._tensors = _arena_tensors(self._mapping, context)
        for tensor in self._tensors:
            tensor.zero_()

    def hello(self) -> bytes:
        """Name the arena."""
        return str(self._path).encode()

    def publish(self, version: int) -> bytes:
        """Copy every tensor to its place."""
        with torch_threads(int(self.context.options["threads"])):
            copy_tensors(self._tensors, list(self.payload.tensors.values()))
        return str(version).encode()

    def close(self) -> None:
        """Unmap and remove the arena."""
        self._tensors.clear()
        self._mapping.close()
        self._path.unlink(missing_ok=True)


class ArenaConsumer(BaseConsumer):
    """Maps the arena once; an update is usable as soon as its message is there."""

    def __init__(self, context: LaneContext, hello: bytes) -> None:
        """Map the arena and touch every page."""
        super().__init__(context, hello)
        nbytes = _arena_nbytes(context)
        with open(hello.decode(), "rb+") as file:  # noqa: PTH123 - the path is the peer's text
            self._mapping = mmap.mmap(file.fileno(), nbytes)
        self._tensors = dict(
            zip(context.spec.names(), _arena_tensors(self._mapping, context), strict=True)
        )
        for tensor in self._tensors.values():
            tensor.view(torch.int16).sum()

    def receive(self, message: bytes) -> Mapping[str, torch.Tensor]:
        """Return the views."""
        int(message)
        return self._tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Copy into the engine's parameters with the lane's number of threads."""
        with torch_threads(int(self.context.options["threads"])):
            return super().load(tensors)

    def close(self) -> None:
        """Unmap."""
        self._tensors = {}
        self._mapping.close()

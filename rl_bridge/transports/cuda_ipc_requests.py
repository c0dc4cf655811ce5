"""Weights that come as torch's CUDA IPC handles: a request with a handle for each tensor, or one.

Two forms are known: *unpacked*, a handle for each tensor, and *packed*, one handle of a flat buffer
in which the tensors lie one behind the other. Both map the GPU's UUID to what ``reduce_tensor``
returned, so that one request serves several GPUs.

    with open_request(ImportRequest.of(request), device=0) as tensors:
        manifest = bridge.publish(tensors, weight_version=7)

The tensors look at the trainer's memory; `publish` takes the snapshot. Keep none of them after the
``with``: its end is what lets the trainer free, or write, its memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch

from rl_bridge.cuda.devices import cuda_cause
from rl_bridge.cuda.torch_handle import Calls, TorchHandle, decline
from rl_bridge.errors import (
    DuplicateTensorName,
    MalformedManifest,
    RangeBeyondSegment,
    ShapeMismatch,
    TransportUnavailable,
)

_SAY_AGAIN = "Send the request as the trainer made it."
_NAME = "cuda-ipc"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """A request, checked; nothing is opened.

    Attributes:
        names: of the tensors.
        dtypes: of each, by its name.
        shapes: of each.
        is_packed: whether all lie in one buffer.
        exports: for each handle of the request, GPU -> export; one of a packed request.

    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_packed: bool
    exports: tuple[Mapping[str, TorchHandle], ...]

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Self:
        """Take a request: of Python objects as the trainer made it, or `to_dict`'s.

        A request that is refused is not declined: nothing shows which exports it meant. Its
        trainer keeps the memory.

        Args:
            request: ``names``, ``dtypes``, ``shapes`` and ``extras``, a list of
                ``{"ipc_handles": {uuid: export}}``; with ``packed``, ``sizes`` in elements.

        Raises:
            WeightManifestValidationError: it is something else, or contradicts itself.
            TransportUnavailable: a tensor lies in an expandable segment.

        """
        names, dtypes, shapes = (_listed(request, key) for key in ("names", "dtypes", "shapes"))
        is_packed = request.get("packed", False)
        if type(is_packed) is not bool or not all(type(name) is str for name in names):
            raise MalformedManifest(f"a request's names or packed are of other types. {_SAY_AGAIN}")
        if not len(names) == len(dtypes) == len(shapes):
            counts = (len(names), len(dtypes), len(shapes))
            raise MalformedManifest(
                f"a request has {counts} names, dtypes and shapes. {_SAY_AGAIN}"
            )
        if len(set(names)) != len(names):
            raise DuplicateTensorName(f"a request has a name twice. {_SAY_AGAIN}")
        found = cls(
            names=tuple(names),
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
            shapes=tuple(_shape(name, shape) for name, shape in zip(names, shapes, strict=True)),
            is_packed=is_packed,
            exports=tuple(_exports(extra) for extra in _listed(request, "extras")),
        )
        if is_packed:
            found._check_packed(_listed(request, "sizes"))
        else:
            found._check_unpacked()
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, without callables."""
        found = {
            "names": list(self.names),
            "dtypes": list(self.dtypes),
            "shapes": [list(shape) for shape in self.shapes],
            "packed": self.is_packed,
            "extras": [
                {"ipc_handles": {gpu: export.to_dict() for gpu, export in exports.items()}}
                for exports in self.exports
            ],
        }
        return found | ({"sizes": [prod(shape) for shape in self.shapes]} if self.is_packed else {})

    def _check_unpacked(self) -> None:
        if len(self.exports) != len(self.names):
            raise MalformedManifest(
                f"{len(self.names)} tensors have {len(self.exports)} handles. {_SAY_AGAIN}"
            )
        rows = zip(self.names, self.dtypes, self.shapes, self.exports, strict=True)
        for name, dtype, shape, exports in rows:
            for export in exports.values():
                if (export.dtype, export.shape) != (dtype, shape):
                    raise ShapeMismatch(
                        f"tensor {name!r} is {dtype} {shape} in the request, and its handle is "
                        f"{export.dtype} {export.shape}. {_SAY_AGAIN}"
                    )

    def _check_packed(self, sizes: Sequence[Any]) -> None:
        if len(self.exports) != 1 or list(sizes) != [prod(shape) for shape in self.shapes]:
            raise MalformedManifest(
                f"a packed request has {len(self.exports)} handles and sizes that are not those of "
                f"its {len(self.names)} shapes, expected one handle. {_SAY_AGAIN}"
            )
        needed = sum(sizes)
        for export in self.exports[0].values():
            if {*self.dtypes, export.dtype} != {export.dtype} or export.stride != (1,):
                raise ShapeMismatch(
                    f"a packed request's buffer is {export.dtype} {export.shape}, expected a flat "
                    f"one of the tensors' dtypes, {sorted(set(self.dtypes))}. {_SAY_AGAIN}"
                )
            if export.numel < needed:
                raise RangeBeyondSegment(
                    f"{needed} elements do not fit a buffer of {export.numel}. {_SAY_AGAIN}"
                )

    def on(self, gpu: str) -> list[TorchHandle]:
        """The exports on one GPU, in the request's order.

        Raises:
            TransportUnavailable: the request has none for it.

        """
        found = [exports.get(gpu) for exports in self.exports]
        known = [export for export in found if export is not None]
        if len(known) != len(found):
            others = sorted({name for exports in self.exports for name in exports})
            raise TransportUnavailable(
                _NAME,
                f"the request has no handles for GPU {gpu}, only for {others}",
                "Export on the GPU that the receiver runs on, once for each receiver.",
            )
        return known


def _listed(request: Mapping[str, Any], key: str) -> list[Any]:
    found = request.get(key)
    if not isinstance(found, list | tuple):
        raise MalformedManifest(f"a request's {key} are {type(found).__name__}. {_SAY_AGAIN}")
    return list(found)


def _shape(name: str, given: object) -> tuple[int, ...]:
    found = tuple(given) if isinstance(given, list | tuple) else (-1,)
    if any(type(size) is not int or size < 0 for size in found):
        raise ShapeMismatch(f"tensor {name!r} has the shape {given!r}. {_SAY_AGAIN}")
    return found


def _exports(extra: object) -> dict[str, TorchHandle]:
    handles = extra.get("ipc_handles") if isinstance(extra, Mapping) else None
    if not isinstance(handles, Mapping) or not all(type(gpu) is str for gpu in handles):
        raise MalformedManifest(f"a request's extras hold no ipc_handles by GPU. {_SAY_AGAIN}")
    return {
        gpu: TorchHandle.from_dict(given) if isinstance(given, Mapping) else TorchHandle.of(given)
        for gpu, given in handles.items()
    }


def _gpu(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def open_request(
    request: ImportRequest,
    *,
    device: int,
    gpu: str | None = None,
    calls: Calls | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Open each export of a request, once; an export that cannot be opened any longer is declined.

    Args:
        request: what came; it can be opened once.
        device: number of the GPU in this process; torch's current stream of it waits for the
            exporter's events.
        gpu: its UUID; None asks torch.
        calls: torch's functions; None takes them.

    Yields:
        Name -> tensor, in the exporter's memory.

    Raises:
        TransportUnavailable: not on this GPU, or a handle does not open here; with the cause.
        WeightUpdateRejectedError: an export was opened before.

    """
    if calls is None:
        if (cause := cuda_cause()) is not None:
            raise TransportUnavailable(_NAME, cause, "Open it where the trainer's GPU is.")
        begin: Any = torch.cuda.init  # torch does not annotate it
        begin()  # as torch's own way to open them does
    functions = Calls.of_torch() if calls is None else calls
    place = torch.device(functions.kind, device)
    exports = request.on(_gpu(device) if gpu is None else gpu)
    opened: list[torch.Tensor] = []
    tensors: dict[str, torch.Tensor] = {}
    try:
        opened += (export.open(place, functions) for export in exports)
        tensors |= _named(request, opened)
        yield tensors
    finally:
        # The user's own references are the user's affair; these end here.
        opened.clear()
        tensors.clear()
        decline(exports, functions)


def _named(request: ImportRequest, opened: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    if not request.is_packed:
        return dict(zip(request.names, opened, strict=True))
    (buffer,) = opened
    found, at = {}, 0
    for name, shape in zip(request.names, request.shapes, strict=True):
        size = prod(shape)
        found[name] = buffer[at : at + size].view(shape)
        at += size
    return found


def decline_request(request: ImportRequest, *, gpu: str, calls: Calls | None = None) -> int:
    """Tell the exporter that a request is not going to be opened on `gpu`, so that it may free.

    Returns:
        How many exports that were.

    """
    functions = Calls.of_torch() if calls is None else calls
    return decline((one[gpu] for one in request.exports if gpu in one), functions)

"""Which engine a device gets: the Triton kernel where it works and is right, else torch."""

import logging
import threading
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.manifest.digest import LEAF_NBYTES, digest_bytes
from rl_bridge.memory.device.engines import KernelEngine
from rl_bridge.memory.device.leaves import ALIGNMENT, LeafTable

__all__ = ["EngineName", "choose_engine", "full_device", "kernel_cause"]

_LOG = logging.getLogger(__name__)

EngineName = Literal["triton", "torch"]

_CAUSES: dict[torch.device, str | None] = {}
_LOCK = threading.Lock()


def full_device(device: torch.device | str | int) -> torch.device:
    """Return a device with its number: "cuda" is the current one."""
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def kernel_cause(device: torch.device | str | int) -> str | None:
    """Why the Triton kernel is not in use on `device`, or None if it is.

    The first question for a device compiles the kernel, which takes seconds, and compares it with
    the reference: a wrong digest must never leave this package. What is found is logged, once.
    """
    device = full_device(device)
    with _LOCK:
        if device not in _CAUSES:
            _CAUSES[device] = cause = _try_kernel(device)
            if cause is not None:
                level = logging.WARNING if device.type == "cuda" else logging.INFO
                _LOG.log(level, "digests on %s run in torch: %s", device, cause)
        return _CAUSES[device]


def choose_engine(engine: EngineName | None, device: torch.device) -> EngineName:
    """Take the engine that is asked for; for None the kernel where it works, else torch.

    Raises:
        WeightBridgeUnavailableError: the kernel is asked for and does not work on `device`.
        ValueError: no such engine.

    """
    if engine not in {None, "triton", "torch"}:
        raise ValueError(f"engine {engine!r}, expected 'triton', 'torch' or None")
    cause = "it was not asked for" if engine == "torch" else kernel_cause(device)
    if engine == "triton" and cause is not None:
        raise WeightBridgeUnavailableError(
            f"the Triton kernel does not work on {device}: {cause}. Install what is missing, or "
            "choose engine='torch', which is slower and equal to the bit."
        )
    return "triton" if cause is None else "torch"


def _try_kernel(device: torch.device) -> str | None:
    try:
        from rl_bridge.memory.device._kernel import INTERPRETED
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if device.type != "cuda" and not INTERPRETED:
        return f"Triton compiles for GPUs, not for a {device.type} device"
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            is_right = _is_right(device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise is the cause
        return f"the kernel cannot be compiled or launched ({type(error).__name__}: {error})"
    return None if is_right else "the kernel disagrees with xxhash on this device"


def _is_right(device: torch.device) -> bool:
    """Compare the kernel with the reference: digest and copy, from aligned and odd addresses."""
    sizes = np.array([0, 1, 1024, 5003, LEAF_NBYTES + 77], np.uint64)
    table, rooms = LeafTable(sizes), -(-sizes.astype(np.int64) // ALIGNMENT) * ALIGNMENT
    offsets, total = np.cumsum(rooms) - rooms, int(rooms.sum())
    data = (np.arange(total + 1, dtype=np.uint64) * 2_654_435_761 >> 7).astype(np.uint8)
    source = torch.from_numpy(data).to(device)
    memory = torch.zeros(total + ALIGNMENT, dtype=torch.uint8, device=device)
    arena = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    engine = KernelEngine(table, offsets, device)
    for shift in (0, 1):
        found = []
        out = torch.zeros(table.num_words, dtype=torch.int64, device=device)
        engine.pack(offsets + source.data_ptr() + shift, arena, np.zeros(len(sizes), np.uint8), out)
        found.append(table.combine(out.cpu().numpy()))
        out.zero_()
        engine.digest(arena, out)
        found.append(table.combine(out.cpu().numpy()))
        places = zip((offsets + shift).tolist(), sizes.tolist(), strict=True)
        expected = b"".join(digest_bytes(data[at : at + n].tobytes()) for at, n in places)
        if found != [expected, expected]:
            return False
    return True

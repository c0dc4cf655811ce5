"""What keeps imported bytes alive: a *pin*, held by every tensor that looks at them."""

import ctypes
import weakref
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.places import CPU_PLACE, Place

if TYPE_CHECKING:
    from rl_bridge.memory.leased import LeasedView

__all__ = ["Pin", "anonymous_pin", "tensor_in"]


@lru_cache(maxsize=32)
def _range_type(nbytes: int) -> Any:
    # A subclass, because instances of plain ctypes arrays take no weak references' callbacks. Some
    # are kept: ctypes never forgets `c_char * n`, and one made for each pin would wait for the
    # garbage collector, which some trainers switch off.
    return type("PinnedRange", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": nbytes})


class Pin:
    """Keeps an address range alive: as long as it, or a tensor made from it, lives.

    Attributes:
        address: first byte.
        nbytes: size.
        view: the leased slot behind it; None for memory that no publisher writes.
        place: what can read and write there.
        header: digest of the header of the manifest that the bytes were published with; None where
            nobody sealed one.

    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        view: "LeasedView | None" = None,
        *,
        place: Place = CPU_PLACE,
    ) -> None:
        """Describe a range; `buffer` is what keeps it alive, nobody reads through it."""
        self.buffer: ctypes.Array[ctypes.c_char] = _range_type(nbytes).from_address(address)
        self.address = address
        self.nbytes = nbytes
        self.view = view
        self.place = place
        self.header: bytes | None = None


def tensor_in(
    pin: Pin, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor that aliases `nbytes` bytes at `offset` of a pinned range, without a copy.

    Each tensor has a storage of its own, which starts at its first byte and keeps the pin.
    """
    # No inference tensors: as an engine's weights, no later version could take their place.
    with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext():
        kind: torch.dtype = getattr(torch, dtype)
        if nbytes == 0:
            # By way of bytes: torch warns of some dtypes (complex32) when asked outright.
            empty = torch.empty(0, dtype=torch.uint8, device=pin.place.device)
            return empty.view(kind).view(shape)
        flat = pin.place.tensor(pin.buffer, offset, nbytes, kind)
        return flat if len(shape) == 1 else flat.view(shape)


def anonymous_pin(nbytes: int) -> Pin:
    """Fresh zero-filled memory of this process, given back when its last tensor dies.

    Raises:
        WeightBridgeUnavailableError: no memory.

    """
    nbytes = vm.round_up(max(nbytes, 1))
    try:
        address = vm.map_anonymous(nbytes)
    except OSError as error:
        msg = f"no {nbytes} bytes of memory for a copy of an update: {error}. Free some, try again."
        raise WeightBridgeUnavailableError(msg) from error
    pin = Pin(address, nbytes)
    weakref.finalize(pin.buffer, vm.unmap, address, nbytes).atexit = False
    return pin

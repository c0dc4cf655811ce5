"""A side-car's limits of sizes and deadlines, and the packages that only the remote part needs."""

import importlib
import math
from dataclasses import dataclass, fields
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Limits of a side-car. Every wait has one of these as its deadline.

    Attributes:
        max_skew_s: how far a request's time may be from this machine's clock, either way; nonces
            are remembered for as long.
        max_body_nbytes: of a manifest.
        body_timeout_s: a request's head must be there in this time, and then its body.
        step_timeout_s: an import, a prepare, a commit or an abort is answered within this time; the
            engine may go on with it, and the status says when that is over.
        hold_s: an update that waits so long for its next step is aborted: its trainer is gone.
        max_connections: open at once; one more ends the one that is idle longest, or is turned away
            where all are being served. All of their bodies together may have twice
            `max_body_nbytes`.

    Raises:
        ValueError: one of them is no positive number.

    """

    max_skew_s: float = 30.0
    max_body_nbytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 20.0
    step_timeout_s: float = 600.0
    hold_s: float = 120.0
    max_connections: int = 32

    def __post_init__(self) -> None:
        """Check them all."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"{field.name} is {value!r}, expected a positive number. Leave it out for "
                    f"{field.default}."
                )


# ---- packages that only the remote part needs ----------------------------------------------------


def needed(name: str) -> Any:
    """Import a package of the extra.

    Raises:
        WeightBridgeUnavailableError: it is missing.

    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            f"rl_bridge.remote needs {name}. Install it: pip install 'rl-bridge[remote]'."
        ) from error

"""Keys and values that an engine keeps of the weights that made them."""

from typing import Literal

from rl_bridge.engines.vllm.client import EngineHandle
from rl_bridge.errors import TornEngine, WeightUpdateRejectedError

__all__ = [
    "CachePolicy",
    "EngineCaches",
]

CachePolicy = Literal["recompute", "reset", "keep"]
"""What becomes of keys and values that the old weights made.

``recompute``: all go, running requests' too; these are computed anew with the new weights.
``reset``: cached prefixes go; refused while requests hold blocks.
``keep``: all stay: for those who give each request a ``cache_salt`` of its version. Only what was
made of images and other media goes all the same: vLLM looks it up without the salt.
"""

_HELD = (
    "requests hold cached blocks of other weights, so the prefix cache cannot be reset. Use "
    "cache='recompute', or pause='wait' or 'abort'; try again when a KV connector is done."
)


class EngineCaches:
    """The caches of one engine, as one driver's updates drop them."""

    def __init__(self, handle: EngineHandle, policy: CachePolicy) -> None:
        """Configure; the engine is not called."""
        self._handle = handle
        self._policy = policy

    def drop_old(self) -> None:
        """Drop what the old weights made, as the policy says.

        Raises:
            WeightUpdateRejectedError: requests hold blocks.

        """
        if self._policy == "keep":
            self._handle.reset_encoder_cache()
        else:
            self._drop(running=self._policy == "recompute")

    def drop_left(self) -> None:
        """Drop all, for an update that another driver left; its policy is not known.

        Raises:
            WeightUpdateRejectedError: requests hold blocks.

        """
        self._drop(running=True)

    def drop_undone(self) -> None:
        """Drop all, for an update that is undone: requests may have been served by it.

        Raises:
            TornEngine: requests hold blocks.

        """
        if not self._handle.reset_caches(running=True):
            msg = (
                "the engine keeps cached blocks of the version that is undone. Call recover() "
                "when its requests are done."
            )
            raise TornEngine(msg)

    def _drop(self, *, running: bool) -> None:
        if not self._handle.reset_caches(running=running):
            raise WeightUpdateRejectedError(_HELD)

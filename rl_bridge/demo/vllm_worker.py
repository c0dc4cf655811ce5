"""What the demo adds to the workers of its vLLM server: their exchange fails half-way, on request.

vLLM mixes `DemoWorker` into its worker class, and lets others call its methods over HTTP.
"""

from contextlib import ExitStack

from rl_bridge.demo.half_way import failing_exchange

__all__ = ["EXTENSION", "METHOD", "DemoWorker"]

_planted = ExitStack()


class DemoWorker:
    """Methods of the demo's in each worker."""

    def rl_bridge_fail_half_way(self, is_armed: int) -> None:
        """Let every install fail half-way from now on, or none."""
        _planted.close()
        if is_armed:
            _planted.enter_context(failing_exchange())


METHOD = DemoWorker.rl_bridge_fail_half_way.__name__
EXTENSION = f"{__name__}.{DemoWorker.__name__}"

"""A bridge over a transport object that is given: one that no registry knows, or a wrapped one."""

from collections.abc import Mapping
from typing import ClassVar

from rl_bridge.bridge.bridges import TensorBridge
from rl_bridge.lifecycle.machine import Observer
from rl_bridge.manifest.compare import Policy
from rl_bridge.transports.base import Transport

__all__ = ["BridgeOver"]


class BridgeOver(TensorBridge):
    """`TensorBridge` over `given`; the no-op detector is off unless asked for."""

    transport: ClassVar[str] = "given"

    def __init__(
        self,
        given: Transport,
        *,
        source_worker: str = "test",
        source_rank: int = 0,
        state_dir: str | None = None,
        suspicious: Policy | str = Policy.OFF,
        observer: Observer | None = None,
    ) -> None:
        """Configure; nothing is opened yet."""
        self.given = given
        super().__init__(
            source_worker=source_worker,
            source_rank=source_rank,
            state_dir=state_dir,
            suspicious=suspicious,
            observer=observer,
        )

    def _make_transport(self, options: Mapping[str, object]) -> Transport:
        if options:
            msg = f"the transport is made already, so it takes no options: {sorted(options)}"
            raise TypeError(msg)
        return self.given

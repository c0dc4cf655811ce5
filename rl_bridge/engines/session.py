"""Which driver has an engine: one at a time, and every call of another one is refused by name.

A driver opens a session with all ranks of its engine before its first update. Each rank keeps who
has it and the session's epoch, a number that only grows; every later call names both, and a call
of another driver or of an earlier epoch is refused by `Session.require`, with the name of the
driver that has the engine. A driver that leaves gives the engine free. One that died has it still:
the next driver takes over, which is a decision (`take_over=True`, or `recover()`), and finishes or
undoes the update that was left half-way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_bridge.errors import EngineAsleep, SessionRefused


def second_driver_error(name: str) -> SessionRefused:
    """The error of a driver that finds another one."""
    return SessionRefused(
        f"driver {name} has this engine, and one driver at a time updates an engine. Close that "
        "one's executor; or take the engine over, by recover() or with take_over=True, which ends "
        "what the other driver left half-way, and shuts it out."
    )


def asleep_error() -> EngineAsleep:
    """The error of a driver that finds the engine asleep."""
    return EngineAsleep(
        "the engine sleeps: its weights are not in the memory that an update would write to. Wake "
        "it first, its weights at least, by the engine's own call; then try again."
    )


@dataclass(slots=True)
class Session:
    """Who has one rank."""

    epoch: int = 0  # of the session, or of the last one
    driver: str = ""  # its driver's id; empty if nobody has the rank
    name: str = ""  # of its driver, or of the last one

    def open(self, driver: str, name: str, epoch: int, *, take_over: bool) -> None:
        """Give the rank to a driver; with `take_over`, also if another one has it."""
        if self.driver not in {"", driver} and not take_over:
            raise second_driver_error(self.name)
        if epoch <= self.epoch:
            raise SessionRefused(
                f"a session of epoch {epoch} was opened too late: driver {self.name} had this "
                f"engine in epoch {self.epoch}. Try again."
            )
        self.epoch, self.driver, self.name = epoch, driver, name

    def require(self, given: Mapping[str, Any]) -> None:
        """Refuse a call that is not of the session."""
        if self.driver and (given.get("driver"), given.get("epoch")) == (self.driver, self.epoch):
            return
        if self.driver:
            raise second_driver_error(self.name)
        whose = f"driver {self.name} had it last" if self.epoch else "it was started anew"
        raise SessionRefused(
            f"no driver has this engine ({whose}), and this call is of a session of epoch "
            f"{given.get('epoch')}. Call recover(), and install a version before it serves."
        )

    def leave(self) -> None:
        """Leave the rank to the next driver."""
        self.driver = ""

    def to_dict(self) -> dict[str, Any]:
        """What anybody may know of it."""
        return {"driver": self.driver, "driver_name": self.name, "epoch": self.epoch}

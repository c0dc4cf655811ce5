"""What can go wrong in the demo itself, apart from what the bridge raises."""

from rl_bridge.errors import WeightBridgeError

__all__ = [
    "BadFrame",
    "FaultUnnoticed",
    "LabelMismatch",
    "LogprobMismatch",
    "PeerGone",
    "UpdateLost",
]


class BadFrame(WeightBridgeError):
    """A message between trainer and rollout is not what its header claims."""


class PeerGone(WeightBridgeError):
    """The process at the other end of the pipe has ended."""


class LogprobMismatch(WeightBridgeError):
    """The rollout's log-probabilities are not those of the version that it reports."""


class LabelMismatch(WeightBridgeError):
    """The engine labels its outputs with another version than the one that it was asked for."""


class FaultUnnoticed(WeightBridgeError):
    """A planted fault was not refused or undone the way it should have been."""


class UpdateLost(WeightBridgeError):
    """A healthy update did not become the rollout's active version."""

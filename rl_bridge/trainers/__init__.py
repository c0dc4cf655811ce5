"""Trainer side: from a model to named tensors."""

from rl_bridge.trainers.state_dict import named_tensors

__all__ = ["named_tensors"]

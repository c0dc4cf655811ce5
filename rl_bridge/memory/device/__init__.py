"""Digest and pack of tensors in a GPU's memory: the device's part of ``rl_bridge.memory``."""

__all__: list[str] = []

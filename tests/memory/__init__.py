"""Tests of `rl_bridge.memory`."""

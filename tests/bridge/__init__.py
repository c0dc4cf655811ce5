"""Tests of `rl_bridge.bridge`."""

"""Tests of `rl_bridge.manifest`."""

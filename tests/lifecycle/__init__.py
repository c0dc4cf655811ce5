"""Tests of `rl_bridge.lifecycle`."""

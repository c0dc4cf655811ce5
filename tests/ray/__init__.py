"""Tests of `rl_bridge.ray` without Ray: endpoints, fleets, pairing."""

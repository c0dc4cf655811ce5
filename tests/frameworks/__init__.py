"""Tests with real frameworks for RL on the CPU, TRL among them: `make test-frameworks`."""

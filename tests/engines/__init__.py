"""Tests with real vLLM engines on the CPU: `make test-engines`."""

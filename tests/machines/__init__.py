"""Tests with real NIXL and Ray: `make test-machines` makes their environment and runs them."""

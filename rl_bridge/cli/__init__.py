"""The command line: one module per command, assembled by `rl_bridge.cli.program`."""

from rl_bridge.cli.program import main

__all__ = ["main"]

"""Programs of this package that start without the rest of the library, and without torch."""

import json
import sys
from pathlib import Path

__all__ = ["bare_command"]

# A package without its `__init__`, which would import torch.
_PROGRAM = """
import importlib, json, sys, types
sys.path[:], folder, module = json.loads(sys.argv[1])
package = sys.modules["rl_bridge"] = types.ModuleType("rl_bridge")
package.__path__ = [folder]
importlib.import_module(module).main()
"""
_FOLDER = str(Path(__file__).resolve().parents[2])


def bare_command(module: str) -> list[str]:
    """The command that runs `main` of a module, with this process's own places for modules."""
    given = json.dumps([sys.path, _FOLDER, module])
    return [sys.executable, "-I", "-c", _PROGRAM, given]

"""A driver in a process of its own, which stands still at one step until it is killed."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_bridge import WeightBridgeError, WeightUpdateManifest
from rl_bridge.engines.vllm.client import ServerClient
from tests.engines.drive import executor_for

# Behind which of its calls it stops, and the arguments that this one begins with.
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "paused": ("stop", ()),
    "installed": ("call", ("install",)),
    "undone": ("call", ("undo",)),
    "resumed": ("resume", ()),
}


def drive(url: str, text: str, step: str, mark: str) -> None:
    """Update the server at `url`; behind `step`, touch `mark` and stand still."""
    name, begins = STEPS[step]
    original = getattr(ServerClient, name)

    def stops(client: ServerClient, *arguments: Any) -> Any:
        told = original(client, *arguments)
        if arguments[: len(begins)] == begins:
            Path(mark).touch()
            threading.Event().wait()
        return told

    setattr(ServerClient, name, stops)
    with executor_for(url) as executor, suppress(WeightBridgeError):
        executor.update_weights(WeightUpdateManifest.from_json(text))

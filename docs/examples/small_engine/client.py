"""The driver's side: how the engine is called, and the adapter that users give an executor."""

import json
from pathlib import Path

from engine import Engine
from loader import FileLoader

from rl_bridge.engines import (
    EngineClient,
    EngineDriver,
    LabelMaker,
    Replies,
    Reply,
    ServingOptions,
    default_label,
    lost,
)
from rl_bridge.errors import DeadlineExceeded


class SmallClient(EngineClient):
    """Calls a small engine of this process."""

    def __init__(self, engine: Engine, timeout_s: float = 600.0) -> None:
        super().__init__(timeout_s)
        self.engine = engine

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        """Ask all ranks; one reply for each, by rank."""
        text = json.dumps({**payload, "verb": verb})
        return [json.loads(said) for said in self.ask_ranks("host:call", text, timeout_s)]

    def ask_ranks(self, function: str, text: str = "", timeout_s: float = 60.0) -> list[str]:
        """The engine's own call, with the errors that a driver understands."""
        try:
            return self.engine.ask(function, text, timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{error} within {timeout_s} s. See its log.") from error
        except ConnectionError as error:
            raise lost(error, f"call {function}") from error

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        """This engine has one way to pause: requests freeze between two tokens."""
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def is_paused(self) -> bool:
        return self.engine.is_paused

    def drop_caches(self, policy: str | None) -> str:
        """None is everything, also where the policy is to keep what other weights cached."""
        if policy != "keep":
            self.ask_ranks("engine:reset_cache")
        return ""

    def label(self) -> str:
        return self.engine.version

    def set_label(self, label: str) -> None:
        self.engine.version = label


def small_engine_adapter(
    engine: Engine,
    *,
    cache: str = "drop",
    label: LabelMaker | None = default_label,
    file: Path | None = None,
    staging: str | None = None,
    memory_budget_nbytes: int | None = None,
    take_over: bool = False,
) -> EngineDriver:
    """What an executor installs into a small engine by."""
    serving = ServingOptions(pause="freeze", cache=cache, label=label)
    serving.check(("freeze",), ("drop", "keep"))
    client = SmallClient(engine)
    return EngineDriver(
        client,
        serving=serving,
        options={"staging": staging, "memory_budget_nbytes": memory_budget_nbytes},
        loader=None if file is None else FileLoader(client, file),
        take_over=take_over,
    )

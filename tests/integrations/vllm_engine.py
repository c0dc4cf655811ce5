"""A vLLM engine without vLLM, as its clients see it; the ranks are of the protocol's tests."""

import json

from rl_bridge.engines.rpc import Replies, Reply
from rl_bridge.engines.vllm.client import VLLMClient
from tests.integrations.threaded_engine import WAIT_S, Engine

__all__ = ["Client"]


class Client(VLLMClient):
    """One driver's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(WAIT_S)
        self.engine = engine
        self.media = ["of the old weights"]
        self.prefixes = ["of the old weights"]
        self.modes: list[str] = []

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        return self.engine.ask(verb, json.loads(json.dumps(payload)))

    def stop(self, mode: str) -> None:
        self.modes.append(mode)
        self.engine.stopped = True

    def resume(self) -> None:
        self.engine.stopped = False

    def is_paused(self) -> bool:
        return self.engine.stopped

    def reset_encoder_cache(self) -> None:
        self.media.clear()

    def reset_prefix_cache(self, *, running: bool) -> bool:
        if running or not self.engine.keeps:
            self.prefixes.clear()
        return running or not self.engine.keeps

    def label(self) -> str | None:
        return self.engine.shown

    def set_label(self, label: str) -> None:
        self.engine.shown = label

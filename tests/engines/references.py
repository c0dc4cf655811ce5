"""What a fresh engine answers: the reference for every update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.engines.drive import PROMPTS, Answers, Setting, answers, start
from tests.engines.models import Checkpoints


class References:
    """Answers of fresh engines, each asked for once in a session."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """Begin with none."""
        self._checkpoints = checkpoints
        self._known: dict[Any, Answers] = {}

    def of(
        self, setting: Setting, version: int, prompts: Sequence[Sequence[int]] = PROMPTS
    ) -> Answers:
        """Start an engine from that version's checkpoint, and ask it."""
        if setting.ranks == 1:
            setting = replace(setting, in_process=True)  # the same to the bit, and much faster
        key = (setting, version, tuple(map(tuple, prompts)))
        if key not in self._known:
            path = self._checkpoints.path(setting.kind, version)
            with start(setting, path) as llm:
                self._known[key] = answers(llm, prompts)
        return self._known[key]

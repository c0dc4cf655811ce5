"""What a fresh engine answers: the reference for every update."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.engines.drive import PROMPTS, Answers, Setting, answers, start
from tests.engines.models import Checkpoints


class References:
    """Answers of fresh engines, each asked for once by the processes of a run."""

    def __init__(self, checkpoints: Checkpoints, folder: Path) -> None:
        """Keep them in a folder; a run begins with none."""
        folder.mkdir(exist_ok=True)
        self._checkpoints, self._folder = checkpoints, folder

    def of(
        self, setting: Setting, version: int, prompts: Sequence[Sequence[int]] = PROMPTS
    ) -> Answers:
        """Start an engine from that version's checkpoint, and ask it."""
        if setting.ranks == 1:
            setting = replace(setting, in_process=True)  # the same to the bit, and much faster
        named = f"{setting!r} {version} {list(map(list, prompts))}"
        kept = self._folder / f"{hashlib.sha256(named.encode()).hexdigest()}.json"
        if not kept.exists():
            with start(setting, self._checkpoints.path(setting.kind, version)) as llm:
                written = kept.with_suffix(f".{os.getpid()}")
                written.write_text(json.dumps(answers(llm, prompts)))
                written.rename(kept)
        return tuple(
            (tuple(tokens), tuple(probabilities))
            for tokens, probabilities in json.loads(kept.read_text())
        )

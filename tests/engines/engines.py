"""One engine in this process with its two versions, as most tests use it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_bridge import RolloutExecutor, WeightUpdateManifest
from tests.engines.drive import (
    PROMPTS,
    Answers,
    Setting,
    answers,
    executor_for,
    greedy,
    native_update,
    prompts_for,
    read,
    start,
)
from tests.engines.faults import uproot
from tests.engines.models import Checkpoints
from tests.engines.references import References
from tests.engines.stand import Stand
from tests.engines.trainer import Trainer


@dataclass(kw_only=True)
class Bench(Stand):
    """With an executor around the engine, an `LLM`."""

    setting: Setting
    executor: RolloutExecutor
    fresh: Sequence[Answers]

    @property
    def llm(self) -> Any:
        """The engine."""
        return self.engine

    def answers(self) -> Answers:
        """Ask the engine."""
        return answers(self.llm)

    def update(self, executor: Any = "executor", number: int | None = None) -> WeightUpdateManifest:
        """By its executor, or by vLLM's own calls."""
        by = self.executor if executor == "executor" else _Native(self.llm)
        return super().update(by, number)

    def begin(self, prefix: str, steps: int, max_tokens: int = 24) -> list[str]:
        """Bring requests under way and leave them there."""
        ids = [f"{prefix}-{index}" for index in range(len(PROMPTS))]
        for name, prompt in zip(ids, prompts_for(PROMPTS), strict=True):
            self.llm.llm_engine.add_request(name, prompt, greedy(max_tokens))
        for _ in range(steps):
            self.llm.llm_engine.step()
        return ids

    def finish(self, ids: Sequence[str]) -> list[Any]:
        """Let them come to their end; outputs in the order of `ids`."""
        done: dict[str, Any] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    done[output.request_id.rpartition("#")[0] or output.request_id] = output
        return [done[name] for name in ids]

    def rest(self, ids: Sequence[str]) -> Answers:
        """What the requests answered in the end."""
        return read(self.finish(ids))


class _Native(NamedTuple):
    llm: Any

    def update_weights(self, manifest: WeightUpdateManifest) -> None:
        native_update(self.llm, manifest)


@contextmanager
def bench(
    setting: Setting, checkpoints: Checkpoints, references: References, **options: Any
) -> Iterator[Bench]:
    """Start it; options are `LLM`'s."""
    second = references.of(setting, 1)  # first: no two engines in one process
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    with (
        Trainer() as trainer,
        start(setting, checkpoints.path(setting.kind, 0), **options) as llm,
        executor_for(llm) as executor,
    ):
        first = answers(llm)
        llm.init_weight_transfer_engine({"init_info": {}})
        try:
            yield Bench(
                llm, trainer, weights, fresh=(first, second), setting=setting, executor=executor
            )
        finally:
            uproot()

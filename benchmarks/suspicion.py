"""Runs GRPO and counts what the no-op detector says: `python benchmarks/suspicion.py [--quick]`.

Sound runs of a small Qwen2 on the CPU, as they are usual: fp32 training, bfloat16 published, AdamW
with a small learning rate that begins and ends at 0; all weights, a LoRA adapter, and merged
weights. A line of the log in one of them is a false alarm. Then a fault is planted behind the sound
updates of each run, and found if one of the next few updates is told or refused. Needs transformers
and peft. README.md beside this file says how each figure comes about.
"""

import copy
import datetime as dt
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment, save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest.digest import digests_differ

__all__ = ["main"]

_FORMAT = 1
_OUT = Path(__file__).resolve().parent / "results" / "suspicion.json"
_STEPS, _QUICK_STEPS = 300, 40
_WARM_UP = 10
_SOUND = 24
"""Updates before a fault."""
_FAULTY = 4
"""Updates with it."""
_VOCABULARY, _PROMPT, _ANSWER = 1024, 4, 8
_PROMPTS, _GROUP = 4, 4

State = dict[str, torch.Tensor]
Publish = Callable[[int], WeightUpdateManifest]


# ---- GRPO ----------------------------------------------------------------------------------------


def _qwen() -> Any:
    transformers = import_module("transformers")
    config = transformers.Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config)


class _Run:
    """Training of one model: sampled answers, rewards by group, clipped steps of AdamW."""

    def __init__(self, kind: str, steps: int) -> None:
        """Make the model. A reward is the share of an answer's tokens in the vocabulary's half."""
        torch.manual_seed(0)
        model = _qwen()
        rate = 1e-6
        if kind != "weights":
            peft = import_module("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
            rate = 1e-4
        self.model: Any = model
        # What is published: a copy in 16 bits, as for an engine.
        self.served: Any = copy.deepcopy(model).to(torch.bfloat16)
        trained = [one for one in model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: min(step / _WARM_UP, (steps - step) / (steps - _WARM_UP)),
        )

    def step(self) -> float:
        """Sample, and learn from it; the mean reward."""
        prompts = torch.randint(0, _VOCABULARY, (_PROMPTS, _PROMPT)).repeat_interleave(_GROUP, 0)
        tokens = prompts
        with torch.no_grad():
            for _ in range(_ANSWER):
                logits = self.model(input_ids=tokens).logits[:, -1]
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        answers = tokens[:, _PROMPT:]
        rewards = (answers < _VOCABULARY // 2).float().mean(1)
        grouped = rewards.view(_PROMPTS, _GROUP)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (
            grouped.std(1, keepdim=True) + 1e-4
        )
        logits = self.model(input_ids=tokens).logits[:, _PROMPT - 1 : -1]
        chosen = logits.log_softmax(-1).gather(2, answers.unsqueeze(-1)).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        loss = -(ratio * advantages.view(-1, 1)).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(rewards.mean())

    def refresh(self) -> Any:
        """The copy in 16 bits, made anew."""
        with torch.no_grad():
            for mine, own in zip(self.served.parameters(), self.model.parameters(), strict=True):
                mine.copy_(own)
        return self.served


# ---- what is told --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Told:
    """What a publisher said of its updates."""

    lines: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@contextmanager
def _listening() -> Iterator[_Told]:
    told = _Told()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.lines.append(record.getMessage())  # type: ignore[method-assign]  # all that is wanted of one
    log = logging.getLogger("rl_bridge")
    log.addHandler(handler)
    log.propagate = False
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.propagate = True


def _publish(
    bridge: TensorBridge, told: _Told, source: Any, version: int, options: dict[str, Any]
) -> WeightUpdateManifest | None:
    try:
        made = bridge.publish(source, weight_version=version, **options)
    except SuspiciousUpdate as error:
        told.refused.append(str(error))
        return None
    bridge.release(made.update_id)
    return made


def _idle(before: WeightUpdateManifest, after: WeightUpdateManifest) -> tuple[int, int]:
    """Trainable tensors that an update left as they were, and all of them."""
    flags = torch.tensor([one == "1" for one in after.table.trainable or ""])
    changed = torch.from_numpy(digests_differ(before.digests, after.digests))
    return int((flags & ~changed).sum()), int(flags.sum())


# ---- sound runs, and faults behind them ----------------------------------------------------------

_KINDS: dict[str, dict[str, Any]] = {
    "weights": {},
    "adapter": {"adapter": "default"},
    "merged": {"merged": True},
}


def _sound(kind: str, steps: int, console: Console) -> tuple[dict[str, Any], list[Any]]:
    """One whole run, and copies of its first models."""
    run, options = _Run(kind, steps), _KINDS[kind]
    kept: list[Any] = []
    rewards: list[float] = []
    idle: list[tuple[int, int]] = []
    before = None
    with _listening() as told, make_weight_bridge("shared-memory") as bridge:
        for step in track(range(steps), kind, console=console):
            served = run.refresh()
            if step < _SOUND + _FAULTY:
                kept.append(copy.deepcopy(served))
            made = _publish(bridge, told, served, step, options)
            if before is not None and made is not None:
                idle.append(_idle(before, made))
            before = made or before
            rewards.append(run.step())
    tenth = max(1, steps // 10)
    return {
        "updates": steps,
        "trainable_tensors": idle[-1][1],
        "median_idle_tensors": median(count for count, _ in idle),
        "updates_with_idle_tensors": sum(count > 0 for count, _ in idle),
        "false_alarms": len(told.lines) + len(told.refused),
        "told": told.lines + told.refused,
        "reward_first_tenth": mean(rewards[:tenth]),
        "reward_last_tenth": mean(rewards[-tenth:]),
    }, kept


def _mixed(new: Any, old: Any) -> Any:
    """A model of which every second layer is an old one's."""
    made, stale = copy.deepcopy(new), old.state_dict()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            number = name.partition("layers.")[2].partition(".")[0]
            if number and int(number) % 2:
                tensor.copy_(stale[name])
    return made


def _with_nan(model: Any) -> Any:
    made = copy.deepcopy(model)
    trained = [
        one for name, one in made.named_parameters() if one.requires_grad and "norm" not in name
    ]
    with torch.no_grad():
        trained[len(trained) // 2].view(-1)[7] = torch.nan
    return made


_FAULTS: dict[str, Callable[[list[Any], int], Any]] = {
    "frozen base": lambda kept, _: kept[0],
    "stale copy": lambda kept, _: kept[_SOUND - 1],
    "half of the layers stale": lambda kept, at: _mixed(kept[at], kept[_SOUND - 1]),
    "float16 in place of bfloat16": lambda kept, at: copy.deepcopy(kept[at]).half(),
    "float32 in place of bfloat16": lambda kept, at: copy.deepcopy(kept[at]).float(),
    "one NaN": lambda kept, at: _with_nan(kept[at]),
    "frozen base, once": lambda kept, at: kept[0 if at == _SOUND else at],
    "stale copy, once": lambda kept, at: kept[_SOUND - 1 if at == _SOUND else at],
    "half of the layers stale, once": lambda kept, at: (
        _mixed(kept[at], kept[_SOUND - 1]) if at == _SOUND else kept[at]
    ),
}


def _faulty(kind: str, fault: str, kept: list[Any]) -> dict[str, Any]:
    """Sound updates, then some with a fault: at which of these it was found."""
    options, found = _KINDS[kind], None
    with _listening() as told, make_weight_bridge("shared-memory") as bridge:
        for at in range(_SOUND + _FAULTY):
            source = kept[at] if at < _SOUND else _FAULTS[fault](kept, at)
            _publish(bridge, told, source, at, options)
            if at < _SOUND:
                assert not told.lines, told.lines
            elif found is None and (told.lines or told.refused):
                found = at - _SOUND + 1
    return {"found_at_update": found, "told": told.lines, "refused": told.refused}


# ---- command line --------------------------------------------------------------------------------


def main(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter runs.")] = False,
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = _OUT,
) -> None:
    """Run everything and write one JSON file."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    steps = _QUICK_STEPS if quick else _STEPS
    kinds: dict[str, Any] = {}
    for kind in _KINDS:
        sound, kept = _sound(kind, steps, console)
        faults = {fault: _faulty(kind, fault, kept) for fault in _FAULTS}
        kinds[kind] = {"sound": sound, "faults": faults}
    cases = [one for kind in kinds.values() for one in kind["faults"].values()]
    found = sum(one["found_at_update"] is not None for one in cases)
    false_alarms = sum(kind["sound"]["false_alarms"] for kind in kinds.values())
    report = {
        "format": _FORMAT,
        "quick": quick,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "environment": collect_environment(),
        "kinds": kinds,
        "false_alarms": false_alarms,
        "faults": len(cases),
        "faults_found": found,
    }
    save(report, out)
    table = Table("run", "updates", "with idle tensors", "false alarms", "faults found")
    for name, kind in kinds.items():
        sound = kind["sound"]
        known = [one["found_at_update"] is not None for one in kind["faults"].values()]
        table.add_row(
            name,
            str(sound["updates"]),
            str(sound["updates_with_idle_tensors"]),
            str(sound["false_alarms"]),
            f"{sum(known)} of {len(known)}",
        )
    console.print(table)
    if false_alarms or found < len(cases):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

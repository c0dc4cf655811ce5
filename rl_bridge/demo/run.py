"""The demo: real reinforcement learning whose weights travel over the bridge, faults included."""

import importlib.util
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rl_bridge.demo.report import (
    BareRow,
    DemoResult,
    EventRow,
    Large,
    draw_picture,
    print_event,
    print_fault,
    print_report,
    step_line,
    write_json,
)
from rl_bridge.demo.rollout import Engine, Rollout, RolloutConfig
from rl_bridge.demo.stored import FAULTS, StoreRollout, StoreTrainer
from rl_bridge.demo.trainer import USUAL_FAULTS, BareTrainer, Trainer, plan_faults
from rl_bridge.errors import TransportUnavailable, WeightBridgeUnavailableError
from rl_bridge.testing.processes import Child
from rl_bridge.transports.registry import canonical_name, transport_class

DEFAULT_STEPS = 80
_TRANSPORTS = ("shared-memory", "local-clone", "files")
_LARGE = {"width": 512, "num_layers": 7, "num_heads": 8}
"""Of a model of 22 million parameters: to learn to sort, it would need hours on two cores."""
_LARGE_STEPS, _LARGE_GROUPS = 6, 1
_STEP_S = 60.0  # the longest that a step may take, on a busy machine
_LORA_TRANSPORTS = ("nixl", "shared-memory")

# Engine -> the packages that it needs, the extras that have them.
_NEEDED = {
    Engine.MODULE: ((), "demo"),
    Engine.VLLM: (("vllm", "transformers"), "demo,vllm"),
    Engine.SGLANG: (("sglang", "transformers"), "demo,sglang"),
    Engine.VLLM_HTTP: (
        ("vllm", "transformers", "fastapi", "h11", "httpx", "prometheus_client"),
        "demo,vllm,remote",
    ),
}

_NEEDED_FOR_LORA = (("vllm", "transformers", "peft"), "demo,vllm,peft,nixl")


def run_demo(
    *,
    transport: str | None = None,
    engine: str = Engine.MODULE,
    lora: bool = False,
    url: str | None = None,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    out: Path = Path("demo-out"),
    plain: bool = False,
    console: Console | None = None,
) -> DemoResult:
    """Run what the help of ``rl-bridge demo`` describes, with its options, and write it down.

    Each step insists that the rollout's log-probabilities are those of the version that it reports.
    With a module, the same run goes on beside it without the bridge: weights are copied, the same
    faults are planted, nobody checks. Over ``shared-memory`` a few updates of a model of 22 million
    parameters end it: there, the phases of an update are about bytes.

    Args:
        transport: name or short form; None takes ``shared-memory``, for an adapter ``nixl``, and
            ``files`` for a `url`.
        engine: what the rollout samples with: ``module``, ``vllm``, ``sglang`` or ``vllm-http``.
        lora: train a LoRA adapter instead of all weights: on two ranks under FSDP2, over NIXL into
            a vLLM engine on two ranks.
        url: with ``files``, the store that trainer and engines share; None makes one in `out`.
        steps: training steps, one update of the weights each.
        seed: the same seed gives the same rewards, with SGLang and a server only about the same.
        out: where `demo.json` and `demo.png` go; made if it is not there.
        plain: print a line for each step, and no bar.
        console: where progress goes; a bar is for terminals only.

    Returns:
        Everything that `demo.json` holds.

    Raises:
        ValueError: too few steps, or no such engine.
        WeightBridgeUnavailableError: the transport, the engine or the drawing library is not
            there, or nothing can be written to `out`.
        WeightBridgeError: the bridge did not keep a promise: an update was lost, a planted fault
            went unnoticed, or log-probabilities disagree.

    """
    start = time.perf_counter()
    console = console or Console()
    config = _checked(transport, engine, seed, url, lora=lora)
    is_stored = config.transport == "files"
    faults = plan_faults(steps, FAULTS if is_stored else USUAL_FAULTS)
    _check_writable(out)
    if is_stored and not config.url:
        config = replace(config, url=tempfile.mkdtemp(prefix="store-", dir=out.absolute()))
    if config.engine is not Engine.MODULE:
        config = replace(config, engine_log=str((out / f"{config.engine}.log").absolute()))
        _say(
            console,
            f"starting {config.engine}, which takes half a minute; its log is {config.engine_log}",
        )
    rows, fault_rows, events = [], [], list[EventRow]()
    with ExitStack() as stack:
        # Trainer and rollout take turns with matrices too small to share among threads.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        rollout, trainer = _started(config, stack, steps)
        name = rollout.wait_until_ready()
        _say(
            console,
            f"sort {config.task.num_digits} digits: a {name} samples in process {rollout.pid}; its "
            f"weights come over {config.transport}{f', in {config.url}' if is_stored else ''}",
        )
        without = None
        if config.engine is Engine.MODULE and not is_stored:
            # Beside the run: most of the time, one of two cores has nothing to do.
            without = stack.enter_context(Child(BareTrainer, config=config, num_steps=steps))
            without.tell("run")
        bar = stack.enter_context(_bar(console, is_shown=not plain))
        task = bar.add_task("starting", total=steps)
        for number in range(1, steps + 1):
            row, fault_row = trainer.step(number, faults.get(number))
            rows.append(row)
            if fault_row is not None:
                fault_rows.append(fault_row)
                print_fault(fault_row, console)
            for event in trainer.events[len(events) :]:
                events.append(event)
                print_event(event, console)
            bar.update(task, description=step_line(row, steps), advance=1)
            if plain:
                _say(console, step_line(row, steps))
        manifest, labels_checked = trainer.held, trainer.labels_checked
        crosses = transport_class(config.transport).crosses_processes
        bare, large = list[BareRow](), Large()
        if without:
            bar.update(task, description="the same without the bridge")
            bare = [BareRow(**row) for row in without.answer(deadline_s=_STEP_S * steps)]
            large = _run_large(config, bar) if crosses else large
    result = DemoResult(
        transport=config.transport,
        engine=config.engine.value,
        seed=seed,
        num_processes=4 if config.engine is Engine.VLLM_HTTP or lora or is_stored else 1 + crosses,
        num_tensors=manifest.tensor_count,
        total_nbytes=manifest.total_nbytes,
        seconds=time.perf_counter() - start,
        rows=tuple(rows),
        faults=tuple(fault_rows),
        engine_name="" if config.engine is Engine.MODULE else name,
        labels_checked=labels_checked,
        lora=lora,
        url=config.url,
        bare=tuple(bare),
        large=large,
        events=tuple(events),
    )
    write_json(result, out / "demo.json")
    draw_picture(result, out / "demo.png")
    print_report(result, console)
    if is_stored:
        _say(console, f"the last versions stay: rl-bridge files ls {config.url}")
    _say(console, f"{out / 'demo.json'} {out / 'demo.png'}")
    return result


def _bar(console: Console, *, is_shown: bool) -> Progress:
    """A bar below what is printed, where a terminal can show one."""
    columns = TextColumn("{task.description}"), BarColumn()
    disable = not (is_shown and console.is_terminal)
    return Progress(*columns, console=console, transient=True, disable=disable)


def _run_large(config: RolloutConfig, bar: Progress) -> Large:
    """Train a large model for a few steps, too few to learn: its updates are about bytes."""
    config = replace(config, sizes=_LARGE, num_groups=_LARGE_GROUPS)
    with ExitStack() as stack:
        rollout, trainer = _started(config, stack, _LARGE_STEPS)
        rollout.wait_until_ready()
        numbers = bar.track(range(1, _LARGE_STEPS + 1), description="updates of a large model")
        rows = tuple(trainer.step(number, None)[0] for number in numbers)
        return Large(rows=rows, nbytes=trainer.held.total_nbytes)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _checked(
    transport: str | None, engine: str, seed: int, url: str | None, *, lora: bool
) -> RolloutConfig:
    """Find every reason not to start before anything is started."""
    if engine not in list(Engine):
        raise ValueError(f"no engine {engine!r} for the demo, expected one of {', '.join(Engine)}")
    if lora and engine != Engine.VLLM:
        raise WeightBridgeUnavailableError(
            f"the demo's LoRA adapter is applied by vLLM, not by engine {engine!r}. Take "
            "engine='vllm' (--engine vllm)."
        )
    usable = _LORA_TRANSPORTS if lora else _TRANSPORTS
    if url is not None and transport is None:
        transport = "files"
    name = canonical_name(transport) if transport in {"shm", "local"} else transport or usable[0]
    if name not in usable:
        raise WeightBridgeUnavailableError(
            f"the demo's trainer has its weights on the CPU and sends them over "
            f"{' or '.join(usable)}, not over {transport!r}. Take one of these."
        )
    if url is not None and name != "files":
        raise WeightBridgeUnavailableError(
            f"the demo has a url for transport files, not for {name!r}. Take transport='files' "
            "(--transport files), or no url."
        )
    if name == "files" and engine != Engine.MODULE:
        raise WeightBridgeUnavailableError(
            f"the demo over files samples with engine 'module', not with {engine!r}. Take that "
            "engine (--engine module), or transport='shared-memory' (--transport shared-memory)."
        )
    config = RolloutConfig(
        transport=name, seed=seed, engine=Engine(engine), lora=lora, url=url or ""
    )
    kind = transport_class(config.transport)
    packages, extras = _NEEDED_FOR_LORA if lora else _NEEDED[config.engine]
    missing = [name for name in (*packages, "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise WeightBridgeUnavailableError(
            f"the demo with engine {engine!r} needs {' and '.join(missing)}, not installed here. "
            f"Install it with: pip install 'rl_bridge[{extras}]'"
        )
    if config.engine is not Engine.MODULE and not kind.crosses_processes:
        raise WeightBridgeUnavailableError(
            f"the engine {engine!r} samples in a process of its own, and {config.transport} does "
            "not leave this one. Take another transport: --transport shared-memory"
        )
    found = kind.probe()
    if found.status != "pass":
        raise TransportUnavailable(config.transport, found.cause, found.remedy)
    return config


def _started(config: RolloutConfig, stack: ExitStack, steps: int) -> tuple[Rollout, Trainer]:
    """Start both halves, at once; the stack ends them."""
    rollout: Rollout
    trainer: Trainer
    if config.url:
        rollout = engine = stack.enter_context(StoreRollout(config))
        trainer = StoreTrainer(config, engine, num_steps=steps)
    else:
        rollout = stack.enter_context(Rollout(config))
        trainer = Trainer(config, rollout, num_steps=steps)
    stack.callback(trainer.close)
    return rollout, trainer


def _check_writable(out: Path) -> None:
    """Find out before the run, not after its last step."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise WeightBridgeUnavailableError(
            f"the demo cannot write its results to {out}: {error.strerror or error}. Name another "
            "directory with out= (--out)."
        ) from error

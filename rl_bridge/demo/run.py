"""The demo: real reinforcement learning whose weights travel over the bridge, faults included."""

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.engines import check_engine
from rl_bridge.demo.faults import plan_faults
from rl_bridge.demo.http_rollout import HttpRollout
from rl_bridge.demo.live import LiveView
from rl_bridge.demo.options import DEFAULT_STEPS, Engine
from rl_bridge.demo.records import DemoResult
from rl_bridge.demo.report import print_report, write_files
from rl_bridge.demo.rollout import Rollout, RolloutWorker
from rl_bridge.demo.rollout_process import RolloutProcess
from rl_bridge.demo.trainer import Trainer
from rl_bridge.errors import TransportUnavailable, WeightBridgeUnavailableError
from rl_bridge.transports.registry import canonical_name, transport_class

__all__ = ["run_demo"]


def run_demo(
    *,
    transport: str = "shared-memory",
    engine: str = Engine.MODULE,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    out: Path = Path("demo-out"),
    console: Console | None = None,
) -> DemoResult:
    """Train a small policy over the bridge, plant three faults, and write down what happened.

    The trainer runs here; the rollout runs in a process of its own where the transport crosses
    processes. Each step insists that the rollout's log-probabilities are those of the version that
    it reports. Two updates are refused and one is undone on purpose.

    Args:
        transport: name or short form.
        engine: what the rollout samples with: ``module``, a torch module; ``vllm`` or ``sglang``,
            such an engine, which takes half a minute to start; ``vllm-http``, a vLLM server with a
            side-car beside it.
        steps: training steps, one update of the weights each.
        seed: of the weights and of the samples; the same seed gives the same rewards, with SGLang
            and with a server only about the same.
        out: where `demo.json` and `demo.png` go; made if it is not there.
        console: where progress goes; a terminal gets a live panel, anything else plain lines.

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
    faults = plan_faults(steps)
    config = _checked(transport, engine, seed)
    _check_writable(out)
    if config.engine != Engine.MODULE:
        config = replace(config, engine_log=str((out / f"{config.engine}.log").absolute()))
        console.print(
            f"starting {config.engine}, which takes half a minute; its log is {config.engine_log}",
            soft_wrap=True,
            highlight=False,
        )
    rows, fault_rows = [], []
    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        rollout, num_processes = _start_rollout(config)
        stack.callback(rollout.close)
        trainer = Trainer(config, rollout, num_steps=steps)
        stack.callback(trainer.close)
        engine_name = rollout.wait_until_ready()
        if config.engine == Engine.MODULE:
            engine_name = ""
        title = f"rl_bridge demo: sort {config.num_digits} digits, {config.transport}"
        if engine_name:
            title += f", {engine_name}"
        view = stack.enter_context(LiveView(console, title=title, num_steps=steps))
        view.say(
            f"the rollout samples in {rollout.place}; its weights come over {config.transport}"
        )
        for number in range(1, steps + 1):
            row, fault_row = trainer.step(number, faults.get(number))
            if fault_row is not None:
                fault_rows.append(fault_row)
                view.fault(fault_row)
            rows.append(row)
            view.step(row)
        manifest, labels_checked = trainer.held, trainer.labels_checked
    result = DemoResult(
        transport=config.transport,
        engine=config.engine,
        seed=seed,
        num_processes=num_processes,
        num_tensors=manifest.tensor_count,
        total_nbytes=manifest.total_nbytes,
        seconds=time.perf_counter() - start,
        rows=tuple(rows),
        faults=tuple(fault_rows),
        engine_name=engine_name,
        labels_checked=labels_checked,
    )
    paths = write_files(result, out)
    print_report(result, console)
    console.print(*paths, soft_wrap=True, highlight=False)
    return result


def _checked(transport: str, engine: str, seed: int) -> RolloutConfig:
    """Find every reason not to start before anything is started."""
    name = canonical_name(transport)
    check_engine(engine, name)
    if importlib.util.find_spec("matplotlib") is None:
        raise WeightBridgeUnavailableError(
            "the demo draws its picture with matplotlib, which is not installed. "
            "Install it with: pip install 'rl_bridge[demo]'"
        )
    found = transport_class(name).probe()
    if found.status != "pass":
        raise TransportUnavailable(name, found.cause, found.remedy)
    return RolloutConfig(transport=name, seed=seed, engine=str(engine))


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


def _start_rollout(config: RolloutConfig) -> tuple[Rollout, int]:
    if config.engine == Engine.VLLM_HTTP:
        return HttpRollout(config), 3
    if transport_class(config.transport).crosses_processes:
        return RolloutProcess(config), 2
    return RolloutWorker(config), 1


@contextmanager
def _one_thread() -> Iterator[None]:
    """Trainer and rollout take turns with matrices too small to share among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

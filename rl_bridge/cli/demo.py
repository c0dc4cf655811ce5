"""`rl-bridge demo`: train a small policy over the bridge, plant faults, draw what happened."""

from pathlib import Path
from typing import Annotated

import typer

from rl_bridge.cli.screen import screen
from rl_bridge.demo.options import DEFAULT_STEPS, MIN_STEPS, Engine
from rl_bridge.demo.run import run_demo

__all__ = ["demo"]


def demo(
    transport: Annotated[
        str, typer.Option(help="How the weights travel: shared-memory, or local-clone.")
    ] = "shared-memory",
    engine: Annotated[
        Engine,
        typer.Option(help="What the rollout samples with: module, vllm, sglang, or vllm-http."),
    ] = Engine.MODULE,
    steps: Annotated[
        int, typer.Option(min=MIN_STEPS, help="Training steps, one update of the weights each.")
    ] = DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same rewards.")] = 0,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Where demo.json and demo.png go.")
    ] = Path("demo-out"),
) -> None:
    """Train a small policy over the bridge, while faults are planted.

    A trainer and a rollout process learn to sort digits by reinforcement, in about a minute. Each
    step checks that the rollout samples with exactly the version that it reports. In the middle one
    update is corrupted, one is stale and one install fails half-way: each is refused or undone, and
    training goes on.
    """
    run_demo(
        transport=transport,
        engine=engine.value,
        steps=steps,
        seed=seed,
        out=out,
        console=screen(),
    )

"""`rl-bridge demo`: train a small policy over the bridge, while faults are planted."""

from pathlib import Path
from typing import Annotated

import typer

from rl_bridge.cli.screen import screen
from rl_bridge.demo.rollout import Engine
from rl_bridge.demo.run import DEFAULT_STEPS, run_demo
from rl_bridge.demo.trainer import MIN_STEPS


def demo(
    *,
    transport: Annotated[
        str | None,
        typer.Option(
            help="How the weights travel: shared-memory, local-clone, or files; an adapter: nixl, "
            "or shared-memory.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="The rollout's engine: module, vllm, sglang, or vllm-http."),
    ] = Engine.MODULE,
    lora: Annotated[
        bool,
        typer.Option("--lora", help="Train a LoRA adapter on two ranks; it needs --engine vllm."),
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Over files: the store, a directory or such as s3://bucket/run. Without it, a "
            "directory in OUT.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=MIN_STEPS, help="Training steps, one update of the weights each.")
    ] = DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same rewards.")] = 0,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Where demo.json and demo.png go.")
    ] = Path("demo-out"),
    plain: Annotated[
        bool, typer.Option("--plain", help="Print a line for each step, and no progress bar.")
    ] = False,
) -> None:
    """Train a small policy over the bridge, while faults are planted.

    A trainer and a rollout process learn to sort digits by reinforcement, in about a minute. Each
    step checks that the rollout samples with exactly the version that it reports. In the middle one
    update is corrupted, one is stale and one install fails half-way: each is refused or undone, and
    training goes on. The same run without the bridge shows what they do there.

    Over files, trainer and engines share nothing but the url of a store. The trainer is killed in
    the middle of a publication, a second engine joins while no trainer lives, and a new trainer
    goes on from the newest version.
    """
    run_demo(
        transport=transport,
        engine=engine.value,
        lora=lora,
        url=url,
        steps=steps,
        seed=seed,
        out=out,
        plain=plain,
        console=screen(),
    )

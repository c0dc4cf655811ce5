"""`rl-bridge sidecar`: stand beside an engine, and take its updates over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from rl_bridge.integrations.remote.serve import EngineServer, find_executor
from rl_bridge.remote import SidecarConfig, serve

__all__ = ["sidecar"]

_DEFAULTS = SidecarConfig()


def sidecar(  # noqa: PLR0917 - typer calls it by name
    engine: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help="A server's URL, or module:function that makes a TwoPhaseExecutor.",
        ),
    ],
    key_file: Annotated[
        Path,
        typer.Option(
            "--key-file",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="The key that is shared with the trainer: 32 bytes or more, mode 0600.",
        ),
    ],
    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir",
            file_okay=False,
            show_default=False,
            help="What it must remember over a restart; a directory of its own.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Requests are signed, not encrypted.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8471,
    transport: Annotated[
        str, typer.Option(help="By which the bytes come, where the engine is a URL.")
    ] = "shared-memory",
    server: Annotated[
        EngineServer, typer.Option(help="Whose server the URL is: vllm, or sglang.")
    ] = EngineServer.VLLM,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="The key that SGLang's server asks for, its admin's if it has one; mode 0600.",
        ),
    ] = None,
    hold_s: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds that an update may wait for its next step."),
    ] = _DEFAULTS.hold_s,
    step_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Seconds in which each step is answered.")
    ] = _DEFAULTS.step_timeout_s,
    body_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Seconds in which each request must have arrived.")
    ] = _DEFAULTS.body_timeout_s,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections at once; more are turned away.")
    ] = _DEFAULTS.max_connections,
) -> None:
    """Stand beside an engine and take its updates over HTTP.

    Each request is signed with a shared key. The bytes come by the transport that trainer and
    engine share; /metrics is for Prometheus, /openapi.json describes the rest. Killed at any point,
    it brings the engine back at its next start, or says that it has no version.
    """
    config = SidecarConfig(
        hold_s=hold_s,
        step_timeout_s=step_timeout_s,
        body_timeout_s=body_timeout_s,
        max_connections=max_connections,
    )
    executor = find_executor(
        engine,
        transport=transport,
        server=server,
        api_key_file=api_key_file,
        timeout_s=step_timeout_s,
    )
    try:
        serve(executor, key_file=key_file, state_dir=state_dir, host=host, port=port, config=config)
    finally:
        executor.close()

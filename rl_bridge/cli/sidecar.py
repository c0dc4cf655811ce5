"""`rl-bridge sidecar`: finds the engine that is named on the command line, and stands beside it."""

import importlib
import logging
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import TwoPhaseExecutor
from rl_bridge.engines.sglang.client import connect as sglang_client
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.remote import SidecarConfig, serve
from rl_bridge.remote.signing import read_secret
from rl_bridge.transports.wire.tls import TLS, TLSFiles

_DEFAULTS = SidecarConfig()


class EngineServer(StrEnum):
    """Whose server a URL is."""

    VLLM = "vllm"
    SGLANG = "sglang"


KeyFile = Annotated[
    Path,
    typer.Option(
        "--key-file",
        exists=True,
        dir_okay=False,
        show_default=False,
        help="The key that trainer and side-car share: 32 bytes or more, mode 0600.",
    ),
]
TLSCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        dir_okay=False,
        show_default=False,
        help="For TLS: this side's certificate, which names its host.",
    ),
]
TLSKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        dir_okay=False,
        show_default=False,
        help="For TLS: the key of this certificate.",
    ),
]
TLSAuthority = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        dir_okay=False,
        show_default=False,
        help="For TLS: the authority that signed the other side's certificate.",
    ),
]


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TLSFiles | None:
    """The files of three options that are given together, or not at all."""
    if cert and key and ca:
        return TLSFiles(cert=cert, key=key, ca=ca)
    if cert or key or ca:
        raise typer.BadParameter(
            "expected --tls-cert, --tls-key and --tls-ca together. Give all three, or none."
        )
    return None


def sidecar(  # noqa: PLR0917 - typer calls it by name
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            show_default=False,
            help="A server's URL, or module:function that makes a TwoPhaseExecutor.",
        ),
    ],
    key_file: KeyFile,
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
        str,
        typer.Option(help="Address to listen on. Without TLS, requests are signed, not encrypted."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8471,
    transport: Annotated[
        str, typer.Option(help="Transport of the bytes, if the engine is a URL.")
    ] = "shared-memory",
    server: Annotated[
        EngineServer, typer.Option(help="Kind of server at the URL: vllm or sglang.")
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
    tls_cert: TLSCert = None,
    tls_key: TLSKey = None,
    tls_ca: TLSAuthority = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Take the engine from a driver that has it, such as a side-car that died.",
        ),
    ] = False,
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
        int,
        typer.Option(min=1, help="Connections at once; one more ends the one idle for longest."),
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
    tls = tls_files(tls_cert, tls_key, tls_ca)
    if tls is not None:
        TLS(tls)  # before the engine is taken
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("rl_bridge").setLevel(logging.INFO)
    executor = find_executor(
        engine,
        transport=transport,
        server=server,
        api_key_file=api_key_file,
        timeout_s=step_timeout_s,
    )
    if take_over:
        executor.recover()
    try:
        serve(
            executor,
            key_file=key_file,
            state_dir=state_dir,
            host=host,
            port=port,
            config=config,
            tls=tls,
        )
    finally:
        executor.close()


# ---- engines that a command line names -----------------------------------------------------------


def find_executor(
    engine: str,
    *,
    transport: str = "shared-memory",
    server: EngineServer | str = EngineServer.VLLM,
    api_key_file: str | os.PathLike[str] | None = None,
    timeout_s: float = 600.0,
) -> TwoPhaseExecutor:
    """The executor of an engine that is named on a command line.

    Args:
        engine: a server's URL, or ``module:function``, a function without arguments that makes a
            `TwoPhaseExecutor`; it is looked for in the working directory as well.
        transport: by which the bytes come, for a URL.
        server: whose server it is, for a URL.
        api_key_file: with the key that SGLang's server asks for, mode 0600.
        timeout_s: deadline of each call to a server.

    Raises:
        ValueError: no such server, or a key for one that takes none.
        WeightBridgeUnavailableError: there is no such engine, or the key's file cannot be used.

    """
    if engine.startswith(("http://", "https://")):
        adapter = _adapter(engine, EngineServer(server), api_key_file, timeout_s)
        return TwoPhaseExecutor(
            weight_bridge=make_weight_bridge(transport, source_worker="sidecar"),
            weight_install_adapter=adapter,
        )
    module, _, name = engine.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise WeightBridgeUnavailableError(
            f"there is no engine {engine!r}: {error}. Name a server's URL, or a function that "
            "makes a TwoPhaseExecutor as module:function."
        ) from error
    made = make()
    if not isinstance(made, TwoPhaseExecutor):
        raise WeightBridgeUnavailableError(
            f"{engine} made a {type(made).__name__}, expected a TwoPhaseExecutor. Make it return "
            "rl_bridge.remote.TwoPhaseExecutor(weight_bridge=..., weight_install_adapter=...)."
        )
    return made


def _adapter(
    url: str,
    server: EngineServer,
    api_key_file: str | os.PathLike[str] | None,
    timeout_s: float,
) -> TransactionalAdapter:
    if server is EngineServer.SGLANG:
        key = None if api_key_file is None else _api_key(api_key_file)
        client = sglang_client(url, timeout_s=timeout_s, api_key=key)
        return SGLangInstallAdapter(client)
    if api_key_file is not None:
        raise ValueError("a vLLM server's update routes take no API key. Leave --api-key-file out.")
    return VLLMEngineAdapter(url, timeout_s=timeout_s)


def _api_key(path: str | os.PathLike[str]) -> str:
    text = read_secret(path).decode("latin-1").strip()
    if not (text and text.isascii() and text.isprintable()):
        raise WeightBridgeUnavailableError(
            f"the file {path} holds no API key, expected one line of text. Write it there."
        )
    return text

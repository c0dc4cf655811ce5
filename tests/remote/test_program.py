"""`rl-bridge sidecar` and what it is made of: engines that are none, packages that are missing."""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.cli.sidecar import find_executor
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.remote import RemoteEngine, Status, TwoPhaseExecutor, create_app, serve
from rl_bridge.remote.signing import read_key
from rl_bridge.remote.state import StateDirectory
from rl_bridge.sglang import SGLangInstallAdapter
from rl_bridge.testing.processes import DEADLINE_S
from tests.cli_program import call
from tests.remote import engines
from tests.remote.process import environment


def one_phase() -> RolloutExecutor:
    return RolloutExecutor()


def test_an_engine_is_found_by_its_module_and_name() -> None:
    with find_executor(f"{engines.__name__}:plain") as executor:
        assert isinstance(executor, TwoPhaseExecutor)


@pytest.mark.parametrize(
    "engine", ["nowhere:make", "tests.remote.engines:nothing", "tests.remote.engines", ":", ""]
)
def test_an_engine_that_is_none_is_told(engine: str) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match="as module:function"):
        find_executor(engine)


def test_an_executor_that_cannot_stop_between_its_steps_is_refused(
    key_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match="expected a TwoPhaseExecutor"):
        find_executor(f"{__name__}:one_phase")
    with (
        make_weight_bridge("local-clone") as bridge,
        RolloutExecutor(weight_bridge=bridge) as executor,
        pytest.raises(TypeError, match="expected a TwoPhaseExecutor"),
    ):
        create_app(executor, key_file=key_file, state_dir=tmp_path / "state")  # type: ignore[arg-type]
    assert not (tmp_path / "state").exists()


def test_a_url_is_of_a_server_of_either_kind(tmp_path: Path, key_file: Path) -> None:
    url = "http://127.0.0.1:1"
    with find_executor(url, timeout_s=3.0) as executor:
        assert isinstance(executor.weight_install_adapter, VLLMEngineAdapter)
    with pytest.raises(WeightBridgeUnavailableError, match="holds no API key"):
        find_executor(url, server="sglang", api_key_file=key_file)
    key_file.write_text("the server's\n", "utf-8")
    with find_executor(url, server="sglang", api_key_file=key_file) as executor:
        assert isinstance(executor.weight_install_adapter, SGLangInstallAdapter)
    with pytest.raises(ValueError, match="Leave --api-key-file out"):
        find_executor(url, api_key_file=key_file)
    with pytest.raises(ValueError, match="tgi"):
        find_executor(url, server="tgi")
    key_file.chmod(0o644)
    with pytest.raises(WeightBridgeUnavailableError, match="chmod 600"):
        find_executor(url, server="sglang", api_key_file=key_file)


@pytest.mark.parametrize("package", ["httpx", "fastapi", "anyio", "h11", "prometheus_client"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> object:
        if package == "httpx":
            return RemoteEngine("http://127.0.0.1:1", key_file)
        with TwoPhaseExecutor(weight_transport="local-clone") as executor:
            serve(executor, key_file=key_file, state_dir=tmp_path / "state")
        return None

    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WeightBridgeUnavailableError, match=r"pip install 'rl-bridge\[remote\]'"):
        make()


async def asked_by_asgi(app: Any, *headers: dict[str, str]) -> list[httpx.Response]:
    """What the status is to requests with these headers, from its start to its end."""
    told, said = asyncio.Queue[dict[str, str]](), asyncio.Queue[dict[str, str]]()
    async with asyncio.timeout(DEADLINE_S):
        served = asyncio.create_task(app({"type": "lifespan"}, told.get, said.put))
        await told.put({"type": "lifespan.startup"})
        assert (await said.get())["type"] == "lifespan.startup.complete"
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            found = [await client.get("/status", headers=one) for one in headers]
        await told.put({"type": "lifespan.shutdown"})
        await served
    return found


def test_other_servers_serve_it_by_asgi(key_file: Path, tmp_path: Path) -> None:
    signed = read_key(key_file).sign("GET", "/status", b"", time=int(time.time()))
    with engines.plain() as executor:
        app: Any = create_app(executor, key_file=key_file, state_dir=tmp_path / "state")
        unsigned, found = asyncio.run(asked_by_asgi(app, {}, {"authorization": signed.header()}))
        assert unsigned.status_code == 401
        assert Status.model_validate_json(found.content).state == "empty"
        StateDirectory(tmp_path / "state").close()  # nobody has it any more


def test_an_address_that_is_taken_is_told(key_file: Path, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        TwoPhaseExecutor(weight_transport="local-clone") as executor,
    ):
        port = taken.getsockname()[1]
        with pytest.raises(WeightBridgeUnavailableError, match="cannot listen on"):
            serve(executor, key_file=key_file, state_dir=tmp_path / "state", port=port)


CALLER = """
import os, signal, sys, threading
from rl_bridge.remote import TwoPhaseExecutor, serve

def handler(number, frame):
    print("handled", flush=True)
    raise SystemExit(7)

class Told:
    def write(self, text):
        if "listening on" in text:
            os.kill(os.getpid(), signal.SIGTERM)
    def flush(self):
        pass

import logging
logging.basicConfig(stream=Told(), level=logging.INFO)
signal.signal(signal.SIGTERM, handler)
executor = TwoPhaseExecutor(weight_transport="local-clone")
try:
    serve(executor, key_file=sys.argv[1], state_dir=sys.argv[2], port=0)
finally:
    executor.close()
    print("closed", flush=True)
"""


def test_a_caller_handles_sigterm_as_before(key_file: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CALLER, str(key_file), str(tmp_path / "state")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.split() == ["handled", "closed"], ended.stderr
    assert ended.returncode == 7


@pytest.mark.parametrize("url", ["127.0.0.1:8471", "ftp://a", "http://", "http://a?b=c"])
def test_a_url_that_is_none_is_told(url: str, key_file: Path) -> None:
    with pytest.raises(ValueError, match="expected one such as"):
        RemoteEngine(url, key_file)
    with pytest.raises(ValueError, match="Give seconds"):
        RemoteEngine("http://127.0.0.1:1", key_file, timeout_s=0)


def test_the_program_tells_in_one_line_what_is_wrong_with_a_key(
    key_file: Path, tmp_path: Path
) -> None:
    key_file.chmod(0o644)
    said = call(
        *("sidecar", f"{engines.__name__}:plain", "--key-file", key_file),
        *("--state-dir", tmp_path / "state"),
    )
    assert said.complains("WeightBridgeUnavailableError")
    assert "chmod 600" in said.err

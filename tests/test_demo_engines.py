"""What a real engine adds to the demo, as far as it shows without one."""

import importlib.util
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_bridge.demo import sglang_fault
from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.failures import FaultUnnoticed, PeerGone
from rl_bridge.demo.faults import Fault, examine
from rl_bridge.demo.half_way import EngineFault, failing_exchange
from rl_bridge.demo.options import MIN_STEPS, Engine
from rl_bridge.demo.phases import BETWEEN, grouped, phase_series
from rl_bridge.demo.records import DemoResult
from rl_bridge.demo.report import print_report
from rl_bridge.demo.rollout import InstallReply
from rl_bridge.demo.rollout_process import RolloutProcess
from rl_bridge.demo.run import run_demo
from rl_bridge.demo.servers import Server, make_key
from rl_bridge.demo.vllm_worker import METHOD, DemoWorker
from rl_bridge.engines.staging import AttributeChange, Exchange, Staged, TensorChange
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.remote.signing import read_key
from rl_bridge.testing.processes import DEADLINE_S, until

WITH_VLLM = importlib.util.find_spec("vllm") is not None
LOCAL = RolloutConfig(transport="local-clone", seed=3, num_digits=3, base=4)


@pytest.mark.skipif(WITH_VLLM, reason="vLLM is installed: it would start")
def test_an_engine_that_does_not_start_says_why_and_where_it_printed(tmp_path: Path) -> None:
    log = str(tmp_path / "vllm.log")
    config = replace(LOCAL, transport="shared-memory", engine=Engine.VLLM.value, engine_log=log)
    with closing(RolloutProcess(config)) as rollout:
        with pytest.raises(WeightBridgeUnavailableError, match=r"did not start.*vllm") as caught:
            rollout.wait_until_ready()
        assert log in str(caught.value)


def test_what_a_killed_process_printed_is_named(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    config = replace(LOCAL, transport="shared-memory", engine_log=str(log))
    with closing(RolloutProcess(config)) as rollout:
        rollout.wait_until_ready()
        assert log.exists()
        os.kill(rollout.pid, signal.SIGKILL)
        with pytest.raises(PeerGone, match=r"engine\.log"):
            rollout.sample(num_groups=1, group_size=1)


@pytest.mark.parametrize(
    ("engine", "installed", "transport", "words"),
    [
        ("vllm", False, "shared-memory", r"needs vllm and transformers.*rl_bridge\[demo,vllm\]"),
        ("vllm", True, "local-clone", "local-clone does not leave this one.*--transport shared-"),
        ("sglang", False, "shared-memory", r"needs sglang and .*rl_bridge\[demo,sglang\]"),
        ("sglang", True, "local-clone", "SGLang samples in a process of its own.*--transport"),
        ("vllm-http", False, "shared-memory", r"fastapi and.*rl_bridge\[demo,vllm,remote\]"),
        ("vllm-http", True, "local-clone", "vLLM samples in a process of its own.*--transport"),
    ],
)
def test_an_engine_that_cannot_sample_is_refused_before_anything_starts(
    engine: str,
    installed: bool,
    transport: str,
    words: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if installed or name == "matplotlib" else None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(WeightBridgeUnavailableError, match=words):
        run_demo(engine=engine, transport=transport, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    # What is told of it does not depend on the task.
    task = partial(RolloutConfig, num_digits=LOCAL.num_digits, base=LOCAL.base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_bridge.demo.run.RolloutConfig", task)
        return run_demo(
            transport="local-clone",
            steps=MIN_STEPS,
            out=tmp_path_factory.mktemp("out"),
            console=Console(file=io.StringIO()),
        )


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG, Engine.VLLM_HTTP])
def test_what_an_engine_does_between_pause_and_resume_is_told_as_the_install(
    engine: Engine, result: DemoResult
) -> None:
    phases = {"prepare": 8.0, "pause": 0.5, "install": 1.0, "cache": 0.25, "resume": 0.25}
    row = replace(result.rows[0], publish_ms={}, install_ms=phases, update_ms=10.0)
    told = {one.name: one.median_ms for one in grouped(phase_series([row]), engine)}
    assert told == {"stage": 8.0, "install": 2.0, BETWEEN: 0.0}


def test_only_a_real_engine_adds_its_name_and_labels(result: DemoResult) -> None:
    extra: dict[str, Any] = {"engine_name": "vLLM 1.2", "labels_checked": 5}
    assert not result.to_json().keys() & extra.keys()
    real = replace(result, engine="vllm", **extra)
    assert real.to_json().items() >= extra.items()
    screen = io.StringIO()
    print_report(real, Console(file=screen, width=120))
    assert "vLLM 1.2" in screen.getvalue()
    assert "5 outputs, each with the label" in screen.getvalue()


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG, Engine.VLLM_HTTP])
@pytest.mark.parametrize("said", ["EngineFault: the engine failed", "OutOfMemory: the engine"])
def test_a_half_way_install_elsewhere_is_told_by_the_cause_that_is_named(
    said: str, engine: Engine
) -> None:
    reply = InstallReply(active_version=4, error="WeightUpdateRejectedError", message=said)
    if said.startswith("EngineFault"):
        found = examine(Fault.HALF_WAY, reply, active_version=4, engine=engine)
        assert (found.outcome, found.error) == ("undone", "WeightUpdateRejectedError")
        return
    with pytest.raises(FaultUnnoticed, match="OutOfMemory"):
        examine(Fault.HALF_WAY, reply, active_version=4, engine=engine)


def test_a_failing_exchange_leaves_a_mixture_that_its_undo_takes_back() -> None:
    held = [torch.full((2,), float(index)) for index in range(3)]
    layer = torch.nn.Module()
    layer.packed = "old"  # type: ignore[assignment]
    staged = Staged(
        [TensorChange(str(index), live, live + 10, index) for index, live in enumerate(held)],
        [AttributeChange("layer", layer, "packed", "new")],
    )
    exchange = Exchange()
    with failing_exchange(), pytest.raises(EngineFault, match="after 2 of 4 exchanges"):
        exchange.apply(staged)
    assert [tensor[0].item() for tensor in held] == [10, 11, 2]
    exchange.undo()
    assert [tensor[0].item() for tensor in held] == [0, 1, 2]
    exchange.apply(staged)
    assert [tensor[0].item() for tensor in held] == [10, 11, 12]
    assert layer.packed == "new"


class Loading(torch.nn.Module):
    """A model that loads by name, as those of engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, float] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.held.update((name, tensor.item()) for name, tensor in weights)


def test_a_loader_fails_half_way_only_while_it_is_asked_to() -> None:
    model = Loading()
    given = [(str(number), torch.tensor(float(number))) for number in range(5)]
    for is_armed in (True, True, False):
        sglang_fault.plant(model, [(sglang_fault.NAME, torch.tensor([float(is_armed)]))])
        model.held.clear()
        if is_armed:
            with pytest.raises(EngineFault, match="after 2 of 5 tensors"):
                model.load_weights(iter(given))
            assert list(model.held) == ["0", "1"]
    model.load_weights(iter(given))
    assert len(model.held) == 5
    with pytest.raises(EngineFault, match="expected one tensor"):
        sglang_fault.plant(model, given)


def test_a_worker_fails_half_way_only_while_it_is_asked_to() -> None:
    apply, worker = Exchange.apply, DemoWorker()
    for _ in range(2):
        getattr(worker, METHOD)(1)
        assert Exchange.apply is not apply
    getattr(worker, METHOD)(0)
    assert Exchange.apply is apply


def test_a_server_that_ends_is_told_with_what_it_printed(tmp_path: Path) -> None:
    server = Server("side-car", ["rl_bridge", "nonsense"], port=1, log=tmp_path / "log")
    with (
        closing(server),
        pytest.raises(WeightBridgeUnavailableError, match=r"side-car did not start.*ended with 2"),
    ):
        server.wait_until(lambda: False, timeout_s=DEADLINE_S)
    assert "nonsense" in (tmp_path / "log").read_text("utf-8")


def test_a_server_ends_with_who_started_it(tmp_path: Path) -> None:
    # It starts one that would listen for good, says where, and is killed.
    starter = """
import sys
from pathlib import Path
from rl_bridge.demo.servers import Server
server = Server("web", ["http.server", "0", "--bind", "127.0.0.1"], port=1, log=Path("log"))
print(server.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) == pid
        parent.kill()
    until(lambda: not is_running(pid), what="the server is gone with the one that started it")


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_key_is_new_and_only_its_owners(tmp_path: Path) -> None:
    keys = [make_key(tmp_path / name) for name in ("a", "b")]
    assert keys[0].read_bytes() != keys[1].read_bytes()
    assert [key.stat().st_mode & 0o777 for key in keys] == [0o600, 0o600]
    assert all(read_key(key) for key in keys)

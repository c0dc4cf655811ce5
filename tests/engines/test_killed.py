"""A whole engine of two ranks dies, or stands still, in the middle of an update.

The trainer gets a typed error within the deadline, goes on publishing, and a fresh engine gets the
same version before it is servable.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import EngineLost, RolloutExecutor, TornEngine
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.testing.processes import until
from tests.engines.drive import Setting, answers, executor_for, start
from tests.engines.looped import looped
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.served import served
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3"), in_process=False, ranks=2)
# Four minutes: with every combination of the others, in `make test-engines-full`.
pytestmark = pytest.mark.full
DEADLINE_S = 60
DEAD = (EngineLost, TornEngine)


def family(pid: int) -> list[int]:
    """A process and all below it, whichever thread started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return [pid, *(each for child in children for each in family(child))]


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Halted:
    """The workers stop in the exchange until they are killed."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.error: BaseException | None = None

    def wait(self) -> None:
        until(lambda: len(list(self.marks.iterdir())) == 2, what="both ranks are in the exchange")


def killed_meanwhile(
    executor: RolloutExecutor, manifest: Any, marks: Path, kill: Callable[[], None]
) -> Halted:
    """Update in another thread, and kill when all workers are in the middle of it."""
    halted = Halted(marks)

    def update() -> None:
        try:
            executor.update_weights(manifest)
        except Exception as error:  # noqa: BLE001 - looked at by `check`
            halted.error = error

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    halted.wait()
    kill()
    thread.join(DEADLINE_S + 30)
    assert not thread.is_alive(), "the update did not end"
    return halted


def check(executor: RolloutExecutor, trainer: Trainer, manifest: Any, halted: Halted) -> None:
    """A typed error; nothing servable; the trainer publishes on."""
    assert isinstance(halted.error, DEAD), halted.error
    assert "fresh engine" in str(halted.error)
    with pytest.raises(DEAD):
        executor.check_servable()
    assert {r.presence for r in trainer.holders(manifest) if r.worker == "vllm"} <= {"gone"}


@pytest.fixture(scope="module")
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.mark.timeout(400)  # engines start
def test_killing_all_of_an_async_engine_in_an_update_is_a_typed_error_and_the_next_takes_over(
    checkpoints: Checkpoints,
    references: References,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    fresh = references.of(Setting(SETTING.kind), 1)
    path = checkpoints.path(SETTING.kind, 0)
    manifest = trainer.publish(weights[1])
    with looped(SETTING, path) as engine:
        before = set(family(os.getpid()))
        pids = engine.run(engine.llm.collective_rpc("tell_pid"))
        assert len(set(pids)) == 2
        core = [pid for pid in before if set(pids) <= set(family(pid)) and pid != os.getpid()]
        assert core
        engine.run(engine.llm.collective_rpc("halt_in_exchange", None, (str(tmp_path),)))
        with executor_for(engine.llm, loop=engine.loop, timeout_s=DEADLINE_S) as executor:
            halted = killed_meanwhile(
                executor, manifest, tmp_path, lambda: send([*core, *pids], signal.SIGKILL)
            )
            check(executor, trainer, manifest, halted)
    with (
        start(Setting(SETTING.kind), path) as llm,
        executor_for(llm) as executor,
    ):
        executor.update_weights(manifest)
        executor.check_servable()
        assert answers(llm) == fresh
    assert trainer.publish(weights[0]).weight_version > manifest.weight_version


@pytest.mark.timeout(400)
def test_killing_all_of_a_server_in_an_update_is_a_typed_error_and_the_trainer_goes_on(
    checkpoints: Checkpoints,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    path = checkpoints.path(SETTING.kind, 0)
    manifest = trainer.publish(weights[1])
    marks = tmp_path / "marks"
    marks.mkdir()
    with served(SETTING, path, tmp_path / "log", VLLM_SERVER_DEV_MODE="1") as server:
        halt = {"method": "halt_in_exchange", "args": [str(marks)]}
        assert server.call("collective_rpc", json=halt).is_success
        with executor_for(server.url, timeout_s=DEADLINE_S) as executor:
            halted = killed_meanwhile(executor, manifest, marks, server.end)
            check(executor, trainer, manifest, halted)
    assert trainer.publish(weights[0]).weight_version > manifest.weight_version


@pytest.mark.timeout(240)
def test_workers_of_an_in_process_engine_that_stand_still_are_told_at_the_deadline(
    checkpoints: Checkpoints,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    setting = Setting(SETTING.kind, in_process=True, ranks=2)
    with start(setting, checkpoints.path(SETTING.kind, 0)) as llm:
        pids = llm.collective_rpc("tell_pid")
        assert os.getpid() not in pids
        with executor_for(llm, timeout_s=5) as executor:
            executor.update_weights(trainer.publish(weights[1]))
            llm.collective_rpc("halt_in_exchange", args=(str(tmp_path),))
            with pytest.raises((DeadlineExceeded, TornEngine)):
                executor.update_weights(trainer.publish(weights[0]))
            assert len(list(tmp_path.iterdir())) == 2
            with pytest.raises(TornEngine):
                executor.check_servable()
        send(pids, signal.SIGKILL)

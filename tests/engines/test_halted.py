"""Workers that stand still in the middle of an update: a typed error at the deadline."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from rl_bridge import TornEngine
from rl_bridge.errors import DeadlineExceeded
from tests.engines.drive import Setting, executor_for, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3"), in_process=True, ranks=2)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_workers_of_an_in_process_engine_that_stand_still_are_told_at_the_deadline(
    checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path
) -> None:
    weights = [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]
    with start(SETTING, checkpoints.path(SETTING.kind, 0)) as llm:
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
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

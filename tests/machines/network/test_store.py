"""The demo over files on three machines: the store's, the trainer's, and that of two engines.

Trainer and engines reach nobody but the store. The judge is beside it.
"""

import os
import socket
import tempfile
from contextlib import closing
from dataclasses import asdict
from typing import Any, ClassVar

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from rl_bridge.demo import stored
from rl_bridge.demo.learning import SortTask
from rl_bridge.demo.rollout import RolloutConfig
from rl_bridge.demo.stored import FAULTS, StoreRank, StoreRollout, StoreTrainer, StoreWorker
from rl_bridge.demo.trainer import MIN_STEPS, plan_faults
from rl_bridge.testing.processes import Child
from tests.machines.network.namespaces import enter, three_machines, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

STORE_PORT = 9_000  # the namespaces are the test's own
URL = "s3://bucket/run1"
DEADLINE_S = 240.0


def enter_machine(variable: str) -> None:
    """Take this process onto a machine, with a directory for temporary files of its own.

    Processes of one host that share that directory fetch a version once for all of them.
    """
    enter(os.environ[variable])
    tempfile.tempdir = tempfile.mkdtemp()


class PlacedRank(StoreRank):
    """A trainer on its machine."""

    def __init__(self, **options: Any) -> None:
        enter_machine("TRAINER_IS_ON")
        super().__init__(**options)


class PlacedWorker(StoreWorker):
    """An engine on the engines' machine."""

    def __init__(self, config: RolloutConfig) -> None:
        enter_machine("ENGINES_ARE_ON")
        super().__init__(config)


class Judge:
    """The store, and what starts all others."""

    def __init__(self, namespace: str, address: str, trainer: str, engines: str) -> None:
        enter(namespace)
        self.server = ThreadedMotoServer(address, port=STORE_PORT, verbose=False)
        self.server.start()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{address}:{STORE_PORT}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "TRAINER_IS_ON": trainer,
            "ENGINES_ARE_ON": engines,
        }
        fsspec.filesystem("s3").makedirs("bucket")

    def run(self) -> dict[str, Any]:
        vars(stored).update(StoreRank=PlacedRank, StoreWorker=PlacedWorker)
        config = RolloutConfig(
            transport="files", seed=1, url=URL, task=SortTask(num_digits=3, base=4)
        )
        faults, rows, planted = plan_faults(MIN_STEPS, FAULTS), [], []
        with (
            StoreRollout(config) as engine,
            closing(StoreTrainer(config, engine, num_steps=MIN_STEPS)) as trainer,
        ):
            engine.wait_until_ready()
            for number in range(1, MIN_STEPS + 1):
                row, fault = trainer.step(number, faults.get(number))
                rows.append(row)
                planted += [] if fault is None else [fault]
            return {
                "rows": [asdict(row) for row in rows],
                "faults": [fault.outcome for fault in planted],
                "events": [asdict(event) for event in trainer.events],
                "nbytes": trainer.held.total_nbytes,
            }


class JudgeProcess(Child):
    """Its children are processes, too."""

    is_daemon: ClassVar[bool] = False


class Onlooker:
    """A process that is on a machine and does nothing by itself."""

    def __init__(self, namespace: str) -> None:
        enter(namespace)

    def reaches(self, address: str) -> bool:
        try:
            socket.create_connection((address, STORE_PORT), timeout=10).close()
        except OSError:
            return False
        return True


def test_a_trainer_killed_on_its_machine_is_resumed_and_an_engine_joins_from_the_store() -> None:
    with (
        three_machines() as (store, left, right),
        Child(Onlooker, namespace=left.namespace) as by_trainer,
        Child(Onlooker, namespace=right.namespace) as by_engines,
        JudgeProcess(
            Judge,
            namespace=store.namespace,
            address=store.address,
            trainer=left.namespace,
            engines=right.namespace,
        ) as judge,
    ):
        judge.ready()
        for onlooker, other in ((by_trainer, right), (by_engines, left)):
            assert onlooker.ready().call("reaches", address=store.address)
            assert not onlooker.call("reaches", address=other.address)
        judge.tell("run")
        found = judge.answer(deadline_s=DEADLINE_S)
        trained, served = left.traffic(by_trainer.pid), right.traffic(by_engines.pid)
        judge.stop()

    assert [event["kind"] for event in found["events"]] == ["killed", "joined", "resumed"]
    assert sorted(found["faults"]) == ["lost", "refused", "refused", "undone"]
    assert [row["update"] for row in found["rows"]].count("installed") == MIN_STEPS - 3
    assert found["rows"][-1]["reward"] > found["rows"][0]["reward"]
    versions = {row["version"] for row in found["rows"]}
    # Each version left the trainer's machine once; a new trainer fetched the newest one.
    assert trained.sent > len(versions) * found["nbytes"]
    assert trained.received > found["nbytes"]
    # The first engine fetched all, the second one from the newest version on.
    assert served.received > (len(versions) + 1) * found["nbytes"]

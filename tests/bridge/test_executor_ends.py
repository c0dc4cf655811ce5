"""What an executor and its bridge hold, from the first copy to the end of the process."""

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, TensorBridge, make_weight_bridge
from rl_bridge.errors import BridgeClosed
from tests.bridge.engines import Recording, SeedStyle, Unseen, publish
from tests.helpers import forked, forking

# ---- initial weights ----------------------------------------------------------------------------


def anonymous_nbytes() -> int:
    """Private memory of this process that is in use."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_initial_weights_are_copied_once_and_let_go_by_the_first_commit() -> None:
    nbytes = 96 << 20
    engine = {"w": torch.ones(nbytes // 4)}
    with (
        make_weight_bridge("shared-memory", suspicious="off") as trainer,
        make_weight_bridge("shared-memory") as rollout,
    ):
        manifest = trainer.publish({"w": torch.zeros(nbytes // 4)}, weight_version=1)
        gc.collect()
        before = anonymous_nbytes()
        executor = RolloutExecutor(
            weight_bridge=rollout, weight_install_adapter=Unseen(engine), initial_weights=engine
        )
        assert nbytes <= anonymous_nbytes() - before + (4 << 20) < 1.5 * nbytes
        executor.update_weights(manifest)
        assert anonymous_nbytes() - before < 0.5 * nbytes
        assert not engine["w"].any()


class WithUndo(SeedStyle):
    def undo(self) -> None:
        """Knows a way of its own."""


@pytest.mark.parametrize("style", [None, ModuleInstallAdapter, WithUndo])
def test_initial_weights_that_nothing_would_use_are_refused(
    style: Callable[[Any], Any] | None, engine: dict[str, torch.Tensor]
) -> None:
    adapter = None if style is None else style(engine)
    with pytest.raises(ValueError, match=r"initial_weights= would never be used: .*Leave them out"):
        RolloutExecutor(
            weight_transport="local", weight_install_adapter=adapter, initial_weights=engine
        )


# ---- closing ------------------------------------------------------------------------------------


def test_a_closed_executor_has_released_its_version_and_closed_its_own_bridge(
    publisher: TensorBridge,
) -> None:
    manifest = publish(publisher, 1)
    with RolloutExecutor(weight_transport=publisher.transport) as executor:
        executor.update_weights(manifest)
    executor.close()
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, report.presence) == ("released", "gone")
    with pytest.raises(BridgeClosed, match="executor is closed"):
        executor.update_weights(publish(publisher, 2))


def test_a_closed_executor_leaves_a_bridge_that_it_was_given_open(
    publisher: TensorBridge, consumer: TensorBridge
) -> None:
    manifest = publish(publisher, 1)
    with RolloutExecutor(weight_bridge=consumer) as executor:
        executor.update_weights(manifest)
    assert consumer.update_status(manifest.update_id) == "released"
    assert consumer.import_update(publish(publisher, 2))


def test_closing_closes_the_bridge_although_the_adapter_fails(
    publisher: TensorBridge, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor = RolloutExecutor(weight_transport=publisher.transport, weight_install_adapter=adapter)
    executor.update_weights(manifest)
    adapter.fails[f"release {manifest.update_id[:4]}"] = LookupError("no")
    with pytest.raises(LookupError):
        executor.close()
    (report,) = publisher.holders(manifest.update_id)
    assert report.presence == "gone"


@forking
def test_a_forked_child_cannot_close_its_parents_executor(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with RolloutExecutor(weight_transport=publisher.transport) as executor:
        executor.update_weights(manifest)

        def closes() -> bool:
            executor.close()
            return True

        assert forked(closes)
        (report,) = publisher.holders(manifest.update_id)
        assert (report.state, report.presence) == ("acknowledged", "alive")


def test_nothing_is_reported_while_the_interpreter_ends() -> None:
    program = """
        import torch
        from rl_bridge.testing.peer import BridgeOver
        from rl_bridge.transports.local import LocalClone

        class Telling(LocalClone):
            def consumer_end(self, worker, rank):
                end = super().consumer_end(worker, rank)
                end.report = lambda manifest, report: print(report.state, flush=True)
                return end

        bridge = BridgeOver(Telling())
        bridge.transport = "local-clone"
        bridge._transport.name = "local-clone"
        manifest = bridge.publish({"w": torch.ones(3)}, weight_version=1)
        kept = bridge.import_update(manifest)["w"]
        bridge.release(manifest.update_id)
        print("end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["verified", "released", "end"]


def test_a_bridge_that_is_dropped_gives_its_state_directory_back(tmp_path: Path) -> None:
    bridge = make_weight_bridge("local", state_dir=tmp_path)
    assert publish(bridge, 1)
    del bridge
    gc.collect()
    with make_weight_bridge("local", state_dir=tmp_path) as other:
        assert publish(other, 2)

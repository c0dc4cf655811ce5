"""Forked children: each call says that the bridge is the parent's, and disturbs nobody."""

import signal
import threading
from collections.abc import Callable

import pytest

from rl_bridge import RolloutExecutor, SharedMemoryTensorBridge, TensorBridge
from rl_bridge.errors import BridgeClosed
from tests.bridge.engines import linear_weights, publish
from tests.helpers import forked, forking


@forking
def test_a_forked_child_is_told_even_if_a_thread_of_its_parent_held_the_locks() -> None:
    with SharedMemoryTensorBridge() as trainer, SharedMemoryTensorBridge() as rollout:
        manifest = trainer.publish(linear_weights(1.0), weight_version=1)
        executor = RolloutExecutor(weight_bridge=rollout)
        executor.update_weights(manifest)
        locks = [
            trainer._lock,
            trainer.publisher._lock,
            rollout._lock,
            rollout.consumer._lock,
            executor._lock,
        ]
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in locks:
                lock.acquire()
            taken.set()
            done.wait(60)
            for lock in locks:
                lock.release()

        holder = threading.Thread(target=hold)
        holder.start()
        taken.wait(60)

        def child() -> bool:
            signal.alarm(30)  # a hang ends in a signal, and then it says nothing
            calls: list[Callable[[], object]] = [
                lambda: trainer.publish(linear_weights(2.0), weight_version=2),
                trainer.consumers,
                lambda: trainer.holders(manifest.update_id),
                lambda: trainer.release(manifest.update_id),
                lambda: rollout.import_update(manifest),
                lambda: rollout.acknowledge(manifest.update_id),
                lambda: rollout.reject(manifest.update_id, "no"),
                lambda: executor.update_weights(manifest),
                executor.release_weights,
                executor.recover,
            ]
            for call in calls:
                with pytest.raises(BridgeClosed, match="belongs to the parent process"):
                    call()
            trainer.close()
            rollout.close()
            return True

        try:
            assert forked(child)
        finally:
            done.set()
            holder.join(60)
        # And it disturbed nobody.
        (report,) = trainer.holders(manifest.update_id)
        assert (report.presence, report.state) == ("alive", "acknowledged")
        executor.update_weights(trainer.publish(linear_weights(2.0), weight_version=2))


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

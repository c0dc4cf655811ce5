"""G8 Leak-free: every segment, descriptor, mapping and lock belongs to a version and a holder.

After release, rejection, death or close they are gone, and steady updates open and map nothing new.
`assert_nothing_leaks` first sees a planted leak of each kind, so that its silence means something.

It ends at tensors that you keep: each one pins its version's slot. With `directory=`, files of a
killed publisher stay until the next sweep.
"""

import itertools
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.testing import (
    BridgeOver,
    Holdings,
    assert_nothing_leaks,
    contents_of,
    sample_weights,
)
from tests.guarantees.kit import OverEachAdapter, OverEachTransport, on_engines, scenarios

MANY = 20


@scenarios(
    "test_fifty_cycles_leave_nothing_behind",
    "test_fifty_bridges_leave_nothing_behind",
    "test_one_tensor_that_is_held_keeps_its_bytes",
    "test_memory_is_used_again_once_nobody_holds_it",
    "test_close_is_idempotent_and_final",
)
class TestEachTransport(OverEachTransport):
    """After release, rejection, death or close."""

    @pytest.mark.parametrize("comes", ["publisher", "consumer"])
    def test_one_side_that_comes_and_goes_leaves_nothing_with_the_other(
        self, make_bridge: Any, comes: str
    ) -> None:
        stays, versions = make_bridge(), itertools.count(1)

        def cycle() -> None:
            with BridgeOver(self.transport_class.create(**self.options)) as other:
                publisher, consumer = (other, stays) if comes == "publisher" else (stays, other)
                manifest = publisher.publish(sample_weights(1), weight_version=next(versions))
                consumer.import_update(manifest)
                consumer.acknowledge(manifest)
            stays.release(manifest)

        assert_nothing_leaks(cycle, *self._watched(self.options), num_cycles=20)

    @pytest.mark.usefixtures("crossing")
    def test_readers_that_are_killed_leave_nothing_with_the_publisher(
        self, publisher: BridgeOver, make_peer: Any
    ) -> None:
        versions = itertools.count(1)

        def cycle() -> None:
            manifest = publisher.publish(sample_weights(1), weight_version=next(versions))
            with make_peer(worker="victim") as victim:
                victim.call("import_update", manifest=manifest.to_json())
            publisher.release(manifest)

        watched = self._watched(self.options)
        assert_nothing_leaks(cycle, *watched, num_cycles=2, num_warm_up=3)

    @pytest.mark.usefixtures("crossing")
    def test_a_publisher_that_is_killed_leaves_its_readers_only_what_they_hold(
        self, consumer: BridgeOver, make_peer: Any
    ) -> None:
        trainer = make_peer(worker="trainer")
        first = trainer.call("publish", seed=1, weight_version=1)
        consumer.import_update(first)
        consumer.release(first)
        before = Holdings.now()
        held = consumer.import_update(trainer.call("publish", seed=2, weight_version=2))
        trainer.kill()
        assert contents_of(held) == contents_of(sample_weights(2))
        del held
        consumer.close()
        after = Holdings.now()
        assert len(after.descriptors) <= len(before.descriptors)
        assert after.files.total() <= before.files.total()


@scenarios(
    "test_updates_that_succeed_and_fail_leave_nothing_behind",
)
class TestEachAdapter(OverEachAdapter):
    """Nor do updates that fail."""


ENGINES = on_engines(
    "test_what_was_only_staged_is_released_and_may_come_again",
)


def test_executors_that_come_and_go_leave_the_engine_and_nothing_else() -> None:
    versions = itertools.count(1)
    engine = {"w": torch.zeros(1 << 16)}
    with make_weight_bridge("shared-memory", suspicious="off") as trainer:

        def cycle() -> None:
            with RolloutExecutor(weight_install_adapter=ModuleInstallAdapter(engine)) as executor:
                manifest = trainer.publish(
                    {"w": torch.ones(1 << 16)}, weight_version=next(versions)
                )
                executor.update_weights(manifest)
            trainer.release(manifest)

        assert_nothing_leaks(cycle, num_cycles=MANY)

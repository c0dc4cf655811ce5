"""G8 Leak-free: every segment, descriptor, mapping and lock belongs to a version and a holder.

After release, rejection, death or close they are gone, and steady updates open and map nothing new.
`assert_nothing_leaks` first sees a planted leak of each kind, so that its silence means something.

It ends at tensors that you keep: each one pins its version's slot. With `directory=`, files of a
killed publisher stay until the next sweep.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing import (
    BridgeOver,
    Child,
    Holdings,
    Stage,
    assert_nothing_leaks,
    contents_of,
    random_tensor,
    sample_weights,
)
from tests.guarantees.kit import Carrier, Replica, damage

MANY = 20


def watched(transport: Carrier) -> list[Any]:
    """The transport's directory, where it has one: names in it count as well."""
    return [value for name, value in transport.options.items() if name == "directory"]


def test_updates_that_come_and_go_leave_nothing_behind(
    trainer: BridgeOver, rollout: BridgeOver, transport: Carrier
) -> None:
    versions = itertools.count(1)
    source = {"w": random_tensor("uint8", (1 << 20,), seed=1)}

    def cycle() -> None:
        version = next(versions)
        source["w"] += 1
        manifest = trainer.publish(source, weight_version=version)
        if version % 4 == 0:
            damage(trainer, manifest, "w", version)
        with suppress(WeightBridgeError):
            rollout.import_update(manifest.to_json())
            rollout.acknowledge(manifest) if version % 3 else rollout.reject(manifest, "no")
        for side in (rollout, trainer):
            side.release(manifest)

    assert_nothing_leaks(cycle, *watched(transport), num_cycles=MANY)


def test_bridges_that_close_take_everything_along(transport: Carrier) -> None:
    def cycle() -> None:
        with transport.bridge() as trainer, transport.bridge() as rollout:
            held = rollout.import_update(trainer.publish(sample_weights(1), weight_version=1))
            rollout.import_update(trainer.publish(sample_weights(2), weight_version=2))
        del held

    assert_nothing_leaks(cycle, *watched(transport), num_cycles=MANY)


@pytest.mark.parametrize("who", ["trainer", "rollout"])
def test_one_side_that_comes_and_goes_leaves_nothing_with_the_other(
    who: str, make_bridge: Callable[..., BridgeOver], transport: Carrier
) -> None:
    stays, versions = make_bridge("stays"), itertools.count(1)

    def cycle() -> None:
        with transport.bridge(source_worker=who) as comes:
            trainer, rollout = (comes, stays) if who == "trainer" else (stays, comes)
            manifest = trainer.publish(sample_weights(1), weight_version=next(versions))
            rollout.import_update(manifest)
            rollout.acknowledge(manifest)
        stays.release(manifest)

    assert_nothing_leaks(cycle, *watched(transport), num_cycles=MANY)


def test_engines_that_are_updated_and_fail_hold_no_more_than_before(replica: Replica) -> None:
    numbers = itertools.count(1)

    def cycle() -> None:
        number = next(numbers)
        replica.update(number)
        replica.fail_next(list(Stage)[number % 4])
        with pytest.raises(replica.fault):
            replica.update(number + 1)

    assert_nothing_leaks(cycle, num_cycles=MANY)


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


def test_readers_that_are_killed_leave_nothing_with_the_publisher(
    trainer: BridgeOver, transport: Carrier
) -> None:
    if not transport.declares.crosses_processes:
        pytest.skip("nobody else can be killed")
    versions = itertools.count(1)

    def cycle() -> None:
        manifest = trainer.publish(sample_weights(1), weight_version=next(versions))
        with transport.peer(worker="victim") as victim:
            victim.call("import_update", manifest=manifest.to_json())
        trainer.release(manifest)

    assert_nothing_leaks(cycle, *watched(transport), num_cycles=2, num_warm_up=3)


def test_a_publisher_that_is_killed_leaves_its_readers_only_what_they_hold(
    rollout: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    trainer = make_peer("trainer")
    first = trainer.call("publish", seed=1, weight_version=1)
    rollout.import_update(first)
    rollout.release(first)
    before = Holdings.now()
    held = rollout.import_update(trainer.call("publish", seed=2, weight_version=2))
    trainer.kill()
    assert contents_of(held) == contents_of(sample_weights(2))
    del held
    rollout.close()
    after = Holdings.now()
    assert len(after.descriptors) <= len(before.descriptors)
    assert sum(after.files.values()) <= sum(before.files.values())


def test_a_kept_tensor_pins_its_own_version_and_no_other(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    sizes, kept = [], []
    for version in range(1, 20):
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        tensors = rollout.import_update(manifest)
        if version == 5:
            kept.append(tensors["embed"])
        del tensors
        for side in (rollout, trainer):
            side.release(manifest)
        sizes.append(trainer.published_nbytes)
    assert len(set(sizes[8:])) == 1
    assert contents_of({"w": kept[0]}) == contents_of({"w": sample_weights(5)["embed"]})


def test_a_closed_publisher_says_that_it_holds_no_memory(trainer: BridgeOver) -> None:
    trainer.publish(sample_weights(1), weight_version=1)
    assert trainer.published_nbytes > 0
    trainer.close()
    assert trainer.published_nbytes == 0

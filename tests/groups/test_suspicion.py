"""A group's version is suspicious as a whole: one rank's part may well stay as it is."""

import logging
from contextlib import ExitStack

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.errors import SuspiciousUpdate
from rl_bridge.manifest.group import GroupManifest
from tests.groups.meshes import Shards, cut, model
from tests.groups.rig import Trainers

SHAPES = {"first": (4, 2), "second": (4, 2)}


def wary(stack: ExitStack, policy: str = "reject") -> Trainers:
    return Trainers(
        [
            stack.enter_context(
                make_weight_bridge("shared-memory", source_rank=rank, suspicious=policy)
            )
            for rank in range(2)
        ]
    )


def shards(version: int) -> list[Shards]:
    return cut(model(SHAPES, version), 2, {"first": 0, "second": 0})


def test_a_part_may_stay_as_it_is_where_another_one_changes() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        group.publish(shards(1), 1, trainable=SHAPES)
        changed = [shards(1)[0], shards(2)[1]]
        assert group.publish(changed, 2, trainable=SHAPES).weight_version == 2


def test_a_rank_without_tensors_takes_part_in_every_version() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        for version in (1, 2):
            whole = cut(model(SHAPES, version), 1, {})
            assert isinstance(group.publish([*whole, ({}, {})], version), GroupManifest)


def test_a_group_that_changes_nowhere_is_suspicious() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        group.publish(shards(1), 1)
        for one in group.try_publish(shards(1), 2):
            assert isinstance(one, SuspiciousUpdate)
            assert "changes nothing" in str(one)
        assert group.publish(shards(2), 3).weight_version == 3


def test_a_trainable_tensor_that_changes_nowhere_is_suspicious() -> None:
    with ExitStack() as stack:
        group = wary(stack)
        group.publish(shards(1), 1, trainable=SHAPES)
        half = [
            ({**old, "first": new["first"]}, placements)
            for (old, placements), (new, _) in zip(shards(1), shards(2), strict=True)
        ]
        for one in group.try_publish(half, 2, trainable=SHAPES):
            assert isinstance(one, SuspiciousUpdate)
            assert "1 trainable tensors did not change: second" in str(one)
        assert group.publish(half, 3, trainable={"first"}).weight_version == 3


def test_the_policy_may_be_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        group = wary(stack, "warn")
        for version in (1, 2):
            group.publish(shards(1), version)
        assert "suspicious update: version 2 (after 1) changes nothing" in caplog.text

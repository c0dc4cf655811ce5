"""Whoever attacks the one control server keeps no version from an engine that means well."""

import sys
from pathlib import Path
from typing import Any

from rl_bridge import make_weight_bridge
from rl_bridge.testing.peer import sample_weights
from rl_bridge.transports.broadcast.messages import PROTOCOL, BroadcastHandle
from tests.transports.hostile_rig import Target, every_version_arrives


def test_an_engine_gets_every_version_while_others_attack_a_broadcast() -> None:
    options: dict[str, Any] = {"timeout_s": 12.0}  # a third of it is what one who hangs may cost
    with (
        make_weight_bridge("broadcast", source_worker="trainer", **options) as trainer,
        make_weight_bridge("broadcast", source_worker="rollout", **options) as rollout,
    ):
        first = trainer.publish(sample_weights(1), weight_version=1)
        rollout.import_update(first)
        group = BroadcastHandle.model_validate(first.handle).group
        target = Target(
            port=group.port,
            token=bytes.fromhex(group.token),
            identity=group.identity,
            protocol=PROTOCOL,
            joins={"group_rank": 9},
        )
        every_version_arrives(trainer, rollout, target, num_deeds=30)


def test_an_engine_gets_every_version_while_others_attack_a_transport_of_ones_own() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
    import socket_transport as mine

    with (
        make_weight_bridge("socket", source_worker="trainer") as trainer,
        make_weight_bridge("socket", source_worker="rollout") as rollout,
    ):
        first = trainer.publish(sample_weights(1), weight_version=1)
        rollout.import_update(first)
        handle = mine.SocketHandle.model_validate(first.handle)
        target = Target(
            port=handle.port,
            token=bytes.fromhex(handle.token),
            identity=handle.publisher,
            protocol=mine.PROTOCOL,
        )
        every_version_arrives(trainer, rollout, target, num_deeds=30)

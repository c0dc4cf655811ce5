"""Whoever attacks the control server of ``nixl`` keeps no version from an engine."""

from typing import Any, Literal

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.testing.peer import sample_weights
from rl_bridge.transports.nixl.messages import PROTOCOL, NIXLHandle
from tests.transports.hostile_rig import Target, every_version_arrives


@pytest.mark.parametrize("serve", ["process", "inline"])
def test_an_engine_gets_every_version_while_others_attack(
    serve: Literal["process", "inline"],
) -> None:
    # A lease that its reader does not end costs a slot for `timeout_s` at most.
    options: dict[str, Any] = {"timeout_s": 3.0, "max_slots": 64}
    with (
        make_weight_bridge("nixl", source_worker="trainer", serve=serve, **options) as trainer,
        make_weight_bridge("nixl", source_worker="rollout", **options) as rollout,
    ):
        first = trainer.publish(sample_weights(1), weight_version=1)
        rollout.import_update(first)
        endpoint = NIXLHandle.model_validate(first.handle).endpoint
        assert endpoint.token is not None
        target = Target(
            port=endpoint.port,
            token=bytes.fromhex(endpoint.token),
            identity=endpoint.identity,
            protocol=PROTOCOL,
            joins={"timeout_s": 3.0},
        )
        every_version_arrives(trainer, rollout, target, num_deeds=30)

"""Who dies in the middle of a read ends that read, and nothing else."""

import os
import signal
from typing import cast

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing.processes import Child, until
from rl_bridge.testing.tensors import bytes_of
from tests.machines.nixl_roles import Reader, Trainer, weights


def test_a_publisher_killed_in_the_middle_ends_the_import_and_a_new_one_goes_on() -> None:
    """Over TCP: a typed error at once, the version before stays, the same reader goes on."""
    ucx = {"UCX_TLS": "tcp"}
    with Child(Reader, ucx=ucx, timeout_s=20.0) as reader, Child(Trainer, ucx=ucx) as trainer:
        first = trainer.call("publish", version=1)
        assert reader.call("read", manifest=first) == 1
        second = trainer.call("publish", version=2)
        server = trainer.call("server_pid")
        found = reader.call("read", manifest=second, kills=trainer.pid, ends=server)
        assert trainer.exitcode() == -signal.SIGKILL
        assert found == "SegmentError"
        assert reader.call("holds") == 1
        with Child(Trainer, ucx=ucx) as successor:
            assert reader.call("read", manifest=successor.call("publish", version=3)) == 3


def test_a_reader_killed_in_the_middle_leaves_its_publisher_alone() -> None:
    """Its lease ends, the publisher's memory does not grow, and others read on (on one host)."""
    ucx: dict[str, str] = {}
    with Child(Trainer, ucx=ucx) as trainer:
        for version in (1, 2):
            manifest = trainer.call("publish", version=version)
            with Child(Reader, ucx=ucx, timeout_s=20.0) as reader:
                reader.tell("read", manifest=manifest, kills=reader.pid)
                assert reader.exitcode() == -signal.SIGKILL
            until(lambda: trainer.call("readers") == [], what="the lease to end")
            with Child(Reader, ucx=ucx, timeout_s=20.0) as other:
                assert other.call("read", manifest=manifest) == version
            trainer.call("release_all")
        assert trainer.call("registered") <= 2


def test_a_publisher_at_the_same_port_is_not_taken_for_the_one_before() -> None:
    """The same port and server name: an old manifest leads to nothing, a new one works."""
    consumer = cast("NIXLTensorBridge", make_weight_bridge("nixl", timeout_s=5.0))
    port = 20000 + os.getpid() % 20000
    try:
        with Child(Trainer, port=port) as trainer:
            old = trainer.call("publish", version=1)
            late = trainer.call("publish", version=2)
            kept = consumer.import_update(old)
            trainer.kill()
        with Child(Trainer, port=port) as successor:
            # (It listens when its first version is out.)
            newest = successor.call("publish", version=3)
            with pytest.raises(WeightBridgeError, match="token is not its own"):
                consumer.import_update(late)
            newer = consumer.import_update(newest)
            assert bytes_of(newer["w"]) == bytes_of(weights(3)["w"])
        assert bytes_of(kept["w"]) == bytes_of(weights(1)["w"])
    finally:
        consumer.close()

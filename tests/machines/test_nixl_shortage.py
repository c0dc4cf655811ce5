"""A publisher that is short of something goes on with what it can do."""

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rl_bridge import WeightBridgeUnavailableError, make_weight_bridge
from rl_bridge.testing.processes import DEADLINE_S
from rl_bridge.testing.tensors import bytes_of
from rl_bridge.transports.nixl.agent import Agent, MemoryRefused
from rl_bridge.transports.nixl.reading import Reading
from tests.machines.nixl_roles import weights


@contextmanager
def no_descriptors(one: int) -> Iterator[None]:
    """Have this process unable to open another file; `one` is any that is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(one))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_stranger_that_cannot_be_accepted_does_not_stop_the_publisher() -> None:
    with make_weight_bridge("nixl", suspicious="off") as publisher, socket.socket() as stranger:
        for version in (1, 2, 3):  # what it opens, it has opened by now
            manifest = publisher.publish(weights(version), weight_version=version)
            publisher.release(manifest.update_id)
        endpoint = manifest.handle["endpoint"]
        publishing = threading.Thread(
            target=publisher.publish, args=(weights(4),), kwargs={"weight_version": 4}, daemon=True
        )
        with no_descriptors(stranger.fileno()):
            stranger.connect((endpoint["address"], endpoint["port"]))
            publishing.start()
            publishing.join(DEADLINE_S)
            assert not publishing.is_alive()
        latest = publisher.latest_manifest
        assert latest is not None
        assert latest.weight_version == 4


def test_an_engine_whose_memory_is_refused_for_a_while_reads_from_everybody_later() -> None:
    """A read fails, and what is registered anew for the next one is refused in the middle of it."""
    with (
        make_weight_bridge("nixl", suspicious="off") as one,
        make_weight_bridge("nixl", suspicious="off") as other,
        make_weight_bridge("nixl") as engine,
    ):
        for trainer in (one, other):
            first = trainer.publish(weights(1), weight_version=1)
            engine.import_update(first)
            engine.release(first)  # its slot is used again
        second = one.publish(weights(2), weight_version=2)
        tries = []

        def refusing(*_: object) -> None:
            tries.append(1)
            raise MemoryRefused("no more memory may be locked.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reading, "step", refusing)
            patch.setattr(Agent, "register", refusing)
            patch.setattr(Agent, "register_segment", refusing)
            with pytest.raises(WeightBridgeUnavailableError, match="cannot be read"):
                engine.import_update(second)
        assert len(tries) == 2, "the read, and the memory: asking for more would not help"
        assert bytes_of(engine.import_update(second)["w"]) == bytes_of(weights(2)["w"])
        engine.release(second.update_id)
        newer = other.publish(weights(2), weight_version=2)
        assert bytes_of(engine.import_update(newer)["w"]) == bytes_of(weights(2)["w"])
        newer = one.publish(weights(3), weight_version=3)
        assert bytes_of(engine.import_update(newer)["w"]) == bytes_of(weights(3)["w"])

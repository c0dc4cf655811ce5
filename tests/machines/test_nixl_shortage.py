"""A publisher that is short of something goes on with what it can do."""

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_bridge import make_weight_bridge
from rl_bridge.testing.processes import DEADLINE_S
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


def test_who_cannot_be_accepted_does_not_keep_the_publisher_from_publishing() -> None:
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

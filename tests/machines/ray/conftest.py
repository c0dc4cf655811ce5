"""One cluster for the modules that need no more than one node."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-machines")

from rl_bridge.ray import register_direct_transport
from tests.machines.ray.cluster import local_ray


@pytest.fixture(scope="package")
def one_node() -> Iterator[None]:
    # Not pytest's own folder: the paths of Ray's sockets must stay below 107 characters.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        local_ray(Path(folder)),
    ):
        register_direct_transport()
        yield

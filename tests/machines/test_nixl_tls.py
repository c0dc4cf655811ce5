"""TLS of `nixl`: its control connections, with both ways to serve, and over a new connection."""

import socket
from typing import Literal

import pytest

from rl_bridge.testing.peer import hashes, sample_weights
from rl_bridge.testing.processes import until
from tests.machines.nixl_roles import both, publisher_end
from tests.tls_files import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), ["127.0.0.1"])


@pytest.mark.parametrize("serve", ["process", "inline"])
def test_updates_go_on_over_a_new_connection(
    serve: Literal["process", "inline"], certificates: Certificates
) -> None:
    tls = certificates.good
    with both(trainer={"serve": serve}, tls=tls.plain()) as (
        publisher,
        consumer,
    ):
        server = publisher_end(publisher)._server
        for version in (1, 2, 3):
            weights = sample_weights(version)
            manifest = publisher.publish(weights, weight_version=version)
            assert hashes(consumer.import_update(manifest)) == hashes(weights)
            consumer.acknowledge(manifest.update_id)
            (member,) = server.members
            assert member.channel.is_secured
            member.channel.socket.shutdown(socket.SHUT_RDWR)  # as a network might
            until(lambda: not server.members, what="the connection is gone")

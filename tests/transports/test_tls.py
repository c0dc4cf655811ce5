"""TLS of control connections: what it lets through, and what it refuses before a byte."""

import logging
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    CertificateRefused,
    SegmentError,
    TransferTimeout,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.peer import Peer, hashes, sample_weights
from rl_bridge.testing.processes import Child, until
from rl_bridge.transports import TLSFiles
from rl_bridge.transports.broadcast.messages import PROTOCOL, BroadcastHandle, Join
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.wire.channel import Channel
from rl_bridge.transports.wire.client import Connector
from rl_bridge.transports.wire.server import Acceptor, listen
from rl_bridge.transports.wire.tls import load_tls
from tests.tls_files import Authority, Certificates, let_expired_pass

DEADLINE_S = 20.0
WAYS = {
    "wrong": "it names another host .*not valid for '127.0.0.1'",
    "expired": "it has expired .certificate has expired",
    "foreign": "another authority signed it .unable to get local issuer",
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), ["127.0.0.1"])


@contextmanager
def trainer(tls: TLSFiles | None) -> Iterator[TensorBridge]:
    with make_weight_bridge(
        "broadcast", source_worker="trainer", timeout_s=DEADLINE_S, suspicious="off", tls=tls
    ) as made:
        yield made


def import_by(tls: Any, manifest: WeightUpdateManifest) -> dict[str, str]:
    with make_weight_bridge(
        "broadcast", source_worker="engine", timeout_s=DEADLINE_S, tls=tls
    ) as engine:
        return hashes(engine.import_update(manifest))


def is_acknowledged(bridge: TensorBridge, manifest: WeightUpdateManifest) -> bool:
    states = [one.state for one in bridge.consumers() if one.update_id == manifest.update_id]
    return states == ["acknowledged"]


def address_of(manifest: WeightUpdateManifest) -> tuple[str, int]:
    group = manifest.parse_handle(BroadcastHandle).group
    return group.address, group.port


# ---- what it lets through ------------------------------------------------------------------------


def test_updates_of_another_process_go_on_over_a_new_connection(certificates: Certificates) -> None:
    """Options travel to it as JSON, as they do to the ranks of an engine."""
    options = {"tls": certificates.good.model_dump(mode="json"), "timeout_s": DEADLINE_S}
    with (
        trainer(certificates.good) as bridge,
        Child(Peer, transport_class=Broadcast, transport_kwargs=options) as engine,
    ):
        engine.ready()
        server: Any = bridge.publisher.end._server  # type: ignore[attr-defined]
        for version in (1, 2, 3):
            weights = sample_weights(version)
            manifest = bridge.publish(weights, weight_version=version)
            assert engine.call("import_update", manifest=manifest.to_json()) == hashes(weights)
            engine.call("acknowledge", update_id=manifest.update_id)
            until(
                partial(is_acknowledged, bridge, manifest),
                what="the report has arrived",
            )
            assert server.members[0].channel.is_secured
            server.members[0].channel.socket.shutdown(socket.SHUT_RDWR)  # as a network might
            until(lambda: not server.members, what="the connection is gone")


def test_the_token_is_asked_for_inside_of_tls(certificates: Certificates) -> None:
    with trainer(certificates.good) as bridge:
        info = bridge.init_info()  # type: ignore[attr-defined]
        other = info.model_copy(update={"token": "0" * 64})
        engine = make_weight_bridge(
            "broadcast",
            source_worker="engine",
            init_info=other,
            timeout_s=DEADLINE_S,
            tls=certificates.good,
        )
        with engine, pytest.raises(SegmentError, match="the token is not its own"):
            assert engine.consumer


def test_messages_of_many_threads_come_whole_both_ways(certificates: Certificates) -> None:
    """Each side reads in one thread, while others send: both use one session of TLS."""
    tls = load_tls(certificates.good)
    assert tls is not None
    near, far = socket.socketpair()
    for one in (near, far):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = Channel(near, tls=tls.connect("127.0.0.1"))
    server = Channel(far, tls=tls.accept())
    sides, num, texts = (client, server), 3, [bytes([at]) * 40_000 for at in range(60)]
    total = num * len(texts)
    received: dict[Channel, list[bytes]] = {side: [] for side in sides}

    def read(side: Channel) -> None:
        end = time.monotonic() + DEADLINE_S
        # A side that has all that it waits for may still have to send.
        while any(len(got) < total for got in received.values()) and time.monotonic() < end:
            poll = select.poll()
            poll.register(side.socket, select.POLLIN | (select.POLLOUT if side.has_outgoing else 0))
            poll.poll(20)
            side.flush()
            side.fill(is_polled=True)
            while (text := side.take()) is not None:
                received[side].append(text)
            assert not side.is_lost

    def send(side: Channel) -> None:
        for text in texts:
            side.send_bytes(text)

    threads = [threading.Thread(target=read, args=(side,)) for side in sides]
    threads += [threading.Thread(target=send, args=(side,)) for side in sides for _ in range(num)]
    with closing(client), closing(server):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * DEADLINE_S)
        assert {side: sorted(got) for side, got in received.items()} == {
            side: sorted(texts * num) for side in sides
        }


# ---- certificates that are refused ---------------------------------------------------------------


@pytest.mark.parametrize("kind", WAYS)
def test_an_engine_refuses_a_publishers_certificate_by_name(
    kind: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_expired_pass(monkeypatch)
    with trainer(getattr(certificates, kind)) as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        with pytest.raises(CertificateRefused, match=WAYS[kind]) as caught:
            import_by(certificates.good, manifest)
        assert str(certificates.good.ca) in str(caught.value)


@pytest.mark.parametrize(("kind", "said"), [("expired", "expired"), ("foreign", "unknown ca")])
def test_an_engine_whose_certificate_is_refused_learns_which_it_is(
    kind: str, said: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_expired_pass(monkeypatch)
    with trainer(certificates.good) as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        with pytest.raises(CertificateRefused, match=f"refuses this side's .*{said}") as caught:
            import_by(getattr(certificates, kind), manifest)
        assert f"that of commonName={kind}, signed by commonName=" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("expired", "its certificate: it has expired"),
        ("foreign", "its certificate: another authority signed it"),
        ("", "it showed no certificate"),
    ],
)
def test_a_publisher_refuses_a_certificate_before_a_byte_and_says_so_in_its_log(
    kind: str, line: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=certificates.good.ca)
    if kind:
        files = getattr(certificates, kind)
        context.load_cert_chain(files.cert, files.key)
    with trainer(certificates.good) as bridge, caplog.at_level(logging.WARNING):
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        with (
            socket.create_connection(address_of(manifest), DEADLINE_S) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as link,
            # The publisher speaks first, and it says why it does not.
            pytest.raises(ssl.SSLError, match="alert"),
        ):
            link.recv(1)
        until(lambda: line in caplog.text, what="the publisher says so")


def test_versions_of_tls_before_1_3_are_refused(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=certificates.good.ca)
    context.load_cert_chain(certificates.good.cert, certificates.good.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with acceptor(certificates.good) as secured, caplog.at_level(logging.WARNING):
        with (
            socket.create_connection(secured.listener.getsockname(), DEADLINE_S) as plain,
            pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
        ):
            context.wrap_socket(plain, server_hostname="127.0.0.1")
        until(lambda: "could not agree" in caplog.text, what="the publisher says so")


def test_an_engine_says_nothing_to_a_certificate_that_it_refuses(
    certificates: Certificates,
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.foreign.cert, certificates.foreign.key)
    heard: list[object] = []

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            with context.wrap_socket(connection, server_side=True) as link:
                heard.append(link.recv(1))
        except ssl.SSLError as error:
            heard.append(error.reason)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(CertificateRefused, match=r"^the peer at 127\.0\.0\.1 port"):
            connect(listener, certificates.good)
        thread.join(DEADLINE_S)
    assert heard == ["TLSV1_ALERT_UNKNOWN_CA"]


# ---- sides that do not fit -----------------------------------------------------------------------


def connect(listener: socket.socket, tls: TLSFiles | None, *, within_s: float = DEADLINE_S) -> None:
    address, port = listener.getsockname()
    connector = Connector(
        "the peer", address, port, PROTOCOL, timeout_s=within_s, tls=load_tls(tls)
    )
    connector.connect(b"token", "identity").close()


@contextmanager
def acceptor(tls: TLSFiles | None, *, timeout_s: float = DEADLINE_S) -> Iterator[Acceptor[Join]]:
    """One that is served until the end."""
    made: Acceptor[Join] = Acceptor(
        listen("test", "127.0.0.1", 0),
        PROTOCOL,
        token=b"token",
        identity="identity",
        timeout_s=timeout_s,
        max_members=1,
        tls=load_tls(tls),
    )
    is_over = threading.Event()
    pause = threading.Condition()

    def serve() -> None:
        while not is_over.is_set():
            poll = select.poll()
            poll.register(made.listener, select.POLLIN)
            for channel in made.channels:
                poll.register(channel.socket, select.POLLIN)
            with pause:
                made.serve({fd for fd, _ in poll.poll(20)}, pause)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield made
    finally:
        is_over.set()
        thread.join(DEADLINE_S)
        made.close()


@pytest.mark.parametrize("has_tls", [True, False])
def test_an_engine_without_the_publishers_tls_is_told_at_once(
    *, has_tls: bool, certificates: Certificates
) -> None:
    files = (certificates.good, None)
    with trainer(files[not has_tls]) as bridge:
        manifest = bridge.publish(sample_weights(1), weight_version=1)
        has, lacks = ("the publisher", "this side")[:: 1 if has_tls else -1]
        with pytest.raises(
            WeightBridgeUnavailableError, match=f"^{has}.* has tls= and {lacks}.* has not"
        ):
            import_by(files[has_tls], manifest)


def test_a_side_with_tls_sees_that_the_other_one_has_none(certificates: Certificates) -> None:
    with (
        acceptor(None) as plain,
        pytest.raises(WeightBridgeUnavailableError, match="this side has tls= and the peer"),
    ):
        connect(plain.listener, certificates.good)


def test_a_side_without_tls_that_nothing_answers_is_told_that_it_may_be_that(
    certificates: Certificates,
) -> None:
    with (
        acceptor(certificates.good) as secured,
        pytest.raises(TransferTimeout, match="or it has tls= and this side has not"),
    ):
        connect(secured.listener, None, within_s=0.5)


def test_strangers_neither_keep_an_engine_out_nor_fill_the_log(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than may wait: silent ones, half handshakes, random bytes, other protocols."""
    first = client_hello(certificates.good)
    said = [b"", first[: len(first) // 2], first, os.urandom(300), b"\x16" + os.urandom(300)]
    said += [b"GET / HTTP/1.1\r\n\r\n"]
    with acceptor(certificates.good) as secured, ExitStack() as held:
        with caplog.at_level(logging.WARNING):
            for at in range(120):
                link = socket.create_connection(secured.listener.getsockname(), DEADLINE_S)
                held.enter_context(link)
                link.sendall(said[at % len(said)])
            connect(secured.listener, certificates.good)
        assert len(secured.channels) <= 65
    refused = [one for one in caplog.messages if "was refused" in one]
    assert 1 <= len(refused) <= 10


def test_a_half_handshake_ends_with_the_time_to_join(certificates: Certificates) -> None:
    with acceptor(certificates.good, timeout_s=0.3) as secured:
        link = socket.create_connection(secured.listener.getsockname(), DEADLINE_S)
        with link:
            link.sendall(client_hello(certificates.good)[:50])
            assert link.recv(1) == b""


def client_hello(files: TLSFiles) -> bytes:
    tls = load_tls(files)
    assert tls is not None
    return tls.connect("127.0.0.1").take()


# ---- files ---------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_are_refused_at_the_door(
    certificates: Certificates, tmp_path: Path
) -> None:
    good = certificates.good
    locked = tmp_path / "locked.key"
    locked.write_text(LOCKED_KEY, encoding="ascii")
    for changed, said in (
        ({"cert": tmp_path / "none"}, "cert='.*none': it cannot be read .No such file"),
        ({"ca": tmp_path}, "ca=.*Is a directory"),
        ({"cert": good.key}, "cert=.*holds no certificate in PEM"),
        ({"ca": good.key}, "ca=.*holds no certificate in PEM"),
        ({"key": good.cert}, "key=.*holds no private key in PEM"),
        ({"key": certificates.wrong.key}, "key=.*not the key of the certificate in cert="),
        ({"key": locked}, "key=.*a password is asked for it"),
    ):
        with pytest.raises(WeightBridgeUnavailableError, match=said):
            make_weight_bridge("broadcast", tls=good.model_copy(update=changed))


@pytest.mark.parametrize(("begins", "ends", "said"), [(-9, -2, "has expired"), (2, 9, "not valid")])
def test_a_certificate_that_is_not_valid_today_is_refused_at_the_door(
    begins: int, ends: int, said: str, tmp_path: Path
) -> None:
    files = Authority(tmp_path / "run", "the run").files("x", ["::1"], begins=begins, ends=ends)
    with pytest.raises(CertificateRefused, match=f"{re.escape(str(files.cert))}.*{said}.*GMT"):
        make_weight_bridge("broadcast", tls=files)


@pytest.mark.parametrize(
    ("given", "kind"),
    [(3, TypeError), ({"cert": "a"}, ValueError), ({"cert": "a", "crt": "b"}, ValueError)],
)
def test_other_values_of_the_option_are_refused(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="TLSFiles"):
        make_weight_bridge("broadcast", tls=given)


# Made by `openssl ecparam -genkey -name prime256v1 | openssl pkcs8 -topk8`, with a password.
LOCKED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAiqybBDaCiNJQICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEECGdMdXsHz1lKarFNpRaxoEEgZAf
USnie9xlc1n/lR5sHF1k9efWjncwmGVXkmyYbbwYbAqbPoaIcTih+HUVlDJpf0Bd
glYsp6Bj5l0ctISVhgdC1Xx3ZzUEcKmximG+hvRAP5NLWADat4eJ1LOkHKqXqaxr
tbi3o+56n+hH4jF2ZOIkAWCZU2HWCN0Kzsbj229OxFwDRfbfltZNeaApjRqX2Ao=
-----END ENCRYPTED PRIVATE KEY-----
"""

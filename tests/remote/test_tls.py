"""Requests over TLS: both sides show a certificate, and refuse others' by name."""

import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from rl_bridge import TensorBridge
from rl_bridge.errors import (
    CertificateRefused,
    WeightBridgeUnavailableError,
)
from rl_bridge.remote import RemoteEngine
from rl_bridge.testing.processes import DEADLINE_S, until
from rl_bridge.transports import TLSFiles
from tests.helpers import weights
from tests.remote.process import SidecarProcess, make_key
from tests.tls_files import Certificates, let_expired_pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), ["127.0.0.1"])


@pytest.fixture(scope="module")
def secured(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarProcess]:
    """A side-car with TLS, which waits for few, and not for long."""
    directory = tmp_path_factory.mktemp("secured")
    made = SidecarProcess(directory, make_key(directory), tls=certificates.good)
    made.start(body_timeout_s=2, max_connections=4)
    yield made
    made.stop()
    assert not made.is_alive


def context_of(files: TLSFiles | None, ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


def test_an_update_goes_over_tls(secured: SidecarProcess, trainer: TensorBridge) -> None:
    manifest = trainer.publish(weights(1), weight_version=1)
    with secured.client() as engine:
        assert engine.update_weights(manifest).weight_version == 1
        assert engine.status().active_weight_version == 1


@pytest.mark.parametrize("kind", ["expired", "foreign"])
def test_a_client_whose_certificate_is_refused_learns_which_it_is(
    kind: str,
    secured: SidecarProcess,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_expired_pass(monkeypatch)
    with secured.client(tls=getattr(certificates, kind)) as engine:
        with pytest.raises(CertificateRefused, match="refuses this side's certificate") as caught:
            engine.status()
        assert f"commonName={kind}," in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("expired", "its certificate: it has expired"),
        ("foreign", "its certificate: another authority signed it"),
        ("", "it showed no certificate"),
    ],
)
def test_a_side_car_answers_a_stranger_with_nothing_but_the_reason(
    kind: str, line: str, secured: SidecarProcess, certificates: Certificates
) -> None:
    files = getattr(certificates, kind) if kind else None
    context = context_of(files, certificates.good.ca)
    with (
        socket.create_connection(("127.0.0.1", secured.port), DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as link,
    ):
        with suppress(ConnectionError):
            link.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(ssl.SSLError, match="alert"):
            link.recv(1)
    until(lambda: line in secured.log.read_text(), what="the side-car says so")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("wrong", "not valid for"),
        ("expired", "certificate has expired"),
        ("foreign", "unable to get local issuer"),
    ],
)
def test_a_client_refuses_a_side_cars_certificate_before_a_byte(
    kind: str, said: str, certificates: Certificates, tmp_path: Path
) -> None:
    files = getattr(certificates, kind)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    heard: list[object] = []

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            with context.wrap_socket(connection, server_side=True) as link:
                heard.append(link.recv(1))
        except ssl.SSLError:
            heard.append("an alert")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with (
            RemoteEngine(url, make_key(tmp_path), tls=certificates.good) as engine,
            pytest.raises(CertificateRefused, match=f"the side-car at {url} showed .*{said}"),
        ):
            engine.status()
        thread.join(DEADLINE_S)
    assert heard == ["an alert"]


def test_a_client_without_tls_is_told_that_the_side_car_has_it(secured: SidecarProcess) -> None:
    url = f"http://127.0.0.1:{secured.port}"
    with (
        RemoteEngine(url, secured.key_file) as engine,
        pytest.raises(WeightBridgeUnavailableError, match="has tls= and the client has not"),
    ):
        engine.status()


def test_a_client_with_tls_is_told_that_the_side_car_has_none(
    shared: SidecarProcess, certificates: Certificates
) -> None:
    url = f"https://127.0.0.1:{shared.port}"
    with (
        RemoteEngine(url, shared.key_file, tls=certificates.good) as engine,
        pytest.raises(WeightBridgeUnavailableError, match="this side has tls= and the side-car"),
    ):
        engine.status()


def test_half_handshakes_and_noise_do_not_keep_others_out(secured: SidecarProcess) -> None:
    """They have the time and the number of connections that requests have."""
    with ExitStack() as held:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01\x00", b"\x16" + os.urandom(99)) * 4:
            link = socket.create_connection(("127.0.0.1", secured.port), DEADLINE_S)
            held.enter_context(closing(link))
            link.sendall(said)
        with secured.client() as engine:
            assert engine.status()


def test_a_url_that_does_not_say_so_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("expected https://")):
        RemoteEngine("http://127.0.0.1:8471", make_key(tmp_path), tls=certificates.good)

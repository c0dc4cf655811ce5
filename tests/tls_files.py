"""Certificates for tests: good ones, and such as nobody may accept.

Written with the library itself, and not by `rl-bridge certs`, which makes none that is expired.
"""

import datetime as dt
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rl_bridge.transports import TLSFiles

__all__ = ["Authority", "Certificates", "let_expired_pass"]

DAY = dt.timedelta(days=1)


class Authority:
    """Signs certificates, in a directory of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True)
        self.directory, self.name = directory, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.path = directory / "ca.pem"
        self._write("ca", self._signed(name, self.key, [], is_authority=True))

    def files(self, name: str, hosts: list[str], *, begins: int = -1, ends: int = 30) -> TLSFiles:
        """Make a certificate; `begins` and `ends` are days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
        cert = self._signed(name, key, names, begins=begins, ends=ends)
        (self.directory / f"{name}.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        return TLSFiles(
            cert=self._write(name, cert), key=self.directory / f"{name}.key", ca=self.path
        )

    def _write(self, name: str, cert: x509.Certificate) -> Path:
        path = self.directory / f"{name}.pem"
        path.write_bytes(cert.public_bytes(Encoding.PEM))
        return path

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        hosts: list[x509.IPAddress],
        *,
        is_authority: bool = False,
        begins: int = -1,
        ends: int = 30,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins * DAY)
            .not_valid_after(now + ends * DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return builder.sign(self.key, SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


class Certificates:
    """What a run has, and what none may have.

    Attributes:
        good: of the run's authority, for the hosts.
        wrong: of the run's authority, for another host.
        expired: of the run's authority, for the hosts, of last week.
        foreign: of another authority, for the hosts; this side accepts the run's.

    """

    def __init__(self, directory: Path, hosts: list[str]) -> None:
        run = Authority(directory / "run", "the run")
        self.good = run.files("good", hosts)
        self.wrong = run.files("wrong", ["192.0.2.7"])
        self.expired = run.files("expired", hosts, begins=-9, ends=-2)
        foreign = Authority(directory / "foreign", "another run").files("foreign", hosts)
        self.foreign = foreign.model_copy(update={"ca": run.path})


def let_expired_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process show a certificate that it would refuse by itself."""
    monkeypatch.setattr("rl_bridge.transports.wire.tls.TLS._check_time", lambda _: None)

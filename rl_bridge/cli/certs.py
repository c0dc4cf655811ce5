"""`rl-bridge certs`: an authority for one run, and a certificate with its key for each host.

The authority signs for this run alone: whoever has a certificate of it belongs to the run. Called
again with other hosts, it signs with the authority that is there. Needs the extra ``tls``.
"""

import datetime as dt
import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_bridge.cli.screen import plain, screen, table
from rl_bridge.errors import WeightBridgeUnavailableError

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*")
_SKEW = dt.timedelta(hours=1)
_MAX_COMMON_NAME = 64


def certs(
    directory: Annotated[
        Path,
        typer.Argument(
            file_okay=False, metavar="DIRECTORY", show_default=False, help="Where the files go."
        ),
    ],
    hosts: Annotated[
        str,
        typer.Option(
            show_default=False,
            help="Addresses in numbers, or names, that others connect to, with commas between.",
        ),
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 90,
) -> None:
    """Make an authority and certificates for the TLS of a run.

    One certificate with its key for each host, for tls= of bridges and of RemoteEngine, and for
    --tls-cert, --tls-key and --tls-ca of a side-car. Nothing is overwritten. If the directory holds
    an authority already, it signs the new ones.
    """
    names = [host.strip() for host in hosts.split(",")]
    for name in names:
        _check(name)
    pairs = {name: tuple(directory / f"{name}{end}" for end in (".pem", ".key")) for name in names}
    _refuse_to_overwrite([path for pair in pairs.values() for path in pair])
    made_at = dt.datetime.now(dt.UTC)
    until = made_at + dt.timedelta(days=days)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, signing_key = _authority(directory, made_at, until)
    for name, (cert_path, key_path) in pairs.items():
        made = _made(name, (authority, signing_key), made_at, until)
        _save(made, cert_path, key_path)
    out = screen()
    shown = table("host", "cert", "key", "ca")
    for name, pair in pairs.items():
        shown.add_row(name, *(plain(str(path)) for path in (*pair, directory / "ca.pem")))
    out.print(shown)
    ca_key = plain(str(directory / "ca.key"))
    out.print(
        f"Give each host its own three files. Keep {ca_key} to yourself: who has it can join.",
        markup=False,
    )


def _check(name: str) -> None:
    if _address(name) is None and not _NAME.fullmatch(name):
        raise typer.BadParameter(
            f"{name!r} is no host, expected such as 10.0.0.1 or node-7. Give those.",
            param_hint="--hosts",
        )
    if name == "ca":
        raise typer.BadParameter(
            "'ca' is the authority's own name. Give the host's address.", param_hint="--hosts"
        )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _refuse_to_overwrite(paths: list[Path]) -> None:
    for path in paths:
        if path.exists():
            raise WeightBridgeUnavailableError(
                f"{path} is there already. Remove it, or name another directory."
            )


# ---- certificates --------------------------------------------------------------------------------


def _authority(directory: Path, made_at: dt.datetime, until: dt.datetime) -> Any:
    """The authority that is there, with its key, or a new one."""
    _library()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    cert_path, key_path = directory / "ca.pem", directory / "ca.key"
    if cert_path.exists() and key_path.exists():
        try:
            cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
            return cert, load_pem_private_key(key_path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise WeightBridgeUnavailableError(
                f"{cert_path} and {key_path} hold no authority that can be used: {error}. Name "
                "another directory."
            ) from error
    _refuse_to_overwrite([cert_path, key_path])
    made = _made("rl_bridge run", None, made_at, until)
    _save(made, cert_path, key_path)
    return made


def _made(
    name: str, signer: tuple[Any, Any] | None, made_at: dt.datetime, until: dt.datetime
) -> tuple[Any, Any]:
    """Make a certificate with its key; without a signer, that of an authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_MAX_COMMON_NAME])])
    issuer, signing_key = (subject, key) if signer is None else (signer[0].subject, signer[1])
    is_authority = signer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(made_at - _SKEW)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), True)
        .add_extension(_usage(is_authority=is_authority), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), False
        )
    )
    if not is_authority:
        address = _address(name)
        host = x509.DNSName(name) if address is None else x509.IPAddress(address)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName([host]), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), False)
    return builder.sign(signing_key, SHA256()), key


def _usage(*, is_authority: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _save(made: tuple[Any, Any], cert_path: Path, key_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    cert, key = made
    pem = serialization.Encoding.PEM
    unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for path, text in (
        (key_path, key.private_bytes(pem, *unencrypted)),
        (cert_path, cert.public_bytes(pem)),
    ):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)


def _library() -> None:
    try:
        import cryptography  # noqa: F401 - whether it is there
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            "`rl-bridge certs` needs cryptography. Install it: pip install 'rl-bridge[tls]'."
        ) from error

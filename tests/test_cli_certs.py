"""`rl-bridge certs`: what it makes is what the TLS of a run needs, and it destroys nothing."""

import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509

from rl_bridge import make_weight_bridge
from rl_bridge.testing.peer import hashes, sample_weights
from rl_bridge.transports import TLSFiles
from tests.cli_program import call


def files(directory: Path, host: str) -> TLSFiles:
    return TLSFiles(
        cert=directory / f"{host}.pem", key=directory / f"{host}.key", ca=directory / "ca.pem"
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_hosts_update_with_what_it_makes_and_a_third_one_that_comes_later(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    said = call("certs", str(run), "--hosts", "127.0.0.1, node-7", "--days", "2")
    assert said.code == 0, said.err
    assert call("certs", str(run), "--hosts", "::1").code == 0
    for path in contents(run):
        assert stat.S_IMODE((run / path).stat().st_mode) == 0o600
        assert path in said.out or path.startswith("::1")
    weights = sample_weights(1)
    trainer = make_weight_bridge(
        "broadcast", source_worker="trainer", tls=files(run, "127.0.0.1"), suspicious="off"
    )
    with trainer:
        for number, host in enumerate(("node-7", "::1"), 1):
            manifest = trainer.publish(weights, weight_version=number)
            with make_weight_bridge(
                "broadcast", source_worker="engine", tls=files(run, host)
            ) as engine:
                assert hashes(engine.import_update(manifest)) == hashes(weights)


def test_addresses_and_names_are_what_certificates_say(tmp_path: Path) -> None:
    hosts = ["10.0.0.7", "fd00::7", "node-7.example"]
    assert call("certs", str(tmp_path), "--hosts", ",".join(hosts), "--days", "2").code == 0
    found = []
    for host in hosts:
        cert = x509.load_pem_x509_certificate((tmp_path / f"{host}.pem").read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found += [str(one) for one in names.get_values_for_type(x509.IPAddress)]
        found += names.get_values_for_type(x509.DNSName)
        assert (cert.not_valid_after_utc - cert.not_valid_before_utc).days == 2
    assert found == hosts


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert call("certs", str(tmp_path), "--hosts", "127.0.0.1").code == 0
    before = contents(tmp_path)
    again = call("certs", str(tmp_path), "--hosts", "node-7,127.0.0.1")
    assert (again.code, "is there already" in again.err) == (1, True)
    assert contents(tmp_path) == before
    (tmp_path / "ca.key").unlink()
    alone = call("certs", str(tmp_path), "--hosts", "node-7")
    assert (alone.code, "ca.pem is there already" in alone.err) == (1, True)


@pytest.mark.parametrize("hosts", ["", "a b", "../a", "a,,b", "ca", "10.0.0.1/24", "-a"])
def test_what_is_no_host_is_refused(hosts: str, tmp_path: Path) -> None:
    said = call("certs", str(tmp_path / "run"), f"--hosts={hosts}")
    assert said.code == 2
    assert "--hosts" in said.err
    assert not (tmp_path / "run").exists()


def test_without_the_library_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    said = call("certs", str(tmp_path / "run"), "--hosts", "127.0.0.1")
    assert said.code == 1
    assert "pip install 'rl-bridge[tls]'" in said.err


def test_a_side_car_takes_all_three_files_or_none(tmp_path: Path) -> None:
    for name in ("key", "cert.pem"):
        (tmp_path / name).touch()
    said = call(
        *("sidecar", "nowhere:make", "--key-file", str(tmp_path / "key"), "--state-dir"),
        *(str(tmp_path / "state"), "--tls-cert", str(tmp_path / "cert.pem")),
    )
    assert said.code == 2
    assert "Give all three, or none" in said.err

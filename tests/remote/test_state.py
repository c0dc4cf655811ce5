"""What a side-car remembers: keys, nonces and steps, over restarts and damage."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_bridge.errors import (
    BridgeClosed,
    MalformedManifest,
    SignatureRefused,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.remote import SidecarConfig
from rl_bridge.remote.signing import Credentials, Key, read_key
from rl_bridge.remote.state import DurableLines, Entry, Ledger, NonceBook, StateDirectory, Step
from tests.helpers import make_manifest

NOW = 1_700_000_000.0

# ---- the key ------------------------------------------------------------------------------------


def instead(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


KEYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "cannot be read"),
    "a directory": (lambda path: instead(path, Path.mkdir), "no plain file"),
    "a pipe": (lambda path: instead(path, os.mkfifo), "no plain file"),
    "readable by the group": (lambda path: path.chmod(0o640), "mode 0640"),
    "readable by others": (lambda path: path.chmod(0o604), "mode 0604"),
    "short": (lambda path: path.write_bytes(b"x" * 31), "31 bytes"),
    "endless": (lambda path: path.write_bytes(b"x" * 5000), "expected 32 to 4096"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_file_is_refused_that_is(name: str, key_file: Path) -> None:
    spoil, said = KEYS[name]
    assert read_key(key_file)
    spoil(key_file)
    with pytest.raises(WeightBridgeUnavailableError, match=said):
        read_key(key_file)


def test_a_key_never_shows_its_bytes() -> None:
    assert "secret" not in repr(Key(b"secret" * 8))


def test_credentials_are_written_and_read_back() -> None:
    given = Key(b"k" * 32).sign("GET", "/status?a=%20", b"body", time=12)
    assert Credentials.parse(given.header()) == given
    for header in (None, "", given.header() + " ", given.header()[:-1], given.header().upper()):
        with pytest.raises(SignatureRefused, match="expected 'RLB-HMAC-SHA256"):
            Credentials.parse(header)


# ---- nonces -------------------------------------------------------------------------------------


def one(time: float, number: int = 0) -> Credentials:
    return Credentials(time=int(time), nonce=f"{number:032x}", signature="0" * 64)


def book(path: Path, now: float = NOW) -> NonceBook:
    return NonceBook(path / "nonces.log", max_skew_s=30, now=now)


def test_a_nonce_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    nonces = book(tmp_path)
    nonces.claim(one(NOW), now=NOW)
    for again in (nonces, book(tmp_path), book(tmp_path, NOW + 29)):
        with pytest.raises(SignatureRefused, match="replay"):
            again.claim(one(NOW), now=NOW)
        again.claim(one(NOW, id(again)), now=NOW)


@pytest.mark.parametrize("time", [NOW - 31, NOW + 32])
def test_a_request_counts_only_around_its_time(time: float, tmp_path: Path) -> None:
    with pytest.raises(SignatureRefused, match="Set the clocks"):
        book(tmp_path).claim(one(time), now=NOW)


def test_a_forgotten_nonce_stays_refused_if_the_clock_is_set_back(tmp_path: Path) -> None:
    book(tmp_path).claim(one(NOW), now=NOW)
    later = book(tmp_path, NOW + 100)  # forgets it
    assert f"{1:032x}" not in (tmp_path / "nonces.log").read_text()
    for nonces in (later, book(tmp_path, NOW + 1)):
        with pytest.raises(SignatureRefused):
            nonces.claim(one(NOW), now=NOW + 1)
        nonces.claim(one(NOW + 2, id(nonces)), now=NOW + 1)


def test_the_file_of_nonces_does_not_grow_for_ever(tmp_path: Path) -> None:
    nonces = book(tmp_path)
    for number in range(10_000):
        nonces.claim(one(NOW + number / 10, number), now=NOW + number / 10)
    assert (tmp_path / "nonces.log").stat().st_size < 10_000 * 43


def test_a_nonce_that_cannot_be_written_down_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonces = book(tmp_path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        with pytest.raises(WeightBridgeError, match="No space left"):
            nonces.claim(one(NOW), now=NOW)
    nonces.claim(one(NOW), now=NOW)
    with pytest.raises(SignatureRefused):
        book(tmp_path).claim(one(NOW), now=NOW)


def test_damaged_nonces_are_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "nonces.log").write_text("12 abc\n")
    with pytest.raises(WeightBridgeError, match="damaged"):
        book(tmp_path)


# ---- lines --------------------------------------------------------------------------------------


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    DurableLines(path).append("whole")
    with path.open("a") as file:
        file.write("hal")
    lines = DurableLines(path)
    assert lines.found == ["whole"]
    lines.append("next")
    assert DurableLines(path).found == ["whole", "next"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines.close()
    with pytest.raises(BridgeClosed):
        lines.append("more")


def test_a_directory_is_one_sidecars(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state") as held:
        with pytest.raises(WeightBridgeUnavailableError, match="another live side-car"):
            StateDirectory(held.path)
        assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
    StateDirectory(tmp_path / "state").close()
    with pytest.raises(WeightBridgeUnavailableError, match="Make what it lies in"):
        StateDirectory(tmp_path / "missing" / "state")


# ---- the ledger ---------------------------------------------------------------------------------

STEPS: list[Step] = ["prepared", "committing", "committed"]
FIRST = make_manifest(update_id="1" * 32, weight_version=1)
SECOND = make_manifest(update_id="2" * 32, weight_version=2)


def test_the_ledger_knows_what_is_active_and_what_was_on_its_way(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert (ledger.active, ledger.pending) == (None, None)
    for step in STEPS:
        ledger.note(FIRST, step)
    ledger.note(SECOND, "prepared")
    for again in (ledger, Ledger(tmp_path)):
        assert again.active == Entry.of(FIRST, "committed")
        assert again.pending == Entry.of(SECOND, "prepared")
        assert again.manifest_of(Entry.of(FIRST, "committed")) == FIRST
        with pytest.raises(MalformedManifest):
            again.manifest_of(Entry.of(SECOND, "prepared"))
        again.tidy()
    ledger = Ledger(tmp_path)
    ledger.note(SECOND, "committing")
    assert ledger.manifest_of(Entry.of(SECOND, "committing")) == SECOND
    ledger.note(SECOND, "ended")
    again = Ledger(tmp_path)
    assert (again.active, again.pending) == (Entry.of(FIRST, "committed"), None)
    assert again.manifest_of(Entry.of(FIRST, "committed")) == FIRST


def test_the_ledger_does_not_grow_for_ever(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for version in range(1, 2000):
        manifest = make_manifest(update_id=f"{version:032x}", weight_version=version)
        for step in STEPS:
            ledger.note(manifest, step)
    assert (tmp_path / "updates.log").stat().st_size < 400_000
    active = Ledger(tmp_path).active
    assert active is not None
    assert active.weight_version == 1999


def test_a_damaged_ledger_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "updates.log").write_text('{"format":"rl_bridge.sidecar/2"}\n')
    with pytest.raises(WeightBridgeError, match="damaged"):
        Ledger(tmp_path)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValueError, match="hold_s is"):
        SidecarConfig(hold_s=value)

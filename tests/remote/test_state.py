"""What a side-car remembers: keys, nonces and steps, over restarts and damage."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_bridge.errors import (
    BridgeClosed,
    SignatureRefused,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.remote import SidecarConfig
from rl_bridge.remote.signing import Credentials, Key, read_key
from rl_bridge.remote.state import Entry, Ledger, NonceBook, StateDirectory, Step
from tests.helpers import forked, forking, make_manifest

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


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    with StateDirectory(tmp_path / "state") as made:
        yield made


@contextmanager
def restarted(state: StateDirectory) -> Iterator[StateDirectory]:
    """As the next side-car finds it."""
    state.close()
    with StateDirectory(state.path) as again:
        yield again


def book(state: StateDirectory, now: float = NOW) -> NonceBook:
    return NonceBook(state, max_skew_s=30, now=now)


@pytest.mark.parametrize("now", [NOW, NOW + 29])
def test_a_nonce_counts_once_also_after_a_restart(state: StateDirectory, now: float) -> None:
    nonces = book(state)
    nonces.claim(one(NOW), now=NOW)
    with pytest.raises(SignatureRefused, match="replay"):
        nonces.claim(one(NOW), now=NOW)
    nonces.claim(one(NOW, 1), now=NOW)
    with restarted(state) as again:
        for number in (0, 1):
            with pytest.raises(SignatureRefused, match="replay"):
                book(again, now).claim(one(NOW, number), now=NOW)


@pytest.mark.parametrize("time", [NOW - 31, NOW + 32])
def test_a_request_counts_only_around_its_time(time: float, state: StateDirectory) -> None:
    with pytest.raises(SignatureRefused, match="Set the clocks"):
        book(state).claim(one(time), now=NOW)


def test_a_forgotten_nonce_stays_refused_if_the_clock_is_set_back(state: StateDirectory) -> None:
    book(state).claim(one(NOW), now=NOW)
    later = book(state, NOW + 100)  # forgets it
    for nonces in (later, book(state, NOW + 1)):
        with pytest.raises(SignatureRefused, match="Set the clocks"):
            nonces.claim(one(NOW), now=NOW + 1)
        nonces.claim(one(NOW + 2, id(nonces)), now=NOW + 1)


def test_nonces_do_not_grow_for_ever(state: StateDirectory) -> None:
    nonces = book(state)
    for number in range(1000):
        nonces.claim(one(NOW + number, number), now=NOW + number, sync=False)
    with state.change(sync=False) as db:
        (num,) = db.execute("SELECT count(*) FROM nonces").fetchone()
    assert num < 40


def test_a_damaged_file_is_not_guessed_at(state: StateDirectory) -> None:
    Ledger(state).note(FIRST, "prepared")
    with state.change(sync=True) as db:
        db.execute("UPDATE updates SET manifest = substr(manifest, 1, 99)")
    with restarted(state) as again, pytest.raises(WeightBridgeError, match="If it is damaged"):
        Ledger(again)
    (state.path / "state.db").write_bytes(b"no such thing" * 1000)
    with pytest.raises(WeightBridgeError, match="If it is damaged"):
        StateDirectory(state.path)


def test_a_directory_is_one_sidecars(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state") as held:
        with pytest.raises(WeightBridgeUnavailableError, match="another live side-car"):
            StateDirectory(held.path)
        assert stat.S_IMODE(held.path.stat().st_mode) == 0o700
        for file in held.path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    StateDirectory(tmp_path / "state").close()
    with pytest.raises(WeightBridgeUnavailableError, match="Make what it lies in"):
        StateDirectory(tmp_path / "missing" / "state")


FORKING = """
import os, signal, sys, time
from rl_bridge.remote.signing import Credentials
from rl_bridge.remote.state import NonceBook, StateDirectory

nonces = NonceBook(StateDirectory(sys.argv[1]), max_skew_s=30, now=1.7e9)
for number in range(2):
    given = Credentials(time=1_700_000_000, nonce=f"{number:032x}", signature="0" * 64)
    nonces.claim(given, now=1.7e9)
    if number == 0:
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_that_ends_takes_nothing_away_from_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "state"
    ended = subprocess.run([sys.executable, "-c", FORKING, path], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    with StateDirectory(path) as found:
        for number in range(2):
            with pytest.raises(SignatureRefused, match="replay"):
                book(found).claim(one(NOW, number), now=NOW)


@forking
def test_a_forked_child_writes_nothing_into_its_parents_directory(state: StateDirectory) -> None:
    def child() -> bool:
        with pytest.raises(BridgeClosed, match="the parent process's"):
            book(state)
        state.close()
        return True

    assert forked(child)
    book(state).claim(one(NOW), now=NOW)


def test_a_directory_stays_taken_whoever_reads_its_files(state: StateDirectory) -> None:
    for file in state.path.iterdir():
        file.read_bytes()  # which ends the locks that this process has by way of POSIX
    code = "import sys; from rl_bridge.remote.state import StateDirectory as S; S(sys.argv[1])"
    other = subprocess.run(
        [sys.executable, "-c", code, state.path], capture_output=True, timeout=60, check=False
    )
    assert b"another live side-car" in other.stderr


def test_a_directory_that_is_closed_says_so(state: StateDirectory) -> None:
    nonces = book(state)
    state.close()
    with pytest.raises(BridgeClosed, match="Start a new side-car"):
        nonces.claim(one(NOW), now=NOW)


# ---- the ledger ---------------------------------------------------------------------------------

STEPS: list[Step] = ["prepared", "committing", "committed"]
FIRST = make_manifest(update_id="1" * 32, weight_version=1)
SECOND = make_manifest(update_id="2" * 32, weight_version=2)


def test_the_ledger_knows_what_is_active_and_what_was_on_its_way(state: StateDirectory) -> None:
    ledger = Ledger(state)
    assert (ledger.active, ledger.pending) == (None, None)
    for step in STEPS:
        ledger.note(FIRST, step)
    for step in STEPS[:2]:
        ledger.note(SECOND, step)
        for again in (ledger, Ledger(state)):
            assert again.active == Entry("committed", FIRST)
            assert again.pending == Entry(step, SECOND)
    ledger.note(SECOND, "ended")
    with restarted(state) as found:
        again = Ledger(found)
        assert (again.active, again.pending) == (Entry("committed", FIRST), None)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValueError, match="hold_s is"):
        SidecarConfig(hold_s=value)

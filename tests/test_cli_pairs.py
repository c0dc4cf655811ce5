"""`rl-bridge doctor` says which transport a pair uses, from what the other side wrote down."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli_program import call


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """What a trainer's side wrote on this machine."""
    path = tmp_path / "trainer.json"
    path.write_text(call("doctor", "--facts", "--address", "10.0.0.1").out, encoding="utf-8")
    return path


def change(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changed), encoding="utf-8")


def test_a_pair_on_one_machine_shares_memory(trainer: Path) -> None:
    said = call("doctor", "--pair", str(trainer))
    assert said.code == 0
    assert "shared-memory" in said.out
    assert "reachable through /proc" in said.out


def test_a_pair_on_two_machines_is_told_what_it_uses_and_why(trainer: Path) -> None:
    lacking = {"shared-memory": "", "nixl": "it is not installed", "broadcast": ""}
    change(trainer, boot_id="another", transports=lacking)
    found = call("doctor", "--pair", str(trainer), "--json").json
    assert found["transport"] == "broadcast"
    assert found["publisher_options"] == {"address": "10.0.0.1"}
    assert found["not_taken"]["shared-memory"] == "they run on different machines"
    assert "it is not installed" in found["not_taken"]["nixl"]
    out = call("doctor", "--pair", str(trainer)).out
    assert "from the trainer at 10.0.0.1 to here" in out
    assert "trainer passes" in out


def test_containers_with_a_directory_of_both_share_memory(trainer: Path, tmp_path: Path) -> None:
    said = call("doctor", "--facts", "--directory", str(tmp_path)).out
    trainer.write_text(said, encoding="utf-8")
    change(trainer, pid_namespace=1)
    found = call("doctor", "--pair", str(trainer), "--directory", str(tmp_path), "--json").json
    assert found["consumer_options"] == {"directory": str(tmp_path)}


def test_no_facts_and_no_transport_are_errors(trainer: Path, tmp_path: Path) -> None:
    change(trainer, boot_id="another", transports={})
    said = call("doctor", "--pair", str(trainer))
    assert said.code == 1
    assert "no transport between" in said.err
    trainer.write_text("{}", encoding="utf-8")
    said = call("doctor", "--pair", str(trainer))
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("error: ")
    said = call("doctor", "--pair", str(tmp_path / "none"))
    assert (said.code, said.out) == (2, "")
    assert "with `rl-bridge doctor --facts > FILE`" in " ".join(said.err.split())

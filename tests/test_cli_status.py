"""`rl-bridge status`: what live publishers hold and who reads it, and where a side-car stands."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.testing.processes import Child
from tests.cli_program import call

WEIGHTS = {"w": torch.ones(5_000)}


class Trainer:
    """A publisher in a process of its own."""

    def __init__(self, directory: str | None = None) -> None:
        self.bridge = make_weight_bridge("shared-memory", max_slots=3, directory=directory)

    def publish(self, version: int) -> str:
        return self.bridge.publish(WEIGHTS, weight_version=version).to_json()


def publishers(*arguments: str | Path) -> list[dict[str, Any]]:
    said = call("status", *arguments, "--json")
    assert (said.code, said.err) == (0, "")
    found: list[dict[str, Any]] = said.json["publishers"]
    return found


def test_a_live_publisher_is_shown_with_its_slots_and_who_reads_them() -> None:
    with (
        Child(Trainer) as trainer,
        make_weight_bridge("shared-memory", source_worker="engine") as engine,
    ):
        held = engine.import_update(trainer.call("publish", version=7))
        trainer.call("publish", version=8)
        (shown,) = publishers(str(trainer.pid))
        assert [slot["weight_version"] for slot in shown["slots"]] == [7, None]
        assert [slot["state"] for slot in shown["slots"]] == ["published, leased", "published"]
        (consumer,) = shown["consumers"]
        who = (consumer["worker"], consumer["pid"], consumer["presence"])
        assert who == ("engine", os.getpid(), "alive")
        assert shown in publishers(), "listed without its pid, too"
        out = call("status", str(trainer.pid)).out
        assert f"in process {trainer.pid}: 2 slots" in out
        assert "engine" in out
        assert "not told yet" in out, "nobody read version 8, so nobody told its number"
        assert held["w"].sum() == 5_000
        trainer.stop()


def test_a_consumer_is_no_publisher() -> None:
    with make_weight_bridge("shared-memory") as trainer, Child(_Reader) as reader:
        reader.call("read", manifest=trainer.publish(WEIGHTS, weight_version=1).to_json())
        assert call("status", str(reader.pid)).complains("WeightBridgeUnavailableError")
        assert publishers(str(os.getpid()))[0]["consumers"][0]["pid"] == reader.pid
        reader.stop()


class _Reader:
    """A consumer in a process of its own, which keeps what it read."""

    def __init__(self) -> None:
        self.bridge = make_weight_bridge("shared-memory", source_worker="reader")
        self.held: Any = None

    def read(self, manifest: str) -> None:
        self.held = self.bridge.import_update(manifest)


def test_a_look_changes_nothing_for_the_publisher() -> None:
    with make_weight_bridge("shared-memory", max_slots=2) as trainer:
        previous = trainer.publish(WEIGHTS, weight_version=1)
        for version in range(2, 6):
            manifest = trainer.publish(WEIGHTS, weight_version=version)
            assert len(publishers(str(os.getpid()))[0]["slots"]) == 2
            trainer.release(previous.update_id)
            previous = manifest
        assert trainer.consumers() == []


def test_a_publisher_with_named_segments_is_found_by_its_directory(tmp_path: Path) -> None:
    with Child(Trainer, directory=str(tmp_path)) as trainer:
        trainer.call("publish", version=3)
        (shown,) = publishers(tmp_path)
        assert [slot["state"] for slot in shown["slots"]] == ["published"]
        trainer.kill()
        trainer.exitcode()
    assert call("status", tmp_path).complains("WeightBridgeUnavailableError"), "it died"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "expected such as 4711, /dev/shm/run1 or http://127.0.0.1:8471"),
        (("http://127.0.0.1:1",), "Give --key-file"),
    ],
    ids=["no-target", "no-key"],
)
def test_a_target_that_cannot_be_asked_is_told_with_what_to_write(
    arguments: tuple[str, ...], words: str
) -> None:
    said = call("status", *arguments)
    assert said.code == 2
    assert words in " ".join(said.err.split())

"""``shared-memory`` keeps every promise of a transport, with sealed memfds and with named files."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.errors import SegmentError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.testing import TransportSuite
from rl_bridge.transports.shared_memory import SharedMemory

WEIGHTS = {"w": torch.arange(1000.0), "b": torch.zeros(3)}


class TestSealedMemory(TransportSuite):
    transport_class = SharedMemory


class TestNamedFiles(TransportSuite):
    transport_class = SharedMemory

    @pytest.fixture
    def transport_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"directory": tmp_path / "segments"}


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_a_segment_error_with_a_remedy(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine", "ascii")
    with (
        make_weight_bridge("shared-memory", directory=tmp_path / name) as bridge,
        pytest.raises(SegmentError, match=r"directory='.*file.*tmpfs"),
    ):
        bridge.publish(WEIGHTS, weight_version=1)
    assert (tmp_path / "file").read_text("ascii") == "mine"


def test_a_directory_that_cannot_be_swept_is_a_segment_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rlb-0123456789ab-1.seg").touch()
    monkeypatch.setattr("rl_bridge.memory.segment.is_held", failing(errno.ENOLCK))
    with pytest.raises(SegmentError, match=r"cannot hold segments: .*locks"):
        SharedMemory(directory=tmp_path).publisher_end("a" * 32)


def test_a_file_that_cannot_be_read_is_a_segment_error_and_no_lease_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        make_weight_bridge("shared-memory", directory=tmp_path, max_slots=1) as bridge,
        make_weight_bridge("shared-memory", directory=tmp_path) as consumer,
    ):
        manifest = bridge.publish(WEIGHTS, weight_version=1)
        with monkeypatch.context() as patch:
            patch.setattr(vm, "read_into", failing(errno.EIO))
            with pytest.raises(SegmentError, match=r"cannot be read: .*Publish again") as caught:
                consumer.import_update(manifest)
        bridge.release(manifest.update_id)
        bridge.publish(WEIGHTS, weight_version=2)  # into the only slot
        del caught


def test_a_look_reads_every_byte_and_leaves_no_record(tmp_path: Path) -> None:
    for directory in (None, tmp_path):
        with make_weight_bridge("shared-memory", directory=directory) as bridge:
            manifest = bridge.publish(WEIGHTS, weight_version=1)
            end = SharedMemory(directory=directory).consumer_end("looker", 0)
            assert end.look(manifest).digests() == manifest.digests
            end.close()
            assert bridge.consumers() == []


def test_the_probe_takes_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharedMemory.probe().status == "pass"
    monkeypatch.setattr(leases, "try_shared", failing(errno.ENOLCK))
    found = SharedMemory.probe()
    assert (found.status, "locks" in found.cause) == ("blocked", True)


def test_files_that_somebody_removed_are_made_anew_and_the_next_version_arrives(
    tmp_path: Path,
) -> None:
    with (
        make_weight_bridge("shared-memory", directory=tmp_path) as trainer,
        make_weight_bridge("shared-memory", directory=tmp_path) as rollout,
    ):
        for version in (1, 2, 3):
            manifest = trainer.publish(
                {"w": torch.full((4,), float(version))}, weight_version=version
            )
            assert rollout.import_update(manifest)["w"].tolist() == [version] * 4
            rollout.acknowledge(manifest.update_id)
            assert [report.state for report in trainer.holders(manifest.update_id)] == [
                "acknowledged"
            ]
            rollout.release(manifest.update_id)
            trainer.release(manifest.update_id)
            for path in tmp_path.iterdir():  # as a cleaner of old files does
                path.unlink()

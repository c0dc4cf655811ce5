"""The way back: what consumers report, and what the publisher believes of it."""

import errno
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory import vm
from rl_bridge.memory.control import (
    RECORD_NBYTES,
    ControlReader,
    ControlWriter,
    Record,
    UpdateReport,
    control_nbytes,
    legible,
)
from rl_bridge.memory.segment import OwnedSegment, SegmentRef
from tests.helpers import open_fds

PUBLISHER = "b" * 32


@pytest.fixture
def reader() -> Iterator[ControlReader]:
    made = make_reader(3)
    yield made
    made.close()


@pytest.fixture
def writer(reader: ControlReader) -> Iterator[ControlWriter]:
    made = writer_of(reader.segment.ref)
    yield made
    made.close()


def make_reader(max_consumers: int) -> ControlReader:
    segment = OwnedSegment.make("rl_bridge-test", control_nbytes(max_consumers), writers=True)
    return ControlReader(segment, PUBLISHER)


def writer_of(ref: SegmentRef, worker: str = "rollout", rank: int = 0) -> ControlWriter:
    return ControlWriter(ref, PUBLISHER, worker=worker, rank=rank, directory=None)


def update(number: int = 1, **fields: object) -> UpdateReport:
    known = {"update_id": f"{number:032x}", "weight_version": number, "state": "imported"}
    return UpdateReport.model_validate({**known, **fields})


def only(reader: ControlReader) -> Record:
    (record,) = reader.records()
    return record


# ---- reports ------------------------------------------------------------------------------------


def test_a_report_arrives_as_it_was_written(reader: ControlReader, writer: ControlWriter) -> None:
    report = update(
        state="acknowledged",
        reason=None,
        proof={"method": "digest", "nested": [True, None, {"x": 1.5}]},
        timings_ms={"verify": 1.25},
        tensors_held=True,
    )
    writer.report(report)
    assert only(reader).updates == (report,)
    writer.close()


def test_the_last_updates_are_kept_and_older_ones_make_room(
    reader: ControlReader, writer: ControlWriter
) -> None:
    for number in range(1, 10):
        writer.report(update(number))
    assert [report.weight_version for report in only(reader).updates] == [4, 5, 6, 7, 8, 9]


def test_a_long_reason_is_cut_and_a_broken_one_made_legible(
    reader: ControlReader, writer: ControlWriter
) -> None:
    writer.report(update(reason="x" * 5000))
    writer.report(update(2, reason="lone \ud800 surrogate"))
    first, second = only(reader).updates
    assert first.reason == "x" * 400 + "..."
    assert second.reason == "lone ? surrogate"
    assert legible(5) == 5


def test_a_report_too_large_for_its_record_loses_details_and_not_its_news(
    reader: ControlReader,
    writer: ControlWriter,
) -> None:
    writer.report(update(1))
    writer.report(update(2, state="acknowledged", proof={"big": "y" * RECORD_NBYTES}))
    (report,) = only(reader).updates
    assert (report.weight_version, report.state, report.proof) == (2, "acknowledged", None)


def test_a_worker_with_an_endless_name_is_cut(reader: ControlReader) -> None:
    writer = writer_of(reader.segment.ref, "\U0001d11e" * 10_000)
    writer.report(update(1))
    record = only(reader)
    assert len(record.worker) < 512
    assert record.updates == (update(1),)
    writer.close()


def test_a_record_that_is_written_while_it_is_read_is_not_taken_for_damage(
    reader: ControlReader, writer: ControlWriter
) -> None:
    reports = [update(number) for number in range(150)]
    thread = threading.Thread(target=lambda: deque(map(writer.report, reports), maxlen=0))
    thread.start()
    while thread.is_alive():
        assert only(reader).presence == "alive"
    assert len(only(reader).updates) == 6


# ---- presence -----------------------------------------------------------------------------------


def test_a_place_that_is_free_again_is_taken_by_the_next(reader: ControlReader) -> None:
    writers = [writer_of(reader.segment.ref, name) for name in "abc"]
    before = open_fds()
    with pytest.raises(
        WeightBridgeUnavailableError, match=r"room for 3 consumers.*raise max_consumers"
    ):
        writer_of(reader.segment.ref, "d")
    assert open_fds().keys() == before.keys()
    writers[1].close()
    late = writer_of(reader.segment.ref, "d")
    assert [(r.worker, r.presence) for r in reader.records()] == [
        ("a", "alive"),
        ("d", "alive"),
        ("c", "alive"),
    ]
    for writer in (*writers, late):
        writer.close()


def test_a_segment_without_the_publishers_header_is_not_written_to(
    reader: ControlReader,
) -> None:
    with pytest.raises(SegmentError, match=r"no control segment of publisher c+.*as it was"):
        ControlWriter(reader.segment.ref, "c" * 32, worker="w", rank=0, directory=None)
    other = OwnedSegment.make("rl_bridge-test", control_nbytes(1), writers=True)
    with pytest.raises(SegmentError, match="no control segment"):
        writer_of(other.ref)
    assert os.pread(other.fd, 64, 0) == bytes(64)
    other.close()


def test_a_sealed_segment_cannot_be_the_way_back() -> None:
    slot = OwnedSegment.make("rl_bridge-test", control_nbytes(1))
    vm.store(slot.address, b"rl_bridge.control/1\n" + PUBLISHER.encode())
    before = open_fds()
    with pytest.raises(SegmentError, match="cannot be written"):
        writer_of(slot.ref)
    assert open_fds().keys() == before.keys()
    slot.close()


def test_a_control_file_that_was_cut_off_is_an_error_and_no_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "rlb-000000000000-control"
    segment = OwnedSegment.make(name, control_nbytes(1), directory=tmp_path, writers=True)
    reader = ControlReader(segment, PUBLISHER)
    writer = ControlWriter(segment.ref, PUBLISHER, worker="w", rank=0, directory=tmp_path)
    os.truncate(tmp_path / name, 0)
    with pytest.raises(SegmentError, match="truncated"):
        reader.records()
    writer.report(update(1))
    writer.close()
    reader.close()


def test_a_report_that_cannot_be_written_is_logged_and_hurts_nobody(
    reader: ControlReader,
    writer: ControlWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.memory.control.os.pwrite", full)
        writer.report(update(1))
    assert "the publisher will not hear of" in caplog.text
    writer.report(update(2))
    assert [report.weight_version for report in only(reader).updates] == [1, 2]


# ---- hostile consumers --------------------------------------------------------------------------

HEAD = struct.Struct("<IIQ")
UNREADABLE = Record(worker="?", rank=-1, pid=-1, presence="unreadable")


def plant(reader: ControlReader, raw: bytes) -> None:
    os.pwrite(reader.segment.fd, raw[:RECORD_NBYTES], RECORD_NBYTES)


def sealed(text: bytes, *, length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return HEAD.pack(1, size, xxhash.xxh3_64_intdigest(text)) + text


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=300) | st.binary(min_size=1).map(sealed))
def test_garbage_is_unreadable_and_never_crashes(raw: bytes) -> None:
    reader = make_reader(1)
    try:
        plant(reader, raw)
        assert all(record.presence == "unreadable" for record in reader.records())
    finally:
        reader.close()


GOOD = {"worker": "w", "rank": 0, "pid": 1, "updates": []}
REPORT = {"update_id": "a", "weight_version": 1, "state": "imported"}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        GOOD | {"worker": 5},
        GOOD | {"worker": "w" * 513},
        GOOD | {"rank": True},
        GOOD | {"pid": "1"},
        GOOD | {"extra": 1},
        GOOD | {"updates": [REPORT | {"timings_ms": {"verify": float("nan")}}]},
        GOOD | {"updates": [REPORT | {"proof": {"method": ["digest", float("inf")]}}]},
        GOOD | {"presence": "asleep"},
        GOOD | {"updates": [{}]},
        GOOD | {"updates": [REPORT | {"state": "x" * 600}]},
        GOOD | {"updates": [REPORT | {"weight_version": 1.5}]},
        GOOD | {"updates": [REPORT | {"proof": []}]},
        GOOD | {"updates": [REPORT | {"timings_ms": {"verify": "fast"}}]},
        GOOD | {"updates": [REPORT | {"tensors_held": "yes please"}]},
    ],
    ids=range(16),
)
def test_content_of_the_wrong_shape_is_unreadable(content: object, reader: ControlReader) -> None:
    plant(reader, sealed(json.dumps(content).encode()))
    assert reader.records() == [UNREADABLE]


@pytest.mark.parametrize(
    "raw",
    [
        sealed(json.dumps(GOOD).encode(), length=2**32 - 1),
        sealed(json.dumps(GOOD).encode(), length=10),
        sealed(json.dumps(GOOD).encode())[:-1] + b"?",
        sealed(json.dumps(GOOD).encode()).replace(b'"pid": 1', b'"pid": 2'),
        sealed(b"[" * 8000),
        sealed(b'{"rank":' + b"9" * 7000 + b"}"),
        sealed(b"\xff\xfe"),
        sealed(b""),
    ],
    ids=["long", "short", "cut-off", "altered", "deep", "huge-int", "no-text", "empty"],
)
def test_a_damaged_record_is_unreadable_and_the_others_are_read(
    raw: bytes, reader: ControlReader
) -> None:
    plant(reader, bytes(RECORD_NBYTES))
    first = writer_of(reader.segment.ref, "victim")
    second = writer_of(reader.segment.ref, "other")
    plant(reader, raw)
    assert [(r.worker, r.presence) for r in reader.records()] == [
        ("?", "unreadable"),
        ("other", "alive"),
    ]
    # The victim's next report repairs its record.
    first.report(update(1))
    assert reader.records()[0].worker == "victim"
    first.close()
    second.close()


def test_a_record_that_claims_to_live_without_a_lock_is_gone(reader: ControlReader) -> None:
    plant(reader, sealed(json.dumps(GOOD | {"presence": "alive"}).encode()))
    assert only(reader).presence == "gone"


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.EIO, SegmentError), (errno.ENOMEM, WeightBridgeUnavailableError)],
)
@pytest.mark.parametrize("reads", [0, 1])
def test_a_control_segment_that_cannot_be_read_leaves_no_descriptor(
    reads: int,
    code: int,
    kind: type[Exception],
    reader: ControlReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = [None] * reads
    pread = os.pread

    def failing(fd: int, nbytes: int, offset: int) -> bytes:
        if not left:
            raise OSError(code, os.strerror(code))
        left.pop()
        return pread(fd, nbytes, offset)

    before = open_fds()
    monkeypatch.setattr("rl_bridge.memory.control.os.pread", failing)
    with pytest.raises(kind):
        writer_of(reader.segment.ref)
    assert open_fds() == before

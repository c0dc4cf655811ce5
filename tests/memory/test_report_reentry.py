"""Reports that arrive in the middle of a report, and control segments that cannot be read."""

import errno
import os
from collections.abc import Iterator

import pytest

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.memory.control import (
    RECORD_NBYTES,
    ControlReader,
    ControlWriter,
    UpdateReport,
    control_nbytes,
)
from rl_bridge.memory.segment import OwnedSegment
from tests.helpers import open_fds

PUBLISHER = "b" * 32


@pytest.fixture
def reader() -> Iterator[ControlReader]:
    segment = OwnedSegment.make("rl_bridge-test", control_nbytes(2), writers=True)
    made = ControlReader(segment, PUBLISHER)
    yield made
    made.close()


def writer_of(reader: ControlReader) -> ControlWriter:
    return ControlWriter(reader.segment.ref, PUBLISHER, worker="r", rank=0, directory=None)


def update(number: int, state: str, **proof: str) -> UpdateReport:
    return UpdateReport(
        update_id=f"{number:032x}", weight_version=number, state=state, proof=proof or None
    )


def seen(reader: ControlReader) -> list[tuple[int, str]]:
    (record,) = reader.records()
    return [(report.weight_version, report.state) for report in record.updates]


def die_during(
    patch: pytest.MonkeyPatch, writer: ControlWriter, *deaths: UpdateReport, before: bool
) -> None:
    """Have tensors die while the writer builds its text: each death reports, in that thread."""
    left = list(deaths)
    text_of = ControlWriter._text

    def text(self: ControlWriter) -> bytes:
        if left and before:
            writer.report(left.pop(0))
        found = text_of(self)
        if left and not before:
            writer.report(left.pop(0))
        return found

    patch.setattr(ControlWriter, "_text", text)


@pytest.mark.parametrize("before", [True, False])
def test_what_a_dying_tensor_reports_is_not_overwritten_by_the_report_that_it_interrupts(
    before: bool, reader: ControlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(reader)
    writer.report(update(1, "acknowledged"))
    die_during(monkeypatch, writer, update(1, "released"), update(2, "gone"), before=before)
    writer.report(update(3, "imported"))
    assert sorted(seen(reader)) == [(1, "released"), (2, "gone"), (3, "imported")]
    writer.close()


def test_a_report_that_has_to_shrink_may_be_interrupted_too(
    reader: ControlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(reader)
    die_during(monkeypatch, writer, update(2, "released"), before=False)
    writer.report(update(1, "acknowledged", big="x" * RECORD_NBYTES))
    assert (2, "released") in seen(reader)
    writer.close()


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
        writer_of(reader)
    assert open_fds() == before

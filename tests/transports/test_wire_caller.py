"""Whoever cannot reach a publisher is told what to mend, by an error of the library's tree."""

import os
import resource

import pytest

from rl_bridge.errors import SegmentError, WeightBridgeUnavailableError
from rl_bridge.transports._wire.caller import Caller


def call(address: str = "127.0.0.1") -> None:
    Caller("the publisher", address, 1, magic=b"", timeout_s=5.0).connect(b"", "")


def test_a_process_without_a_descriptor_left_is_told_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # the next one that would be given out
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(WeightBridgeUnavailableError, match=r"gets no socket.*ulimit -n"):
            call()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_publisher_that_does_not_listen_is_gone() -> None:
    with pytest.raises(
        SegmentError, match=r"at 127\.0\.0\.1 port 1 cannot be reached.* publish again"
    ):
        call()

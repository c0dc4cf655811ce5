"""A trainer, and ranks of small engines that start without the seconds of torch's import."""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.testing import processes

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "docs" / "examples" / "small_engine")]

import engine as small_engine  # noqa: E402 - a folder of examples is no package


class RankProcess:
    """What a small engine starts with `Popen`, from the server that has torch already."""

    def __init__(self, command: list[str], pass_fds: list[int]) -> None:
        *given, _ = json.loads(command[-1])
        processes.start_server()
        line = Connection(os.dup(pass_fds[0]))
        self._process = multiprocessing.get_context("forkserver").Process(
            target=be_rank, args=(line, *given), daemon=True
        )
        self._process.start()
        line.close()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def be_rank(line: Connection, rank: int, size: int, path: str, group: str) -> None:
    small_engine.serve(rank, size, path, group, os.dup(line.fileno()))


@pytest.fixture(scope="session", autouse=True)
def ranks_start_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_engine, "subprocess", SimpleNamespace(Popen=RankProcess))
        yield


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer", max_slots=8) as bridge:
        yield bridge

"""What the tests with real SGLang engines share: environment, checkpoints, engines, a trainer."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.testing import processes
from tests import forked_engines  # noqa: F401 - SGLang's processes begin with what it imports
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer
from tests.sglang.bench import Bench, Engines

if importlib.util.find_spec("sglang") is None:
    pytest.exit("tests/sglang needs SGLang: run `make test-sglang`, which installs it.", 4)

ROOT = Path(__file__).resolve().parents[2]
# The engine that most tests share is started once. Behind these tests comes the one that kills it,
# then those that share an engine of two ranks, and those that need one each.
LAST = (
    *("test_killed.py", "test_ranks.py", "test_from_trainers.py", "test_kinds.py"),
    "test_adapters.py",
)
STAND_INS = str(ROOT / "tests" / "sglang" / "stand_ins")

# For this process, for the engines' own processes, and for servers.
sys.path.insert(0, STAND_INS)
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    PYTHONPATH=os.pathsep.join((str(ROOT), STAND_INS)),
    SGLANG_USE_CPU_ENGINE="1",
    SGLANG_PLUGINS="rl_bridge",  # and not those that SGLang's own packages bring
)
# (Without `tests.forked_engines`: an engine in a child of ours ends what it began as its children.)
processes.PRELOADED += [
    "tests.server_of_engines",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
]


def pytest_configure(config: pytest.Config) -> None:
    # SGLang and what it imports warn of each other; what rl_bridge itself warns of stays an error.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::rl_bridge")
    warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def engines(checkpoints: Checkpoints) -> Iterator[Engines]:
    engines = Engines(checkpoints)
    try:
        yield engines
    finally:
        engines.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


@pytest.fixture
def bench(engines: Engines) -> Iterator[Bench]:
    """An engine that may hold either of its two versions, without a fault in it."""
    bench = engines.bench(Kind("qwen2"))
    try:
        yield bench
    finally:
        bench.uproot()

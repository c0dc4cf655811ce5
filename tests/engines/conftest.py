"""What the tests with real engines share: the environment, checkpoints, references, a trainer."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge.testing import processes
from tests import forked_engines  # noqa: F401 - vLLM's processes begin with what it imports
from tests.engines.models import Checkpoints
from tests.engines.references import References
from tests.engines.trainer import Trainer

if importlib.util.find_spec("vllm") is None:
    pytest.exit("tests/engines needs vLLM: run `make test-engines`, which installs it.", 4)

# Read by vLLM when it is imported and by the processes that it starts.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CACHE_ROOT=str(Path(sys.prefix) / "vllm-cache"),  # what it found out about models
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # else two ranks want two NUMA nodes
    VLLM_DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


processes.PRELOADED += [
    "tests.server_of_engines",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "tests.forked_engines",
]


def pytest_configure(config: pytest.Config) -> None:
    # vLLM and what it imports warn of each other, and leave sockets of dead engines behind; what
    # rl_bridge itself warns of stays an error.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::rl_bridge")
    # And behind the last test, where pytest itself looks for what died too late.
    warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> References:
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder that the processes of a run share
        home = home.parent
    return References(checkpoints, home / "references")


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer

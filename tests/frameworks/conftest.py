"""What the tests with real frameworks share: the environment, a server, a small model."""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.drive import Setting
from tests.engines.served import DEV, Served, served
from tests.frameworks.tiny import make_checkpoint

for _name in ("trl", "verl", "vllm", "peft"):
    if importlib.util.find_spec(_name) is None:
        pytest.exit(f"tests/frameworks needs {_name}: run `make test-frameworks`, which has it.", 4)

# Read when the frameworks are imported, and by the processes that they start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)


def pytest_configure(config: pytest.Config) -> None:
    # The frameworks warn of each other; what rl_bridge itself warns of stays an error.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::rl_bridge")
    warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = {
        "logprobs_mode": "processed_logprobs",  # as TRL's trainer asks for
        "max_model_len": 256,
        "skip_tokenizer_init": False,
        "weight_transfer_config": False,  # none of vLLM's own is needed
    }
    log = tmp_path_factory.mktemp("server") / "log"
    setting = Setting(in_process=False)
    with served(setting, checkpoint, Path(log), options=options, environment=DEV) as made:
        yield made

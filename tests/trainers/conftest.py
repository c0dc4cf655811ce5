"""What the tests with real trainers share: the environment, ranks."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainers_torch.worlds import World

for _name in ("deepspeed", "megatron", "mbridge", "peft"):
    if importlib.util.find_spec(_name) is None:
        pytest.exit(f"tests/trainers needs {_name}: run `make test-trainers`, which has it.", 4)


def pytest_configure(config: pytest.Config) -> None:
    # The trainers warn of each other; what rl_bridge itself warns of stays an error.
    config.addinivalue_line("filterwarnings", "ignore")
    config.addinivalue_line("filterwarnings", "error:::rl_bridge")
    warnings.filterwarnings("ignore", category=pytest.PytestUnraisableExceptionWarning)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], World]]:
    """Ranks that run the functions of a module of this folder, started when first asked for."""
    found: dict[tuple[int, str], World] = {}

    def world(size: int, cases: str) -> World:
        if (size, cases) not in found:
            path: Path = tmp_path_factory.mktemp("meeting")
            made = World(size, path, f"tests.trainers.{cases}")
            found[size, cases] = made.__enter__()
        return found[size, cases]

    yield world
    for made in found.values():
        made.__exit__(None, None, None)

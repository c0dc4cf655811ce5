"""Megatron on four processes updates an engine of two ranks: each reads its rows and columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.models import Checkpoints, Kind
from tests.sglang.bench import Bench, Engines, executor_for
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import RealTrainer, Updates

KIND = Kind("qwen2")
pytestmark = [
    pytest.mark.skipif(
        not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-sglang` makes"
    ),
    pytest.mark.timeout(600),  # engines start
]


@dataclass(kw_only=True)
class Run(Updates):
    """Of SGLang, by a trainer of which two ranks have layer 0, and two have layer 1."""

    bench: Bench

    def plant(self) -> None:
        self.bench.plant("fail", 7, 1)

    def uproot(self) -> None:
        self.bench.uproot()

    def check(self, what: str) -> None:
        self.bench.holds = self.holds
        self.bench.check(what)


@pytest.fixture(scope="module")
def run(
    engines: Engines, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    bench = engines.bench(KIND, 2)
    paths = [checkpoints.path(KIND, version) for version in (0, 1)]
    cases, imports = "tests.trainers_torch.publishing", "tests.trainers.megatron_cases"
    with (
        executor_for(bench.engine) as executor,
        Elsewhere(4, tmp_path_factory.mktemp("ranks"), cases, PYTHON, imports) as ranks,
    ):
        yield Run(
            executor=executor,
            trainer=RealTrainer(ranks, "begin_megatron", paths),
            worker="sglang",
            # Queries, keys and values of a layer, as Megatron has them in one.
            damaged="decoder.layers.1.self_attention.linear_qkv.weight",
            bench=bench,
            holds=bench.holds,
        )


def test_updates_of_megatron_with_failures_between_them_equal_fresh_engines(run: Run) -> None:
    run.alternate(3)


@pytest.mark.full
def test_twenty_updates_of_megatron_equal_fresh_engines(run: Run) -> None:
    run.alternate(20)

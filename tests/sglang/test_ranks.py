"""An engine whose model is spread over two ranks: they decide together, and keep the protocol.

Its key/value heads are three: SGLang pads them on the CPU, where ranks do not divide them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.engines import EngineDriver, default_label
from rl_bridge.engines.sglang.loaders import RouteName
from rl_bridge.engines.staging import Staging
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from rl_bridge.sglang import SGLangInstallAdapter, SGLangServing
from rl_bridge.testing import EngineSuite, EngineUnderTest
from tests.engines.matrix import few_of
from tests.engines.models import Checkpoints, Kind
from tests.engines.trainer import Trainer
from tests.remote.process import SidecarProcess, make_key
from tests.sglang.bench import WAYS, Bench, Engines, answers_of, executor_for
from tests.sglang.served import KEY, make_api_key, served
from tests.sglang.test_equal import alternate

RANKS = 2
KIND = Kind("odd-heads", tied=True)
OTHER = Kind("llama")
SIDECAR_S = 120
# Two engines of two ranks are started one behind the other.
STARTS = pytest.mark.timeout(600)
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def both(engines: Engines) -> Bench:
    return engines.bench(KIND, RANKS)


@pytest.fixture
def pair(both: Bench) -> Iterator[Bench]:
    yield both
    both.uproot()


@STARTS
@pytest.mark.parametrize("staging", ["beside", "through"])
def test_updates_with_failures_mixed_in_equal_fresh_engines(
    staging: Staging, pair: Bench, tmp_path: Path
) -> None:
    alternate(pair, "import", tmp_path, 4, staging=staging)


@pytest.mark.parametrize(
    ("route", "staging", "rank"),
    few_of(
        [(*way, rank) for way in WAYS for rank in range(RANKS)],
        ("import", "beside", 0),
        ("import", "through", 1),
        ("distributed", None, 0),
    ),
)
def test_a_rank_that_fails_at_any_tensor_takes_the_other_one_back(
    rank: int, route: RouteName, staging: Staging | None, pair: Bench, tmp_path: Path
) -> None:
    count = len(pair.weights[0])
    tensors = range(count) if staging == "through" else (0, count // 2, count - 1)
    with executor_for(pair.engine, route=route, tmp_path=tmp_path, staging=staging) as executor:
        pair.fails_at(executor, tensors, rank=rank)


def test_elements_that_no_rank_takes_are_refused(pair: Bench) -> None:
    """SGLang's loader cuts off what is too long, without a word."""
    name = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = pair.weights[0][name].shape
    longer = pair.next(**{name: torch.zeros(rows + 64, columns)})
    with executor_for(pair.engine) as executor:
        with pytest.raises(IncompatibleUpdate, match=r"gate_proj.* takes \d+ of its \d+ elements"):
            executor.update_weights(pair.trainer.publish(longer))
        pair.check()


@pytest.mark.parametrize(
    ("route", "fault", "rank"),
    few_of(
        # The last byte of a tensor is in the last rank's slice.
        [(way, *one) for way in ("import", "distributed") for one in (("lost", 0), ("wrong", 1))],
        ("import", "lost", 0),
        ("distributed", "wrong", 1),
    ),
)
def test_a_wrong_slice_of_one_rank_is_found_and_its_rank_named(
    route: RouteName, fault: str, rank: int, pair: Bench
) -> None:
    last = list(pair.weights[0]).index("model.layers.1.mlp.down_proj.weight")
    with executor_for(pair.engine, route=route) as executor:
        pair.plant(fault, last, rank)
        with pytest.raises(ProofFailed, match=f"rank {rank}: .*down_proj"):
            executor.update_weights(pair.trainer.publish(pair.next()))
        pair.check()


@pytest.fixture(scope="module")
def running(both: Bench) -> EngineUnderTest:
    return EngineUnderTest(both.engine, (both.fresh[0], both.fresh[1]))


@pytest.mark.timeout(600)  # two engines start, one behind the other
class TestSGLang(EngineSuite):
    route: Any = "import"
    # A killed scheduler is in `test_killed.py`: there is one engine in a process at a time.
    kills = ()
    every = 4
    asks_each_call = False

    @pytest.fixture(autouse=True)
    def engine_of_two(self, both: Bench, tmp_path: Path) -> None:
        self.pair, self.folder = both, tmp_path

    def make_driver(
        self, engine: Any, *, label: Any = default_label, **options: Any
    ) -> EngineDriver:
        serving = SGLangServing(label=label)
        return SGLangInstallAdapter(engine, route=self.route, serving=serving, **options)

    def weights(self, number: int) -> dict[str, torch.Tensor]:
        return self.pair.weights[number]

    def answers(self, engine: Any) -> object:
        return answers_of(engine)

    def is_paused(self, engine: Any) -> bool:
        return bool(engine.tokenizer_manager.is_pause)

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        return self.pair.ask(text, self.folder)


@FULL  # as the small engine does; and `test_from_trainers.py` has real ones
class TestSGLangOfShards(TestSGLang):
    """Two trainer ranks publish each version, each its shard."""

    publishers = 2
    every = 8


@FULL  # as the small engine does
class TestSGLangThrough(TestSGLang):
    every = 8

    def make_driver(self, engine: Any, **options: Any) -> EngineDriver:
        return super().make_driver(engine, staging="through", **options)


@FULL  # the small engine of the documentation keeps the protocol with a loader of its own, too
class TestSGLangByItsOwnLoader(TestSGLang):
    route = "tensor"
    every = 8


# ---- a server of two ranks -----------------------------------------------------------------------


@FULL  # it starts twice
@STARTS
def test_a_server_of_two_ranks_takes_updates_also_from_a_side_car(
    engines: Engines, checkpoints: Checkpoints, trainer: Trainer, tmp_path: Path
) -> None:
    engines.close()  # whoever ends an engine of this process ends all of its children
    weights = [checkpoints.weights(OTHER, version) for version in (0, 1)]
    with served(checkpoints.path(OTHER, 1), tmp_path / "log1", RANKS) as server:
        second = server.sums(), server.answers()
    with served(checkpoints.path(OTHER, 0), tmp_path / "log0", RANKS) as server:
        fresh = [(server.sums(), server.answers()), second]
        bad = {**weights[1], "model.norm.weight": torch.full((128,), float("nan"))}
        for turn, route in enumerate(("import", "tensor", "distributed", "import")):
            holds = 1 - turn % 2
            with executor_for(server.url, route=route, api_key=KEY) as executor:
                with pytest.raises(IncompatibleUpdate, match="NaN"):
                    executor.update_weights(trainer.publish(bad))
                executor.update_weights(trainer.publish(weights[holds]))
            assert (server.sums(), server.answers()) == fresh[holds], route
        sidecar = SidecarProcess(tmp_path, make_key(tmp_path))
        try:
            sidecar.start(server.url, server="sglang", api_key_file=make_api_key(tmp_path))
            with sidecar.client(timeout_s=SIDECAR_S) as remote:
                with pytest.raises(IncompatibleUpdate, match="NaN"):
                    remote.update_weights(trainer.publish(bad))
                assert (server.sums(), server.answers()) == fresh[holds]
                manifest = trainer.publish(weights[1 - holds])
                assert remote.update_weights(manifest).proof.root == manifest.root
                assert (server.sums(), server.answers()) == fresh[1 - holds]
        finally:
            sidecar.kill()

"""vLLM's flow for trainers, unchanged but for the backend's name: init info, source, send_weights.

The clients are vLLM's own for a server, and one of four methods for engines of this process; the
one of Ray is tried in `tests/frameworks`.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.vllm import RLBridgeTrainerInitInfo
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import DEV, Served, served

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "vllm_engines" / "trainer_side.py"
SETTING = Setting(Kind("qwen2", tied=True), in_process=False)


class Model(torch.nn.Module):
    """A checkpoint's tensors as parameters under their names, as a trainer has them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.of_name = {name: torch.nn.Parameter(one.clone()) for name, one in weights.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.of_name.items()

    def become(self, weights: dict[str, torch.Tensor]) -> None:
        """Take a step of training to these."""
        with torch.no_grad():
            for name, one in weights.items():
                self.of_name[name].copy_(one)


class OwnClient:
    """The four methods of vLLM's protocol, over engines of this process."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each(lambda llm: llm.init_weight_transfer_engine({"init_info": init_info}))

    def start_weight_update(self) -> None:
        self._each(lambda llm: llm.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._each(lambda llm: llm.update_weights({"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda llm: llm.finish_weight_update(weight_version))

    def _each(self, call: Callable[[Any], object]) -> None:
        """Call all of them, as vLLM's client for Ray does, and raise what the first one raises."""
        errors = []
        for llm in self.engines:
            try:
                call(llm)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]


def made(source: Any, client: Any, rank: int = 0, **options: Any) -> Any:
    """Follow vLLM's documentation, with our init info."""
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    info = RLBridgeTrainerInitInfo(rank=rank, **options)
    source = ModuleSource(source) if isinstance(source, Model) else source
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


@pytest.fixture(scope="module")
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    path = checkpoints.path(SETTING.kind, 0)
    with served(SETTING, path, log, environment=DEV) as one:
        yield one


@pytest.mark.timeout(300)
def test_vllms_own_flow_and_client_update_a_server(
    server: Served, weights: list[dict[str, torch.Tensor]]
) -> None:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    model, answers_of = Model(weights[1]), {0: server.answers()}
    engine = made(model, HTTPVLLMWeightSyncClient(server.url))
    assert isinstance(engine, TrainerWeightTransferEngine)
    try:
        for version, number in ((1, 1), (2, 0), (3, 1)):
            model.become(weights[number])
            engine.send_weights()
            assert engine.manifest.weight_version == version
            assert server.label() == f"{version}@{engine.manifest.root}"
            # (Those of the second set are not known before it came once.)
            assert answers_of.setdefault(number, server.answers()) == server.answers()
            (report,) = engine.bridge.holders(engine.manifest)
            assert report.proof["root"] == engine.manifest.root
        assert answers_of[0] != answers_of[1]
        held, told = engine.manifest, server.label()
        # A step of training that went wrong: the server says which tensor, and serves on.
        model.become({**weights[0], "model.norm.weight": torch.full((128,), float("nan"))})
        with pytest.raises(WeightUpdateRejectedError, match=r"model\.norm\.weight.*NaN or Inf"):
            engine.send_weights()
        assert engine.manifest is held
        assert (server.label(), server.answers()) == (told, answers_of[1])
        server.collective_rpc("plant_fault", ["exchange", 3])
        model.become(weights[0])
        with pytest.raises(WeightUpdateRejectedError, match="planted at call"):
            engine.send_weights()
        server.collective_rpc("uproot_fault")
        assert (server.label(), server.answers()) == (told, answers_of[1])
        engine.send_weights()
        assert server.answers() == answers_of[0]
    finally:
        engine.shutdown()


def test_the_example_of_the_documentation_runs(server: Served, checkpoints: Checkpoints) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, checkpoints.path(SETTING.kind, 1), server.url],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "version 3: proof by digest" in done.stdout


@pytest.mark.timeout(300)
def test_of_two_engines_both_take_a_version_or_none(
    checkpoints: Checkpoints, weights: list[dict[str, torch.Tensor]]
) -> None:
    path = checkpoints.path(SETTING.kind, 0)
    with start(SETTING, path) as first, start(SETTING, path) as second:
        both, model = (first, second), Model(weights[1])
        before = answers(first)
        engine = made(model, OwnClient(both), engine_options={"staging": "beside"})
        try:
            engine.send_weights()
            after = [answers(llm) for llm in both]
            assert after[0] == after[1] != before
            model.become(weights[0])
            second.collective_rpc("plant_fault", args=("exchange", 3))
            with pytest.raises(WeightUpdateRejectedError, match="was refused in update_weights"):
                engine.send_weights()
            # The first one had it installed, and went back.
            assert [answers(llm) for llm in both] == after
            assert engine.manifest.weight_version == 1
            second.collective_rpc("uproot_fault")
            engine.send_weights()
            assert [answers(llm) for llm in both] == [before, before]
            assert engine.manifest.weight_version == 3
        finally:
            engine.shutdown()


class Counted:
    """A source that tells how far it was read; a gather of all ranks is behind each tensor."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.pairs = pairs
        self.read = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for pair in self.pairs:
            self.read += 1
            yield pair


def test_each_rank_reads_the_whole_source_and_only_the_first_one_calls(
    weights: list[dict[str, torch.Tensor]],
) -> None:
    pairs = list(weights[0].items())
    follower, refused = Counted(pairs), Counted([("no tensor", 3), *pairs])
    silent: Any = object()  # has no method that could be called
    one = made(follower, silent, rank=1)
    one.send_weights()
    assert (one.bridge, follower.read) == (None, len(pairs))
    first = made(refused, OwnClient([]))
    with pytest.raises(IncompatibleUpdate, match="no tensor"):
        first.send_weights()
    assert refused.read == len(refused.pairs)
    first.shutdown()


def test_a_source_of_parts_is_refused_by_what_to_use_instead() -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    class Part(ModuleSource):  # type: ignore[misc]  # vLLM has no types here
        def held_names(self) -> set[str]:
            return {"one"}

        def owned_names(self, rank: int) -> list[str]:  # since vLLM 0.33
            return [] if rank == 0 else ["one"]

    for source in (None, Part(torch.nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="GroupPublisher"):
            made(source, OwnClient([]))


class OwnedSource:
    """A source as vLLM has it since 0.33: no iterator, and it says which rank owns what."""

    def __init__(
        self, pairs: Sequence[tuple[str, torch.Tensor]], owners: set[int], *, whole: bool = True
    ) -> None:
        self.metadata = [name for name, _ in pairs]
        self.pairs, self.owners, self.whole, self.read = pairs, owners, whole, 0

    def owned_names(self, rank: int) -> list[str]:
        return self.metadata if rank in self.owners else self.metadata[:1]

    def implements_iter_full(self) -> bool:
        return self.whole

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pair in self.pairs:
            self.read += 1
            yield pair


def test_a_source_that_says_who_owns_what_is_read_by_its_own_iterator(
    weights: list[dict[str, torch.Tensor]],
) -> None:
    pairs, silent = list(weights[0].items()), object()
    source = OwnedSource(pairs, {0})
    engine = made(source, silent, rank=1)
    engine.send_weights()
    assert (engine.rank, source.read) == (1, len(pairs))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("owners", "whole", "said"), [({1}, True, "rank 0 owns 1 of 2"), ({0, 1}, False, "pieces")]
)
def test_all_ranks_refuse_a_source_that_rank_0_cannot_publish(
    rank: int, owners: set[int], whole: bool, said: str
) -> None:
    pairs = [("one", torch.zeros(1)), ("two", torch.zeros(1))]
    source = OwnedSource(pairs, owners, whole=whole)
    with pytest.raises(ValueError, match=f"{said}.*GroupPublisher"):
        made(source, OwnClient([]), rank)

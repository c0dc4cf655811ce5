"""Strategies end to end: a trainer, two engines in processes of their own, text in between."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from rl_bridge.strategies.sender import WeightTransferSender
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from rl_bridge.testing.processes import Child, ChildDied
from rl_bridge.trainers.state_dict import StateDictExtractor
from tests.strategies.rig import EngineProcess, ProcessClient, make_model, run

PLACEMENTS = {
    "shared-memory": {"is_colocated": True},
    "broadcast": {"is_colocated": False},
}


class Setup:
    def __init__(self, stack: ExitStack, placement: dict[str, Any]) -> None:
        config = {**placement, "num_engines": 2, "threshold_nbytes": 2400, "timeout_s": 30.0}
        strategy = make_transfer_strategy(WeightTransferConfig(**config))
        info = run(strategy.create_init_info())
        self.sender: WeightTransferSender = stack.enter_context(run(strategy.create_sender(info)))
        self.engines = [
            stack.enter_context(
                Child(
                    EngineProcess,
                    config=config,
                    init_info=info.to_json(),
                    rank_offset=strategy.config.rank_offset(engine),
                )
            )
            for engine in range(2)
        ]
        self.client = ProcessClient(self.engines)
        self.model = make_model(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 16)).square().sum().backward()
        self.optimizer.step()

    def sync(self) -> Any:
        chunks = StateDictExtractor(self.model).extract_weights()
        return run(self.sender.send_chunks(chunks, self.client))

    def expected(self) -> dict[str, list[Any]]:
        return {name: one.tolist() for name, one in self.model.state_dict().items()}


@contextmanager
def setup(placement: dict[str, Any]) -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(stack, placement)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_two_engines_get_each_version_of_a_trainer_until_one_dies_between_batches(
    name: str,
) -> None:
    with setup(PLACEMENTS[name]) as s:
        assert [one.call("servable") for one in s.engines] == ["WeightBridgeUnavailableError"] * 2
        for step in range(3):  # the first one is the initial sync, before any step
            if step:
                s.train()
            manifest = s.sync()
            assert manifest.transport == name
            assert manifest.weight_version == step
            assert s.client.num_requests == 2 * (step + 1)
            for engine in s.engines:
                assert engine.call("servable") == ""
                assert engine.call("version") == step
                assert engine.call("weights") == s.expected()
        before = s.expected()
        s.train()
        s.engines[1].call("die_at", batch=0)
        with pytest.raises(ChildDied) as caught:
            s.sync()
        assert any("withdrawn" in note for note in caught.value.__notes__)
        alive = s.engines[0]
        assert alive.call("version") == 2
        assert alive.call("weights") == before
        s.client.engines = [alive]
        s.train()
        s.sync()
        assert alive.call("version") == 4
        assert alive.call("weights") == s.expected()
        alive.call("close")
        assert alive.stop() == 0

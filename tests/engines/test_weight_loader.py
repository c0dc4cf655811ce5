"""Requests of a transfer strategy, loaded by real engines: all batches of a sync, or none."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rl_bridge import VLLMWeightLoader, WeightBridgeUnavailableError, WeightUpdateRequest
from rl_bridge.strategies import WeightTransferConfig, init_info_from_json, make_transfer_strategy
from rl_bridge.trainers import StateDictExtractor
from tests.engines.drive import Setting, answers, start
from tests.engines.models import Checkpoints
from tests.engines.references import References

IN_PROCESS, TWO_RANKS = Setting(), Setting(in_process=False, ranks=2)


class Client:
    """Hands requests to the loader as text."""

    def __init__(self, llm: Any, receiver: Any) -> None:
        self.receiver = receiver
        self.loader = VLLMWeightLoader(llm, receiver)
        self.num_requests = 0
        self.loses: int | None = None

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.num_requests += 1
        if request.batch == self.loses:
            raise ConnectionError("the request was lost")
        read = WeightUpdateRequest.from_json(request.to_json())
        await self.loader.load_weights(self.receiver, read)


@contextmanager
def synced(llm: Any, **placement: Any) -> Iterator[tuple[Any, Client]]:
    config = WeightTransferConfig(threshold_nbytes=100_000, **placement)
    strategy = make_transfer_strategy(config)
    info = asyncio.run(strategy.create_init_info())
    sender = asyncio.run(strategy.create_sender(info))
    receiver = asyncio.run(strategy.create_receiver(init_info_from_json(info.to_json())))
    client = Client(llm, receiver)
    with sender, receiver, client.loader:
        yield sender, client


def sync(sender: Any, client: Client, weights: dict[str, torch.Tensor]) -> None:
    asyncio.run(sender.send_chunks(StateDictExtractor(weights).extract_weights(), client))


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("setting", "placement"),
    [
        pytest.param(IN_PROCESS, {"is_colocated": True}, id="in-process-shared-memory"),
        pytest.param(IN_PROCESS, {"is_elastic": True}, id="in-process-broadcast"),
        pytest.param(
            TWO_RANKS, {"is_elastic": True}, id="two-ranks-broadcast", marks=pytest.mark.full
        ),
    ],
)
def test_an_engine_serves_each_sync_whole_or_not_at_all(
    setting: Setting, placement: dict[str, Any], checkpoints: Checkpoints, references: References
) -> None:
    weights = [checkpoints.weights(setting.kind, version) for version in (0, 1)]
    fresh = [references.of(setting, version) for version in (0, 1)]
    with (
        start(setting, checkpoints.path(setting.kind, 0)) as llm,
        synced(llm, **placement) as (sender, client),
    ):
        with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
            client.loader.check_servable()
        for step in range(3):
            if step == 2:  # a request is lost: nothing of that sync is served
                client.loses = 1
                with pytest.raises(ConnectionError, match="the request was lost"):
                    sync(sender, client, weights[1])
                client.loses = None
                assert answers(llm) == fresh[0]
            before = client.num_requests
            sync(sender, client, weights[(step + 1) % 2])
            assert client.num_requests - before > 1
            client.loader.check_servable()
            assert answers(llm) == fresh[(step + 1) % 2], f"sync {step}"

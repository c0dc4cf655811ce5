"""Requests of a transfer strategy, loaded by a real engine: all batches of a sync, or none."""

import asyncio
from typing import Any

import pytest
import torch

from rl_bridge import SGLangWeightLoader, WeightBridgeUnavailableError, WeightUpdateRequest
from rl_bridge.strategies import WeightTransferConfig, init_info_from_json, make_transfer_strategy
from rl_bridge.trainers import StateDictExtractor
from tests.sglang.bench import Bench


class Client:
    """Hands requests to the loader as text."""

    def __init__(self, engine: Any, receiver: Any) -> None:
        self.receiver = receiver
        self.loader = SGLangWeightLoader(engine, receiver)
        self.num_requests = 0
        self.loses: int | None = None

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.num_requests += 1
        if request.batch == self.loses:
            raise ConnectionError("the request was lost")
        read = WeightUpdateRequest.from_json(request.to_json())
        await self.loader.load_weights(self.receiver, read)


def sync(sender: Any, client: Client, weights: dict[str, torch.Tensor]) -> None:
    asyncio.run(sender.send_chunks(StateDictExtractor(weights).extract_weights(), client))


@pytest.mark.parametrize(
    "placement", [{"is_colocated": True}, {"is_elastic": True}], ids=["shared-memory", "broadcast"]
)
def test_an_engine_serves_each_sync_whole_or_not_at_all(
    bench: Bench, placement: dict[str, Any]
) -> None:
    strategy = make_transfer_strategy(WeightTransferConfig(threshold_nbytes=100_000, **placement))
    info = asyncio.run(strategy.create_init_info())
    sender = asyncio.run(strategy.create_sender(info))
    receiver = asyncio.run(strategy.create_receiver(init_info_from_json(info.to_json())))
    client = Client(bench.engine, receiver)
    with sender, receiver, client.loader as loader:
        with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
            loader.check_servable()
        for step in range(3):
            if step == 2:  # a request is lost: nothing of that sync is served
                client.loses = 1
                with pytest.raises(ConnectionError, match="the request was lost"):
                    sync(sender, client, bench.next())
                client.loses = None
                bench.check("after a lost request")
            before = client.num_requests
            sync(sender, client, bench.next())
            bench.holds = 1 - bench.holds
            assert client.num_requests - before > 1
            loader.check_servable()
            bench.check(f"sync {step}")

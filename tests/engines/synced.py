"""Requests of a transfer strategy, loaded by a real engine: all batches of a sync, or none."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError, WeightUpdateRequest
from rl_bridge.strategies import WeightTransferConfig, init_info_from_json, make_transfer_strategy
from rl_bridge.trainers import StateDictExtractor


class Client:
    """Hands requests to the loader as text."""

    def __init__(self, loader: Any, receiver: Any) -> None:
        self.loader, self.receiver = loader, receiver
        self.num_requests = 0
        self.loses: int | None = None

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        self.num_requests += 1
        if request.batch == self.loses:
            raise ConnectionError("the request was lost")
        read = WeightUpdateRequest.from_json(request.to_json())
        await self.loader.load_weights(self.receiver, read)


def sync_whole_or_not_at_all(
    make_loader: Callable[[Any], Any],
    placement: dict[str, Any],
    weights: Sequence[dict[str, torch.Tensor]],
    check: Callable[[int], None],
) -> None:
    """Sync an engine that holds the first weights; `check` looks which of them it serves."""
    strategy = make_transfer_strategy(WeightTransferConfig(threshold_nbytes=100_000, **placement))
    info = asyncio.run(strategy.create_init_info())
    sender = asyncio.run(strategy.create_sender(info))
    receiver = asyncio.run(strategy.create_receiver(init_info_from_json(info.to_json())))
    client = Client(make_loader(receiver), receiver)

    def sync(number: int) -> None:
        chunks = StateDictExtractor(weights[number]).extract_weights()
        asyncio.run(sender.send_chunks(chunks, client))

    with sender, receiver, client.loader as loader:
        with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
            loader.check_servable()
        for number in (1, 0):
            before = client.num_requests
            sync(number)
            assert client.num_requests - before > 1
            loader.check_servable()
            check(number)
        client.loses = 1
        with pytest.raises(ConnectionError, match="the request was lost"):
            sync(1)
        client.loses = None
        check(0)
        sync(1)
        check(1)

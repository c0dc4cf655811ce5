"""A trainer and an engine by a transfer strategy; here in one process, so that it fits a page."""

import asyncio

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, WeightUpdateRequest
from rl_bridge.strategies import (
    ExecutorWeightLoader,
    WeightTransferConfig,
    init_info_from_json,
    make_transfer_strategy,
)
from rl_bridge.trainers import StateDictExtractor


class Client:
    """Reaches the engine: yours sends the text to other processes."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        await self.engine.update(request.to_json())


class Engine:
    """What an engine's process does."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    async def start(self, config: WeightTransferConfig, init_info: str) -> None:
        strategy = make_transfer_strategy(config)
        self.receiver = await strategy.create_receiver(
            init_info_from_json(init_info), rank_offset=config.rank_offset(0)
        )
        executor = RolloutExecutor(
            weight_bridge=self.receiver.bridge,
            weight_install_adapter=ModuleInstallAdapter(self.module, mode="copy"),
        )
        self.loader = ExecutorWeightLoader(executor)

    async def update(self, request: str) -> None:
        await self.loader.load_weights(self.receiver, WeightUpdateRequest.from_json(request))

    def close(self) -> None:
        self.loader.executor.close()
        self.receiver.close()


async def main() -> None:
    config = WeightTransferConfig(is_colocated=True, num_engines=1)

    # the trainer's rank 0
    model = torch.nn.Linear(4, 4)
    strategy = make_transfer_strategy(config)
    info = await strategy.create_init_info()
    sender = await strategy.create_sender(info)

    # the engine
    engine = Engine(torch.nn.Linear(4, 4))
    await engine.start(config, info.to_json())

    # each sync; the first one before the first rollout
    extractor = StateDictExtractor(model)
    for _ in range(2):
        manifest = await sender.send_chunks(extractor.extract_weights(), Client(engine))
        assert manifest is not None
        engine.loader.check_servable()
        assert torch.equal(engine.module.weight, model.weight)  # type: ignore[arg-type]
        with torch.no_grad():
            model.weight.add_(1.0)

    engine.close()
    sender.close()


if __name__ == "__main__":
    asyncio.run(main())

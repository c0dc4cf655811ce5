"""vLLM's own flow for trainers, where only the init info differs: here to a server."""

import sys

import torch
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rl_bridge.vllm import RLBridgeTrainerInitInfo


def main(model: torch.nn.Module, url: str) -> None:
    engine = WeightTransferTrainerFactory.trainer_init(
        RLBridgeTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    try:
        for _ in range(3):
            with torch.no_grad():  # stands for your step of training
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            engine.send_weights()
            (report,) = engine.bridge.holders(engine.manifest)
            print(f"version {report.weight_version}: proof by {report.proof['method']}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM

    main(AutoModelForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2])

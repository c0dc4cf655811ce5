"""A trainer and an SGLang engine on one machine: publish, install, sample."""

import sys
from pathlib import Path

import sglang
import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.sglang import SGLangInstallAdapter

CPU = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}


def trained(model: str, step: int) -> dict[str, torch.Tensor]:
    """Stands for your trainer: its checkpoint's tensors after a step."""
    from safetensors.torch import load_file

    weights = load_file(Path(model) / "model.safetensors")
    return {name: tensor * (1 + step / 10) for name, tensor in weights.items()}


def main(model: str) -> None:
    engine = sglang.Engine(
        model_path=model,
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        max_total_tokens=2048,
        log_level="error",
        **CPU,  # what an engine without a GPU needs
    )
    publisher = make_weight_bridge("shared-memory", source_worker="trainer")
    executor = RolloutExecutor(
        weight_transport="shared-memory", weight_install_adapter=SGLangInstallAdapter(engine)
    )
    with publisher, executor:
        for step in (1, 2, 3):
            manifest = publisher.publish(trained(model, step), weight_version=step)
            executor.update_weights(manifest)
            publisher.release(manifest.update_id)
            [answer] = engine.generate(
                input_ids=[[1, 5, 9]], sampling_params={"temperature": 0, "max_new_tokens": 8}
            )
            ack = executor.last_ack
            assert ack is not None
            assert ack.proof.root == manifest.root
            print(step, answer["output_ids"], answer["meta_info"]["weight_version"])
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes of its own, which import this file
    main(sys.argv[1])

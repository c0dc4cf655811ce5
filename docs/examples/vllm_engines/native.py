"""The same by vLLM's own calls: one option, and the manifest as the update's info."""

import sys

from safetensors.torch import load_file
from vllm import LLM

from rl_bridge import make_weight_bridge


def main(model: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config={"backend": "rl_bridge"},
    )
    llm.init_weight_transfer_engine({"init_info": {}})
    with make_weight_bridge("shared-memory", source_worker="trainer") as publisher:
        weights = load_file(f"{model}/model.safetensors")
        manifest = publisher.publish(weights, weight_version=1)
        llm.start_weight_update()
        llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
        llm.finish_weight_update(f"1@{manifest.root}")
        assert llm.reset_prefix_cache()
        [report] = publisher.consumers()
        print(report.worker, report.weight_version, report.state)


if __name__ == "__main__":
    main(sys.argv[1])

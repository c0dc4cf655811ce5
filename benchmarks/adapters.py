"""Measures adapters of a real vLLM engine: `python benchmarks/adapters.py [--quick]`.

A LoRA of 100 MB in some 500 tensors, and one of 18,040 small tensors; for each, our publication and
update, and PEFT's files on tmpfs with vLLM's own `add_lora` of that path (what its route
`/v1/load_lora_adapter` calls), in turn in one run, every version new bytes. README.md beside this
file says how each figure comes about.
"""

import datetime as dt
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.alternating import alternate, timed
from _lib.environment import collect_environment, save
from _lib.qwen import QWEN2
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "adapters.json"
_SMALL = {"vocab_size": 512, "tie_word_embeddings": False, "max_position_embeddings": 512}
_SHAPES: dict[str, dict[str, Any]] = {
    "large": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rank": 64,
    },
    "many": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1289,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rank": 8,
    },
}
_QUICK = {"num_hidden_layers": 2}


def _modules(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Adapted modules of a layer: name -> columns and rows of the weight."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    pairs = shape["num_key_value_heads"] * shape["head_dim"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, pairs),
        "self_attn.v_proj": (hidden, pairs),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _weights(shape: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    draw, rank = torch.Generator().manual_seed(seed), shape["rank"]
    found = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (columns, rows) in _modules(shape).items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            for word, size in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                random = torch.randn(size, generator=draw) * 0.05
                found[f"{path}.{word}.weight"] = random.to(torch.bfloat16)
    return found


class _Bench:
    """The engine, two adapters, and both ways of getting them in."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        from vllm import LLM

        from rl_bridge import RolloutExecutor, make_weight_bridge
        from rl_bridge.manifest import AdapterSpec
        from rl_bridge.vllm import VLLMEngineAdapter

        config = {**QWEN2, **_SMALL, **shape}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.folder = folder
        self.versions = [_weights(shape, seed) for seed in (0, 1)]
        self.live = {name: tensor.clone() for name, tensor in self.versions[0].items()}
        self.copied = [tensor.clone() for tensor in self.versions[0].values()]
        self.nbytes = sum(tensor.nbytes for tensor in self.versions[0].values())
        self.config = {
            "peft_type": "LORA",
            "r": shape["rank"],
            "lora_alpha": 2 * shape["rank"],
            "target_modules": sorted(name.split(".")[1] for name in _modules(shape)),
            "bias": "none",
        }
        self.spec = AdapterSpec.of_peft("policy", self.config, [])
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=512 << 20,
            max_model_len=512,
            enable_lora=True,
            max_loras=5,
            max_cpu_loras=5,
            max_lora_rank=max(8, shape["rank"]),
        )
        self.trainer = make_weight_bridge("shared-memory", suspicious="off")
        self.bridge = make_weight_bridge("shared-memory", source_worker="vllm")
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge,
            weight_install_adapter=VLLMEngineAdapter(self.llm),
            suspicious="off",
        )
        self.count = 0

    def ours(self, which: int) -> dict[str, Any]:
        """Publish, then the executor's whole transaction."""
        self.count += 1
        made: list[Any] = []
        # The trainer's own tensors, written by its step: before the clock starts.
        live, spec = self.live, self.spec
        torch._foreach_copy_(list(live.values()), list(self.versions[which].values()))

        def publish() -> None:
            made.append(self.trainer.publish(live, weight_version=self.count, adapter=spec))

        publish_s = timed(publish)
        update_s = timed(lambda: self.executor.update_weights(made[0]))
        self.trainer.release(made[0].update_id)
        ack = self.executor.last_ack
        assert ack is not None
        return {"publish_s": publish_s, "update_s": update_s, "phases_ms": dict(ack.timings_ms)}

    def files(self, which: int) -> dict[str, Any]:
        """PEFT's files on tmpfs, and vLLM's own loading of that path."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()

        def write() -> None:
            save_file(self.versions[which], folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(self.config), "utf-8")

        save_s = timed(write)
        request = LoRARequest("file", self.count, str(folder))
        load_s = timed(lambda: self.llm.llm_engine.add_lora(request))
        self.llm.llm_engine.remove_lora(self.count)
        shutil.rmtree(folder)
        return {"save_s": save_s, "load_s": load_s}

    def copy(self, which: int) -> dict[str, Any]:
        """A bare copy of the same bytes, tensor by tensor, into memory that was written before."""
        sources = list(self.versions[which].values())
        return {"copy_s": timed(lambda: torch._foreach_copy_(self.copied, sources))}

    def close(self) -> None:
        """End the engine: there is one at a time in a process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.executor.close()
        self.bridge.close()
        self.trainer.close()
        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _measure(shape: dict[str, Any], reps: int, warmups: int, console: Console) -> dict[str, Any]:
    """All samples of one adapter, and their ratios."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        bench = _Bench(shape, Path(folder))
        lanes = {"ours": bench.ours, "files": bench.files, "copy": bench.copy}
        samples = alternate(lanes, warmups, reps, console)
        bench.close()

    def mid(lane: str, *names: str) -> float:
        return float(median(sum(sample[name] for name in names) for sample in samples[lane]))

    ours, copy = mid("ours", "publish_s", "update_s"), mid("copy", "copy_s")
    return {
        "shape": shape,
        "tensors": len(bench.versions[0]),
        "total_nbytes": bench.nbytes,
        "ratios": {
            "files_vs_ours": mid("files", "save_s", "load_s") / ours,
            "load_vs_update": mid("files", "load_s") / mid("ours", "update_s"),
            "ours_vs_copy": ours / copy,
            "overhead_s": ours - copy,
            "ours_s": ours,
            "update_s": mid("ours", "update_s"),
            "files_s": mid("files", "save_s", "load_s"),
            "copy_s": copy,
        },
        "samples": samples,
    }


def main(
    quick: Annotated[bool, typer.Option(help="Small adapters, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 9,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 4,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure adapters of a real vLLM engine on the CPU, ours beside vLLM's own."""
    console = Console()
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    os.environ.update(settings)
    began = dt.datetime.now(dt.UTC)
    environment = collect_environment()  # (with the load that others make, before ours)
    adapters = {
        name: _measure(shape | (_QUICK if quick else {}), reps, warmups, console)
        for name, shape in _SHAPES.items()
    }
    import vllm

    document = {
        "format": 1,
        "began": began.isoformat(timespec="seconds"),
        "environment": environment | {"vllm": vllm.__version__, "settings": settings},
        "quick": quick,
        "warmups": warmups,
        "adapters": adapters,
    }
    save(document, out)
    table = Table("figure", *adapters, title=f"adapters of a real engine, {reps} by each way")
    for figure in adapters["large"]["ratios"]:
        table.add_row(figure, *(f"{one['ratios'][figure]:.3f}" for one in adapters.values()))
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)

"""Measures updates of a real SGLang engine: `python benchmarks/sglang_updates.py [--quick]`.

One engine of Qwen2.5-0.5B's shape with random bf16 weights; ours and SGLang's own same-host routes
in turn in one run, every update new bytes. README.md beside this file says how each figure comes
about.
"""

import datetime as dt
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.environment import collect_environment
from rich.console import Console
from rich.progress import track
from rich.table import Table

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_OUT = _ROOT / "benchmarks" / "results" / "sglang.json"
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "rl_bridge",
}
_SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QUICK = {"num_hidden_layers": 4, "vocab_size": 32768}

Weights = dict[str, torch.Tensor]


def _weights(shape: dict[str, Any], seed: int) -> Weights:
    """A checkpoint's tensors, random."""
    draw = torch.Generator().manual_seed(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    pairs = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(shape["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        sizes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.q_proj.bias": (hidden,),
            f"{name}.self_attn.k_proj.weight": (pairs, hidden),
            f"{name}.self_attn.k_proj.bias": (pairs,),
            f"{name}.self_attn.v_proj.weight": (pairs, hidden),
            f"{name}.self_attn.v_proj.bias": (pairs,),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    weights = {}
    for name, size in sizes.items():
        weights[name] = torch.empty(size, dtype=torch.bfloat16)
        weights[name].normal_(0, 0.02, generator=draw)
    return weights


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    share: Any = tensor.clone().share_memory_  # which has no types
    shared: torch.Tensor = share()
    return shared


def _require(answer: Any) -> None:
    if not answer[0]:
        msg = f"SGLang refused an update: {answer[1]}. See its log."
        raise RuntimeError(msg)


class _Bench:
    """The engine, the trainer's weights, and each way of getting them in."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        import sglang

        from rl_bridge import RolloutExecutor, make_weight_bridge
        from rl_bridge.sglang import SGLangInstallAdapter

        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        self.folder = folder
        self.versions = [_weights(shape, seed) for seed in (0, 1)]
        self.nbytes = sum(tensor.nbytes for tensor in self.versions[0].values())
        self.engine = sglang.Engine(
            model_path=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            skip_tokenizer_init=True,
            skip_server_warmup=True,
            mem_fraction_static=0.3,
            max_total_tokens=4096,
            log_level="error",
        )
        self.publisher = make_weight_bridge("shared-memory", source_worker="trainer")
        self.executor = RolloutExecutor(
            weight_bridge=make_weight_bridge("shared-memory", source_worker="rollout"),
            weight_install_adapter=SGLangInstallAdapter(self.engine),
        )
        # What SGLang's route takes by reference: a trainer's weights that lie in shared memory.
        self.shared = [
            {name: _shared(tensor) for name, tensor in weights.items()} for weights in self.versions
        ]
        self.version = 0
        self.published: str | None = None

    def ours(self, which: int) -> dict[str, Any]:
        """Publish, then the executor's whole transaction."""
        self.version += 1
        start = time.perf_counter()
        manifest = self.publisher.publish(self.versions[which], weight_version=self.version)
        publish_s = time.perf_counter() - start
        update_s = _timed(lambda: self.executor.update_weights(manifest))
        if self.published is not None:
            self.publisher.release(self.published)
        self.published = manifest.update_id
        ack = self.executor.last_ack
        assert ack is not None
        reports = [report for report in self.publisher.consumers() if report.worker == "sglang"]
        return {
            "publish_s": publish_s,
            "update_s": update_s,
            "phases_ms": dict(ack.timings_ms),
            "rank_ms": dict(reports[-1].timings_ms),
            "proof": ack.proof.to_dict(),
        }

    def reference(self, which: int) -> dict[str, Any]:
        """`update_weights_from_tensor` of weights in shared memory: one copy, by reference."""
        named = list(self.shared[which].items())
        return {"update_s": _timed(lambda: self._session(named, None))}

    def bucket(self, which: int) -> dict[str, Any]:
        """`update_weights_from_tensor` of a flattened bucket, which is made for it."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        start = time.perf_counter()
        made = FlattenedTensorBucket(named_tensors=list(self.versions[which].items()))
        content = {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}
        serialized = [MultiprocessingSerializer.serialize(content)]
        made_s = time.perf_counter() - start
        return {
            "bucket_s": made_s,
            "update_s": _timed(lambda: self._session(serialized, "flattened_bucket")),
        }

    def disk(self, which: int) -> dict[str, Any]:
        """Safetensors on tmpfs, and `update_weights_from_disk`."""
        from safetensors.torch import save_file

        weights = self.versions[which]
        save_s = _timed(lambda: save_file(weights, self.folder / "model.safetensors"))
        loaded_s = _timed(
            lambda: _require(
                self.engine.update_weights_from_disk(str(self.folder), load_format="safetensors")
            )
        )
        return {"save_s": save_s, "update_s": loaded_s}

    def _session(self, named: Any, load_format: str | None) -> None:
        # As SGLang's own callers do it: a session, and the cache flushed with the last load.
        _require(self.engine.begin_weight_update())
        _require(
            self.engine.update_weights_from_tensor(named, load_format=load_format, flush_cache=True)
        )
        _require(self.engine.end_weight_update())


def _ratios(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    def mid(lane: str, *names: str) -> float:
        return float(median(sum(sample[name] for name in names) for sample in samples[lane]))

    def phase(*names: str) -> float:
        return float(median(sum(s["phases_ms"].get(n, 0) for n in names) for s in samples["ours"]))

    whole = {
        "reference": mid("reference", "update_s"),
        "bucket": mid("bucket", "bucket_s", "update_s"),
        "disk": mid("disk", "save_s", "update_s"),
    }
    cheapest = min(whole.values())
    update = mid("ours", "update_s")
    stopped = phase("pause", "install", "prove", "cache", "label", "resume") / 1e3
    return {
        "update_vs_cheapest": update / cheapest,
        "publish_and_update_vs_cheapest": mid("ours", "publish_s", "update_s") / cheapest,
        "publish_and_update_vs_bucket": mid("ours", "publish_s", "update_s") / whole["bucket"],
        "pause_vs_cheapest": stopped / cheapest,
        "update_s": update,
        "publish_s": mid("ours", "publish_s"),
        "pause_s": stopped,
        **{f"{name}_s": seconds for name, seconds in whole.items()},
    }


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 7,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 4,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure updates of a real SGLang engine on the CPU, ours beside SGLang's own."""
    console = Console()
    os.environ.update(_SETTINGS)
    # What SGLang imports and the CPU does not have: see requirements/sglang-cpu.lock.txt.
    stand_ins = str(_ROOT / "tests" / "sglang" / "stand_ins")
    sys.path.insert(0, stand_ins)
    os.environ["PYTHONPATH"] = stand_ins
    shape = _SHAPE | (_QUICK if quick else {})
    began = dt.datetime.now(dt.UTC)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        bench = _Bench(shape, Path(folder))
        lanes = {
            "ours": bench.ours,
            "reference": bench.reference,
            "bucket": bench.bucket,
            "disk": bench.disk,
        }
        first = bench.ours(1)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in lanes}
        for turn in track(range(warmups + reps), "updates", console=console):
            for offset, (name, lane) in enumerate(lanes.items()):
                # Each way finds the other version in the engine.
                sample = lane((turn + offset) % 2)
                if turn >= warmups:
                    samples[name].append(sample)
        ratios = _ratios(samples)
        import sglang

        document = {
            "format": 1,
            "began": began.isoformat(timespec="seconds"),
            "environment": collect_environment()
            | {"sglang": sglang.__version__, "settings": _SETTINGS},
            "quick": quick,
            "shape": shape,
            "total_nbytes": bench.nbytes,
            "warmups": warmups,
            "ratios": ratios,
            "first_update": first,
            "samples": samples,
        }
        bench.executor.close()
        bench.publisher.close()
        bench.engine.shutdown()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    table = Table(
        "figure", "value", title=f"{bench.nbytes / 2**30:.2f} GiB in bf16, {reps} updates"
    )
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)

"""Measures adapters of a real engine: `python benchmarks/adapters.py [--engine sglang] [--quick]`.

A LoRA of 100 MB in some 500 tensors, and one of 18,040 small tensors; for each, our publication and
update, and PEFT's files on tmpfs with the engine's own loading of that path (vLLM's `add_lora`,
which its route `/v1/load_lora_adapter` calls; SGLang's `load_lora_adapter`, and for it its
`load_lora_adapter_from_tensors` too), in turn in one run, every version new bytes. README.md beside
this file says how each figure comes about.
"""

import datetime as dt
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import torch
import typer
from _lib import sglang_cpu
from _lib.alternating import alternate, timed
from _lib.environment import collect_environment, save
from _lib.qwen import QWEN2, make_weights
from rich.console import Console
from rich.table import Table

from rl_bridge.installers.base import TransactionalAdapter

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results"
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


class _Bench(ABC):
    """The engine, two adapters, and the ways of getting them in."""

    settings: ClassVar[dict[str, str]]

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        from rl_bridge import RolloutExecutor, make_weight_bridge
        from rl_bridge.manifest import AdapterSpec

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
        self.engine: Any = None
        adapter = self.start({**QWEN2, **_SMALL, **shape}, max(8, shape["rank"]))
        self.trainer = make_weight_bridge("shared-memory", suspicious="off")
        self.bridge = make_weight_bridge("shared-memory", source_worker="rollout")
        self.executor = RolloutExecutor(
            weight_bridge=self.bridge, weight_install_adapter=adapter, suspicious="off"
        )
        self.count = 0

    @staticmethod
    @abstractmethod
    def set_up() -> str:
        """Set the environment; returns the engine's version."""

    @abstractmethod
    def start(self, config: dict[str, Any], max_rank: int) -> TransactionalAdapter:
        """Start the engine; returns what drives it."""

    @abstractmethod
    def load(self, folder: Path) -> dict[str, Any]:
        """Let the engine load PEFT's files, and unload them again."""

    def first(self, name: str) -> dict[str, Any]:  # noqa: ARG002 - of any
        """What else takes time until the first answer."""
        return {}

    def lanes(self) -> dict[str, Callable[[int], dict[str, Any]]]:
        """All ways."""
        return {"ours": self.ours, "files": self.files, "copy": self.copy}

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
        return {
            "publish_s": publish_s,
            "update_s": update_s,
            **self.first("policy"),
            "phases_ms": dict(ack.timings_ms),
        }

    def files(self, which: int) -> dict[str, Any]:
        """PEFT's files on tmpfs, and the engine's own loading of that path."""
        from safetensors.torch import save_file

        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()

        def write() -> None:
            save_file(self.versions[which], folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(self.config), "utf-8")

        save_s = timed(write)
        loaded = self.load(folder)
        shutil.rmtree(folder)
        return {"save_s": save_s, **loaded}

    def copy(self, which: int) -> dict[str, Any]:
        """A bare copy of the same bytes, tensor by tensor, into memory that was written before."""
        sources = list(self.versions[which].values())
        return {"copy_s": timed(lambda: torch._foreach_copy_(self.copied, sources))}

    def close(self) -> None:
        """End the engine: there is one at a time in a process."""
        self.executor.close()
        self.bridge.close()
        self.trainer.close()


class _VLLM(_Bench):
    """vLLM in this process."""

    settings: ClassVar[dict[str, str]] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }

    @staticmethod
    def set_up() -> str:
        os.environ.update(_VLLM.settings)
        import vllm

        return str(vllm.__version__)

    def start(self, config: dict[str, Any], max_rank: int) -> TransactionalAdapter:
        from vllm import LLM

        from rl_bridge.vllm import VLLMEngineAdapter

        (self.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.engine = LLM(
            model=str(self.folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=512 << 20,
            max_model_len=512,
            enable_lora=True,
            max_loras=5,
            max_cpu_loras=5,
            max_lora_rank=max_rank,
        )
        return VLLMEngineAdapter(self.engine)

    def load(self, folder: Path) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        request = LoRARequest("file", self.count, str(folder))
        load_s = timed(lambda: self.engine.llm_engine.add_lora(request))
        self.engine.llm_engine.remove_lora(self.count)
        return {"load_s": load_s}

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        super().close()
        self.engine.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


class _SGLang(_Bench):
    """SGLang, whose rank is a process of its own."""

    settings = sglang_cpu.SETTINGS

    @staticmethod
    def set_up() -> str:
        sglang_cpu.set_up()
        import sglang

        return str(sglang.__version__)

    def start(self, config: dict[str, Any], max_rank: int) -> TransactionalAdapter:
        from safetensors.torch import save_file

        from rl_bridge.sglang import SGLangInstallAdapter

        # SGLang loads adapters by the format of its base: there must be files of that, too.
        save_file(make_weights(config, 2), self.folder / "model.safetensors")
        self.engine = sglang_cpu.start(
            config,
            self.folder,
            load_format="safetensors",
            enable_lora=True,
            lora_backend="torch_native",
            max_loras_per_batch=5,
            max_lora_rank=max_rank,
            lora_target_modules=self.config["target_modules"],
        )
        return SGLangInstallAdapter(self.engine)

    def lanes(self) -> dict[str, Callable[[int], dict[str, Any]]]:
        return {**super().lanes(), "tensors": self.tensors}

    def load(self, folder: Path) -> dict[str, Any]:
        return self._loaded(lambda: self.engine.load_lora_adapter("file", str(folder)))

    def tensors(self, which: int) -> dict[str, Any]:
        """`load_lora_adapter_from_tensors` of a flattened bucket, which is made for it."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        made: list[Any] = []

        def make() -> None:
            bucket = FlattenedTensorBucket(named_tensors=list(self.versions[which].items()))
            content = {
                "flattened_tensor": bucket.get_flattened_tensor(),
                "metadata": bucket.get_metadata(),
            }
            made.append(MultiprocessingSerializer.serialize(content))

        bucket_s = timed(make)
        loaded = self._loaded(
            lambda: self.engine.load_lora_adapter_from_tensors(
                "file", made, self.config, load_format="flattened_bucket"
            )
        )
        return {"bucket_s": bucket_s, **loaded}

    def first(self, name: str) -> dict[str, Any]:
        """One token: only with a request does SGLang write what it has loaded into a slot."""
        tokens = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        ask = partial(
            self.engine.generate, input_ids=[[1]], sampling_params=tokens, lora_path=[name]
        )
        return {"first_s": timed(ask)}

    def _loaded(self, load: Callable[[], Any]) -> dict[str, Any]:
        load_s = timed(lambda: sglang_cpu.require(load()))
        first = self.first("file")
        sglang_cpu.require(self.engine.unload_lora_adapter("file"))
        return {"load_s": load_s, **first}

    def close(self) -> None:
        super().close()
        self.engine.shutdown()


class _Engine(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


_BENCHES: dict[_Engine, type[_Bench]] = {_Engine.VLLM: _VLLM, _Engine.SGLANG: _SGLang}


def _measure(
    kind: type[_Bench], shape: dict[str, Any], reps: int, warmups: int, console: Console
) -> dict[str, Any]:
    """All samples of one adapter, and their ratios."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        bench = kind(shape, Path(folder))
        samples = alternate(bench.lanes(), warmups, reps, console)
        bench.close()

    def mid(lane: str, *names: str) -> float:
        return float(median(sum(sample[name] for name in names) for sample in samples[lane]))

    ours, copy = mid("ours", "publish_s", "update_s"), mid("copy", "copy_s")
    ratios = {
        "files_vs_ours": mid("files", "save_s", "load_s") / ours,
        "load_vs_update": mid("files", "load_s") / mid("ours", "update_s"),
        "ours_vs_copy": ours / copy,
        "overhead_s": ours - copy,
        "ours_s": ours,
        "update_s": mid("ours", "update_s"),
        "files_s": mid("files", "save_s", "load_s"),
        "copy_s": copy,
    }
    if "tensors" in samples:
        until = {
            "ours": mid("ours", "publish_s", "update_s", "first_s"),
            "files": mid("files", "save_s", "load_s", "first_s"),
            "tensors": mid("tensors", "bucket_s", "load_s", "first_s"),
        }
        ratios |= {
            "tensors_vs_ours": mid("tensors", "bucket_s", "load_s") / ours,
            "tensors_s": mid("tensors", "bucket_s", "load_s"),
            "files_with_request_vs_ours": until["files"] / until["ours"],
            "tensors_with_request_vs_ours": until["tensors"] / until["ours"],
            **{f"{name}_with_request_s": seconds for name, seconds in until.items()},
        }
    return {
        "shape": shape,
        "tensors": len(bench.versions[0]),
        "total_nbytes": bench.nbytes,
        "ratios": ratios,
        "samples": samples,
    }


def main(
    engine: Annotated[_Engine, typer.Option(help="Whose adapters.")] = _Engine.VLLM,
    quick: Annotated[bool, typer.Option(help="Small adapters, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 9,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 4,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Where the samples go.")] = None,
) -> None:
    """Measure adapters of a real engine on the CPU, ours beside the engine's own."""
    console = Console()
    kind = _BENCHES[engine]
    out = out or _OUT / ("adapters.json" if kind is _VLLM else f"adapters-{engine}.json")
    began = dt.datetime.now(dt.UTC)
    environment = collect_environment()  # (with the load that others make, before ours)
    version = kind.set_up()
    adapters = {
        name: _measure(kind, shape | (_QUICK if quick else {}), reps, warmups, console)
        for name, shape in _SHAPES.items()
    }
    document = {
        "format": 1,
        "began": began.isoformat(timespec="seconds"),
        "environment": environment | {engine.value: version, "settings": kind.settings},
        "quick": quick,
        "warmups": warmups,
        "adapters": adapters,
    }
    save(document, out)
    table = Table("figure", *adapters, title=f"adapters of {engine}, {reps} by each way")
    for figure in adapters["large"]["ratios"]:
        table.add_row(figure, *(f"{one['ratios'][figure]:.3f}" for one in adapters.values()))
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)

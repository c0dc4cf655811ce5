"""Measures updates of a real vLLM engine: `python benchmarks/vllm_updates.py [--quick]`.

Engines of Qwen3-0.6B's shape with random bf16 weights, one whose head shares the embedding's weight
and one with a head of its own; ours and vLLM's own ways in turn in one run, every update new bytes.
README.md beside this file says how each figure comes about.
"""

import datetime as dt
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from _lib.alternating import Ours, alternate, timed
from _lib.environment import collect_environment, save
from _lib.qwen import QUICK, QWEN3, make_weights
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

_OUT = Path(__file__).resolve().parent / "results" / "vllm.json"
_MODELS = {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}


class _Bench:
    """The engine, the trainer's weights, and each way of getting them in."""

    def __init__(self, shape: dict[str, Any], folder: Path) -> None:
        from vllm import LLM

        from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter

        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        self.folder = folder
        self.is_tied = bool(shape["tie_word_embeddings"])
        self.versions = [make_weights(shape, seed) for seed in (0, 1)]
        self.nbytes = sum(tensor.nbytes for tensor in self.versions[0].values())
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=512 << 20,
            max_model_len=512,
        )
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.bridges = Ours(VLLMEngineAdapter(self.llm), "vllm")

    def ours(self, which: int) -> dict[str, Any]:
        """Publish, then the executor's whole transaction."""
        return self.bridges.update(self.versions[which])

    def loader(self, which: int) -> dict[str, Any]:
        """Feed vLLM's loader from memory; then what it leaves stale on the CPU: a tied head."""
        reload_s = timed(lambda: self._reload(weights_iterator=iter(self.versions[which].items())))
        return {"reload_s": reload_s, "tied_head_s": timed(self._pack_tied_head)}

    def path(self, which: int) -> dict[str, Any]:
        """Safetensors on tmpfs, and vLLM's reload of that path."""
        from safetensors.torch import save_file

        save_s = timed(lambda: save_file(self.versions[which], self.folder / "model.safetensors"))
        reload_s = timed(lambda: self._reload(weights_path=str(self.folder)))
        return {"save_s": save_s, "reload_s": reload_s, "tied_head_s": timed(self._pack_tied_head)}

    def _reload(self, **source: Any) -> None:
        from vllm.config import set_current_vllm_config

        self.worker.vllm_config.load_config.load_format = "safetensors"
        with set_current_vllm_config(self.worker.vllm_config):
            self.worker.model_runner.reload_weights(**source)

    def _pack_tied_head(self) -> None:
        if not self.is_tied:
            return
        head = self.worker.model_runner.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)

    def close(self) -> None:
        """End the engine: there is one at a time in a process."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.bridges.close()
        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _measure(shape: dict[str, Any], reps: int, warmups: int, console: Console) -> dict[str, Any]:
    """All samples of one model, and their ratios."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        bench = _Bench(shape, Path(folder))
        lanes = {"ours": bench.ours, "loader": bench.loader, "path": bench.path}
        first = bench.ours(1)
        samples = alternate(lanes, warmups, reps, console)
        bench.close()
    return {
        "shape": shape,
        "total_nbytes": bench.nbytes,
        "ratios": _ratios(samples),
        "first_update": first,
        "samples": samples,
    }


def _ratios(samples: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    def mid(lane: str, *names: str) -> float:
        return float(median(sum(sample[name] for name in names) for sample in samples[lane]))

    def rank(*names: str) -> float:
        return float(median(sum(s["rank_ms"][n] for n in names) for s in samples["ours"])) / 1e3

    def phase(*names: str) -> float:
        return float(median(sum(s["phases_ms"][n] for n in names) for s in samples["ours"])) / 1e3

    loader = mid("loader", "reload_s", "tied_head_s")
    told = [
        sum(ms for name, ms in s["phases_ms"].items() if name != "total") / 1e3 / s["update_s"]
        for s in samples["ours"]
    ]
    stopped = phase("pause", "install", "prove", "cache", "label", "resume")
    return {
        "update_vs_loader": mid("ours", "update_s") / loader,
        "update_vs_loader_without_tied_head": mid("ours", "update_s") / mid("loader", "reload_s"),
        "path_vs_update": mid("path", "save_s", "reload_s", "tied_head_s")
        / mid("ours", "publish_s", "update_s"),
        "pause_vs_loader": stopped / loader,
        "stall_vs_loader": (stopped + phase("prepare")) / loader,
        "prove_vs_install": rank("prove") / rank("stage", "install"),
        "phases_vs_wall": median(told),
        "update_s": mid("ours", "update_s"),
        "pause_s": stopped,
        "loader_s": loader,
        "path_s": mid("path", "save_s", "reload_s", "tied_head_s"),
    }


def main(
    quick: Annotated[bool, typer.Option(help="A small model, few repetitions.")] = False,  # noqa: FBT002 - a flag
    reps: Annotated[int, typer.Option(min=1, help="Updates by each way that count.")] = 7,
    warmups: Annotated[int, typer.Option(min=1, help="Updates by each way before.")] = 4,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the samples go.")] = _OUT,
) -> None:
    """Measure updates of a real vLLM engine on the CPU, ours beside vLLM's own."""
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
    models = {
        name: _measure(QWEN3 | model | (QUICK if quick else {}), reps, warmups, console)
        for name, model in _MODELS.items()
    }
    import vllm

    document = {
        "format": 2,
        "began": began.isoformat(timespec="seconds"),
        "environment": environment | {"vllm": vllm.__version__, "settings": settings},
        "quick": quick,
        "warmups": warmups,
        "models": models,
    }
    save(document, out)
    table = Table("figure", *models, title=f"updates of a real engine, {reps} by each way")
    for figure in models["tied"]["ratios"]:
        table.add_row(figure, *(f"{model['ratios'][figure]:.3f}" for model in models.values()))
    console.print(table)
    console.print(f"all samples are in {out}")


if __name__ == "__main__":
    typer.run(main)

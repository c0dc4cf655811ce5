"""SGLang's engine on the CPU."""

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["SETTINGS", "require", "set_up", "start"]

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "rl_bridge",
}


def set_up() -> None:
    """Set the environment, before SGLang is imported."""
    os.environ.update(SETTINGS)
    # What SGLang imports and the CPU does not have: see requirements/sglang-cpu.lock.txt.
    stand_ins = str(Path(__file__).resolve().parents[2] / "tests" / "sglang" / "stand_ins")
    sys.path.insert(0, stand_ins)
    os.environ["PYTHONPATH"] = stand_ins


def start(shape: dict[str, Any], folder: Path, **options: Any) -> Any:
    """An engine of this shape, whose files are in this folder."""
    import sglang

    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return sglang.Engine(
        model_path=str(folder),
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
        **options,
    )


def require(answer: Any) -> None:
    """Raise what SGLang answered, unless it did what it was asked for."""
    is_done, message = (
        answer[:2] if isinstance(answer, tuple) else (answer.success, answer.error_message)
    )
    if not is_done:
        msg = f"SGLang refused: {message}. See its log."
        raise RuntimeError(msg)

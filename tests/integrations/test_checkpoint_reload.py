"""An update that vLLM is to reload from files: what becomes of the files, and of a slow engine.

What real engines make of it is asked in `tests/engines/test_checkpoint_reload.py`.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge import RolloutExecutor, TensorBridge, TornEngine, make_weight_bridge
from rl_bridge.engines.vllm.checkpoint_reload import VLLMCheckpointReloadAdapter
from tests.integrations.test_engine_adapter import trainer
from tests.integrations.test_rank import publish

__all__ = ["trainer"]  # a fixture, for this file, too


class LLM:
    """An engine in this process, of some workers; it holds what it has loaded last."""

    def __init__(self, checkpoint: Path, workers: int = 1) -> None:
        self.loaded: list[float] = []
        self.before_loading: Callable[[], object] = lambda: None
        self.is_paused = False
        model = SimpleNamespace(
            model=str(checkpoint),
            hf_config=SimpleNamespace(tie_word_embeddings=False),
            quantization=None,
            use_mla=False,
            get_num_experts=lambda: 0,
        )
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=model,
            parallel_config=SimpleNamespace(world_size=workers, data_parallel_size=1),
        )
        core = SimpleNamespace(engine_core=self)
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)
        self.model_executor = SimpleNamespace(is_failed=False)

    def collective_rpc(self, method: Any, kwargs: Any = None) -> list[None]:
        if method == "reload_weights":
            self.before_loading()
            file = Path(kwargs["weights_path"]) / "model.safetensors"
            self.loaded.append(float(load_file(file)["w"][0]))
        return [None]

    def pause_scheduler(self, _mode: str, _clear: bool) -> None:
        self.is_paused = True

    def resume_scheduler(self) -> None:
        self.is_paused = False

    def is_scheduler_paused(self) -> bool:
        return self.is_paused

    def reset_prefix_cache(self, **_options: Any) -> bool:
        return True


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": torch.zeros(4)}, folder / "model.safetensors")
    return folder


@contextmanager
def executor_of(llm: LLM, checkpoint: Path, timeout_s: float = 20) -> Iterator[RolloutExecutor]:
    adapter = VLLMCheckpointReloadAdapter(llm, checkpoint.parent / "versions", timeout_s=timeout_s)
    with (
        make_weight_bridge("shared-memory", source_worker="driver") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        yield executor


def broken() -> None:
    raise RuntimeError("planted")


def test_a_commit_that_comes_again_leaves_the_files_that_an_undo_goes_back_to(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    llm, real = LLM(checkpoint), shutil.rmtree

    def cut_off(*given: Any, **options: Any) -> None:
        patch.undo()
        real(*given, **options)
        raise KeyboardInterrupt

    with executor_of(llm, checkpoint) as executor:
        executor.update_weights(publish(trainer, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "rmtree", cut_off)
            with pytest.raises(KeyboardInterrupt):
                executor.update_weights(publish(trainer, 2))
        failures = [broken]
        llm.before_loading = lambda: failures.pop()() if failures else None
        with pytest.raises(RuntimeError, match="planted"):
            executor.update_weights(publish(trainer, 3))
        executor.check_servable()
        assert executor.active_weight_version == llm.loaded[-1] == 2


def test_a_process_that_begins_anew_installs_what_the_one_before_had(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    manifest = publish(trainer, 1)
    for _ in range(2):
        llm = LLM(checkpoint)
        with executor_of(llm, checkpoint) as executor:
            executor.update_weights(manifest)
        assert llm.loaded == [1]


def test_no_reload_begins_beside_one_that_is_only_late(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    llm, may_load, begun = LLM(checkpoint, workers=2), threading.Event(), []

    def slow() -> None:
        begun.append(len(llm.loaded))
        assert may_load.wait(20)

    with executor_of(llm, checkpoint, timeout_s=0.3) as executor:
        llm.before_loading = slow
        with pytest.raises(TornEngine, match="is still at an earlier call"):
            executor.update_weights(publish(trainer, 1))
        assert llm.is_paused
        assert begun == [0]
        may_load.set()
        executor.recover()
        assert not executor.is_torn
    assert llm.loaded == [1, 0]
    assert not llm.is_paused


def test_an_engine_that_dies_in_a_reload_is_told_at_once(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    """No call to it ends: nothing waits for its deadline."""
    llm, may_end = LLM(checkpoint, workers=2), threading.Event()

    def dies() -> None:
        llm.model_executor.is_failed = True
        assert may_end.wait(60)

    with executor_of(llm, checkpoint, timeout_s=600) as executor:
        llm.before_loading = dies
        with pytest.raises(TornEngine, match="its process ended"):
            executor.update_weights(publish(trainer, 1))
        may_end.set()


def test_a_pause_of_the_users_own_outlasts_a_reload(
    trainer: TensorBridge, checkpoint: Path
) -> None:
    llm = LLM(checkpoint)
    llm.is_paused = True
    with executor_of(llm, checkpoint) as executor:
        executor.update_weights(publish(trainer, 1))
    assert llm.is_paused

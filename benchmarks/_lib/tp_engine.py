"""A trainer and a vLLM engine of two ranks, in processes of their own, told what to do by JSON.

`Lane` starts them with a tree of rl_bridge's sources, so that two commits can take turns. Each
update has all signs of the one before turned. The bytes that each rank copies and digests are
counted where rl_bridge passes over them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from _lib.cuts import placement
from _lib.qwen import make_weights
from _lib.wire import BenchmarkError, recv_json, send_json

__all__ = ["SETTINGS", "Counting", "Lane"]

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# Its layers compute with their weights as they are, as on a GPU, and not with packed copies.
_PLAIN = "TP_ENGINE_PLAIN"
_RANKS = 2
_OWNERS = 4
_START_S = 300.0
_UPDATE_S = 120.0
_END_S = 60.0


class Lane:
    """The two, from outside."""

    def __init__(
        self,
        name: str,
        tree: Path,
        shape: dict[str, Any],
        trainer: str = "whole",
        *,
        is_plain: bool = False,
    ) -> None:
        """Start them, by the sources in `tree`.

        With `is_plain` no layer packs its weights, which vLLM does on the CPU alone. The trainer
        publishes ``whole`` tensors; or its four ranks publish their rows, which go
        into the engine ``direct``, or ``assembled`` by the driver, which publishes once more.
        """
        self.name = name
        ours, theirs = socket.socketpair()
        here = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "_lib.tp_engine",
                str(theirs.fileno()),
                json.dumps(shape),
                trainer,
            ],
            env=os.environ
            | SETTINGS
            | {"PYTHONPATH": f"{tree.resolve()}:{here}", _PLAIN: "1" if is_plain else ""},
            cwd=tree,  # which Python looks into first
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that the engine's processes can be ended with it
        )
        theirs.close()
        self._conn = Connection(ours.detach())
        try:
            self.facts = recv_json(self._conn, _START_S, name)
        except BaseException:
            self.close()
            raise
        if self.facts["source"] != str(tree.resolve()):
            self.close()
            msg = f"{name} runs {self.facts['source']}, expected {tree}"
            raise BenchmarkError(msg)

    def update(self) -> dict[str, Any]:
        """One update, with what its steps took on each rank."""
        send_json(self._conn, {})
        return recv_json(self._conn, _UPDATE_S, self.name)

    def close(self) -> None:
        """End them."""
        self._conn.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END_S)


# ---- inside --------------------------------------------------------------------------------------


class Counting:
    """What is added to each of vLLM's workers: it counts the bytes of rl_bridge's passes."""

    def passed(self) -> dict[str, float]:
        """Bytes that this worker has copied and digested, and its processor's seconds.

        The first call begins to count.
        """
        if not _passed:
            _count()
        return {**_passed, "cpu_s": time.process_time()}


if os.environ.get(_PLAIN):  # in each worker, before it makes its model
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False  # noqa: SLF001 - vLLM has no setting for it

_passed: dict[str, float] = {}


def _count() -> None:
    from rl_bridge.memory.passes import BytePlan

    _passed.update(copied_nbytes=0, digested_nbytes=0)

    def counted(name: str, *what: str) -> None:
        method: Callable[..., Any] = getattr(BytePlan, name)

        @wraps(method)
        def call(self: BytePlan, *given: Any, **options: Any) -> Any:
            for one in what:
                _passed[one] += self.total_nbytes
            return method(self, *given, **options)

        setattr(BytePlan, name, call)

    counted("copy", "copied_nbytes")
    counted("digest", "digested_nbytes")
    counted("copy_digest", "copied_nbytes", "digested_nbytes")


class _Sharded:
    """The ranks of a trainer, each a thread, which hold even rows of every tensor."""

    def __init__(self) -> None:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

        from rl_bridge import make_weight_bridge
        from rl_bridge.groups import GroupPublisher, StoreExchange

        store = HashStore()
        self.publishers = [
            GroupPublisher(
                make_weight_bridge("shared-memory", source_worker="trainer", source_rank=rank),
                StoreExchange(store, rank=rank, world_size=_OWNERS),
            )
            for rank in range(_OWNERS)
        ]

    def publish(self, weights: dict[str, torch.Tensor], version: int) -> Any:
        def publish(rank: int) -> Any:
            shards = {name: whole.chunk(_OWNERS)[rank] for name, whole in weights.items()}
            placements = {
                name: placement(name, tuple(whole.shape), 0, rank, _OWNERS)
                for name, whole in weights.items()
            }
            return self.publishers[rank].publish(shards, placements, weight_version=version)

        with ThreadPoolExecutor(_OWNERS) as pool:
            manifest, *_ = pool.map(publish, range(_OWNERS))
        return manifest

    def told(self, manifest: Any) -> list[Any]:
        return self.publishers[0].consumers(manifest)

    def release(self, manifest: Any) -> None:
        for publisher in self.publishers:
            publisher.release(manifest)

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.bridge.close()


class _Pair:
    def __init__(self, shape: dict[str, Any], folder: Path, trainer: str) -> None:
        from vllm import LLM

        import rl_bridge
        from rl_bridge import RolloutExecutor, make_weight_bridge
        from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
        from rl_bridge.groups import GroupBridge

        (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        self.weights = make_weights(shape, 0)
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=512,
            tensor_parallel_size=_RANKS,
            worker_extension_cls="_lib.tp_engine.Counting",
        )
        self.llm.collective_rpc("passed")
        self.trainer = make_weight_bridge("shared-memory", source_worker="trainer")
        self.sharded: Any = None if trainer == "whole" else _Sharded()
        self.assembles = trainer == "assembled"
        self.group: Any = GroupBridge(source_worker="rollout") if self.sharded else None
        plain = make_weight_bridge("shared-memory", source_worker="rollout")
        self.executor = RolloutExecutor(
            weight_bridge=self.group if trainer == "direct" else plain,
            weight_install_adapter=VLLMEngineAdapter(self.llm),
        )
        self.version = 0
        self.facts = {
            "total_nbytes": sum(one.nbytes for one in self.weights.values()),
            "source": str(Path(rl_bridge.__file__).parents[1]),
        }

    def update(self) -> dict[str, Any]:
        for tensor in self.weights.values():
            tensor.neg_()
        self.version += 1
        start = time.perf_counter()
        if self.sharded is None:
            manifest = self.trainer.publish(self.weights, weight_version=self.version)
        else:
            manifest = self.sharded.publish(self.weights, self.version)
        publish_s = time.perf_counter() - start
        before, own_cpu_s = self.llm.collective_rpc("passed"), time.process_time()
        start = time.perf_counter()
        told = self._install(manifest)
        update_s = time.perf_counter() - start
        own_cpu_s = time.process_time() - own_cpu_s
        after = self.llm.collective_rpc("passed")
        ack = self.executor.last_ack
        assert ack is not None
        reports = {report.rank: dict(report.timings_ms) for report in told}
        (self.trainer if self.sharded is None else self.sharded).release(manifest)
        return {
            "publish_s": publish_s,
            "update_s": update_s,
            "driver_cpu_s": own_cpu_s,
            "phases_ms": dict(ack.timings_ms),
            "rank_ms": [reports[rank] for rank in range(_RANKS)],
            "rank_passes": [
                {name: now[name] - then[name] for name in now}
                for then, now in zip(before, after, strict=True)
            ],
            "load_average": os.getloadavg()[0],
        }

    def _install(self, manifest: Any) -> list[Any]:
        """Update the engine; what its ranks told."""
        published = manifest
        if self.assembles:
            tensors = self.group.import_update(manifest)
            published = self.trainer.publish(tensors, weight_version=self.version)
        self.executor.update_weights(published)
        if self.assembles:
            del tensors
            self.group.acknowledge(manifest)
            self.group.release(manifest)
            self.trainer.release(published)
        is_direct = self.sharded is not None and not self.assembles
        told = self.sharded.told(manifest) if is_direct else self.trainer.holders(published)
        return [report for report in told if report.worker == "vllm"]

    def close(self) -> None:
        self.executor.close()
        if self.sharded is not None:
            self.group.close()
            self.sharded.close()
        self.trainer.close()
        self.llm.llm_engine.engine_core.shutdown()


def _serve(conn: Connection, shape: dict[str, Any], trainer: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, torch.no_grad():
        pair = _Pair(shape, Path(folder), trainer)
        try:
            send_json(conn, pair.facts)
            while True:
                try:
                    conn.recv_bytes()
                except EOFError:
                    return
                send_json(conn, pair.update())
        finally:
            pair.close()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]), sys.argv[3])

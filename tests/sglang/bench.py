"""Engines of this process: one at a time, started once for all tests of one kind of model."""

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateRejectedError, make_weight_bridge
from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.engine_adapter import SGLangServing
from rl_bridge.engines.sglang.loaders import ROUTES, DiskRoute, DistributedRoute, RouteName
from rl_bridge.engines.staging import Staging
from rl_bridge.sglang import SGLangInstallAdapter
from rl_bridge.testing.processes import until
from tests.engines.models import Checkpoints, Kind
from tests.engines.stand import Stand
from tests.engines.trainer import Trainer

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 5, 9, 17, 33), (1, 100, 200), (*[7] * 40, 3, 4, 5))
SAMPLING = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
# Route, and where the next version is made that comes by it.
WAYS: tuple[tuple[RouteName, Staging | None], ...] = (
    ("import", "beside"),
    ("import", "through"),
    *((route, None) for route in ROUTES[1:]),
)
PLANT = "tests.sglang.faults.plant"
ASK = "tests.sglang.faults.ask"
CALL_S = 120.0

Answers = list[tuple[Any, ...]]
"""For each prompt the tokens, and the log-probabilities of the first candidates of each."""


def options(path: str, ranks: int = 1) -> dict[str, Any]:
    """What every engine of these tests is started with."""
    return {
        "tp_size": ranks,
        "model_path": path,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "random_seed": 0,
        "log_level": "error",
        "sleep_on_idle": True,  # else an engine that waits takes a core from whoever works
        "custom_weight_loader": [PLANT, ASK],
    }


def cores_for(ranks: int) -> dict[str, str]:
    """The environment in which so many ranks start: on the CPU each wants cores of its own."""
    if ranks == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    }


def read(outputs: Sequence[dict[str, Any]]) -> Answers:
    """Tokens and log-probabilities of what SGLang answered."""
    return [
        (
            tuple(output["output_ids"]),
            tuple(
                candidate[0]
                for position in output["meta_info"]["output_top_logprobs"]
                for candidate in position
            ),
        )
        for output in outputs
    ]


@contextmanager
def executor_for(
    engine: Any,
    *,
    api_key: str | None = None,
    route: str | DistributedRoute = "import",
    tmp_path: Path | None = None,
    serving: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[RolloutExecutor]:
    """An executor of its own bridge around an engine.

    Args:
        engine: an `Engine`, or a server's URL.
        api_key: of a server.
        route: what `SGLangInstallAdapter` takes; for ``disk`` there is a folder in `tmp_path`.
        tmp_path: of the test.
        serving: what `SGLangServing` takes.
        options: what `SGLangInstallAdapter` takes.

    """
    options["route"] = route
    if route == "disk" and tmp_path is not None:
        options["route"] = DiskRoute(tmp_path / "versions")
    if serving is not None:
        options["serving"] = SGLangServing(**serving)
    if api_key is not None:
        engine = connect(engine, api_key=api_key)
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        closing(SGLangInstallAdapter(engine, **options)) as adapter,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious="off"
        ) as executor,
    ):
        yield executor


@dataclass(kw_only=True)
class Bench(Stand):
    """Of an engine in this process."""

    kind: Kind
    fresh: Sequence[Answers]
    sums: Sequence[dict[str, str]]
    ranks: int = 1

    def answers(self) -> Answers:
        """Ask the engine; no prefix of an earlier question is used."""
        return answers_of(self.engine)

    def check(self, what: object = "") -> None:
        """It holds and answers what a fresh engine of its version does."""
        assert sums_of(self.engine) == self.sums[self.holds], what
        super().check(what)

    def fails_at(self, executor: RolloutExecutor, tensors: Iterable[int], **where: int) -> None:
        """Updates that fail at each of these tensors are undone; the one behind them lands."""
        for nth in tensors:
            self.plant("fail", nth, **where)
            with pytest.raises(WeightUpdateRejectedError, match="" if where else f"tensor {nth}"):
                executor.update_weights(self.publish())
            assert sums_of(self.engine) == self.sums[self.holds], nth
        self.check()
        self.uproot()
        self.update(executor)
        self.check()

    def plant(self, point: str, nth: int = 0, rank: int | None = None) -> None:
        """Plant a fault in the scheduler's process, of all ranks or of one."""
        self._call({"point": point, "nth": nth, "rank": rank})

    def uproot(self) -> None:
        """Take it out."""
        self._call({"point": "", "rank": None})

    def ask(self, text: str, folder: Path) -> list[str]:
        """What each rank answers to `EngineSuite`."""
        self._call({"text": text, "answer": str(folder)}, ASK)
        return [(folder / str(rank)).read_text("utf-8") for rank in range(self.ranks)]

    def _call(self, what: dict[str, Any], by: str = PLANT) -> None:
        call_in_ranks(self.engine, what, by)


def call_in_ranks(engine: Any, what: dict[str, Any], by: str = PLANT) -> None:
    """Call one of the tests' own functions in the schedulers' processes."""
    # SGLang's hook for loaders of the user's own brings tests into its process.
    assert engine.begin_weight_update()[0]
    named = [(json.dumps(what), torch.zeros(1))]
    done = engine.update_weights_from_tensor(named, load_format=by, flush_cache=False)
    assert done[0], done
    assert engine.end_weight_update()[0]


def forget(engine: Any, api_key: str | None = None) -> None:
    """Drop cached prefixes. SGLang's own route takes a quarter of a second more for it.

    A prefix that stayed would make the answers other ones than a fresh engine's.
    """
    with closing(connect(engine, timeout_s=CALL_S, api_key=api_key)) as client:
        # An answer is here before its scheduler has put the request away.
        until(lambda: client.ask("flush")[0]["flushed"], what="no request holds a prefix")


def answers_of(engine: Any, adapter: str | None = None) -> Answers:
    forget(engine)
    prompts = [list(prompt) for prompt in PROMPTS]
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params=SAMPLING,
        return_logprob=True,
        top_logprobs_num=3,
        lora_path=None if adapter is None else [adapter] * len(prompts),
    )
    return read(outputs)


def sums_of(engine: Any) -> dict[str, str]:
    """SGLang's own checksums of all parameters, on all ranks."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    found = engine.loop.run_until_complete(
        engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action="checksum"))
    )
    return checksums(found[2])


def checksums(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the ranks say: position of a rank and name of a parameter -> checksum."""
    said = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
    return {
        f"{index} {name}": value
        for index, rank in enumerate(said)
        for name, value in rank["checksums"].items()
    }


@contextmanager
def _sparing_servers() -> Iterator[None]:
    """An engine's shutdown ends all children of the process; keep what others come from.

    Without the process by which torch shares, no tensor of this one could go to a server any more;
    without the one that has imported SGLang, each engine would begin with that.
    """
    process_class: Any = importlib.import_module("psutil").Process
    every = process_class.children

    def others(process: Any, recursive: bool = False) -> list[Any]:
        children = every(process, recursive)
        spared = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        return [
            child
            for child in children
            if child.pid != spared and not child.name().startswith("torch_shm")
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_class, "children", others)
        yield


class Engines:
    """Starts engines, one at a time: SGLang keeps the settings of one in a process."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """Begin with none."""
        self._checkpoints = checkpoints
        self._engine: Any = None
        self._bench: Bench | None = None

    def bench(self, kind: Kind, ranks: int = 1) -> Bench:
        """The engine of that kind; another one is ended for it."""
        if self._bench is None or (self._bench.kind, self._bench.ranks) != (kind, ranks):
            self.close()
            second = self.start(kind, 1, ranks)
            answers, sums = answers_of(second), sums_of(second)
            first = self.start(kind, 0, ranks)
            self._bench = Bench(
                first,
                Trainer(),
                [self._checkpoints.weights(kind, version) for version in (0, 1)],
                fresh=[answers_of(first), answers],
                kind=kind,
                sums=[sums_of(first), sums],
                ranks=ranks,
            )
        return self._bench

    def start(self, kind: Kind, version: int, ranks: int, **more: Any) -> Any:
        """Start one that nobody shares, with these options beside the usual ones."""
        import sglang

        self.close()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cores_for(ranks).items():
                patch.setenv(name, value)
            path = self._checkpoints.path(kind, version)
            self._engine = sglang.Engine(**{**options(path, ranks), **more})
        return self._engine

    def close(self) -> None:
        """End it."""
        if self._bench is not None:
            self._bench.trainer.bridge.close()
            self._bench = None
        if self._engine is not None:
            with _sparing_servers():
                self._engine.shutdown()
            self._engine = None

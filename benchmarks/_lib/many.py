"""Updates of very many tensors, all of them small: what the software takes for each.

`Lane` measures with a tree of rl_bridge's sources, in a process of its own, so that two commits can
take turns.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch

from _lib.cuts import placement
from rl_bridge import SharedMemoryTensorBridge as Bridge
from rl_bridge.engines import EngineCompat, ModelInstaller
from rl_bridge.engines.rank_bridges import EngineBridges
from rl_bridge.groups import GroupManifest
from rl_bridge.manifest.group_layout import GroupLayout

__all__ = ["Lane"]

_EXPERTS = 128
_ROWS, _COLUMNS = 16, 32

Sample = dict[str, float]


class Lane:
    """The process, from outside."""

    def __init__(self, tree: Path, num_tensors: int, ranks: int) -> None:
        """Start it, by the sources in `tree`."""
        paths = os.pathsep.join((str(tree), str(Path(__file__).resolve().parents[1])))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "_lib.many", str(num_tensors), str(ranks)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=tree,  # which Python looks into first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def update(self) -> Sample:
        """One version; the first one has what is done once as well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        sample: Sample = json.loads(self._process.stdout.readline())
        return sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


# ---- in the process -----------------------------------------------------------------------------


class _Halves(torch.nn.Module):
    """One parameter for each tensor: the first half of its rows, as on one rank of two."""

    def __init__(self, num: int) -> None:
        super().__init__()
        for i in range(num):
            self.register_parameter(f"w{i}", _parameter(_ROWS // 2, _COLUMNS))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """What an engine's loader does."""
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor.chunk(2)[0])


class _Experts(torch.nn.Module):
    """One parameter for the tensors of 128 experts each, as engines fuse them."""

    def __init__(self, num: int) -> None:
        super().__init__()
        for i in range(num // _EXPERTS):
            self.register_parameter(f"w{i}", _parameter(_EXPERTS, _ROWS, _COLUMNS))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """What an engine's loader does."""
        for name, tensor in weights:
            layer, _, expert = name.partition(".")
            self.get_parameter(layer)[int(expert)].copy_(tensor)


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class _Clock:
    """Seconds of each step: on the clock, and of the processor."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        """What was done since the lap before."""
        now = self._now()
        for kind, first, last in zip(("_s", "_cpu_s"), self._last, now, strict=True):
            self._sample[name + kind] = last - first
        self._last = now


def _group(num: int, ranks: int) -> Iterator[Sample]:
    """Versions of many trainer ranks, straight into one of an engine's two ranks."""
    names, shape = [f"w{i}" for i in range(num)], (_ROWS // ranks, _COLUMNS)
    shards = [
        {name: torch.full(shape, i % 7, dtype=torch.bfloat16) for i, name in enumerate(names)}
        for _ in range(ranks)
    ]
    placements = [
        {name: placement(name, (_ROWS, _COLUMNS), 0, rank, ranks) for name in names}
        for rank in range(ranks)
    ]
    installer = ModelInstaller(_Halves(num), EngineCompat(), num_ranks=2)
    bridges, layout = EngineBridges("engine"), None
    with ExitStack() as stack:
        owners = [
            stack.enter_context(Bridge(source_worker="trainer", source_rank=rank, suspicious="off"))
            for rank in range(ranks)
        ]
        for version in count(1):
            parts = []
            for rank, (owner, tensors) in enumerate(zip(owners, shards, strict=True)):
                torch._foreach_add_(list(tensors.values()), 1)
                parts.append(
                    owner.publisher.publish(
                        tensors,
                        weight_version=version,
                        metadata={"layout": {"rank": rank, "world_size": ranks}},
                        is_part=True,
                    )
                )
            if layout is None:
                layout = GroupLayout.build([part.table for part in parts], placements)
            sample = Sample()
            clock = _Clock(sample)
            group = GroupManifest.build(parts, layout, [None] * ranks)
            clock.lap("group_merge")
            for owner, part in zip(owners, parts, strict=True):
                publisher: Any = owner.publisher  # an earlier commit's takes the digest
                is_later = hasattr(publisher, "show_group")
                publisher.join_group(part.update_id, group if is_later else group.header_digest)
            text = group.to_json(layout=version == 1)
            clock.begin()
            group = GroupManifest.from_json(text)
            known: Any = installer  # an earlier commit's has `needs`
            scope = (known.scope_of if hasattr(known, "scope_of") else known.needs)(group)
            mine, given = bridges.bring(group, 0, scope)
            clock.lap("group_read")
            _install(installer, mine, given)
            clock.lap("group_install")
            del given
            bridge = bridges.of(group, 0)
            bridge.acknowledge(group.update_id)
            bridge.release(group.update_id)
            for owner, part in zip(owners, parts, strict=True):
                owner.release(part.update_id)
            yield sample


def _experts(num: int) -> Iterator[Sample]:
    """Updates of one publisher into a model of fused experts."""
    shape, dtype = (_ROWS, _COLUMNS), torch.bfloat16
    tensors = {
        f"w{i // _EXPERTS}.{i % _EXPERTS}": torch.full(shape, i % 7, dtype=dtype)
        for i in range(num // _EXPERTS * _EXPERTS)
    }
    installer = ModelInstaller(_Experts(num), EngineCompat())
    with Bridge(source_worker="trainer", suspicious="off") as trainer, Bridge() as engine:
        for version in count(1):
            torch._foreach_add_(list(tensors.values()), 1)
            manifest = trainer.publish(tensors, weight_version=version)
            given = engine.import_update(manifest)
            sample = Sample()
            clock = _Clock(sample)
            _install(installer, manifest, given)
            clock.lap("experts_install")
            del given
            engine.acknowledge(manifest)
            engine.release(manifest)
            trainer.release(manifest)
            yield sample


def _install(installer: ModelInstaller, manifest: Any, tensors: Any) -> None:
    installer.prepare(manifest, tensors)
    installer.install(manifest, tensors)
    installer.prove()
    installer.commit()


def _serve(num: int, ranks: int) -> None:
    torch.set_num_threads(1)
    both = zip(_group(num, ranks), _experts(num), strict=True)
    for _ in sys.stdin:
        sample, more = next(both)
        print(json.dumps(sample | more), flush=True)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))

"""FSDP2 on two ranks, fan-in over NIXL: each of two engine ranks reads its share from both owners.

Nothing is gathered on the way. What each engine rank holds is compared with an independent full
gather by torch itself, cut as the engine cuts. `python fan_in.py [TRANSPORT]`
"""

import hashlib
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_bridge import FSDPWeightExtractor, ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.groups import (
    GroupPublisher,
    ProcessGroupExchange,
    TensorParallel,
    parallel,
)

STEPS = 4
OWNERS = 2
ENGINES = 2
TIMEOUT_S = 100
SPAWN = multiprocessing.get_context("spawn")
# Which dimension tensor-parallel engine ranks cut; what no pattern fits, each holds whole.
CUTS = {"*.up.*": 0, "*.down.weight": 1, "head.weight": 0}


class Block(torch.nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(9, 22)
        self.down = torch.nn.Linear(22, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    """Sizes that two FSDP ranks cannot share evenly, and two engine ranks can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 9)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(9, 14, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def share(rank: int, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What an engine rank holds of a whole tensor."""
    dim = TensorParallel(ENGINES, rank, CUTS).dim_of(name)
    return whole if dim is None else whole.chunk(ENGINES, dim)[rank].contiguous()


def sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes."""
    return {
        name: hashlib.sha256(one.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, one in tensors
    }


# ---- the trainer


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights, gathered by torch; every rank takes part."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def train(rank: int, engines: list[Connection], transport: str) -> None:
    """Train, and publish this rank's own part of each version."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (OWNERS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extractor = FSDPWeightExtractor(model, keep_buffers=True)

    with make_weight_bridge(transport, source_worker="trainer", source_rank=rank) as bridge:
        publisher = GroupPublisher(bridge, ProcessGroupExchange(), timeout_s=TIMEOUT_S)
        for version in range(STEPS + 1):  # version 0 is the initial sync, before the first rollout
            if version:
                tokens = torch.randint(0, 13, (8, 5))
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, 1:].flatten()
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            manifest = publisher.publish(
                extractor.local(), extractor.placements(), weight_version=version
            )
            # Rank 0 sends the manifest. The engines read the bytes from all ranks by themselves.
            for line in engines:
                line.send_bytes(manifest.to_json(layout=version == 0).encode())
            expected = gathered(model)
            for number, line in enumerate(engines):
                wanted = sums((name, share(number, name, one)) for name, one in expected.items())
                answer = hear(line)
                assert answer == {"version": version, "sums": wanted}, (number, answer["version"])
            dist.barrier()
            states = [one.state for one in publisher.consumers(manifest)]
            assert states == ["acknowledged"] * ENGINES, states
            publisher.release(manifest)
    for line in engines:
        line.send_bytes(b"stop")


def owner(rank: int, engines: list[Connection], transport: str, meet: str) -> None:
    """The process of a trainer's rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=OWNERS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    train(rank, engines, transport)
    dist.destroy_process_group()


# ---- the engine


def engine(rank: int, transport: str, line: Connection) -> None:
    """The process of an engine's rank: installs each version that it is told of."""
    torch.set_num_threads(1)
    weights = {
        name: torch.zeros_like(share(rank, name, one)) for name, one in Model().state_dict().items()
    }
    wanted = parallel(tensor=TensorParallel(ENGINES, rank, CUTS))
    with make_weight_bridge(
        transport, source_worker="engine", source_rank=rank, wanted=wanted
    ) as bridge:
        adapter = ModuleInstallAdapter(weights)
        with RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor:
            while (manifest := line.recv_bytes()) != b"stop":
                executor.update_weights(manifest.decode())
                held = {"version": executor.active_weight_version, "sums": sums(weights.items())}
                line.send_bytes(json.dumps(held).encode())


def hear(line: Connection) -> Any:
    """Wait for JSON."""
    if not line.poll(TIMEOUT_S):
        raise TimeoutError("the engine did not answer")
    return json.loads(line.recv_bytes())


def main() -> None:
    """Start all processes, and wait for them."""
    transport = sys.argv[1] if len(sys.argv) > 1 else "nixl"
    pairs = [SPAWN.Pipe() for _ in range(ENGINES)]
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        processes = [
            SPAWN.Process(target=engine, args=(rank, transport, there), daemon=True)
            for rank, (_, there) in enumerate(pairs)
        ]
        for rank in range(OWNERS):
            lines = [here for here, _ in pairs] if rank == 0 else []
            arguments = (rank, lines, transport, meet)
            processes.append(SPAWN.Process(target=owner, args=arguments, daemon=True))
        for process in processes:
            process.start()
        for pair in pairs:
            for line in pair:  # who waits for one that died is told at once
                line.close()
        for process in processes:
            process.join(TIMEOUT_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    assert codes == [0] * len(processes), codes
    print(
        f"{STEPS + 1} versions from {OWNERS} FSDP2 ranks in {ENGINES} engine ranks over "
        f"{transport}, equal to the byte"
    )


if __name__ == "__main__":
    main()

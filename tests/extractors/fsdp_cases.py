"""What the ranks of the FSDP tests run: they build a model, wrap it and report."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from rl_bridge.extractors.fsdp import FSDPExtractor
from tests.extractors.counting import Collectives
from tests.extractors.worlds import described, filled, local_report

WIDTH = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, 3)
        self.v_proj = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) + (self.k_proj(x) * self.v_proj(x)).sum(-1, keepdim=True)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Sizes that no two ranks can share evenly, a buffer, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.down.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.self_attn(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks between an embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)  # type: ignore[no-any-return]


def plain() -> Model:
    model = Model()
    filled(model)
    return model


def fsdp2() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2_mixed() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def fsdp2_columns() -> nn.Module:
    """Matrices are cut by columns, which are no contiguous memory of the whole."""
    model, mesh = plain(), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    even = [p for p in model.parameters() if p.ndim == 2 and p.shape[1] % 2 == 0]
    fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: Shard(1 if any(p is one for one in even) else 0),
    )
    return model


def hsdp2() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2_over_tensor_parallel() -> nn.Module:
    model, mesh = plain(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def fsdp1(**options: Any) -> nn.Module:
    cpu = torch.device("cpu")
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(plain(), auto_wrap_policy=policy, device_id=cpu, **options)


def fsdp1_original() -> nn.Module:
    return fsdp1(use_orig_params=True)


def fsdp1_flat() -> nn.Module:
    model = plain()
    for one in model.parameters():
        one.requires_grad = True  # this kind wants them alike
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )


def fsdp1_copies() -> nn.Module:
    return fsdp1(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp1_hybrid() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return fsdp1(use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh)


# ---- what is asked of them -----------------------------------------------------------------------


def built(build: str) -> nn.Module:
    return globals()[build]()  # type: ignore[no-any-return]


def local(build: str, dtype: str | None = None) -> Any:
    return local_report(FSDPExtractor(built(build), chunk_nbytes=300), dtype)


def full(build: str, dtype: str | None = None, chunk_nbytes: int = 300) -> Any:
    extractor = FSDPExtractor(built(build), chunk_nbytes=chunk_nbytes)
    wanted = None if dtype is None else getattr(torch, dtype)
    return described(list(extractor.extract_weights(wanted)))


def collectives(build: str) -> Any:
    """How many operations of which kind talk to other ranks."""
    model = built(build)
    counts = {}
    for call in ("metadata", "placements", "local", "full"):
        with Collectives() as counted:
            for _ in getattr(FSDPExtractor(model), call)(torch.bfloat16):
                pass
        counts[call] = len(counted.names)
    return counts

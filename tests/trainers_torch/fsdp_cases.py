"""What the ranks of the FSDP tests run: they build a model, wrap it and report."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from rl_bridge.errors import IncompatibleUpdate, WeightBridgeError
from rl_bridge.groups.exchange import ProcessGroupExchange
from rl_bridge.strategies.requests import WeightUpdateRequest
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from rl_bridge.trainers.fsdp import FSDPWeightExtractor
from rl_bridge.trainers.state_dict import StateDictExtractor
from tests.trainers_torch.counting import peak_nbytes
from tests.trainers_torch.publishing import peak_of_publications
from tests.trainers_torch.worlds import filled, full_report, local_report

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


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def sharded(model: Model, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp2() -> nn.Module:
    return sharded(plain(), line())


def fsdp2_mixed() -> nn.Module:
    model, policy = plain(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=line(), mp_policy=policy, reshard_after_forward=False)
    return model


def fsdp2_columns() -> nn.Module:
    """Matrices are cut by columns, which are no contiguous memory of the whole."""
    model = plain()
    even = [p for p in model.parameters() if p.ndim == 2 and p.shape[1] % 2 == 0]
    fully_shard(
        model,
        mesh=line(),
        shard_placement_fn=lambda p: Shard(1 if any(p is one for one in even) else 0),
    )
    return model


def hsdp2() -> nn.Module:
    return sharded(plain(), square("copies", "shards"))


def fsdp2_over_tensor_parallel() -> nn.Module:
    model, mesh = plain(), square("dp", "tp")
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return sharded(model, mesh["dp"])


def fsdp2_over_split_rows() -> nn.Module:
    """Copies, shards and tensor parallelism, of which two cut the same rows; norms on all ranks."""
    model, mesh = plain(), square("dp", "tp")
    parallelize_module(model, mesh["tp"], {"embed": ColwiseParallel(), "head": RowwiseParallel()})
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "self_attn.q_proj": ColwiseParallel()}
        parallelize_module(block, mesh["tp"], {**plan, "down": SequenceParallel()})
    return sharded(model, mesh["dp"])


def fsdp2_offloaded() -> nn.Module:
    return sharded(plain(), line(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_fewer_after_forward() -> nn.Module:
    """Between forward and backward pass two of four ranks together hold all of it."""
    return sharded(plain(), line(), reshard_after_forward=2)


def crossed() -> nn.Module:
    """Tensor parallelism along one dimension of the mesh here, along the other one there."""
    model, mesh = plain(), square("dp", "tp")
    parallelize_module(model.blocks[0], mesh["tp"], {"up": ColwiseParallel()})
    parallelize_module(model.blocks[1], mesh["dp"], {"up": ColwiseParallel()})
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
    strategy, mesh = ShardingStrategy.HYBRID_SHARD, square("copies", "shards")
    return fsdp1(use_orig_params=True, sharding_strategy=strategy, device_mesh=mesh)


# ---- what is asked of them -----------------------------------------------------------------------


def built(build: str) -> nn.Module:
    return globals()[build]()  # type: ignore[no-any-return]


def report(build: str, dtype: str | None = None) -> Any:
    return full_report(FSDPWeightExtractor(built(build), chunk_nbytes=300), dtype)


def local_after_forward(build: str) -> Any:
    model = built(build)
    extractor = FSDPWeightExtractor(model, chunk_nbytes=300)
    list(extractor.local())
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    before = [getattr(one, "device_mesh", None) for one in model.parameters()]
    found = local_report(extractor)
    assert before != [one.device_mesh for one in model.parameters()]  # type: ignore[attr-defined]
    return found


def trained(build: str) -> Any:
    model = built(build)
    extractor = FSDPWeightExtractor(model)
    before = {name: t for chunk in extractor.local() for name, t in chunk.items()}
    copies = {name: tensor.clone() for name, tensor in before.items()}
    loss = model(torch.tensor([[1, 2, 3]])).square().mean()
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3).step()
    after = {name: t for chunk in extractor.local() for name, t in chunk.items()}
    whole = {name: t for chunk in extractor.full() for name, t in chunk.items()}
    torchs = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in model.state_dict().items()
    }
    return {
        "as_gathered_by_torch": all(torch.equal(whole[name], torchs[name]) for name in torchs),
        "changed": any(not torch.equal(copies[name], after[name]) for name in after),
        "same_memory": all(before[n].data_ptr() == after[n].data_ptr() for n in after),
    }


def exchanged(build: str) -> bool:
    """After a load that exchanges the parameters, the new ones are read."""
    model = built(build)
    extractor = FSDPWeightExtractor(model)
    list(extractor.local())
    state = {
        name: DTensor.from_local(
            one.to_local() * 2,
            one.device_mesh,
            one.placements,
            shape=one.shape,
            stride=one.stride(),
        )
        if isinstance(one, DTensor)
        else one
        for name, one in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    got = {name: t for chunk in extractor.local() for name, t in chunk.items()}
    name = "blocks.0.up.weight"
    return torch.equal(got[name], state[name].to_local())


# ---- memory --------------------------------------------------------------------------------------


def wide(cut: str) -> nn.Module:
    """17 million elements, 64 MiB of float32, in small and large tensors."""
    layers = [nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1025)] * 4
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(128, 33), copy.deepcopy(one)) for one in layers)
    )
    if cut == "flat":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=torch.device("cpu")
        )
    fully_shard(
        model, mesh=line(), shard_placement_fn=lambda p: Shard(int(p.ndim > 1 and cut == "columns"))
    )
    return model


def wide_fsdp2() -> nn.Module:
    return wide("rows")


def wide_fsdp2_columns() -> nn.Module:
    return wide("columns")


def wide_fsdp1() -> nn.Module:
    return wide("flat")


def peak(build: str, call: str, chunk_nbytes: int, dtype: str | None = "bfloat16") -> Any:
    extractor = FSDPWeightExtractor(built(build), chunk_nbytes=chunk_nbytes)
    wanted = None if dtype is None else getattr(torch, dtype)
    for _ in getattr(extractor, call)(wanted):
        pass
    return peak_nbytes(getattr(extractor, call)(wanted))


def peak_of_publishing(build: str, port: int) -> Any:
    return peak_of_publications(
        FSDPWeightExtractor(built("fsdp2")), FSDPWeightExtractor(built(build)), port
    )


# ---- traps ---------------------------------------------------------------------------------------


def all_sent_is_contiguous(build: str) -> bool:
    sent: list[bool] = []
    whole = torch.distributed.broadcast

    def watched(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.is_contiguous())
        return whole(tensor, *arguments, **options)

    with mock.patch.object(torch.distributed, "broadcast", watched):
        for _ in FSDPWeightExtractor(built(build), chunk_nbytes=1 << 20).full():
            pass
    return bool(sent) and all(sent)


def uses_state_dicts(build: str) -> bool:
    model = built(build)
    with mock.patch.object(FullyShardedDataParallel, "state_dict") as called:
        for _ in FSDPWeightExtractor(model).full():
            pass
    return bool(called.called)


def refusals() -> Any:
    partial = nn.Linear(2, 2)
    sums = DTensor.from_local(torch.ones(2, 2), line(), [Partial()])
    partial.weight = nn.Parameter(sums)
    odd = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    flat = FullyShardedDataParallel(odd, device_id=torch.device("cpu"))
    answers = {"no_module": told(lambda: FSDPWeightExtractor(partial.state_dict()))}  # type: ignore[arg-type]
    answers["partial"] = told(lambda: FSDPWeightExtractor(partial).placements())
    answers["flat"] = told(lambda: FSDPWeightExtractor(flat).placements())
    masked = nn.Linear(2, 2)
    masked.register_buffer("mask", torch.eye(2).to_sparse())
    answers["sparse"] = told(lambda: FSDPWeightExtractor(masked).placements())
    return answers


def crossed_meshes() -> Any:
    """What is said of them without the mesh of all ranks, and what comes out with it."""
    model, mesh = crossed(), init_device_mesh("cpu", (2, 2))
    answer = told(lambda: FSDPWeightExtractor(model).placements())
    return {"without": answer, "with": local_report(FSDPWeightExtractor(model, mesh=mesh))}


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except IncompatibleUpdate as error:
        return str(error)
    return "nothing"


# ---- data parallelism, weights without elements, syncs by a strategy -----------------------------


def layers() -> torch.nn.Module:
    """A model of one layer under a name, and a buffer."""
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(3, 2), "norm": torch.nn.BatchNorm1d(2)})
    filled(model)
    return model


def data_parallel() -> Any:
    """What an extractor makes of such a model inside of torch's wrapper."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    wrapped = DistributedDataParallel(layers())
    return local_report(StateDictExtractor(wrapped, rank=rank, world_size=size))


def narrow() -> torch.nn.Module:
    """A layer with no inputs, one with no outputs, and one weight that is there."""
    model = torch.nn.Module()
    for name, shape in {"up": (3, 0), "down": (0, 3), "gain": (3,)}.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    return filled(model)


def without_elements() -> Any:
    """What a rank has of it, and gathers."""
    model = narrow()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return full_report(FSDPWeightExtractor(model))


class _Nobody:
    """Engines that take everything: what is asked here is what becomes of the trainer's ranks."""

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        pass


def syncs(versions: list[int]) -> list[str]:
    """What becomes on this rank of a sync of each version, in one process group."""
    return asyncio.run(_syncs(versions))


async def _syncs(versions: list[int]) -> list[str]:
    rank = torch.distributed.get_rank()
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    filled(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    extractor = FSDPWeightExtractor(model, chunk_nbytes=60)
    options = {"suspicious": "off"}
    config = WeightTransferConfig(is_colocated=True, timeout_s=20.0, trainer_options=options)
    strategy = make_transfer_strategy(config)
    info = await strategy.create_init_info()
    told = []
    with await strategy.create_sender(info, rank=rank, exchange=ProcessGroupExchange()) as sender:
        for version in versions:
            chunks = extractor.extract_weights()
            try:
                await sender.send_chunks(chunks, _Nobody(), weight_version=version)
            except WeightBridgeError as error:
                told.append(f"{type(error).__name__}: {error}")
            else:
                told.append("")
    return told

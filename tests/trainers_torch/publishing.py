"""Trainers that publish shards to real engines: what each rank runs, and how a test commands them.

A rank holds a shard of two sets of weights, and publishes one of them at a time. No rank sees the
whole model after the start: what its publication asked of other ranks is counted.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_bridge import (
    DeepSpeedWeightExtractor,
    FSDPWeightExtractor,
    MegatronWeightExtractor,
    RolloutExecutor,
    WeightExtractor,
    make_weight_bridge,
)
from rl_bridge.errors import ChecksumMismatch, WeightBridgeError
from rl_bridge.groups import GroupManifest, GroupPublisher, StoreExchange
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.testing.processes import free_port
from tests.trainers_torch.counting import Collectives, peak_nbytes
from tests.trainers_torch.elsewhere import Elsewhere

TIMEOUT_S = 60.0

# ---- in a rank -----------------------------------------------------------------------------------


class _Trainer(NamedTuple):
    extractor: WeightExtractor
    hold: Callable[[int], None]
    """Have the model be that set of weights."""
    publisher: GroupPublisher


_trainers: list[_Trainer] = []


def publisher_at(port: int, transport: str = "shared-memory") -> GroupPublisher:
    """This rank's; the ranks meet in a store at that port, and ask each other nothing by Gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False
    )
    bridge = make_weight_bridge(
        transport, source_worker="trainer", source_rank=rank, suspicious="off", max_slots=2
    )
    exchange = StoreExchange(store, rank=rank, world_size=size)
    return GroupPublisher(bridge, exchange, timeout_s=TIMEOUT_S)


def peak_of_publications(small: WeightExtractor, large: WeightExtractor, port: int) -> Any:
    """A group's version of `large`: the growth, the bytes of this rank's shard, what was asked."""
    publisher = publisher_at(port)
    first = publisher.publish(small.local(), small.placements(), weight_version=1)
    publisher.release(first)  # what it takes once is taken by now
    placements = large.placements()
    shard = sum(chunk.total_size_bytes for chunk in large.local())

    def publishing() -> Iterator[Any]:
        yield publisher.publish(large.local(), placements, weight_version=2)

    with Collectives() as asked:
        peak, _ = peak_nbytes(publishing())
    dist.barrier()  # rank 0 has the store, which the others may still ask
    publisher.bridge.close()
    return peak, shard, asked.names


def publish(number: int, version: int) -> list[Any]:
    """Publish a set of weights; the manifest, and what other ranks were asked meanwhile."""
    (trainer,) = _trainers
    trainer.hold(number)
    with Collectives() as asked:
        manifest = trainer.publisher.publish(trainer.extractor, weight_version=version)
    return [manifest.to_json(), asked.names]


def release(update_id: str) -> None:
    """Release this rank's part."""
    _trainers[0].publisher.release(update_id)


def damage(manifest: str, rank: int, name: str) -> None:
    """Turn a byte of a tensor in the published part of `rank`, behind everybody's back."""
    if dist.get_rank() == rank:
        part = GroupManifest.from_json(manifest).parts[rank]
        end = _trainers[0].publisher.bridge.publisher.end
        address = arena_address(end, part.update_id, dict(part.handle))
        flip_byte(address + part.tensors[name].offset)


def told(manifest: str) -> list[list[Any]]:
    """What consumers told this rank: worker, its rank, state."""
    found = _trainers[0].publisher.consumers(GroupManifest.from_json(manifest))
    return [[one.worker, one.rank, one.state] for one in found]


def begin_fsdp2(paths: Sequence[str], port: int) -> None:
    """Layers are units of FSDP2, and so is the rest; the head is tied where there is none."""
    wholes = [load_file(Path(path) / "model.safetensors") for path in paths]
    model = _modules_of(wholes[0])
    if "lm_head.weight" not in wholes[0]:
        model.lm_head = nn.Module()
        model.lm_head.weight = model.get_parameter("model.embed_tokens.weight")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = [
        {name: _shard(whole[name], one) for name, one in model.named_parameters()}
        for whole in wholes
    ]
    del wholes

    def hold(number: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(shards[number][name])

    _trainers.append(_Trainer(FSDPWeightExtractor(model), hold, publisher_at(port)))


def adapted(paths: Sequence[str]) -> tuple[nn.Module, Callable[[int], None]]:
    """A model with an adapter of peft's under FSDP2, and what has it be one of two adapters.

    `paths` are a checkpoint's folder, and those of the adapters.
    """
    from peft import PeftModel, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base, *folders = paths
    wholes = [load_file(Path(folder) / "adapter_model.safetensors") for folder in folders]
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), folders[0], is_trainable=True
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    shards = []
    for whole in wholes:
        set_peft_model_state_dict(model, whole)
        shards.append({name: one.detach().clone() for name, one in trained.items()})
    fully_shard(model, mesh=mesh)

    def hold(number: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(_shard(shards[number][name], parameter))

    return model, hold


def begin_adapter(paths: Sequence[str], port: int, transport: str) -> None:
    """The adapter of a model under FSDP2."""
    model, hold = adapted(paths)
    extractor = FSDPWeightExtractor(model, adapter="policy")
    _trainers.append(_Trainer(extractor, hold, publisher_at(port, transport)))


def begin_megatron(paths: Sequence[str], port: int) -> None:
    """Two stages of two tensor-parallel ranks; mbridge loads them, and gives the names."""
    from tests.trainers.megatron_cases import loaded

    bridge, stages = loaded(paths[0], tp=2, pp=2)
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    shards = []
    for path in paths:
        bridge.load_weights(stages, path)
        shards.append([parameter.detach().clone() for parameter in parameters])

    def hold(number: int) -> None:
        with torch.no_grad():
            for parameter, shard in zip(parameters, shards[number], strict=True):
                parameter.copy_(shard)

    _trainers.append(
        _Trainer(MegatronWeightExtractor(stages, bridge=bridge), hold, publisher_at(port))
    )


def begin_zero3(paths: Sequence[str], port: int) -> None:
    """Ranges of elements on every rank, by DeepSpeed's ZeRO-3."""
    import deepspeed

    from tests.trainers.deepspeed_cases import engine

    wholes = [load_file(Path(path) / "model.safetensors") for path in paths]
    trained = engine(3, model=_modules_of(wholes[0]))

    def hold(number: int) -> None:
        named = dict(trained.module.named_parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(list(named.values()), 0):
            if dist.get_rank() == 0:
                for name, parameter in named.items():
                    parameter.copy_(wholes[number][name])

    _trainers.append(_Trainer(DeepSpeedWeightExtractor(trained), hold, publisher_at(port)))


def _modules_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A model with these parameters. It cannot be called: nobody asks for what it computes."""
    model = nn.Module()
    for name, tensor in tensors.items():
        module, (*path, last) = model, name.split(".")
        for word in path:
            if not hasattr(module, word):
                module.add_module(word, nn.Module())
            module = module.get_submodule(word)
        module.register_parameter(last, nn.Parameter(tensor.clone()))
    return model


def _shard(whole: torch.Tensor, like: torch.Tensor) -> DTensor:
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


# ---- in the test ---------------------------------------------------------------------------------


_VERSIONS = itertools.count(1)


class RealTrainer:
    """A trainer's ranks. Where one was killed, the next version comes of ranks started anew."""

    def __init__(
        self, ranks: Elsewhere, begin: str, paths: Sequence[str], **options: object
    ) -> None:
        """Have ranks begin with this function, with the checkpoints of both sets of weights."""
        self._ranks = ranks
        self._begin = begin
        self._options = {"paths": list(paths), **options}
        self.pids: list[int] = []
        """The processes that published last."""
        self._held: list[GroupManifest] = []
        self.asked: list[str] = []
        """Collectives that publishing called, on any rank."""

    def publish(self, number: int) -> GroupManifest:
        """Publish the next version on all ranks; the one before the last is released."""
        if self.pids != self._ranks.ask("pids"):
            self._run(self._begin, port=free_port(), **self._options)
            self.pids, self._held = self._ranks.ask("pids"), []
        while len(self._held) > 1:
            self._run("release", update_id=self._held.pop(0).update_id)
        done = self._run("publish", number=number, version=next(_VERSIONS))
        (text,) = {text for text, _ in done}
        self.asked += [name for _, names in done for name in names]
        self._held.append(GroupManifest.from_json(text))
        return self._held[-1]

    def _run(self, case: str, **options: Any) -> list[Any]:
        return list(self._ranks.ask("run", case=case, **options))

    def damage(self, manifest: GroupManifest, rank: int, name: str) -> None:
        """Turn a byte of a tensor in the part of `rank`."""
        self._run("damage", manifest=manifest.to_json(), rank=rank, name=name)

    def told(self, manifest: GroupManifest) -> set[tuple[str, int, str]]:
        """What consumers told each rank, and all the same: worker, its rank, state."""
        each = self._run("told", manifest=manifest.to_json())
        (said,) = {frozenset(map(tuple, one)) for one in each}
        return set(said)

    def kill(self, rank: int) -> None:
        """Kill a rank, as it happens; the others, which miss it in all that they do, go too."""
        self._ranks.ask("kill", rank=rank)
        self.end()

    def end(self) -> None:
        """End all ranks: the next version comes of ranks started anew."""
        self._ranks.ask("kill")


@dataclass(kw_only=True)
class Updates:
    """Updates of a running engine by a trainer's ranks, with failures between them.

    Attributes:
        worker: what the engine's ranks are called to the trainer.
        damaged: a tensor of the trainer's, to be damaged.
        damage_says: what an engine rank says of it.
        holds: which of the two sets of weights the engine has.

    """

    executor: RolloutExecutor
    trainer: RealTrainer
    worker: str
    damaged: str
    damage_says: str = "part of rank 3"
    holds: int = 0

    def plant(self) -> None:
        """Let engine rank 1 fail within its next installation."""
        raise NotImplementedError

    def uproot(self) -> None:
        """No rank fails any more."""
        raise NotImplementedError

    def check(self, what: str) -> None:
        """The engine is idle, and answers as a fresh one that holds the same."""
        raise NotImplementedError

    def publish(self) -> GroupManifest:
        """Publish the set that the engine does not hold."""
        return self.trainer.publish(1 - self.holds)

    def update(self) -> GroupManifest:
        """Install the set that the engine did not hold."""
        manifest = self.publish()
        self.executor.update_weights(manifest)
        self.holds = 1 - self.holds
        return manifest

    def an_engine_rank_fails(self) -> None:
        """In the middle; the other is undone."""
        self.plant()
        with pytest.raises(WeightBridgeError, match=r"rank 1: .*planted"):
            self.executor.update_weights(self.publish())
        self.uproot()

    def a_byte_goes_bad(self) -> None:
        """In the memory of a trainer's rank."""
        manifest = self.publish()
        self.trainer.damage(manifest, 3, self.damaged)
        with pytest.raises(ChecksumMismatch, match=self.damage_says):
            self.executor.update_weights(manifest)

    def a_trainer_rank_is_killed(self) -> None:
        """Before the engine's ranks import."""
        # Of memory that an engine rank has mapped by now it would need no publisher.
        self.trainer.end()
        manifest = self.publish()
        self.trainer.kill(2)
        with pytest.raises(WeightBridgeError, match="cannot be opened"):
            self.executor.update_weights(manifest)

    def failures(self) -> list[Callable[[], None]]:
        """What goes wrong, in turn."""
        return [self.an_engine_rank_fails, self.a_byte_goes_bad, self.a_trainer_rank_is_killed]

    def alternate(self, times: int, failures: Sequence[Callable[[], None]] = ()) -> None:
        """Something goes wrong and changes nothing, and an update lands; so many times."""
        failures = failures or self.failures()
        for turn in range(times):
            fails = failures[turn % len(failures)]
            fails()
            self.check(fails.__name__)
            manifest = self.update()
            self.check(f"update {turn}")
            ack = self.executor.last_ack
            assert ack is not None
            assert ack.proof.root == manifest.root
            assert ack.proof.method.startswith("digest")
            # The driver's process read nothing of it, and the trainer's ranks gathered nothing.
            assert "assemble" not in ack.timings_ms
            assert self.trainer.asked == []
            assert self.trainer.told(manifest) == {
                ("rollout", 0, "acknowledged"),
                (self.worker, 0, "released"),
                (self.worker, 1, "released"),
            }

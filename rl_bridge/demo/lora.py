"""The demo's LoRA: an adapter that two ranks train under FSDP2, and publish without a gather.

The base is a Qwen3 with random weights, which trainer and engine have from the same seed; only the
adapter is trained, and only the adapter travels. Each rank has a half of the batch and a shard of
every matrix.
"""

import importlib
import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.demo.learning import Learner, SampleBatch, SortTask
from rl_bridge.demo.qwen import LEARNER, QwenPolicy, build_qwen
from rl_bridge.demo.ranks import Published, TrainerRanks
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.groups.exchange import ProcessGroupExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.testing.processes import Child, ChildDied
from rl_bridge.trainers.fsdp import FSDPWeightExtractor

ADAPTER = "policy"
RANK = 16
"""The rank of the adapter's matrices."""
_NUM_RANKS = 2
_DEADLINE_S = 120.0
# An adapter does not change the head: it must be able to tell digits apart as it is.
_HEAD_SCALE = 0.15
_LEARNER = replace(LEARNER, epochs=4)


def build_base(task: SortTask, seed: int) -> QwenPolicy:
    """Make the base from a seed and leave the global random state as it was."""
    policy = build_qwen(task, seed)
    generator = torch.Generator().manual_seed(seed)
    nn.init.normal_(policy.model.lm_head.weight, std=_HEAD_SCALE, generator=generator)
    return policy


def build_adapted(task: SortTask, seed: int) -> QwenPolicy:
    """Make the base with a fresh adapter, which changes nothing yet."""
    peft: Any = importlib.import_module("peft")
    policy = build_base(task, seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy.model = peft.get_peft_model(policy.model, config)
    return policy


def _trained(policy: QwenPolicy) -> dict[str, nn.Parameter]:
    return {name: one for name, one in policy.named_parameters() if one.requires_grad}


class LoRARank:
    """One rank, in a process of its own. All ranks are asked the same at the same time."""

    def __init__(
        self,
        *,
        rank: int,
        meeting: str,
        transport: str,
        task: dict[str, int],
        seed: int,
        num_steps: int,
    ) -> None:
        """Meet the other rank, and shard the policy."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else by the host's name, which may lead nowhere
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=_NUM_RANKS,
            timeout=timedelta(seconds=_DEADLINE_S),
        )
        self._rank, self._task = rank, SortTask(**task)
        self._policy = build_adapted(self._task, seed)
        mesh = init_device_mesh("cpu", (_NUM_RANKS,))
        for module in self._policy.model.modules():
            if type(module).__name__ == "Qwen3DecoderLayer":
                fully_shard(module, mesh=mesh)
        fully_shard(self._policy.model, mesh=mesh)
        self._learner = Learner(self._policy, num_steps=num_steps, config=_LEARNER)
        self._extractor = FSDPWeightExtractor(self._policy.model, adapter=ADAPTER)
        bridge = make_weight_bridge(transport, source_worker="trainer", source_rank=rank)
        self._publisher = GroupPublisher(bridge, ProcessGroupExchange(), timeout_s=_DEADLINE_S)
        self._published: dict[str, GroupManifest] = {}

    def publish(self, version: int) -> list[Any]:
        """Publish this rank's shards: the manifest of all ranks', and what each phase took."""
        manifest = self._publisher.publish(self._extractor, weight_version=version)
        self._published[manifest.update_id] = manifest
        part = manifest.parts[self._rank]
        return [manifest.to_json(), self._publisher.bridge.timings(part.update_id)]

    def damage(self, update_id: str) -> None:
        """Flip a byte of what rank 1 has published."""
        part = self._published[update_id].parts[self._rank]
        if self._rank == 1:
            end = self._publisher.bridge.publisher.end
            address = arena_address(end, part.update_id, dict(part.handle))
            flip_byte(address + part.table.offsets[0])

    def release(self, update_id: str) -> None:
        """Take a version back."""
        self._publisher.release(self._published.pop(update_id).update_id)

    def learn(self, tokens: list[Any], log_probs: list[Any], group_size: int) -> float:
        """Improve the policy on a batch, of which this rank has its half."""
        own, their_log_probs = (
            torch.tensor(one).chunk(_NUM_RANKS)[self._rank] for one in (tokens, log_probs)
        )
        return self._learner.update(
            SampleBatch.graded(self._task, own, their_log_probs, group_size)
        )

    def save(self, path: str) -> None:
        """Gather the adapter, for the judge: rank 0 writes it."""
        whole = {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).detach()
            for name, one in _trained(self._policy).items()
        }
        if self._rank == 0:
            files: Any = importlib.import_module("safetensors.torch")
            files.save_file(whole, path)

    def close(self) -> None:
        """Take back what was published, and leave."""
        self._publisher.bridge.close()
        dist.destroy_process_group()


class _RankProcess(Child):
    is_daemon: ClassVar[bool] = False  # NIXL's publisher starts a process that serves


class LoRARanks(TrainerRanks):
    """Two ranks in processes of their own."""

    def __init__(self, task: SortTask, *, transport: str, seed: int, num_steps: int) -> None:
        """Start them."""
        self._folder = tempfile.TemporaryDirectory()
        self._state = Path(self._folder.name) / "state"
        self._ranks = [
            _RankProcess(
                LoRARank,
                rank=rank,
                meeting=str(Path(self._folder.name) / "meeting"),
                transport=transport,
                task={"num_digits": task.num_digits, "base": task.base},
                seed=seed,
                num_steps=num_steps,
            )
            for rank in range(_NUM_RANKS)
        ]
        with ExitStack() as stack:  # else a rank that failed would leave the other one
            stack.callback(self._folder.cleanup)
            for one in self._ranks:
                stack.enter_context(one)
            for one in self._ranks:
                one.ready(deadline_s=_DEADLINE_S)
            self._closing = stack.pop_all()

    def publish(self, version: int) -> Published:
        """See `TrainerRanks`."""
        text, timings_ms = self._ask("publish", version=version)
        return Published(GroupManifest.from_json(text), timings_ms)

    def state(self) -> dict[str, Tensor]:
        """See `TrainerRanks`."""
        self._ask("save", path=str(self._state))
        files: Any = importlib.import_module("safetensors.torch")
        state: dict[str, Tensor] = files.load_file(self._state)
        return state

    def damage(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        self._ask("damage", update_id=manifest.update_id)

    def release(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        self._ask("release", update_id=manifest.update_id)

    def learn(self, batch: SampleBatch) -> float:
        """See `TrainerRanks`."""
        entropy: float = self._ask("learn", **batch.document())
        return entropy

    def close(self) -> None:
        """See `TrainerRanks`. A rank that does not end in time is killed."""
        with self._closing, suppress(ChildDied, DeadlineExceeded):
            self._ask("close")
            for one in self._ranks:
                one.stop()

    def _ask(self, name: str, **options: Any) -> Any:
        """Ask all ranks together, and return what rank 0 says."""
        for one in self._ranks:
            one.tell(name, **options)
        first, *_ = [one.answer(deadline_s=_DEADLINE_S) for one in self._ranks]
        return first

"""What LoRA adapters promise in any engine: the tests that vLLM and SGLang both run."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.compat.skyrl import LORA_DISK_LOAD, LoRADiskLoader
from rl_bridge.engines.lora_slots import SlotInstaller
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    SessionRefused,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.base import TransactionalAdapter
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.trainers import write_peft
from tests.engines.faults import patch
from tests.engines.models import ADAPTER, Checkpoints

# As `docs/explanation/vllm-traps.md` names them, where each has its upstream link.
DAMAGES = {
    "gate-and-up-swapped": "swap gate and up",
    "B-scaled-twice": "scale B twice",
    # Of an earlier version in the same slot, which had a larger rank.
    "rest-of-a-larger-rank": "leave what was behind the rank",
    # The slot of another version.
    "slot-never-written": "leave the slot empty",
    "under-an-id-that-no-request-has": "drop it",
}


@dataclass
class Slot:
    """What of a slot is damaged: B of gate and up, A of the first module, and what empties it."""

    gate: torch.Tensor
    up: torch.Tensor
    first: torch.Tensor
    empty: Callable[[], object]


def damage_slots(what: str, slot_of: Callable[[Any, int], Slot]) -> None:
    """Let the slot of each adapter that is staged in this process hold something else."""
    original = vars(SlotInstaller)["stage"]

    def stage(installer: Any, version: Any, *given: Any) -> None:
        original(installer, version, *given)
        slot = slot_of(installer._manager, installer.slot_of(version))
        if what == "swap gate and up":
            kept = slot.gate.clone()
            slot.gate.copy_(slot.up)
            slot.up.copy_(kept)
        elif what == "scale B twice":
            slot.gate.mul_(2)
        elif what == "leave what was behind the rank":
            slot.first[-1, -1] = 1
        elif what == "leave the slot empty":
            slot.empty()
        else:
            installer.free_slot(version)

    patch(SlotInstaller, "stage", stage)


@dataclass
class Adapted(ABC):
    """An engine, a trainer's bridge, and what a fresh engine answers with each adapter."""

    engine: Any
    executor: RolloutExecutor
    bridge: TensorBridge
    fresh: list[Any]
    """Answers with no adapter, with each of two, and perhaps with one of half their rank."""
    weights: list[dict[str, torch.Tensor]]
    count: int = 0
    manifests: list[WeightUpdateManifest] = field(default_factory=list)

    @abstractmethod
    def asked(self, request: Any) -> Any:
        """What the engine answers to requests for this adapter; None is without one."""

    def publish(
        self,
        number: int,
        changes: Mapping[str, torch.Tensor] | None = None,
        *,
        name: str = "policy",
    ) -> WeightUpdateManifest:
        weights = {**self.weights[number], **(changes or {})}
        return self.publish_as(spec_of(self.weights[number], name), weights)

    def publish_as(
        self, spec: AdapterSpec, weights: Mapping[str, torch.Tensor]
    ) -> WeightUpdateManifest:
        for earlier in self.manifests[-1:]:
            self.bridge.release(earlier.update_id)
        self.count += 1
        manifest = self.bridge.publish(weights, weight_version=self.count, adapter=spec)
        self.manifests = [*self.manifests[-1:], manifest]
        return manifest

    def update(self, number: int, *, name: str = "policy") -> int:
        manifest = self.publish(number, name=name)
        self.executor.update_weights(manifest)
        return manifest.weight_version

    def answers(self, name: str = "policy", version: int | None = None) -> Any:
        return self.asked(self.executor.lora_request(name, version))


@dataclass
class Breakable(Adapted):
    """The same of an engine in whose ranks faults are planted."""

    ranks: range = range(1)

    @abstractmethod
    def driver(self) -> TransactionalAdapter:
        """Another driver of the engine."""

    @abstractmethod
    def plant(self, step: str, rank: int) -> None:
        """Let a step fail in a rank."""

    @abstractmethod
    def damage(self, what: str) -> None:
        """Let the slot of each adapter that is staged hold something else: see `DAMAGES`."""

    @abstractmethod
    def drop_all(self) -> None:
        """Drop all adapters, behind the back of those who have installed them."""

    @abstractmethod
    def uproot(self) -> None:
        """Take the fault out."""


def spec_of(weights: Mapping[str, torch.Tensor], name: str = "policy") -> AdapterSpec:
    """What an adapter of these matrices says of itself."""
    rank = next(len(one) for one_name, one in weights.items() if "lora_A" in one_name)
    return AdapterSpec.of_peft(name, {**ADAPTER, "r": rank}, [])


def shapes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in weights.items()}


def renamed(weights: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): one for name, one in weights.items()}


def of_rank(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(
            *((rank, one.shape[1]) if "lora_A" in name else (one.shape[0], rank)), dtype=one.dtype
        )
        for name, one in weights.items()
    }


def cut_to_rank(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        name: (one[:rank] if "lora_A" in name else one[:, :rank]).contiguous()
        for name, one in weights.items()
    }


# ---- many versions -------------------------------------------------------------------------------

_COMPARED = 60  # updates whose tokens are compared, each; of more of them a fifth
LONG_RUNS = pytest.mark.parametrize("updates", [16, pytest.param(1000, marks=pytest.mark.full)])


def check_a_long_run(engine: Adapted, updates: int) -> None:
    """Many versions of two adapters: the right tokens, and afterwards nothing is held but before.

    That counts for this process and all that it has started, an engine's ranks or a server's.
    """
    for number in range(max(updates // 5, min(updates, _COMPARED))):
        engine.update(number % 2)
        assert engine.answers() == engine.fresh[1 + number % 2]
    before, names = held(), set(Path("/dev/shm").iterdir())
    # Without a request: the first one in each block of keys and values takes memory for good.
    for number in range(updates):
        engine.update(number % 2)
    after = held()
    grown = {
        pid: (after[pid][0] - descriptors, (after[pid][1] - memory) >> 10)
        for pid, (descriptors, memory) in before.items()
    }
    # (Fewer, where a server had not yet closed the connection of a client that has gone.)
    assert all(more <= 0 and mib < 4 for more, mib in grown.values()), grown
    # Others on this machine have names there too; what leaks would be there once for each version.
    assert len(set(Path("/dev/shm").iterdir()) - names) < updates // 4
    assert engine.answers() == engine.fresh[1 + (updates - 1) % 2]
    engine.executor.lora_request("policy", engine.count - 1)  # the one before, and no older one
    with pytest.raises(UnknownUpdate):
        engine.executor.lora_request("policy", engine.count - 2)


def held() -> dict[int, tuple[int, int]]:
    """Of this process and all below it: descriptors, and resident memory of its own in KiB."""
    found, left = {}, [os.getpid()]
    while left:
        pid = left.pop()
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        left += [int(child) for path in lists for child in path.read_text().split()]
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        if "RssAnon" in status:  # else it has ended, and nobody has asked for its exit yet
            memory = int(status["RssAnon"].split()[0])
            found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir())), memory
    return found


# ---- the suite -----------------------------------------------------------------------------------


class AdapterSuite:
    """Tests over a fixture `engine`, which gives a `Breakable`."""

    def test_every_version_answers_as_a_fresh_engine_that_read_it_from_files(
        self, engine: Breakable
    ) -> None:
        for number in (0, 1, 0, 1):
            version = engine.update(number)
            assert engine.answers() == engine.fresh[1 + number]
            assert engine.asked(None) == engine.fresh[0]
            assert engine.executor.adapter_version("policy") == version
            ack = engine.executor.last_ack
            assert ack is not None
            assert (ack.weight_version, ack.proof.method, ack.proof.root) == (
                version,
                "digest",
                engine.manifests[-1].root,
            )
        assert engine.executor.active_weight_version is None  # of the engine's own weights

    def test_the_version_before_can_be_asked_for_and_older_ones_are_refused_by_name(
        self, engine: Breakable
    ) -> None:
        first, second, third = engine.update(0), engine.update(1), engine.update(0)
        assert engine.answers(version=second) == engine.fresh[2]
        assert engine.answers(version=third) == engine.fresh[1]
        with pytest.raises(UnknownUpdate, match=rf"version {first} of adapter 'policy'.*{third}"):
            engine.executor.lora_request("policy", first)

    def test_an_adapter_of_another_rank_and_one_of_other_scalings_are_right_in_the_same_slots(
        self, engine: Breakable
    ) -> None:
        for number in (0, 2, 1, 2):
            engine.update(number)
            assert engine.answers() == engine.fresh[1 + number]
        weights = engine.weights[0]
        twice = {
            name: 2 * one for name, one in weights.items() if name.endswith("q_proj.lora_B.weight")
        }
        engine.executor.update_weights(engine.publish(0, twice))
        due = engine.answers()
        assert due != engine.fresh[1]
        modules = [pair.module for pair in spec_of(weights).pairs(shapes_of(weights))]
        config = {**ADAPTER, "alpha_pattern": {"q_proj": 32}}
        spec = AdapterSpec.of_peft("policy", config, modules)
        assert set(spec.scalings.values()) == {4.0}
        engine.executor.update_weights(engine.publish_as(spec, weights))
        assert engine.answers() == due

    def test_a_number_that_a_trainer_gives_once_more_is_another_version_with_a_name_of_its_own(
        self, engine: Breakable
    ) -> None:
        version = engine.update(0)
        before = engine.executor.lora_request("policy")
        with make_weight_bridge("shared-memory", suspicious="off") as anew:  # began again
            weights = engine.weights[1]
            manifest = anew.publish(weights, weight_version=version, adapter=spec_of(weights))
            engine.executor.update_weights(manifest)
            assert engine.answers() == engine.fresh[2]
            assert engine.asked(before) == engine.fresh[1]
            engine.executor.recover()
            assert engine.answers() == engine.fresh[2]
        engine.update(0)
        assert engine.answers() == engine.fresh[1]

    def test_an_adapter_that_ends_leaves_its_slots_and_others_notice_nothing(
        self, engine: Breakable
    ) -> None:
        engine.update(0)
        engine.update(1)
        engine.update(1, name="other")
        engine.executor.drop_adapter("policy")
        with pytest.raises(UnknownUpdate, match=r"no LoRA adapter 'policy'.*\['other'\]"):
            engine.executor.lora_request("policy")
        for number in (0, 1, 0):  # it begins anew, with room for all of its versions
            engine.update(number)
            assert engine.answers() == engine.fresh[1 + number]
            assert engine.answers("other") == engine.fresh[2]
            if number:
                engine.executor.drop_adapter("policy")
        engine.executor.drop_adapter("other")
        assert engine.answers() == engine.fresh[1]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"v_proj.lora_B.weight": float("nan")}, r"lora_B\.weight'.*are NaN or Inf"),
            ({"q_proj.lora_A.weight": (8, 129)}, r"lora_A\.weight'.*expected 128 in dimension 1"),
            ({"o_proj.lora_B.weight": (64, 8)}, r"lora_B\.weight'.*expected 128 in dimension 0"),
        ],
    )
    def test_tensors_that_the_engine_cannot_serve_are_refused_by_name(
        self, engine: Breakable, changes: dict[str, Any], message: str
    ) -> None:
        engine.update(0)
        wrong = {}
        for end, value in changes.items():
            name = next(one for one in engine.weights[0] if one.endswith(end))
            is_shape = isinstance(value, tuple)
            wrong[name] = torch.ones(value) if is_shape else engine.weights[0][name] * value
        with pytest.raises(IncompatibleUpdate, match=message):
            engine.executor.update_weights(engine.publish(1, wrong))
        assert engine.answers() == engine.fresh[1]

    def test_an_adapter_that_the_engine_was_not_started_for_is_refused_by_name(
        self, engine: Breakable
    ) -> None:
        engine.update(0)
        weights = engine.weights[1]
        saved = weights | {"base_model.model.lm_head.weight": torch.ones(2, 2)}
        cases: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
            (renamed(weights, "q_proj", "w_pack"), {}, r"w_pack'.*it adapts .*'q_proj'"),
            (of_rank(weights, 32), {}, r"rank 32.*max_lora_rank=32"),
            (saved, {}, r"tensors beside its pairs.*lm_head\.weight"),
            (weights, {"bias": "lora_only"}, r"bias='lora_only', expected plain LoRA"),
            (weights, {"use_dora": True}, r"use_dora=True, expected plain LoRA"),
            (weights, {"alora_invocation_tokens": [3]}, r"alora_invocation_tokens"),
            (
                weights,
                {"init_lora_weights": "pissa_niter_4"},
                r"changes the trainer's base.*base_root",
            ),
        ]
        for wrong, config, message in cases:
            spec = AdapterSpec.of_peft("policy", {**ADAPTER, **config}, [])
            with pytest.raises(IncompatibleUpdate, match=message):
                engine.executor.update_weights(engine.publish_as(spec, wrong))
        assert engine.answers() == engine.fresh[1]

    @pytest.mark.parametrize("step", ["prepare", "install", "prove", "commit"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_failure_at_any_step_on_any_rank_leaves_the_version_before(
        self, engine: Breakable, step: str, rank: int
    ) -> None:
        if rank not in engine.ranks:
            pytest.skip("the engine has one rank")
        before = engine.update(0)
        engine.plant(step, rank)
        manifest = engine.publish(1)
        try:
            if step == "commit":  # proven on all ranks: forward is the only way
                engine.executor.update_weights(manifest)
                assert engine.executor.adapter_version("policy") == manifest.weight_version
                assert engine.answers() == engine.fresh[2]
            else:
                with pytest.raises(WeightBridgeError, match="planted in a rank"):
                    engine.executor.update_weights(manifest)
                assert engine.executor.adapter_version("policy") == before
                assert engine.answers() == engine.fresh[1]
        finally:
            engine.uproot()
        engine.update(1)
        assert engine.answers() == engine.fresh[2]

    @pytest.mark.parametrize("what", DAMAGES.values(), ids=DAMAGES)
    def test_a_slot_that_holds_anything_else_is_never_acknowledged(
        self, engine: Breakable, what: str
    ) -> None:
        engine.update(0)
        engine.damage(what)
        try:
            with pytest.raises(WeightBridgeError, match=r"is not what was published|is in no slot"):
                engine.executor.update_weights(engine.publish(1))
        finally:
            engine.uproot()
        assert engine.answers() == engine.fresh[1]
        engine.update(1)
        assert engine.answers() == engine.fresh[2]

    def test_a_byte_that_changed_on_its_way_is_found_and_the_version_before_serves(
        self, engine: Breakable
    ) -> None:
        engine.update(0)
        manifest = engine.publish(1)
        flip_byte(arena_address(engine.bridge.publisher.end, manifest.update_id, manifest.handle))
        with pytest.raises(ChecksumMismatch):
            engine.executor.update_weights(manifest)
        assert engine.answers() == engine.fresh[1]

    def test_a_second_driver_is_refused_by_name_and_takes_over_what_is_resident(
        self, engine: Breakable
    ) -> None:
        version = engine.update(0)
        with RolloutExecutor(
            weight_transport="shared-memory",
            weight_install_adapter=engine.driver(),
        ) as second:
            with pytest.raises(SessionRefused, match="one driver at a time"):
                second.update_weights(engine.publish(1))
            second.recover()
            second.update_weights(engine.publish(1))
            assert engine.asked(second.lora_request("policy")) == engine.fresh[2]
            assert engine.asked(second.lora_request("policy", version)) == engine.fresh[1]
        engine.executor.recover()
        engine.update(0)
        assert engine.answers() == engine.fresh[1]

    def test_what_something_else_dropped_is_not_asked_for_and_the_next_version_lands(
        self, engine: Breakable
    ) -> None:
        engine.update(0)
        engine.drop_all()
        engine.executor.recover()
        with pytest.raises(
            UnknownUpdate, match=r"any version of adapter 'policy', expected one of \[\]"
        ):
            engine.executor.lora_request("policy")
        engine.update(1)
        assert engine.answers() == engine.fresh[2]

    def test_a_directory_that_skyrl_names_is_installed_and_proven_and_a_bad_one_changes_nothing(
        self, engine: Breakable, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        def request(folder: str, **version: int) -> dict[str, Any]:
            return {"names": [LORA_DISK_LOAD], "extras": [{"lora_disk_path": folder, **version}]}

        engine.update(0)
        with LoRADiskLoader(engine.driver()) as loader:
            with pytest.raises(SessionRefused):  # the adapter is another driver's
                loader.load(request(checkpoints.adapter(1)))
            loader.executor.recover()
            for number in (1, 0):
                loader.load(request(checkpoints.adapter(number)))
                assert engine.asked(loader.lora_request()) == engine.fresh[1 + number]
                ack = loader.executor.last_ack
                assert ack is not None
                assert ack.proof.method == "digest"
            wrong = of_rank(engine.weights[0], 32)
            write_peft(tmp_path / "wrong", spec_of(wrong), wrong)
            with pytest.raises(IncompatibleUpdate, match="max_lora_rank=32"):
                loader.load(request(str(tmp_path / "wrong")))
            with pytest.raises(WeightBridgeUnavailableError, match="cannot be read"):
                loader.load(request(str(tmp_path / "none")))
            assert engine.asked(loader.lora_request()) == engine.fresh[1]
            for version in (7, 3):  # a trainer that goes back to an earlier step
                loader.load(request(checkpoints.adapter(1), weight_version=version))
                assert loader.executor.adapter_version("policy") == version
            assert engine.asked(loader.lora_request()) == engine.fresh[2]
        engine.executor.recover()

    @LONG_RUNS
    def test_a_long_run_leaves_as_much_memory_and_as_many_descriptors_as_it_found(
        self, engine: Breakable, updates: int
    ) -> None:
        check_a_long_run(engine, updates)

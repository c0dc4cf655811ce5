"""What installs into one rank's model: memory that is exchanged, and what must not be."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines import model_installer, staging
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.rank import EngineRank
from rl_bridge.engines.rpc import RankGroup
from rl_bridge.engines.sglang import host
from rl_bridge.engines.sglang.host import SGLangModelInstaller
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.engines.staging import Exchange
from rl_bridge.errors import (
    IncompatibleUpdate,
    ProofFailed,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.memory import vm

HIDDEN, ROWS, PADDED = 64, 48, 64


class Model(torch.nn.Module):
    """Fuses, ties, pads, slices out of the middle; as loaders of engines do."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.embed = torch.nn.Embedding(PADDED, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, PADDED, bias=False)
        self.head.weight = self.embed.weight
        self.fused = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.cut = torch.nn.Linear(HIDDEN // 2, HIDDEN, bias=False)
        self.register_buffer("positions", torch.arange(100.0), persistent=False)
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            if name == "embed":
                self.embed.weight.data[:ROWS].copy_(tensor)
                self.embed.weight.data[ROWS:].zero_()
            elif name == "cut":
                half = HIDDEN // 2
                self.cut.weight.data[:, :half].copy_(tensor[:, :half])
            else:
                kind, place = name.split(".")
                start = "qkv".index(place) * HIDDEN
                getattr(self.fused, kind).data[start : start + HIDDEN].copy_(tensor)


def version(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {"embed": (ROWS, HIDDEN), "cut": (HIDDEN, HIDDEN // 2)}
    for place in "qkv":
        sizes |= {f"weight.{place}": (HIDDEN, HIDDEN), f"bias.{place}": (HIDDEN,)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


class Driver:
    """Publishes versions, and installs them as an engine's rank does."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.model = model
        self.installer = ModelInstaller(model, EngineCompat(), num_threads=2, **options)
        self.bridge = make_weight_bridge("local", source_worker="trainer", nonfinite="off")
        self.count = 0

    def publish(self, seed: int) -> tuple[WeightUpdateManifest, dict[str, torch.Tensor]]:
        self.count += 1
        tensors = version(seed)
        manifest = self.bridge.publish(tensors, weight_version=self.count)
        self.bridge.release(manifest.update_id)
        return manifest, tensors

    def install(self, seed: int) -> None:
        manifest, tensors = self.publish(seed)
        self.installer.prepare(manifest, tensors)
        self.installer.install(manifest, tensors)
        assert self.installer.prove().root == manifest.root

    def update(self, seed: int) -> None:
        self.install(seed)
        self.installer.commit()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver(Model())
    with driver.bridge:
        yield driver


def loaded(seed: int) -> dict[str, torch.Tensor]:
    """What the model's own loader makes of a version."""
    model = Model()
    model.load_weights(version(seed).items())
    return held(model)


def held(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def places(model: Model) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_made_beside_is_what_the_loader_makes_of_it(driver: Driver) -> None:
    for seed in range(5):
        loads = driver.model.loads
        driver.update(seed)
        assert equal(held(driver.model), loaded(seed))
        assert driver.model.head.weight is driver.model.embed.weight
        assert driver.model.loads == loads


def test_numbers_are_looked_at_where_they_were_assembled_and_named_by_their_tensor(
    driver: Driver,
) -> None:
    most = torch.finfo(torch.float32).max
    for kind, value in enumerate((most, torch.nan)):
        tensors = version(kind) | {"weight.k": torch.full((HIDDEN, HIDDEN), value)}
        manifest = driver.bridge.publish(tensors, weight_version=kind + 1)
        if value == most:  # whose sum is infinite
            driver.installer.prepare(manifest, tensors)
            driver.installer.install(manifest, tensors)
            assert driver.installer.prove().root == manifest.root
            driver.installer.commit()
        else:
            with pytest.raises(IncompatibleUpdate, match=r"'weight.k': 4096 of its 4096 numbers"):
                driver.installer.prepare(manifest, tensors)
        driver.bridge.release(manifest.update_id)


def test_two_versions_take_turns_in_the_same_memory(driver: Driver) -> None:
    first = places(driver.model)
    seen = []
    for seed in range(6):
        driver.update(seed)
        seen.append(places(driver.model))
    assert not {*first.values()} & {*seen[0].values()}
    assert seen[1] != seen[2]
    assert seen[1:3] * 2 == seen[1:5]


def test_an_undo_gives_the_very_memory_back(driver: Driver) -> None:
    driver.update(1)
    before, memory = held(driver.model), places(driver.model)
    for seed in (2, 3):
        driver.install(seed)
        driver.installer.undo()
        assert places(driver.model) == memory
        assert equal(held(driver.model), before)
    driver.update(4)
    assert equal(held(driver.model), loaded(4))


def test_a_parameter_that_somebody_looks_at_keeps_its_memory_and_is_put_back(
    driver: Driver,
) -> None:
    driver.update(1)
    weight = driver.model.fused.weight
    view = weight.data[HIDDEN : 2 * HIDDEN]
    for seed in (2, 3, 4):  # the memory that is left over is no part of what serves
        driver.update(seed)
        assert equal(held(driver.model), loaded(seed))
        assert torch.equal(view, version(seed)["weight.k"])
    driver.install(5)
    driver.installer.undo()
    assert equal(held(driver.model), loaded(4))
    assert torch.equal(view, version(4)["weight.k"])
    del view
    for seed in (6, 7, 8):
        driver.update(seed)
        assert equal(held(driver.model), loaded(seed))


def test_memory_that_other_processes_map_keeps_its_place(driver: Driver) -> None:
    weight: Any = driver.model.cut.weight
    weight.data.share_memory_()
    place = weight.data_ptr()
    driver.update(1)
    assert weight.data_ptr() == place
    assert equal(held(driver.model), loaded(1))


def test_memory_that_serves_is_never_spare(driver: Driver) -> None:
    driver.update(1)
    live, spares = driver.model.fused.weight, driver.installer._spares
    spares.keep([(0, live.data)])
    plan = next(iter(driver.installer._plans.values()))
    taken = spares.take({i: plan.targets[i] for i in plan.steps})
    assert live.data_ptr() not in {memory.data_ptr() for memory in taken.values()}
    assert equal(held(driver.model), loaded(1))


def test_a_parameter_that_is_a_part_of_other_memory_gets_its_own(driver: Driver) -> None:
    memory = torch.zeros(HIDDEN, HIDDEN)
    part = torch.nn.Parameter(memory[:, HIDDEN // 2 :], requires_grad=False)
    driver.model.cut.weight = part
    del memory
    for seed in (1, 2):
        driver.update(seed)
        assert equal(held(driver.model), loaded(seed))


@pytest.mark.parametrize("done", [2, 9], ids=["half_way", "whole"])
def test_an_exchange_must_be_ended_before_a_loader_writes(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """Its undo has no copy of what the loader would write to."""
    driver.update(1)
    manifest, tensors = driver.publish(2)
    driver.installer.prepare(manifest, tensors)
    with monkeypatch.context() as patch:
        asked, is_alone = iter(range(done)), staging.is_alone

        def fail(live: torch.Tensor) -> bool:
            if next(asked, None) is None:
                raise MemoryError
            return is_alone(live)

        patch.setattr(staging, "is_alone", fail)
        with pytest.raises(MemoryError) if done < 4 else nullcontext():
            driver.installer.install(manifest, tensors)
    third, tensors = driver.publish(3)
    with pytest.raises(IncompatibleUpdate, match="Call undo first"):
        driver.installer.prepare(third, {})
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))
    driver.installer.prepare(third, {})
    driver.installer.begin()
    driver.model.load_weights(tensors.items())
    assert driver.installer.prove().root == third.root
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_a_view_of_a_version_that_was_undone_keeps_its_bytes(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.update(1)
    driver.install(2)
    view = driver.model.cut.weight.data[:2]
    bytes_of_two = view.clone()
    driver.installer.undo()
    told = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert told == [("cut.weight",)]
    assert equal(held(driver.model), loaded(1))
    for seed in (3, 4, 5):
        driver.update(seed)
        assert torch.equal(view, bytes_of_two)
        assert equal(held(driver.model), loaded(seed))


@pytest.mark.parametrize("is_looked_at", [False, True], ids=["alone", "looked_at"])
def test_parameters_that_somebody_looks_at_count_twice(
    driver: Driver, *, is_looked_at: bool
) -> None:
    """Once for the next version, once to go back."""
    needed = sum(parameter.nbytes for parameter in driver.model.parameters())
    view = driver.model.cut.weight.data if is_looked_at else None
    needed += 0 if view is None else view.nbytes
    compat = EngineCompat()

    def update(seed: int, nbytes: int) -> None:
        driver.installer = ModelInstaller(
            driver.model, compat, staging="beside", memory_budget_nbytes=nbytes
        )
        driver.update(seed)

    with pytest.raises(IncompatibleUpdate, match=f"takes {needed} bytes more"):
        update(1, needed - 1)
    update(2, needed)


def test_memory_that_the_machine_does_not_have_just_now_rejects_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(vm, "available_memory", lambda: 1)
        with pytest.raises(WeightBridgeUnavailableError, match="the machine has 1"):
            driver.update(1)
    driver.update(1)


def test_parameters_made_in_inference_mode_are_written_through(driver: Driver) -> None:
    with torch.inference_mode():
        weight = torch.nn.Parameter(torch.zeros(HIDDEN, HIDDEN // 2), requires_grad=False)
    driver.model.cut.weight = weight
    driver.installer = SGLangModelInstaller(driver.model)
    before = held(driver.model)
    manifest, tensors = driver.publish(1)
    driver.installer.prepare(manifest, tensors)
    driver.installer.install(manifest, tensors)
    proof = driver.installer.prove()
    assert (proof.root, proof.staging) == (manifest.root, "through")
    assert driver.model.cut.weight is weight
    driver.installer.undo()
    assert equal(held(driver.model), before)


def test_numbers_that_were_not_copied_are_found(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.update(1)
    monkeypatch.setattr(model_installer, "assemble", lambda *_, **__: None)
    with pytest.raises(ProofFailed, match=r"does not hold tensor|padding"):
        driver.install(2)
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(vm, "spare_pages"), (ModelInstaller, "commit")],
    ids=["behind_the_point_of_no_return", "before_it"],
)
def test_a_commit_that_failed_in_a_rank_may_be_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    model = Model()
    monkeypatch.setattr(host, "require_supported", lambda _: None)
    one = EngineRank(host.SGLangHost(model, lambda: True, RankGroup(0, 1)))
    with make_weight_bridge("local", source_worker="trainer") as trainer:
        for number in (1, 2, 3):
            manifest = trainer.publish(version(number), weight_version=number)
            one.prepare(manifest)
            one.install(manifest.update_id)
            with monkeypatch.context() as patch:
                if number == 2:  # the first one had no memory of ours to keep
                    patch.setattr(owner, name, fail)
                    with pytest.raises(MemoryError):
                        one.commit(manifest.update_id)
            one.commit(manifest.update_id)
            assert equal(held(model), loaded(number))
            assert one.commit(manifest.update_id) == {}


def test_an_undo_that_does_not_exchange_back_tears_the_engine(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.update(1)
    driver.install(2)
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "undo", lambda _: None)
        with pytest.raises(TornEngine):
            driver.installer.undo()
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_options_that_are_none_are_refused() -> None:
    made: Any = ModelInstaller
    with pytest.raises(TypeError, match="cast='yes': expected True or False"):
        made(Model(), EngineCompat(), cast="yes")
    with pytest.raises(ValueError, match=r"staging='aside': expected one of .*'through'"):
        made(Model(), EngineCompat(), staging="aside")


def test_a_snapshot_copies_what_has_two_names_once() -> None:
    model = Model()
    once = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert Snapshot(model)._plan.total_nbytes == sum(once.values())

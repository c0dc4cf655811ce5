"""A version that is written into the memory that serves, and the way back from any layer."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines import model_installer
from rl_bridge.engines.model_installer import ModelInstaller, layers_of
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import (
    IncompatibleUpdate,
    ProofFailed,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.memory import vm
from tests.installers.test_model_installer import (
    Model,
    equal,
    held,
    loaded,
    places,
    version,
)
from tests.peaks import peak_nbytes

LAYERS = ("embed", "fused", "cut")


class PlantedError(Exception):
    """What a test planted."""


class Driver:
    """Publishes in shared memory, imports, and installs as an engine's rank does."""

    def __init__(self, bridges: ExitStack, slots: int = 8, **options: Any) -> None:
        self.model = Model()
        self.options = options
        self.installer = self.make()
        self.trainer = bridges.enter_context(
            make_weight_bridge("shared-memory", source_worker="trainer", max_slots=slots)
        )
        self.bridge = bridges.enter_context(
            make_weight_bridge("shared-memory", source_worker="engine")
        )
        self.count = 0

    def make(self, **options: Any) -> ModelInstaller:
        return ModelInstaller(
            self.model, EngineCompat(), num_threads=2, **{**self.options, **options}
        )

    def publish(self, seed: int) -> tuple[WeightUpdateManifest, Mapping[str, torch.Tensor]]:
        self.count += 1
        manifest = self.trainer.publish(version(seed), weight_version=self.count)
        tensors = self.bridge.import_update(manifest)
        self.trainer.release(manifest.update_id)
        return manifest, tensors

    def install(self, seed: int) -> str:
        manifest, tensors = self.publish(seed)
        self.installer.prepare(manifest, tensors)
        self.installer.install(manifest, tensors)
        proof = self.installer.prove()
        assert proof.root == manifest.root
        assert proof.staging == self.installer.staging
        return manifest.update_id

    def commit(self, update_id: str) -> None:
        self.installer.commit()
        self.bridge.release_imported(update_id)

    def update(self, seed: int) -> str:
        update_id = self.install(seed)
        self.commit(update_id)
        assert equal(held(self.model), loaded(seed))
        return update_id


@pytest.fixture
def driver() -> Iterator[Driver]:
    with ExitStack() as bridges:
        yield Driver(bridges, staging="through")


def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """The copies of the model that are made."""
    made: list[Snapshot] = []

    def make(*args: Any, **options: Any) -> Snapshot:
        made.append(Snapshot(*args, **options))
        return made[-1]

    monkeypatch.setattr(model_installer, "Snapshot", make)
    return made


def plant(patch: pytest.MonkeyPatch, installer: ModelInstaller, layer: int) -> None:
    """Let the write of the n-th layer fail half-way."""
    write, calls = installer._write, iter(range(100))

    def fail(written: Any, groups: Any) -> Any:
        done = write(written, groups)
        if next(calls) == layer:
            raise PlantedError
        return done

    patch.setattr(installer, "_write", fail)


def test_versions_are_written_into_the_same_memory_and_copied_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, memory = snapshots(monkeypatch), places(driver.model)
    for seed in range(5):
        driver.update(seed)
        assert places(driver.model) == memory
    assert len(made) == 1, "only what the engine was started with"
    assert driver.model.loads == 0


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("updates", [0, 1, 3], ids=lambda count: f"behind_{count}")
def test_a_fault_at_any_layer_is_undone(driver: Driver, layer: int, updates: int) -> None:
    driver.model.load_weights(version(9).items())
    for seed in range(updates):
        driver.update(seed)
    before, memory = held(driver.model), places(driver.model)
    for seed in (5, 6):  # and what was refused wears nothing out
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, driver.installer, layer)
            with pytest.raises(PlantedError):
                driver.install(seed)
        assert not equal(held(driver.model), before)
        driver.installer.undo()
        assert equal(held(driver.model), before)
        assert places(driver.model) == memory
    driver.update(7)


def test_an_undo_that_fails_goes_on_where_it_is_called_again(driver: Driver) -> None:
    driver.update(1)
    driver.install(2)
    for layer in range(len(LAYERS)):
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, driver.installer, layer)
            with pytest.raises(PlantedError):
                driver.installer.undo()
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_an_undo_that_does_not_lead_back_tears_the_engine(driver: Driver) -> None:
    driver.update(1)
    driver.install(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.installer, "_write", lambda before, _: before.staged())
        with pytest.raises(TornEngine, match="version 1 was written once more"):
            driver.installer.undo()
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_what_somebody_wrote_into_the_tensors_before_does_not_come_back(driver: Driver) -> None:
    manifest, tensors = driver.publish(1)
    driver.installer.prepare(manifest, tensors)
    driver.installer.install(manifest, tensors)
    driver.installer.prove()
    driver.installer.commit()
    tensors["cut"].zero_()
    driver.install(2)
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


@pytest.mark.parametrize("by", ["a release", "another loader", "no lease"])
def test_a_copy_is_made_where_the_version_before_cannot_be_written_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    update_id = driver.update(1)
    made = snapshots(monkeypatch)
    if by == "a release":
        driver.installer.release(update_id)
    elif by == "another loader":
        driver.model.load_weights(version(4).items())
    else:  # somebody's own tensors, and he may write to them
        manifest, tensors = driver.publish(4)
        driver.installer.install(manifest, dict(tensors))
        driver.installer.prove()
        driver.commit(manifest.update_id)
        assert not made
    before = held(driver.model)
    driver.install(2)
    assert len(made) == 1
    driver.installer.undo()
    assert equal(held(driver.model), before)
    driver.update(3)
    driver.update(2)


def test_the_version_before_keeps_its_slot_and_no_other_one() -> None:
    with ExitStack() as bridges:
        driver = Driver(bridges, slots=2, staging="through")
        for seed in range(6):
            driver.update(seed)
            refused = driver.install(seed + 10)
            driver.installer.undo()
            driver.bridge.release_imported(refused)
            assert equal(held(driver.model), loaded(seed))


# ---- memory -------------------------------------------------------------------------------------


def test_the_budget_chooses_and_is_told_both_needs(driver: Driver) -> None:
    weights = sum(parameter.nbytes for parameter in driver.model.parameters())
    everything = Snapshot(driver.model)._plan.total_nbytes
    driver.installer = driver.make(staging=None, memory_budget_nbytes=weights - 1)
    both = rf"beside .* takes {weights} bytes more, .*; writing .* takes {everything} bytes more"
    with pytest.raises(IncompatibleUpdate, match=both):
        driver.install(1)
    driver.installer = driver.make(staging=None, memory_budget_nbytes=weights)
    driver.update(2)
    assert driver.installer.staging == "beside"
    view = driver.model.fused.weight.data  # which an exchange copies aside, too
    driver.installer = driver.make(staging=None, memory_budget_nbytes=everything)
    driver.update(3)
    assert driver.installer.staging == "through"
    driver.installer._budget = 0  # the version before is leased: nothing is copied any more
    driver.update(4)
    del view


def test_a_version_beside_one_that_was_written_through_needs_no_copy_of_it(driver: Driver) -> None:
    driver.update(1)
    weights = sum(parameter.nbytes for parameter in driver.model.parameters())
    driver.installer._chosen, driver.installer._budget = None, weights
    driver.update(2)
    assert driver.installer.staging == "beside"


def test_memory_that_the_machine_does_not_have_just_now_rejects_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.installer = driver.make(staging=None)
    with monkeypatch.context() as patch:
        patch.setattr(vm, "available_memory", lambda: 1)
        with pytest.raises(WeightBridgeUnavailableError, match=r"beside .* 1; writing .* has 1"):
            driver.update(1)
    driver.update(1)


def test_writing_through_takes_no_memory_beside(driver: Driver) -> None:
    driver.update(1)
    manifest, tensors = driver.publish(2)
    largest = max(parameter.nbytes for parameter in driver.model.parameters())

    def update() -> None:
        driver.installer.prepare(manifest, tensors)
        driver.installer.install(manifest, tensors)
        driver.installer.undo()
        driver.installer.prepare(manifest, tensors)
        driver.installer.install(manifest, tensors)

    assert peak_nbytes(update) < 1.1 * largest
    assert driver.installer.prove().root == manifest.root


# ---- one install behind another -----------------------------------------------------------------


def test_installs_that_are_not_committed_are_undone_together(driver: Driver) -> None:
    driver.update(1)
    driver.install(2)
    manifest, tensors = driver.publish(1)
    driver.installer.prepare(manifest, tensors)
    driver.installer.install(manifest, tensors)
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_the_engines_loader_must_not_write_before_the_undo(driver: Driver) -> None:
    driver.update(1)
    driver.install(2)
    third = driver.trainer.publish(version(3), weight_version=9)
    with pytest.raises(IncompatibleUpdate, match="Call undo first"):
        driver.installer.prepare(third, {})
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))
    driver.installer.prepare(third, {})
    driver.installer.begin()
    driver.model.load_weights(version(3).items())
    assert driver.installer.prove().root == third.root
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_numbers_that_were_not_written_are_found(driver: Driver) -> None:
    driver.update(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model_installer,
            "write_parameters",
            lambda plan, _, indexes, **__: [],
        )
        with pytest.raises(ProofFailed):
            driver.install(2)
    driver.installer.undo()
    assert equal(held(driver.model), loaded(1))


def test_layers_are_what_is_below_a_number_or_one_module() -> None:
    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Model() for _ in range(2))

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                _, number, rest = name.split(".", 2)
                part: Any = self.layers[int(number)]
                part.load_weights([(rest, tensor)])

    model = Deep()
    sent = {f"layers.{n}.{name}": one for n in range(2) for name, one in version(1).items()}
    with make_weight_bridge("local", source_worker="trainer") as bridge:
        manifest = bridge.publish(sent, weight_version=1)
        installer = ModelInstaller(model, EngineCompat(), staging="through")
        installer.install(manifest, sent)
        assert installer.prove().root == manifest.root
        plan = next(iter(installer._plans.values()))
        assert {name: len(groups) for name, groups in layers_of(plan).items()} == {
            "layers.0": 3,
            "layers.1": 3,
        }

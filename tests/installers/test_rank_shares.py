"""A rank of several reads its share of an update, and looks at nothing else of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import pytest
import torch

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.engines.staging import Assembled, Staged
from rl_bridge.engines.vllm.model_installer import _Making, _Packs
from rl_bridge.errors import ChecksumMismatch, IncompatibleUpdate, ProofFailed
from rl_bridge.manifest.digest import LEAF_NBYTES
from rl_bridge.memory.parts import PartNeeds, Scope
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory

RANKS, ROWS, COLUMNS = 2, 8, LEAF_NBYTES // 4
HALF = ROWS // RANKS


class Model(torch.nn.Module):
    """One rank of two: half of the rows of one tensor, all of another, half of a third's columns.

    A row of the first is one leaf.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        shapes = {"rows": (HALF, COLUMNS), "norm": (COLUMNS,), "columns": (4, COLUMNS // RANKS)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.requires_grad_(False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            mine = getattr(self, name).data
            dim = {"rows": 0, "columns": 1}.get(name)
            place = 0 if dim is None else self.rank * mine.shape[dim]
            mine.copy_(tensor.narrow(dim or 0, place, mine.shape[dim or 0]))


def weights(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {
        "rows": torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS),
        "norm": torch.ones(COLUMNS),
        "columns": torch.arange(4 * COLUMNS, dtype=torch.float32).view(4, COLUMNS),
    }
    return {**made, **changed}


class Rank:
    """A rank and its bridge."""

    def __init__(self, rank: int, bridge: TensorBridge) -> None:
        self.model = Model(rank)
        self.installer = ModelInstaller(self.model, EngineCompat(), num_ranks=RANKS)
        self.bridge = bridge

    def update(self, manifest: WeightUpdateManifest) -> str:
        needs = self.installer.scope_of(manifest)
        assert isinstance(needs, PartNeeds)
        tensors = self.bridge.consumer.import_update(manifest, scope=needs)
        self.installer.prepare(manifest, tensors)
        self.installer.install(manifest, tensors)
        root = self.installer.prove().root
        self.installer.commit()
        return root


@pytest.fixture
def faults() -> FaultInjecting:
    return FaultInjecting(SharedMemory())


@pytest.fixture
def trainer(faults: FaultInjecting) -> Iterator[TensorBridge]:
    with BridgeOver(faults) as bridge:
        yield bridge


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    with make_weight_bridge("shared-memory") as one, make_weight_bridge("shared-memory") as other:
        yield [Rank(0, one), Rank(1, other)]


def test_each_rank_installs_and_proves_from_its_share_alone(
    trainer: TensorBridge, ranks: list[Rank]
) -> None:
    sent = weights()
    manifest = trainer.publish(sent, weight_version=1)
    for place, rank in enumerate(ranks):
        assert rank.update(manifest) == manifest.root
        held = rank.model.state_dict()
        assert torch.equal(held["rows"], sent["rows"][place * HALF :][:HALF])
        assert torch.equal(held["norm"], sent["norm"])
        assert torch.equal(held["columns"], sent["columns"].chunk(RANKS, dim=1)[place])


def test_a_rank_reads_its_rows_and_not_those_of_the_other(
    trainer: TensorBridge, ranks: list[Rank]
) -> None:
    sent = weights()
    manifest = trainer.publish(sent, weight_version=1)
    rows = sent["rows"].nbytes // RANKS
    for rank in ranks:
        needs = rank.installer.scope_of(manifest)
        assert isinstance(needs, PartNeeds)
        # Columns that are narrower than a leaf share their leaves with the other rank's.
        assert int(needs.nbytes.sum()) == rows + sent["norm"].nbytes + sent["columns"].nbytes
        assert rank.installer.scope_of(manifest) is needs


def test_a_byte_that_only_the_other_rank_takes_is_its_own_to_refuse(
    trainer: TensorBridge, faults: FaultInjecting, ranks: list[Rank]
) -> None:
    manifest = trainer.publish(weights(), weight_version=1)
    faults.corrupt(manifest, manifest.tensors["rows"].offset + HALF * LEAF_NBYTES)
    assert ranks[0].update(manifest) == manifest.root
    with pytest.raises(
        ChecksumMismatch, match=r"'rows' in version 1: bytes 524288 to 1048576 are not"
    ):
        ranks[1].update(manifest)


def test_a_number_that_is_not_finite_is_refused_by_the_rank_that_takes_it(
    trainer: TensorBridge, ranks: list[Rank]
) -> None:
    rows = weights()["rows"]
    rows[HALF, 0] = torch.nan
    manifest = trainer.publish(weights(rows=rows), weight_version=1)
    assert ranks[0].update(manifest) == manifest.root
    with pytest.raises(IncompatibleUpdate, match="'rows': 1 of its 262144 numbers are NaN"):
        ranks[1].update(manifest)


def test_bytes_that_went_bad_after_the_import_are_not_installed(
    trainer: TensorBridge, faults: FaultInjecting, ranks: list[Rank]
) -> None:
    rank = ranks[1]
    manifest = trainer.publish(weights(), weight_version=1)
    needs = rank.installer.scope_of(manifest)
    assert isinstance(needs, PartNeeds)
    tensors = rank.bridge.consumer.import_update(manifest, scope=needs)
    faults.corrupt(manifest, manifest.tensors["rows"].offset + HALF * LEAF_NBYTES + 4)
    with pytest.raises(ProofFailed, match="went bad after it was imported"):
        rank.installer.prepare(manifest, tensors)
    assert not rank.model.state_dict()["rows"].any()


MOMENTS = ("published", "imported", "expected", "staged", "prepared", "installed")


class Watched(ModelInstaller):
    """Calls `at` between its steps; with `packs` as an engine whose packs answer for all."""

    def __init__(self, model: Model, at: Callable[[str], None], *, packs: bool) -> None:
        super().__init__(model, EngineCompat(), num_ranks=RANKS)
        self.at, self.packs = at, packs

    def _stage(
        self,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        staged: Staged,
        evidence: Evidence,
    ) -> AbstractSet[str]:
        self.at("expected")
        finite = super()._stage(plan, tensors, staged, evidence)
        self.at("staged")
        if not self.packs:
            return finite
        for index, memory in staged.memory.items():
            evidence.add(Assembled(index, memory, borrowed=False, replaced=True))
        return plan.taken


@pytest.mark.parametrize("packs", [False, True], ids=["kept", "packed"])
@pytest.mark.parametrize("name", ["rows", "norm", "columns"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_byte_that_changes_at_any_moment_is_found_or_was_not_taken(
    trainer: TensorBridge, faults: FaultInjecting, moment: str, name: str, *, packs: bool
) -> None:
    sent = weights()
    manifest = trainer.publish(sent, weight_version=1)

    def at(now: str) -> None:
        if now == moment:
            faults.corrupt(manifest, manifest.tensors[name].offset + 4)

    model = Model(0)
    installer = Watched(model, at, packs=packs)
    needs = installer.scope_of(manifest)
    assert isinstance(needs, PartNeeds)

    def update(bridge: TensorBridge) -> None:
        at("published")
        tensors = bridge.consumer.import_update(manifest, scope=needs)
        at("imported")
        installer.prepare(manifest, tensors)
        at("prepared")
        installer.install(manifest, tensors)
        at("installed")
        assert installer.prove().root == manifest.root

    with make_weight_bridge("shared-memory") as bridge:
        try:
            update(bridge)
        except (ChecksumMismatch, ProofFailed):
            installer.undo()
            assert not any(held.any() for held in model.state_dict().values())
            assert moment not in {"prepared", "installed"}
        else:
            assert moment not in {"published", "imported", "expected"}
            held = model.state_dict()
            assert torch.equal(held["rows"], sent["rows"][:HALF])
            assert torch.equal(held["norm"], sent["norm"])
            assert torch.equal(held["columns"], sent["columns"].chunk(RANKS, dim=1)[0])


def test_what_was_compared_as_it_was_packed_is_not_read_again(
    trainer: TensorBridge, faults: FaultInjecting
) -> None:
    manifest = trainer.publish(weights(), weight_version=1)
    model = Model(0)

    def at(now: str) -> None:
        if now == "staged":
            faults.corrupt(manifest, manifest.tensors["rows"].offset)

    installer = Watched(model, at, packs=True)
    needs = installer.scope_of(manifest)
    assert isinstance(needs, PartNeeds)
    with make_weight_bridge("shared-memory") as bridge:
        tensors = bridge.consumer.import_update(manifest, scope=needs)
        installer.prepare(manifest, tensors)
        installer.install(manifest, tensors)
        assert installer.prove().root == manifest.root


class Packing(Watched):
    """Packs each parameter away right behind its comparison, as vLLM does on a CPU."""

    def __init__(self, model: Model, at: Callable[[str], None]) -> None:
        super().__init__(model, at, packs=True)
        self.packed: dict[str, torch.Tensor] = {}

    def _stage(
        self,
        plan: LoadPlan,
        tensors: Mapping[str, torch.Tensor],
        staged: Staged,
        evidence: Evidence,
    ) -> AbstractSet[str]:
        making = _Making(plan, tensors, Staged(), _Packs(), EngineCompat(), None)
        for index in plan.steps:
            target = plan.targets[index]
            target.is_consumed = True
            assembled = making._assembled(index, alone=True)
            evidence.add(assembled)
            self.at(f"compared {target.name}")
            self.packed[target.name] = assembled.tensor.clone()
            target.is_consumed = False
        ModelInstaller._stage(self, plan, tensors, staged, evidence)
        return plan.taken


@pytest.mark.parametrize("name", ["rows", "norm", "columns"])
def test_what_is_packed_is_what_was_compared_or_is_looked_at_behind_it(
    trainer: TensorBridge, faults: FaultInjecting, name: str
) -> None:
    sent = weights()
    manifest = trainer.publish(sent, weight_version=1)

    def at(now: str) -> None:
        if now == f"compared {name}":
            faults.corrupt(manifest, manifest.tensors[name].offset + 4)

    installer = Packing(Model(0), at)
    needs = installer.scope_of(manifest)
    assert isinstance(needs, PartNeeds)
    with make_weight_bridge("shared-memory") as bridge:
        tensors = bridge.consumer.import_update(manifest, scope=needs)
        try:
            installer.prepare(manifest, tensors)
        except ProofFailed:
            return
    assert torch.equal(installer.packed["rows"], sent["rows"][:HALF])
    assert torch.equal(installer.packed["norm"], sent["norm"])
    assert torch.equal(installer.packed["columns"], sent["columns"].chunk(RANKS, dim=1)[0])


def test_a_rank_that_takes_everything_reads_the_update_as_a_whole(trainer: TensorBridge) -> None:
    manifest = trainer.publish({"weight": torch.ones(3, 4)}, weight_version=1)

    class Whole(torch.nn.Linear):
        def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.weight.data.copy_(dict(given)["weight"])

    model = Whole(4, 3, bias=False).requires_grad_(requires_grad=False)
    assert ModelInstaller(model, EngineCompat()).scope_of(manifest) is Scope.ALL

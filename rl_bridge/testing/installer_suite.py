"""`InstallerSuite`: what every installer must keep, as tests that an adapter's class inherits."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine
from rl_bridge.installers.base import Engine, TransactionalAdapter, WeightInstallAdapter
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.testing.installer_faults import (
    ENGINE_FAULT,
    EngineFault,
    Sabotage,
    Stage,
    poke,
    reinterpret,
    transpose,
)
from rl_bridge.testing.strategies import bytes_of, random_tensor
from rl_bridge.testing.transport_case import only_report
from rl_bridge.transports.registry import transport_class

# ---- the set-up: a trainer, an engine behind an adapter, an executor between --------------------

Adapter = WeightInstallAdapter | TransactionalAdapter


def engine_state(engine: Engine) -> dict[str, tuple[int, str, tuple[int, ...], bytes]]:
    """All that an undo must bring back: tensor object, dtype, strides and bytes, by name."""
    return {
        name: (id(tensor), str(tensor.dtype), tensor.stride(), bytes_of(tensor))
        for name, tensor in named_engine_tensors(engine).items()
    }


class Rig:
    """A trainer, an engine behind the adapter under test, and an executor between them."""

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter,
        transport: str,
        *,
        initial_weights: Mapping[str, torch.Tensor] | None,
        rebinds: bool,
        published: Callable[[Engine], Mapping[str, torch.Tensor]] = named_engine_tensors,
    ) -> None:
        """Put them together; `sabotage` stands between executor and adapter.

        `published` tells what an engine holds, under the names and in the shapes of updates.
        """
        self.engine = engine
        self._published = published
        self.adapter = adapter
        self.trainer: TensorBridge = make_weight_bridge(transport, suspicious="off")
        self.consumer: TensorBridge = make_weight_bridge(transport, suspicious="off")
        self.sabotage = Sabotage(adapter, engine, rebinds=rebinds)
        self.executor = RolloutExecutor(
            weight_bridge=self.consumer,
            weight_install_adapter=self.sabotage.wrapped(),
            initial_weights=initial_weights,
            suspicious="off",
        )
        self._version = 0

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Random weights of the published names, shapes, dtypes and ties; contiguous."""
        made: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        found = {}
        for index, (name, tensor) in enumerate(self._published(self.engine).items()):
            key = (tensor.data_ptr() if tensor.numel() else -index, tuple(tensor.shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[name] = made.setdefault(
                key, random_tensor(dtype, tuple(tensor.shape), 100 * seed + index)
            )
        return found

    def install(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Publish and update; the update is released by the trainer whatever happens."""
        self._version += 1
        manifest = self.trainer.publish(weights, weight_version=self._version)
        try:
            return self.executor.update_weights(manifest.to_json())
        finally:
            self.trainer.release(manifest.update_id)

    @property
    def version(self) -> int | None:
        """The version that the executor says the engine holds."""
        return self.executor.active_weight_version

    def holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the engine holds these bytes, under all published names."""
        return {name: bytes_of(t) for name, t in self._published(self.engine).items()} == {
            name: bytes_of(t) for name, t in weights.items()
        }

    def close(self) -> None:
        """Close both bridges."""
        self.consumer.close()
        self.trainer.close()


def sample_engine(seed: int = 5) -> torch.nn.Module:
    """A small module with a tie, buffers, a channels-last weight, an empty and a 0-dim tensor."""
    torch.manual_seed(seed)
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(7, 6)
    module.head = torch.nn.Linear(6, 7, bias=False)
    module.head.weight = module.embed.weight
    module.conv = torch.nn.Conv2d(3, 4, 2)
    weight = module.conv.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    module.norm = torch.nn.BatchNorm1d(5)
    module.square = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    module.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
    module.register_buffer("nothing", torch.empty(0, 3))
    module.register_buffer("mask", torch.tensor([True, False, True]))
    return module


def tied_like(
    tensors: Mapping[str, torch.Tensor], copies: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tie the copies of an engine's tensors as the engine ties its own."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            same = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            copies[name] = copies[same]
    return copies


# ---- the suite ----------------------------------------------------------------------------------

MakeRig = Callable[[], Rig]


class InstallerSuite:
    """Inherit, give `make_engine` and `make_adapter`, and all promises are tested.

    ::

        class TestMyAdapter(InstallerSuite):
            def make_engine(self):
                return MyModel()

            def make_adapter(self, engine):
                return MyAdapter(engine)

    For an engine that stores its weights in another way than updates bring them, also `published`.
    """

    transport: ClassVar[str] = "shared-memory"
    shows_engine: ClassVar[bool] = True
    """Whether the engine's memory can be read for the proof, and restored without the adapter."""
    rebinds: ClassVar[bool] = False
    """Whether it points the engine's tensors at other memory instead of writing to theirs."""
    is_read_only: ClassVar[bool] = False
    """Whether nobody in the engine's process can write to its weights once an update is in."""
    needs_initial_weights: ClassVar[bool] = False
    """Whether the first undo needs ``initial_weights=``."""

    def make_engine(self) -> Engine:
        """An engine with its initial weights: tied, buffers, odd sizes, strided and empty ones."""
        return sample_engine()

    def make_adapter(self, engine: Engine) -> Adapter:
        """The adapter under test."""
        raise NotImplementedError

    def published(self, engine: Engine) -> Mapping[str, torch.Tensor]:
        """The tensors that an engine holds now, by the names and in the shapes that updates bring.

        By default its own tensors. Override it where updates have other names, or other parts (q, k
        and v of a weight that the engine fuses): views of the engine's tensors, or copies, in the
        dtypes in which they are published. Random weights are made after it, and it tells what the
        engine holds of them.
        """
        return named_engine_tensors(engine)

    @pytest.fixture
    def make_rig(self) -> Iterator[MakeRig]:
        """Make rigs that are closed at the end."""
        made: list[Rig] = []

        def make() -> Rig:
            engine = self.make_engine()
            held = self.published(engine)
            initial = {name: tensor.detach().clone() for name, tensor in held.items()}
            rig = Rig(
                engine,
                self.make_adapter(engine),
                self.transport,
                initial_weights=tied_like(held, initial) if self.needs_initial_weights else None,
                rebinds=self.rebinds,
                published=self.published,
            )
            made.append(rig)
            return rig

        yield make
        for rig in made:
            rig.close()

    @pytest.fixture
    def rig(self, make_rig: MakeRig) -> Rig:
        """One rig."""
        return make_rig()

    def _names(self) -> list[str]:
        return list(named_engine_tensors(self.make_engine()))

    # ---- installing -----------------------------------------------------------------------------

    def test_version_after_version_the_engine_holds_what_was_published(self, rig: Rig) -> None:
        """Byte for byte, under every name, and proven as far as the adapter promises."""
        for version in range(1, 7):
            weights = rig.weights(version)
            rig.install(weights)
            assert rig.holds(weights)
            assert rig.version == version
            ack = rig.executor.last_ack
            assert ack is not None
            assert ack.weight_version == version
            assert (ack.proof.method != "unproven") == self.shows_engine
            assert {"install", "prove", "verify", "total"} <= set(ack.timings_ms)

    def test_the_proof_reaches_the_publisher(self, rig: Rig) -> None:
        """With the root of what the engine holds."""
        rig.install(rig.weights(1))
        told = only_report(report for report in rig.trainer.consumers() if report.update_id)
        assert told.state == "acknowledged"
        ack = rig.executor.last_ack
        assert ack is not None
        assert (told.proof or {})["root"] == (ack.root if self.shows_engine else "")

    def test_tied_tensors_of_the_engine_stay_tied(self, rig: Rig) -> None:
        """One memory under both names, after installs and after an undo."""

        def ties() -> set[frozenset[str]]:
            groups: dict[tuple[int, tuple[int, ...]], set[str]] = {}
            for name, tensor in named_engine_tensors(rig.engine).items():
                if tensor.numel():
                    groups.setdefault((tensor.data_ptr(), tuple(tensor.shape)), set()).add(name)
            return {frozenset(group) for group in groups.values() if len(group) > 1}

        before = ties()
        for version in (1, 2):
            rig.install(rig.weights(version))
            assert ties() == before
        rig.sabotage.plan(Stage.AFTER_INSTALL)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(3))
        assert ties() == before

    # ---- undoing --------------------------------------------------------------------------------

    @pytest.mark.parametrize("stage", list(Stage))
    def test_a_first_install_that_fails_leaves_the_initial_weights(
        self, make_rig: MakeRig, stage: Stage
    ) -> None:
        """Wherever it fails: the same objects with the same bytes, version None; then it works."""
        rig = make_rig()
        before = engine_state(rig.engine)
        rig.sabotage.plan(stage)
        with pytest.raises(EngineFault, match=ENGINE_FAULT):
            rig.install(rig.weights(1))
        self._assert_back(rig, before)
        assert rig.version is None
        assert rig.executor.active_weight_update_id is None
        weights = rig.weights(2)
        rig.install(weights)
        assert rig.holds(weights)

    @pytest.mark.parametrize("stage", list(Stage))
    def test_a_later_install_that_fails_leaves_the_version_before(
        self, make_rig: MakeRig, stage: Stage
    ) -> None:
        """Also twice in a row, and the one after succeeds."""
        rig = make_rig()
        rig.install(rig.weights(1))
        before = engine_state(rig.engine)
        for seed in (2, 3):
            rig.sabotage.plan(stage)
            with pytest.raises(EngineFault, match=ENGINE_FAULT) as caught:
                rig.install(rig.weights(seed))
            self._assert_back(rig, before)
            assert rig.version == 1
            assert any("version 1" in note for note in caught.value.__notes__)
        weights = rig.weights(4)
        rig.install(weights)
        assert rig.holds(weights)
        assert rig.version == 4

    def test_an_install_that_fails_at_any_tensor_is_undone(self, make_rig: MakeRig) -> None:
        """After none, one, two ... all of them were written, of a first and of a later version."""
        rig = make_rig()
        for first in (True, False):
            for count in range(len(self._names()) + 1):
                if first:
                    rig = make_rig()
                before = engine_state(rig.engine)
                rig.sabotage.plan(Stage.HALF_WAY, count)
                with pytest.raises(EngineFault):
                    rig.install(rig.weights(7 + count))
                self._assert_back(rig, before)
                assert rig.version == (None if first else 1)
            if first:
                rig = make_rig()
                rig.install(rig.weights(1))

    @pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
    @pytest.mark.parametrize("stage", list(Stage))
    def test_a_torn_engine_goes_back_to_before_it_was_torn(
        self, rig: Rig, stage: Stage, *, is_first: bool
    ) -> None:
        """Even after further attempts: the state of a torn engine is nothing to go back to."""
        if not isinstance(rig.adapter, TransactionalAdapter):
            pytest.skip("the undo of an adapter without undo() is not its own")
        if not is_first:
            rig.install(rig.weights(1))
        before = engine_state(rig.engine)
        rig.sabotage.plan(stage)
        rig.sabotage.fails_undo = True
        with pytest.raises(TornEngine):
            rig.install(rig.weights(2))
        assert rig.executor.is_torn
        assert rig.version is None
        rig.executor.release_weights()
        rig.sabotage.fails_undo = False
        rig.sabotage.plan(Stage.HALF_WAY)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(3))
        rig.executor.recover()
        self._assert_back(rig, before)
        assert rig.version == (None if is_first else 1)
        weights = rig.weights(4)
        rig.install(weights)
        assert rig.holds(weights)

    def test_what_the_user_wrote_into_the_old_version_does_not_come_back(self, rig: Rig) -> None:
        """The mapping that an update returned is the user's to write to; the undo is not his."""
        weights = rig.weights(1)
        mine = rig.install(weights)
        if any(
            mine[name].data_ptr() == tensor.data_ptr()
            for name, tensor in self.published(rig.engine).items()
            if tensor.numel()
        ):
            pytest.skip("the engine's tensors are the imported ones: writing there is writing here")
        if not transport_class(self.transport).create().writable_import:
            pytest.skip(f"what {self.transport} imports cannot be written to")
        for tensor in mine.values():
            tensor.zero_()
        rig.sabotage.plan(Stage.AFTER_INSTALL)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(2))
        assert rig.holds(weights)
        assert rig.version == 1

    def test_after_release_weights_a_failed_install_is_undone_all_the_same(self, rig: Rig) -> None:
        """The engine goes on with the bytes that it has, and gets them back."""
        if not self.shows_engine:
            pytest.skip("what was released cannot be installed again through the adapter")
        weights = rig.weights(1)
        rig.install(weights)
        rig.executor.release_weights()
        assert rig.holds(weights)
        rig.sabotage.plan(Stage.AFTER_INSTALL)
        with pytest.raises(EngineFault):
            rig.install(rig.weights(2))
        assert rig.holds(weights)
        weights = rig.weights(3)
        rig.install(weights)
        assert rig.holds(weights)

    # ---- proving --------------------------------------------------------------------------------

    def test_the_proof_fails_when_one_byte_differs(self, make_rig: MakeRig) -> None:
        """First and last byte of every tensor, changed behind the installer's back; then undone."""
        if not self.shows_engine:
            pytest.skip("this adapter says that it proves nothing")
        if self.is_read_only:
            pytest.skip("nobody in this process can change a byte of the engine's")
        rig = make_rig()
        rig.install(rig.weights(1))
        for name in self._names():
            for place in (0, -1) if named_engine_tensors(rig.engine)[name].numel() else ():
                before = engine_state(rig.engine)
                rig.sabotage.plan(Stage.AFTER_INSTALL, action=_poke_at(rig.engine, name, place))
                with pytest.raises(ProofFailed):
                    rig.install(rig.weights(2))
                self._assert_back(rig, before)

    def test_the_proof_fails_when_a_tensor_is_read_another_way(self, make_rig: MakeRig) -> None:
        """Transposed, or of another dtype: the same bytes are other weights."""
        if not self.shows_engine:
            pytest.skip("this adapter says that it proves nothing")
        for change in (transpose, reinterpret):
            rig = make_rig()
            rig.install(rig.weights(1))
            before = engine_state(rig.engine)
            if not change(rig.engine):
                continue
            change(rig.engine)  # done twice, it is as before
            assert engine_state(rig.engine) == before
            rig.sabotage.plan(Stage.AFTER_INSTALL, action=partial(change, rig.engine))
            with pytest.raises(ProofFailed):
                rig.install(rig.weights(2))
            self._assert_back(rig, before)

    # ---- refusing -------------------------------------------------------------------------------

    @pytest.mark.parametrize("wrong", ["missing", "surplus", "shape", "dtype"])
    def test_what_does_not_fit_is_refused_before_byte_0(self, rig: Rig, wrong: str) -> None:
        """Names, shapes, dtypes: the engine is not touched, and the next update works."""
        if not isinstance(rig.adapter, TransactionalAdapter):
            pytest.skip("an adapter without prepare() cannot refuse before it begins")
        rig.install(rig.weights(1))
        before = engine_state(rig.engine)
        weights = rig.weights(2)
        last = list(weights)[-1]
        some = next(name for name, tensor in weights.items() if tensor.numel() > 1)
        if wrong == "missing":
            del weights[last]
        elif wrong == "surplus":
            weights["surplus"] = torch.ones(3)
        elif wrong == "shape":
            weights[some] = weights[some].reshape(1, -1, 1)
        else:
            weights[some] = weights[some].view(torch.uint8)
        with pytest.raises(IncompatibleUpdate):
            rig.install(weights)
        assert engine_state(rig.engine) == before
        assert rig.version == 1
        rig.install(rig.weights(3))
        assert rig.version == 3

    def _assert_back(self, rig: Rig, before: dict[str, Any]) -> None:
        """The engine is what it was; of one that cannot be seen only bytes can come back."""
        after = engine_state(rig.engine)
        if self.shows_engine:
            assert after == before
        else:
            assert {name: state[-1] for name, state in after.items()} == {
                name: state[-1] for name, state in before.items()
            }


def _poke_at(engine: Engine, name: str, place: int) -> Callable[[], None]:
    return lambda: poke(named_engine_tensors(engine)[name], place)

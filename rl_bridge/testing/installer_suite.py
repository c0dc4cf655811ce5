"""`InstallerSuite`: what every installer must keep, as tests that an adapter's class inherits."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, StaleUpdate, TornEngine
from rl_bridge.installers.base import (
    Engine,
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
)
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.installer_faults import (
    ENGINE_FAULT,
    EngineFault,
    Sabotage,
    Stage,
    poke,
    reinterpret,
    transpose,
)
from rl_bridge.testing.leaks import assert_nothing_leaks
from rl_bridge.testing.processes import DEADLINE_S
from rl_bridge.testing.tensors import bytes_of, random_tensor
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
        self.trainer: TensorBridge = make_weight_bridge(
            transport, suspicious="off", nonfinite="off"
        )
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

    def publish(self, weights: Mapping[str, torch.Tensor]) -> WeightUpdateManifest:
        """Publish under the next version."""
        self._version += 1
        return self.trainer.publish(weights, weight_version=self._version)

    def install(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Publish and update; the update is released by the trainer whatever happens."""
        manifest = self.publish(weights)
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

_PHASES = {"attach", "verify", "prepare", "install", "prove", "resume"}
"""What each acknowledgement and each report has the time of."""


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
            rig.executor.check_servable()

    def test_an_acknowledgement_says_what_was_installed_proven_and_how_long_it_took(
        self, rig: Rig
    ) -> None:
        """With the root of what the engine holds, all its bytes, and each phase."""
        rig.install(rig.weights(1))
        ack, manifest = rig.executor.last_ack, rig.trainer.latest_manifest
        assert ack is not None
        assert manifest is not None
        assert (ack.update_id, ack.weight_version) == (manifest.update_id, 1)
        assert (ack.root, ack.total_nbytes) == (manifest.root, manifest.total_nbytes)
        assert set(ack.timings_ms) >= {*_PHASES, "total"}
        assert 0 < sum(ack.timings_ms.values()) - ack.timings_ms["total"] <= ack.timings_ms["total"]
        assert ack.peak_rss_nbytes > 1 << 20
        if not self.shows_engine:
            assert ack.proof == InstallProof(method="unproven")
            return
        assert ack.proof.method in {"digest", "digest+canary", "identity"}
        assert (ack.proof.root, ack.proof.tensors) == (manifest.root, manifest.tensor_count)
        assert ack.proof.digested_nbytes + ack.proof.identical_nbytes >= manifest.total_nbytes

    def test_the_proof_reaches_the_publisher(self, rig: Rig) -> None:
        """With the root of what the engine holds, and the consumer's phases."""
        rig.install(rig.weights(1))
        told = only_report(report for report in rig.trainer.consumers() if report.update_id)
        assert (told.state, told.presence, told.weight_version) == ("acknowledged", "alive", 1)
        assert set(told.timings_ms) >= _PHASES
        ack = rig.executor.last_ack
        assert ack is not None
        assert (told.proof or {})["root"] == (ack.root if self.shows_engine else "")
        assert (told.proof or {})["method"] == ack.proof.method

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
            rig.executor.check_servable()
            assert any("version 1" in note for note in caught.value.__notes__)
            refused = rig.trainer.latest_manifest
            assert refused is not None
            told = only_report(rig.trainer.holders(refused))
            assert told.state == "rejected"
            assert (told.reason or "").split(": ")[-1] in str(caught.value)
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
        with pytest.raises(TornEngine):
            rig.executor.check_servable()
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

    def test_a_later_version_in_full_mends_a_torn_engine(self, rig: Rig) -> None:
        """Without `recover`."""
        if not isinstance(rig.adapter, TransactionalAdapter):
            pytest.skip("the undo of an adapter without undo() is not its own")
        rig.install(rig.weights(1))
        rig.sabotage.plan(Stage.HALF_WAY)
        rig.sabotage.fails_undo = True
        with pytest.raises(TornEngine):
            rig.install(rig.weights(2))
        rig.sabotage.fails_undo = False
        weights = rig.weights(4)
        rig.install(weights)
        assert rig.holds(weights)
        rig.executor.check_servable()

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

    def test_updates_that_succeed_and_fail_leave_nothing_behind(self, rig: Rig) -> None:
        """Wherever they fail."""
        seeds = itertools.count(1)

        def cycle() -> None:
            seed = next(seeds)
            rig.install(rig.weights(seed % 7))
            rig.sabotage.plan(list(Stage)[seed % 4])
            with pytest.raises(EngineFault):
                rig.install(rig.weights(8))

        assert_nothing_leaks(cycle, num_cycles=20)

    # ---- whenever -------------------------------------------------------------------------------

    def test_a_ctrl_c_at_any_moment_leaves_one_version_or_the_other(self, rig: Rig) -> None:
        """A real one: the call that runs ends first."""
        weights = [rig.weights(1), rig.weights(2)]
        rig.install(weights[0])
        rig.install(weights[1])
        took = rig.executor.last_ack.timings_ms["total"] / 1e3 if rig.executor.last_ack else 1.0
        held = weights[1]
        for moment in range(1, 25):
            manifest = rig.publish(weights[moment % 2])
            with suppress(KeyboardInterrupt), _ctrl_c_after(took * moment / 20):
                rig.executor.update_weights(manifest)
            rig.executor.recover()  # ends what a second Ctrl-C would leave torn; else does nothing
            rig.trainer.release(manifest)
            held = weights[moment % 2] if rig.version == manifest.weight_version else held
            assert rig.holds(held)
            rig.executor.check_servable()

    def test_threads_that_update_one_engine_take_turns(self, rig: Rig) -> None:
        """The later version stays; a thread that comes too late is refused."""
        sent = {version: rig.weights(version) for version in (1, 2)}
        manifests = [rig.publish(weights) for weights in sent.values()]

        def update(manifest: WeightUpdateManifest) -> None:
            with suppress(StaleUpdate):
                rig.executor.update_weights(manifest)

        threads = [threading.Thread(target=update, args=(manifest,)) for manifest in manifests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert rig.version == 2
        assert rig.holds(sent[2])

    def test_a_late_manifest_leaves_the_engine_as_it_is(self, rig: Rig) -> None:
        """Nor is the version that it holds installed again."""
        early, late = (rig.publish(rig.weights(version)) for version in (1, 2))
        rig.executor.update_weights(late)
        before = engine_state(rig.engine)
        for manifest in (early, late):
            with pytest.raises(StaleUpdate):
                rig.executor.update_weights(manifest)
            assert engine_state(rig.engine) == before
            assert rig.version == 2

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


@contextmanager
def _ctrl_c_after(seconds: float) -> Iterator[None]:
    """A real SIGINT at that moment, if the body still runs then."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _poke_at(engine: Engine, name: str, place: int) -> Callable[[], None]:
    return lambda: poke(named_engine_tensors(engine)[name], place)

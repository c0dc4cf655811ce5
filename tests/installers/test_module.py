"""`ModuleInstallAdapter`: what only one of its ways does.

That each keeps every promise of an installer is in `tests/guarantees`.
"""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import pytest
import torch

from rl_bridge import RolloutExecutor, SharedMemoryTensorBridge, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate, SegmentError, TornEngine
from rl_bridge.installers.base import Engine
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.memory import vm
from rl_bridge.testing import InstallerSuite
from rl_bridge.testing.installer_suite import Rig, engine_state, sample_engine
from rl_bridge.testing.tensors import bytes_of


class TestCopyFromLocalClone(InstallerSuite):
    transport: ClassVar[str] = "local-clone"

    def make_adapter(self, engine: Engine) -> ModuleInstallAdapter:
        return ModuleInstallAdapter(engine, mode="copy")


# ---- what only one of the ways does --------------------------------------------------------------


class Refusing:
    """`vm.move` that fails at chosen calls, from 1."""

    def __init__(self, *failing: int) -> None:
        self.failing = set(failing)
        self.calls = 0

    def __call__(self, source: int, nbytes: int, target: int) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise OSError(errno.EPERM, "refused, as planned")
        vm_move(source, nbytes, target)


vm_move = vm.move


@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2)])
def test_a_kernel_that_refuses_a_flip_leaves_the_version_before(
    failing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = flip_rig()
    rig.install(rig.weights(1))
    before = engine_state(rig.engine)
    monkeypatch.setattr(vm, "move", Refusing(*failing))
    with pytest.raises(SegmentError, match="refused, as planned"):
        rig.install(rig.weights(2))
    assert engine_state(rig.engine) == before
    assert rig.version == 1
    monkeypatch.setattr(vm, "move", vm_move)
    weights = rig.weights(3)
    rig.install(weights)
    assert rig.holds(weights)
    rig.close()


def test_a_flip_that_fails_half_way_and_back_is_torn_until_the_undo_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = flip_rig()
    rig.install(rig.weights(1))
    before = engine_state(rig.engine)
    # What the engine itself wrote since is no part of the version that comes back.
    named_engine_tensors(rig.engine)["norm.running_mean"].fill_(7.0)
    monkeypatch.setattr(vm, "move", Refusing(2, 3, 4))
    with pytest.raises(TornEngine):
        rig.install(rig.weights(2))
    assert rig.executor.is_torn
    with pytest.raises(TornEngine):
        rig.executor.check_servable()
    monkeypatch.setattr(vm, "move", vm_move)
    rig.executor.recover()
    assert engine_state(rig.engine) == before
    assert rig.version == 1
    rig.close()


def flip_rig() -> Rig:
    engine = sample_engine()
    adapter = ModuleInstallAdapter(engine, mode="flip")
    return Rig(engine, adapter, "shared-memory", initial_weights=None, rebinds=False)


@pytest.mark.parametrize("mode", ["alias", "flip"])
def test_an_engine_that_shares_the_pages_pays_for_none(mode: Literal["alias", "flip"]) -> None:
    engine = {"w": torch.zeros(16 << 20, dtype=torch.uint8)}
    adapter = ModuleInstallAdapter(engine, mode=mode)
    rig = Rig(engine, adapter, "shared-memory", initial_weights=None, rebinds=False)
    rig.install(rig.weights(1))
    ack = rig.executor.last_ack
    assert ack is not None
    assert (ack.proof.method, ack.proof.digested_nbytes) == ("identity", 0)
    assert ack.proof.identical_nbytes == 16 << 20
    rig.close()


def test_a_flip_keeps_every_address() -> None:
    rig = flip_rig()
    rig.install(rig.weights(1))
    addresses = {n: t.data_ptr() for n, t in named_engine_tensors(rig.engine).items()}
    for version in range(2, 6):
        rig.install(rig.weights(version))
        assert addresses == {n: t.data_ptr() for n, t in named_engine_tensors(rig.engine).items()}
    rig.close()


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_an_engine_whose_elements_share_memory_is_refused_before_byte_0(
    mode: Literal["copy", "alias", "flip"],
) -> None:
    engine = {"w": torch.zeros(1, 4).expand(3, 4)}
    adapter = ModuleInstallAdapter(engine, mode=mode)
    rig = Rig(engine, adapter, "shared-memory", initial_weights=None, rebinds=False)
    with pytest.raises(IncompatibleUpdate, match="expanded"):
        rig.install({"w": torch.ones(3, 4)})
    assert not rig.executor.is_torn
    assert bytes_of(engine["w"]) == bytes(48)
    rig.close()


@pytest.mark.parametrize("step", ["install", "prove", "resume"])
def test_a_shortage_is_undone_wherever_it_comes_and_the_same_update_may_come_again(
    step: str, trainer: SharedMemoryTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_short(*_: object) -> None:
        raise MemoryError

    engine = {"w": torch.zeros(3)}
    adapter = ModuleInstallAdapter(engine)
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        manifest = trainer.publish({"w": torch.ones(3)}, weight_version=1)
        with monkeypatch.context() as patch:
            patch.setattr(adapter, step, run_short)
            with pytest.raises(MemoryError):
                executor.update_weights(manifest)
        assert engine["w"].tolist() == [0, 0, 0]
        executor.update_weights(manifest)
        assert engine["w"].tolist() == [1, 1, 1]


def test_an_engine_that_did_not_go_on_behind_its_undo_is_let_go_on_by_recover() -> None:
    fails = [True, True]
    runs = threading.Event()

    @contextmanager
    def quiesce() -> Iterator[None]:
        runs.clear()
        yield
        if fails:
            fails.pop()
            raise OSError("the engine does not go on")
        runs.set()

    with make_weight_bridge("shared-memory") as trainer:
        engine = {"w": torch.zeros(4)}
        executor = RolloutExecutor(
            weight_transport="shared-memory",
            weight_install_adapter=ModuleInstallAdapter(engine, quiesce=quiesce),
        )
        with pytest.raises(TornEngine):
            executor.update_weights(trainer.publish({"w": torch.ones(4)}, weight_version=1))
        assert not runs.is_set()
        executor.recover()
        assert runs.is_set()
        executor.close()

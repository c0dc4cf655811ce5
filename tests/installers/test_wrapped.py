"""Adapters of the user's own, with ``install`` and ``release`` only, in a transaction."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from rl_bridge import RolloutExecutor, TornEngine, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import ProofFailed
from rl_bridge.installers.base import Engine, InstallProof, WeightInstallAdapter
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.testing import InstallerSuite
from rl_bridge.testing.installer_faults import EngineFault
from rl_bridge.testing.installer_suite import engine_state
from rl_bridge.testing.tensors import bytes_of, contents_of

Tensors = Mapping[str, torch.Tensor]


Install = Callable[[Tensors], None]


Publish = Callable[[torch.nn.Module | Tensors], str]


def copy_into(engine: Engine, tensors: Tensors) -> None:
    live = named_engine_tensors(engine)
    with torch.no_grad():
        for name, tensor in tensors.items():
            # By way of bytes: a bool of random bytes would come out as another byte.
            if tensor.dtype is torch.bool:
                live[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
            else:
                live[name].copy_(tensor)


class SeenAdapter:
    """Its engine is in an attribute."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.released: list[str] = []

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        copy_into(self.engine, tensors)

    def release(self, update_id: str) -> None:
        self.released.append(update_id)


class UnseenAdapter:
    """Its engine is behind a function, as if it were in another process."""

    def __init__(self, engine: Engine) -> None:
        self._install: Install = lambda tensors: copy_into(engine, tensors)

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        self._install(tensors)

    def release(self, update_id: str) -> None:
        pass


class TestEngineInAnAttributeAsADict(InstallerSuite):
    transport: ClassVar[str] = "local-clone"

    def make_engine(self) -> Engine:
        return {name: t.detach() for name, t in named_engine_tensors(super().make_engine()).items()}

    def make_adapter(self, engine: Engine) -> WeightInstallAdapter:
        return SeenAdapter(engine)


class TestEngineOutOfSight(InstallerSuite):
    shows_engine: ClassVar[bool] = False
    needs_initial_weights: ClassVar[bool] = True

    def make_adapter(self, engine: Engine) -> WeightInstallAdapter:
        return UnseenAdapter(engine)


# ---- what such adapters really do ---------------------------------------------------------------


class Scripted:
    """Holds a module; what an install does is given, and then it fails if told so."""

    def __init__(self, module: torch.nn.Module, act: Callable[[torch.nn.Module, Tensors], None]):
        self.module = module
        self.act = act
        self.fails = False

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        self.act(self.module, tensors)
        if self.fails:
            raise EngineFault("as planned")

    def release(self, update_id: str) -> None:
        pass


def assign_data(module: torch.nn.Module, tensors: Tensors) -> None:
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensor.data = tensors[name]


def replace_parameters(module: torch.nn.Module, tensors: Tensors) -> None:
    for name, _ in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        setattr(owner, leaf, torch.nn.Parameter(tensors[name].clone()))


def delete_and_set_plain_tensors(module: torch.nn.Module, tensors: Tensors) -> None:
    for name, _ in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        delattr(owner, leaf)
        setattr(owner, leaf, tensors[name].clone())


def turn_parameters_into_buffers(module: torch.nn.Module, tensors: Tensors) -> None:
    for name, _ in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        delattr(owner, leaf)
        owner.register_buffer(leaf, tensors[name].clone())


def add_one_more(module: torch.nn.Module, tensors: Tensors) -> None:
    copy_into(module, tensors)
    module.register_parameter("surplus", torch.nn.Parameter(torch.ones(3)))


def drop_a_buffer(module: torch.nn.Module, tensors: Tensors) -> None:
    copy_into(module, tensors)
    del module.get_submodule("1").running_mean


def transpose_in_place(module: torch.nn.Module, tensors: Tensors) -> None:
    weight = module.get_submodule("0").weight
    assert isinstance(weight, torch.Tensor)
    weight.data = weight.data.t()


ACTS = (
    assign_data,
    replace_parameters,
    delete_and_set_plain_tensors,
    turn_parameters_into_buffers,
    add_one_more,
    drop_a_buffer,
    transpose_in_place,
)


def small_module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def is_torn(executor: RolloutExecutor) -> bool:
    return executor.is_torn


@contextmanager
def executor_with(adapter: object, **options: object) -> Iterator[tuple[RolloutExecutor, Publish]]:
    with (
        make_weight_bridge("shared-memory", suspicious="off") as trainer,
        make_weight_bridge("shared-memory") as consumer,
    ):
        executor = RolloutExecutor(
            weight_bridge=consumer,
            weight_install_adapter=adapter,  # type: ignore[arg-type]  # checked where it matters
            suspicious="off",
            **options,  # type: ignore[arg-type]  # the executor's own
        )
        versions = iter(range(1, 100))

        def publish(source: torch.nn.Module | Tensors) -> str:
            manifest = trainer.publish(source, weight_version=next(versions))
            return manifest.to_json()

        yield executor, publish


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_whatever_a_failed_install_did_to_the_module_is_undone(
    act: Callable[[torch.nn.Module, Tensors], None], *, is_first: bool
) -> None:
    module = small_module()
    adapter = Scripted(module, copy_into)
    with executor_with(adapter) as (executor, publish):
        if not is_first:
            executor.update_weights(publish(small_module(1)))
        before = engine_state(module)
        names = [name for name, _ in module.named_parameters()]
        buffers = {name for name, _ in module.named_buffers()}
        adapter.act, adapter.fails = act, True
        with pytest.raises(EngineFault, match="as planned"):
            executor.update_weights(publish(small_module(2)))
        assert engine_state(module) == before
        assert sorted(name for name, _ in module.named_parameters()) == sorted(names)
        assert {name for name, _ in module.named_buffers()} == buffers
        assert executor.active_weight_version == (None if is_first else 1)
        module(torch.ones(2, 4))
        adapter.act, adapter.fails = copy_into, False
        executor.update_weights(publish(small_module(3)))
        assert contents_of(module.state_dict()) == contents_of(small_module(3).state_dict())


@pytest.mark.parametrize("act", [assign_data, replace_parameters])
def test_a_module_whose_tensors_were_exchanged_is_proven_all_the_same(
    act: Callable[[torch.nn.Module, Tensors], None],
) -> None:
    module = small_module()
    with executor_with(Scripted(module, act)) as (executor, publish):
        source = small_module(1)
        source.get_submodule("1").load_state_dict(module.get_submodule("1").state_dict())
        with torch.no_grad():
            module.get_submodule("1").weight.fill_(7)  # type: ignore[operator]  # a parameter
        executor.update_weights(publish(source))
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "digest"
        assert contents_of(module.state_dict()) == contents_of(source.state_dict())


def test_an_expanded_buffer_is_put_back_as_well() -> None:
    engine = torch.nn.Linear(2, 2)
    engine.register_buffer("mask", torch.zeros(1, 3).expand(4, 3), persistent=False)

    class Failing(SeenAdapter):
        def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
            engine.get_buffer("mask")[0].fill_(1.0)
            raise EngineFault

    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        manifest = trainer.publish(torch.nn.Linear(2, 2), weight_version=1)
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=Failing(engine))
        with pytest.raises(EngineFault):
            executor.update_weights(manifest)
    assert engine.get_buffer("mask").flatten().tolist() == [0.0] * 12
    assert engine.get_buffer("mask").stride() == (0, 1)


def test_the_first_failure_of_an_engine_out_of_sight_is_torn_and_told() -> None:
    engine = {"w": torch.zeros(3)}
    adapter = UnseenAdapter(engine)
    install = adapter._install

    def fails(tensors: Tensors) -> None:
        install(tensors)
        raise EngineFault("as planned")

    with executor_with(adapter) as (executor, publish):
        adapter._install = fails
        with pytest.raises(TornEngine, match="initial_weights"):
            executor.update_weights(publish({"w": torch.ones(3)}))
        assert is_torn(executor)
        with pytest.raises(TornEngine):
            executor.check_servable()
        with pytest.raises(TornEngine):
            executor.recover()
        adapter._install = install
        executor.update_weights(publish({"w": torch.full((3,), 2.0)}))
        assert not is_torn(executor)
        executor.check_servable()
        assert executor.active_weight_version == 2
        assert bytes_of(engine["w"]) == bytes_of(torch.full((3,), 2.0))


def test_an_undo_from_weights_that_somebody_wrote_to_is_refused() -> None:
    """local-clone: the retained version is this process's own memory, and can be written to."""
    engine = {"w": torch.zeros(3)}
    adapter = UnseenAdapter(engine)
    install = adapter._install
    with (
        make_weight_bridge("local-clone", suspicious="off") as bridge,
    ):
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious="off"
        )
        mine = executor.update_weights(bridge.publish({"w": torch.ones(3)}, weight_version=1))
        mine["w"].fill_(9.0)

        def fails(tensors: Tensors) -> None:
            raise EngineFault("as planned")

        adapter._install = fails
        with pytest.raises(TornEngine, match="wrote into"):
            executor.update_weights(bridge.publish({"w": torch.zeros(3)}, weight_version=2))
        assert is_torn(executor)
        adapter._install = install
        executor.update_weights(bridge.publish({"w": torch.full((3,), 3.0)}, weight_version=3))
        assert not is_torn(executor)


class WithVerbs(SeenAdapter):
    """Brings its own prove and undo, without being a `TransactionalAdapter`."""

    def __init__(self, engine: dict[str, torch.Tensor]) -> None:
        super().__init__(engine)
        self.called: list[str] = []
        self._before: dict[str, torch.Tensor] = {}

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        self.called.append("prepare")
        live = named_engine_tensors(self.engine)
        self._before = {name: tensor.clone() for name, tensor in live.items()}

    def prove(self) -> InstallProof:
        self.called.append("prove")
        return InstallProof(method="digest", root="0" * 32)

    def undo(self) -> None:
        self.called.append("undo")
        copy_into(self.engine, self._before)


def test_the_verbs_that_an_adapter_has_are_used_and_its_proof_is_checked() -> None:
    engine = {"w": torch.zeros(3)}
    adapter = WithVerbs(engine)
    with executor_with(adapter) as (executor, publish):
        with pytest.raises(ProofFailed, match="0000"):
            executor.update_weights(publish({"w": torch.ones(3)}))
        assert adapter.called == ["prepare", "prove", "undo"]
        assert bytes_of(engine["w"]) == bytes_of(torch.zeros(3))


def test_a_meta_tensor_beside_the_engine_does_not_crash_the_undo() -> None:
    class Adapter:
        def __init__(self) -> None:
            self.engine = torch.nn.Linear(3, 3)
            self.engine.register_buffer("nowhere", torch.empty(3, device="meta"))

        def install(self, manifest: WeightUpdateManifest, tensors: Any) -> None:
            del manifest
            self.engine.load_state_dict(dict(tensors), strict=False)

        def release(self, update_id: str) -> None:
            """Nothing is kept."""

    adapter = Adapter()
    with make_weight_bridge("local") as trainer, make_weight_bridge("local") as rollout:
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        executor.update_weights(trainer.publish(torch.nn.Linear(3, 3), weight_version=1))
    assert executor.active_weight_version == 1

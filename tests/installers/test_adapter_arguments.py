"""What an adapter is given wrongly is told when it is made, with what was expected and a remedy."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, SimpleAdapter, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.groups import FunctionExchange
from rl_bridge.installers.wrapped import as_transactional


class Good:
    def install(self, manifest: object, tensors: Mapping[str, torch.Tensor]) -> None:
        pass

    def release(self, update_id: str) -> None:
        pass


def weights() -> dict[str, Any]:
    return {"w": torch.ones(2)}


ENGINES = {
    "none": (None, "got None, expected an nn.Module or a dict"),
    "class": (torch.nn.Linear, "got the class Linear"),
    "array": ({"w": np.zeros(2)}, r"got engine\['w'\], which is a ndarray"),
    "nested": ({"model": weights()}, r"got engine\['model'\], which is a dict"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_no_engine_is_refused_when_the_adapter_is_made(name: str) -> None:
    engine, message = ENGINES[name]
    with pytest.raises(TypeError, match=message):
        ModuleInstallAdapter(engine)  # type: ignore[arg-type]  # that is what is tried


def test_what_gets_into_the_engine_later_and_is_no_tensor_is_refused_by_name() -> None:
    engine = weights()
    executor, trainer = executor_of(ModuleInstallAdapter(engine, strict=False))
    engine["step"] = 3
    with pytest.raises(TypeError, match=r"engine\['step'\]"):
        executor.update_weights(trainer.publish(weights(), weight_version=1))


@pytest.mark.parametrize("quiesce", [torch.no_grad, threading.Lock])
def test_a_quiesce_may_be_whatever_makes_a_context_manager(quiesce: Any) -> None:
    executor, trainer = executor_of(ModuleInstallAdapter(engine := weights(), quiesce=quiesce))
    executor.update_weights(trainer.publish({"w": torch.zeros(2)}, weight_version=1))
    assert engine["w"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["module", "simple"])
def test_an_engine_that_never_came_to_rest_is_not_torn(kind: str) -> None:
    def stops() -> Any:
        return None

    engine = weights()
    adapter: Any = ModuleInstallAdapter(engine, quiesce=stops)
    if kind == "simple":
        adapter = SimpleAdapter(engine.__getitem__, engine.__setitem__, quiesce=stops)
    executor, trainer = executor_of(adapter)
    with pytest.raises(TypeError, match="context manager"):
        executor.update_weights(trainer.publish({"w": torch.zeros(2)}, weight_version=1))
    assert not executor.is_torn
    assert engine["w"].tolist() == [1, 1]


@pytest.mark.parametrize("num_threads", ["2", 0, 1.0, True])
def test_what_is_no_number_of_threads_is_refused(num_threads: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"num_threads=.*: expected an int of 1"):
        ModuleInstallAdapter(weights(), num_threads=num_threads)


ADAPTERS = {
    "class": (Good, "got the class Good, which has no engine yet"),
    "module": (torch.nn.Linear(1, 1), r"got a Linear, .* ModuleInstallAdapter\(engine\)"),
    "function": (weights, "function, which has no install and no release"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_no_adapter_is_refused_with_what_to_pass(name: str) -> None:
    adapter, message = ADAPTERS[name]
    with pytest.raises(TypeError, match=message):
        as_transactional(adapter)  # type: ignore[arg-type]  # that is what is tried


def test_a_compiled_engine_is_refused_with_a_word_about_its_names() -> None:
    class Compiled(torch.nn.Module):
        """As torch.compile makes it: the module is a child of that name."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    executor, trainer = executor_of(ModuleInstallAdapter(Compiled(torch.nn.Linear(2, 2))))
    with pytest.raises(IncompatibleUpdate, match=r"compiled \(compiled\._orig_mod\) on both sides"):
        executor.update_weights(trainer.publish(torch.nn.Linear(2, 2), weight_version=1))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("module.", r"hand over the module that was wrapped \(wrapped\.module\)"),
        ("base_model.model.", r"call model\.merge_adapter\(\) and publish StateDictExtractor"),
    ],
)
def test_names_with_a_wrappers_prefix_are_refused_with_its_remedy(prefix: str, words: str) -> None:
    executor, trainer = executor_of(ModuleInstallAdapter(torch.nn.Linear(2, 2)))
    state = {prefix + name: one for name, one in torch.nn.Linear(2, 2).state_dict().items()}
    with pytest.raises(IncompatibleUpdate, match=words):
        executor.update_weights(trainer.publish(state, weight_version=1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_an_engine_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    executor, trainer = executor_of(ModuleInstallAdapter({"w": nested}))
    with pytest.raises(IncompatibleUpdate, match="'w' of the engine is a nested tensor"):
        executor.update_weights(trainer.publish(weights(), weight_version=1))


def executor_of(adapter: Any) -> tuple[RolloutExecutor, Any]:
    return (
        RolloutExecutor(
            weight_bridge=make_weight_bridge("local-clone"), weight_install_adapter=adapter
        ),
        make_weight_bridge("local-clone"),
    )


class Guessed(Good):
    """A method whose parameters were guessed by those of others."""

    def prove(self, manifest: object, tensors: object) -> None:
        pass


class GuessedToo(ModuleInstallAdapter):
    def finds_versions(self, take: bool) -> bool:  # type: ignore[override]  # that is what is tried
        return take


class Free(Good):
    """What takes anything can be called as it will be; nobody calls a method of another name."""

    def commit(self, *given: object, **options: object) -> None:
        pass

    def resume(self, request: str) -> None:
        pass


def test_a_method_that_cannot_be_called_is_refused_when_the_executor_is_made() -> None:
    with pytest.raises(TypeError, match=r"Guessed\.prove cannot be called with \(\): missing"):
        as_transactional(Guessed())
    with pytest.raises(TypeError, match=r"finds_versions cannot be called with \(take_over\)"):
        as_transactional(GuessedToo(weights()))
    assert as_transactional(Free()) is not None


@pytest.mark.parametrize("verb", ["install", "undo", "prove"])
@pytest.mark.parametrize("kind", ["async def", "generator"])
def test_methods_that_return_before_they_have_done_anything_are_refused(
    verb: str, kind: str
) -> None:
    async def waits(*_: object) -> None: ...

    def yields(*_: object) -> Iterator[None]:
        yield

    adapter = Good()
    setattr(adapter, verb, waits if kind == "async def" else yields)
    with pytest.raises(TypeError, match=rf"Good\.{verb} is .*{kind}, expected a plain function"):
        as_transactional(adapter)


@pytest.mark.parametrize("verb", ["drop_versions", "leave", "undo", "resume"])
def test_no_method_of_a_transactional_adapter_may_be_a_coroutines(verb: str) -> None:
    async def waits(self: object, *_: object) -> None: ...

    adapter = type("Waiting", (ModuleInstallAdapter,), {verb: waits})(weights())
    with pytest.raises(TypeError, match=rf"Waiting\.{verb} is async def, expected a plain"):
        as_transactional(adapter)


def test_a_method_in_the_place_of_a_property_is_refused() -> None:
    class Called(ModuleInstallAdapter):
        def imports_itself(self) -> bool:  # type: ignore[override]  # that is what is tried
            return False

    with pytest.raises(TypeError, match=r"Called\.imports_itself is a method.*Write @property"):
        as_transactional(Called(weights()))

    class Worked(ModuleInstallAdapter):
        imports_itself = functools.cached_property(lambda _: False)

    assert as_transactional(Worked(weights())).imports_itself is False


def test_an_install_that_returns_what_nothing_awaits_is_undone() -> None:
    async def later() -> None: ...

    class Late(Good):
        def __init__(self) -> None:
            self.engine = weights()

        def install(self, manifest: object, tensors: Mapping[str, torch.Tensor]) -> Any:
            self.engine["w"].zero_()
            return later()

    executor, trainer = executor_of(adapter := Late())
    with pytest.raises(
        TypeError, match=r"Late\.install returned a coroutine, which nothing awaits"
    ):
        executor.update_weights(trainer.publish({"w": torch.zeros(2)}))
    assert adapter.engine["w"].tolist() == [1, 1]
    assert not executor.is_torn


async def _observe(_: object) -> None: ...


async def _quiesce() -> None: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_weight_bridge("local-clone", observer=_observe),  # type: ignore[arg-type]  # as above
        lambda: ModuleInstallAdapter(weights(), quiesce=_quiesce),  # type: ignore[arg-type]  # as above
        lambda: SimpleAdapter(_observe, print),  # type: ignore[arg-type]  # as above
        lambda: FunctionExchange(_observe, rank=0, world_size=1),  # type: ignore[arg-type]  # as above
    ],
    ids=["observer", "quiesce", "read", "exchange"],
)
def test_a_callback_that_nothing_would_await_is_refused_at_the_door(
    make: Callable[[], object],
) -> None:
    with pytest.raises(TypeError, match="is async def, expected a plain function"):
        make()


def test_a_callback_that_is_no_function_is_refused_at_the_door() -> None:
    lock: Any = threading.Lock()
    with pytest.raises(TypeError, match="quiesce: got a lock, expected a function"):
        ModuleInstallAdapter(weights(), quiesce=lock)


def test_a_bridge_with_coroutines_for_verbs_is_refused() -> None:
    class Waiting:
        async def import_update(self, manifest: object) -> None: ...

        async def acknowledge(self, update_id: str) -> None: ...

        async def reject(self, update_id: str, reason: str) -> None: ...

        async def release(self, update_id: str) -> None: ...

    with pytest.raises(TypeError, match=r"Waiting\.import_update is async def"):
        RolloutExecutor(weight_bridge=Waiting(), weight_install_adapter=Good())  # type: ignore[arg-type]  # that is what is tried

"""An engine of which only two functions are known: what it is refused, and what an undo does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, SimpleAdapter, TensorBridge, TornEngine, make_weight_bridge
from rl_bridge.errors import IncompatibleUpdate, ProofFailed

Weights = dict[str, torch.Tensor]


class Engine:
    """Two tensors; what it is told to do happens at a load."""

    def __init__(self) -> None:
        self.held = weights(0.0)
        self.loaded: list[str] = []
        self.at_load: Callable[[str], object] = lambda _: None
        self.after_load: Callable[[str], object] = lambda _: None

    def read(self, name: str) -> torch.Tensor:
        return self.held[name]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.at_load(name)
        self.loaded.append(name)
        self.held[name].copy_(tensor)
        self.after_load(name)

    def values(self) -> list[float]:
        return [float(one.max()) for one in self.held.values()]


def weights(value: float) -> Weights:
    return {"a": torch.full((2, 3), float(value)), "b": torch.full((4,), float(value))}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@contextmanager
def run(engine: Engine, **options: Any) -> Iterator[tuple[TensorBridge, RolloutExecutor]]:
    adapter = SimpleAdapter(engine.read, engine.load, **options)
    with (
        make_weight_bridge("local", suspicious="off") as trainer,
        make_weight_bridge("local") as rollout,
        RolloutExecutor(rollout, adapter) as executor,
    ):
        yield trainer, executor


def fail(_: str) -> None:
    raise OSError("the device fell off the bus")


def test_an_update_is_loaded_proven_and_undone_if_the_next_one_fails(engine: Engine) -> None:
    with run(engine) as (trainer, executor):
        proof = executor.update_weights(trainer.publish(weights(1))).proof
        assert (proof.method, proof.digested_nbytes, proof.tensors) == ("digest", 40, 2)
        engine.at_load = lambda name: fail(name) if name == "b" else None
        with pytest.raises(OSError, match="fell off"):
            executor.update_weights(trainer.publish(weights(2)))
        engine.at_load = lambda _: None
        assert engine.values() == [1, 1]
        assert executor.active_weight_version == 0


def test_an_undo_loads_only_what_is_not_there_any_more(engine: Engine) -> None:
    with run(engine) as (trainer, executor):
        executor.update_weights(trainer.publish(weights(1)))
        engine.loaded.clear()
        engine.at_load = lambda name: fail(name) if name == "b" else None
        with pytest.raises(OSError, match="fell off"):
            executor.update_weights(trainer.publish(weights(2)))
    assert engine.loaded == ["a", "a"]


def test_an_engine_that_does_not_take_its_weights_back_is_torn(engine: Engine) -> None:
    with run(engine) as (trainer, executor):
        executor.update_weights(trainer.publish(weights(1)))

        def half(name: str) -> None:
            if engine.loaded[2:]:
                fail(name)

        engine.at_load = half
        with pytest.raises(TornEngine, match="fell off"):
            executor.update_weights(trainer.publish(weights(2)))
        engine.at_load = lambda _: None
        executor.recover()
        assert engine.values() == [1, 1]


def test_what_an_engine_holds_otherwise_than_loaded_is_no_proof(engine: Engine) -> None:
    with run(engine) as (trainer, executor):
        engine.after_load = lambda name: engine.held[name].add_(1)
        with pytest.raises(TornEngine, match="does not hold version 0: tensor 'a'") as caught:
            executor.update_weights(trainer.publish(weights(1)))
        assert isinstance(caught.value.__cause__, ProofFailed)


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({"a": torch.ones(2, 3)}, r"b"),
        ({**weights(1), "c": torch.ones(1)}, r"c"),
        ({**weights(1), "b": torch.ones(2, 2)}, r"'b': the engine has float32\[4\], the update"),
        ({**weights(1), "b": torch.ones(4).double()}, r"the update float64\[4\]. Publish in"),
    ],
    ids=["missing", "surplus", "shape", "dtype"],
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "by the first version"])
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    engine: Engine, published: Weights, message: str, *, named: bool
) -> None:
    with run(engine, names=engine.held if named else None) as (trainer, executor):
        if not named:
            executor.update_weights(trainer.publish(weights(1)))
            engine.loaded.clear()
        with pytest.raises(IncompatibleUpdate, match=message):
            executor.update_weights(trainer.publish(published))
        assert engine.loaded == []


def test_a_name_that_the_engine_does_not_have_is_told(engine: Engine) -> None:
    with run(engine) as (trainer, executor):
        with pytest.raises(IncompatibleUpdate, match=r"no tensor 'c': read\(\) raised KeyError"):
            executor.update_weights(trainer.publish(weights(1) | {"c": torch.ones(1)}))
        assert engine.loaded == []


async def _read(_: str) -> torch.Tensor:
    return torch.ones(1)


def _later(function: Callable[[str], object], name: str) -> object:
    return function(name)


def test_what_read_returns_must_be_a_tensor(engine: Engine) -> None:
    given: list[tuple[Any, type[Exception], str]] = [
        (lambda _: [1.0], IncompatibleUpdate, r"read\('a'\) returned is a list, expected a dense"),
        (lambda _: torch.ones(2, device="meta"), IncompatibleUpdate, "is on meta"),
        (partial(_later, _read), TypeError, "read returned a coroutine, which nothing awaits"),
    ]
    for read, error, message in given:
        engine.read = read  # type: ignore[method-assign]  # that is what is tried
        with run(engine) as (trainer, executor), pytest.raises(error, match=message):
            executor.update_weights(trainer.publish(weights(1)))


def test_installs_and_undos_happen_where_the_engine_rests(engine: Engine) -> None:
    inside: list[bool] = []
    is_quiet = False

    @contextmanager
    def quiesce() -> Iterator[None]:
        nonlocal is_quiet
        is_quiet = True
        yield
        is_quiet = False

    def note(name: str) -> None:
        inside.append(is_quiet)
        if len(inside) == 2:
            fail(name)

    engine.at_load = note
    with run(engine, quiesce=quiesce) as (trainer, executor):
        with pytest.raises(OSError, match="fell off"):
            executor.update_weights(trainer.publish(weights(1)))
        is_quiet = False
        executor.update_weights(trainer.publish(weights(2)))
    assert inside == [True] * 5

"""The cached walk of a module must never be told apart from a fresh one."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch

from rl_bridge.memory import passes
from rl_bridge.memory.tensors import ModuleState, plain_state


@pytest.fixture(params=["compiled", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compare."""
    if request.param == "python":
        monkeypatch.setattr(passes, "NATIVE", None)
    elif passes.native_module() is None:
        pytest.skip(f"no compiled module: {passes.native_cause()}")


def build() -> torch.nn.Module:
    """A module with a parameter tied, a buffer of each kind, and children."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("left_out", torch.ones(2), persistent=False)
    module.append(torch.nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def _replace_parameter(module: torch.nn.Module) -> None:
    module.get_submodule("0").bias = torch.nn.Parameter(torch.zeros(3))


def _add_parameter(module: torch.nn.Module) -> None:
    module.get_submodule("1").register_parameter("more", torch.nn.Parameter(torch.zeros(1)))


def _drop_parameter(module: torch.nn.Module) -> None:
    setattr(module.get_submodule("0"), "bias", None)  # noqa: B010 - torch's stubs forbid None


def _replace_child(module: torch.nn.Module) -> None:
    module.add_module("0", torch.nn.Linear(3, 3))


def _grow_a_leaf(module: torch.nn.Module) -> None:
    module.get_submodule("2").add_module("adapter", torch.nn.Linear(1, 1))


def _exchange_two_children(module: torch.nn.Module) -> None:
    first, last = module.get_submodule("0"), module.get_submodule("2")
    module.add_module("0", last)
    module.add_module("2", first)


def _replace_buffer(module: torch.nn.Module) -> None:
    module.kept = torch.zeros(2)


def _make_buffer_temporary(module: torch.nn.Module) -> None:
    module.register_buffer("kept", torch.ones(2), persistent=False)


def _make_buffer_persistent(module: torch.nn.Module) -> None:
    module.register_buffer("left_out", torch.ones(2), persistent=True)


def _replace_the_dictionary(module: torch.nn.Module) -> None:
    child = module.get_submodule("0")
    child._parameters = OrderedDict(weight=torch.nn.Parameter(torch.zeros(3, 3)), bias=None)


def _write_to_a_dictionary(module: torch.nn.Module) -> None:
    kept = module.get_submodule("0")._parameters
    # Often enough for the interpreter to take its shortcuts.
    for bias in [kept["bias"]] * 99 + [torch.nn.Parameter(torch.zeros(3))]:
        kept["bias"] = bias


def _empty_a_dictionary_and_fill_it_again(module: torch.nn.Module) -> None:
    kept = module.get_submodule("0")._parameters
    weight = kept["weight"]
    kept.clear()
    kept.update(weight=weight, bias=torch.nn.Parameter(torch.zeros(3)))


def _take_and_set_anew(module: torch.nn.Module) -> None:
    kept = module._buffers
    kept.pop("kept")
    kept.setdefault("kept", torch.zeros(2))


def _replace_all_attributes(module: torch.nn.Module) -> None:
    child = module.get_submodule("2")
    child.__dict__ = {**child.__dict__, "_parameters": {"weight": child.weight, "bias": None}}


def _grow_a_child_while_others_stay(module: torch.nn.Module) -> None:
    module.get_submodule("1").training = False
    module.get_submodule("0")._non_persistent_buffers_set.add("none")
    module.get_submodule("2")._buffers["late"] = torch.zeros(1)


def _hook(module: torch.nn.Module) -> None:
    def rename(_module: object, state: dict[str, torch.Tensor], *_rest: object) -> None:
        state["renamed"] = state.pop("kept")

    module.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]  # torch's own


_CHANGES: list[Callable[[torch.nn.Module], None]] = [
    _replace_parameter,
    _add_parameter,
    _drop_parameter,
    _replace_child,
    _grow_a_leaf,
    _exchange_two_children,
    _replace_buffer,
    _make_buffer_temporary,
    _make_buffer_persistent,
    _replace_the_dictionary,
    _write_to_a_dictionary,
    _empty_a_dictionary_and_fill_it_again,
    _take_and_set_anew,
    _replace_all_attributes,
    _grow_a_child_while_others_stay,
    _hook,
]


def _fresh(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, item in module.state_dict(keep_vars=True).items():
        if isinstance(item, torch.Tensor):
            yield name, item


def _agrees(state: ModuleState, module: torch.nn.Module) -> bool:
    cached, fresh = dict(state.tensors()), dict(_fresh(module))
    return list(cached) == list(fresh) and all(cached[name] is fresh[name] for name in fresh)


@pytest.mark.parametrize("change", _CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("looks", [1, 3])  # each look may note what makes the next one shorter
def test_a_change_of_structure_is_seen(
    change: Callable[[torch.nn.Module], None], looks: int
) -> None:
    module = build()
    state = ModuleState(module)
    for _ in range(looks):
        assert _agrees(state, module)
    change(module)
    assert _agrees(state, module)
    assert _agrees(state, module), "and stays seen"
    plain = plain_state(module)
    assert (plain is None) is bool(module._state_dict_hooks)
    assert plain is None or list(plain) == list(module.state_dict())


def test_nothing_is_walked_again_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build()
    state = ModuleState(module)
    first = state.tensors()
    with torch.no_grad():
        for tensor in first.values():
            tensor.zero_()
    monkeypatch.setattr(torch.nn.Module, "named_modules", lambda *_: pytest.fail("walked again"))
    assert state.tensors() is first


def test_a_change_that_was_taken_back_costs_no_walk() -> None:
    module = build()
    state = ModuleState(module)
    first = state.tensors()
    for is_training in (False, True):
        assert state.tensors() is first
        module.train(is_training)
        kept = module.get_submodule("0")._parameters
        kept["bias"], bias = torch.nn.Parameter(torch.zeros(3)), kept["bias"]
        kept["bias"] = bias
    assert state.tensors() is first


def test_a_module_with_a_state_dict_of_its_own_is_walked_every_time() -> None:
    class Moody(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("there", torch.ones(1))
            self.shown = "one"

        def _save_to_state_dict(
            self, destination: dict[str, object], prefix: str, keep_vars: bool
        ) -> None:
            del keep_vars
            destination[prefix + self.shown] = self.there

    moody = Moody()
    module = torch.nn.Sequential(moody)
    state = ModuleState(module)
    assert set(state.tensors()) == {"0.one"}
    moody.shown = "two"
    assert set(state.tensors()) == {"0.two"}


@pytest.mark.parametrize("where", ["_parameters", "_buffers"])
def test_what_is_no_tensor_is_left_to_torch(where: str) -> None:
    module = build()
    getattr(module.get_submodule("0"), where)["odd"] = 1.0
    assert plain_state(module) is None
    assert "0.odd" not in ModuleState(module).tensors()

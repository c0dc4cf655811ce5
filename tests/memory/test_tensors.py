"""Tensors that changed, and modules that did, are found out in both ways to compare."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory import passes
from rl_bridge.memory import tensors as facts
from rl_bridge.memory.tensors import ModuleState, TensorFacts, plain_state


@pytest.fixture(params=["compiled", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compare."""
    if request.param == "python":
        monkeypatch.setattr(passes, "NATIVE", None)
    elif passes.NATIVE is None:
        pytest.skip(f"no compiled module: {passes.native_cause()}")


def test_facts_tell_whether_tensors_lie_where_they_were() -> None:
    tensors = [torch.randn(4, 4), torch.randn(3, 2).t(), torch.empty(0)]
    noted = TensorFacts(tensors)
    assert noted.hold(iter(tensors))
    assert noted.hold(tensor.detach() for tensor in tensors)
    assert not noted.hold(tensors[:2])
    assert not noted.hold([*tensors, tensors[0]])
    assert not noted.hold([])
    assert TensorFacts([]).hold([])
    assert not TensorFacts([]).hold(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_a_tensor_that_reads_as_its_negative_is_told_although_all_else_holds(
    dtype: torch.dtype,
) -> None:
    tensors = (torch.ones(2, 2), torch.ones(3, dtype=dtype), torch.nn.Parameter(torch.ones(1)))
    noted = TensorFacts(tensors)
    assert noted.hold_unnegated(tensors)
    tensors[1].data = torch._neg_view(tensors[1].data)
    assert noted.hold(tensors)
    assert not noted.hold_unnegated(tensors)
    tensors[1].data = torch._neg_view(tensors[1].data)
    assert noted.hold_unnegated(tensors)
    assert not noted.hold_unnegated(tensors[:2])
    tensors[2].data = torch.ones(2)
    assert not noted.hold_unnegated(tensors)


def test_a_question_that_fails_does_not_hold_and_leaves_no_reference() -> None:
    class Failing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *_rest: Any) -> Any:
            raise RuntimeError(f"{func} is not for this one")

    tensors = [torch.ones(2), torch.Tensor._make_subclass(Failing, torch.ones(2))]
    if facts._ask("tensor_facts", []) is None:
        pytest.skip("the other way raises what the tensor raised")
    with torch._C.DisableTorchFunction():
        noted = TensorFacts(tensors)
        counts = [sys.getrefcount(tensor) for tensor in tensors]
    assert not noted.hold_unnegated(tensors)
    assert [sys.getrefcount(tensor) for tensor in tensors] == counts


def test_many_tensors_of_many_kinds_are_compared_with_what_is_asked_for_ahead_of_time() -> None:
    made: list[torch.Tensor] = []
    for index in range(40):
        made += [torch.empty(0), torch.ones(index), torch.nn.Parameter(torch.ones(1, index))]
        made += [torch.ones(4, 4).t(), torch.tensor(1.0), torch.ones(2, dtype=torch.complex64)]
    assert TensorFacts(made).hold_unnegated(made)
    for last in (torch.empty(0, device="meta"), torch.zeros(4).to_sparse(), torch.ones(1)):
        assert not TensorFacts(made).hold_unnegated([*made[:-1], last])
        assert not TensorFacts(made).hold_unnegated([*made[:3], last, *made[4:]])


def test_the_compiled_module_finds_its_way_in_this_torchs_tensors() -> None:
    native = passes.NATIVE
    if native is None:
        pytest.skip("not compiled")
    assert native.learn_layout(torch.Tensor.__base__, torch.empty(1), 0, 0)
    with pytest.raises(TypeError, match="no tensor"):
        native.learn_layout(torch.Tensor.__base__, object(), 0, 0)


def test_every_dtype_is_told_from_every_other() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    views = [memory[:16].view(getattr(torch, name)) for name in DTYPE_NBYTES]
    alike = {
        (one.dtype, other.dtype)
        for one in views
        for other in views
        if TensorFacts([one]).hold([other])
    }
    assert alike == {(view.dtype, view.dtype) for view in views}


def test_a_dtype_that_the_compiled_module_does_not_know_is_compared_all_the_same() -> None:
    bits = [torch.zeros(4, dtype=torch.uint8).view(torch.bits8) for _ in range(2)]
    noted = TensorFacts(bits[:1])
    assert noted.hold(bits[:1])
    assert not noted.hold(bits[1:])
    plain = TensorFacts([bits[0].view(torch.uint8)])
    assert not plain.hold(bits[:1]), "noted as bytes, found as bits"


def test_views_are_made_again_of_the_storages_that_tensors_have_now() -> None:
    owners = [torch.arange(16.0), torch.arange(16.0)]
    views = [owners[0][4:12].view(2, 4), owners[1].view(4, 4).t()]
    noted = TensorFacts(views)
    expected = [view.clone() for view in views]
    views[0].data = owners[0][:3]
    views[1].data = owners[1].view(2, 8)
    assert not noted.hold(views)
    assert noted.restore(views) == []
    assert noted.hold(views)
    assert all(torch.equal(one, other) for one, other in zip(views, expected, strict=True))


def test_a_tensor_whose_storage_is_elsewhere_cannot_be_made_the_view_that_it_was() -> None:
    views = [torch.zeros(8), torch.arange(16.0)[4:12]]
    noted = TensorFacts(views)
    views[1].data = torch.zeros(8)
    assert noted.restore(views) == [1]


# ---- a module's state dict, walked once ----------------------------------------------------------


def build() -> torch.nn.Module:
    """A module with a parameter tied, a buffer of each kind, and children."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("left_out", torch.ones(2), persistent=False)
    module.append(torch.nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def _exchange_two_children(module: torch.nn.Module) -> None:
    first, last = module.get_submodule("0"), module.get_submodule("2")
    module.add_module("0", last)
    module.add_module("2", first)


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


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape))


_CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "replace-a-parameter": lambda m: setattr(m.get_submodule("0"), "bias", _parameter(3)),
    "add-a-parameter": lambda m: m.get_submodule("1").register_parameter("more", _parameter(1)),
    "drop-a-parameter": lambda m: setattr(m.get_submodule("0"), "bias", None),
    "replace-a-child": lambda m: m.add_module("0", torch.nn.Linear(3, 3)),
    "grow-a-leaf": lambda m: m.get_submodule("2").add_module("adapter", torch.nn.Linear(1, 1)),
    "replace-a-buffer": lambda m: setattr(m, "kept", torch.zeros(2)),
    "a-buffer-is-temporary": lambda m: m.register_buffer("kept", torch.ones(2), persistent=False),
    "a-buffer-is-persistent": lambda m: m.register_buffer("left_out", torch.ones(2)),
    "exchange-two-children": _exchange_two_children,
    "replace-a-dictionary": _replace_the_dictionary,
    "write-to-a-dictionary": _write_to_a_dictionary,
    "empty-a-dictionary-and-fill-it-again": _empty_a_dictionary_and_fill_it_again,
    "take-and-set-anew": _take_and_set_anew,
    "replace-all-attributes": _replace_all_attributes,
    "grow-a-child-while-others-stay": _grow_a_child_while_others_stay,
    "hook": _hook,
}


def _agrees(state: ModuleState, module: torch.nn.Module) -> bool:
    cached, fresh = dict(state.tensors()), module.state_dict(keep_vars=True)
    return list(cached) == list(fresh) and all(cached[name] is fresh[name] for name in fresh)


@pytest.mark.parametrize("change", _CHANGES)
@pytest.mark.parametrize("looks", [1, 3])  # each look may note what makes the next one shorter
def test_a_change_of_structure_is_seen(change: str, looks: int) -> None:
    module = build()
    state = ModuleState(module)
    for _ in range(looks):
        assert _agrees(state, module)
    _CHANGES[change](module)
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

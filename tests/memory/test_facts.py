"""Tensors that are no longer what was noted of them are found out, in both ways to compare."""

import sys
from typing import Any

import pytest
import torch

from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory import passes
from rl_bridge.memory import tensors as facts
from rl_bridge.memory.tensors import TensorFacts


@pytest.fixture(params=["compiled", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compare."""
    if request.param == "python":
        monkeypatch.setattr(passes, "NATIVE", None)
    elif passes.native_module() is None:
        pytest.skip(f"no compiled module: {passes.native_cause()}")


def test_facts_tell_whether_tensors_lie_where_they_were() -> None:
    tensors = [torch.randn(4, 4), torch.randn(3, 2).t(), torch.empty(0)]
    noted = TensorFacts(tensors)
    assert noted.hold(iter(tensors))
    assert not noted.hold(tensors[:2])
    assert not noted.hold([*tensors, tensors[0]])
    assert not noted.hold([])
    assert TensorFacts([]).hold([])
    assert not TensorFacts([]).hold(tensors)


def test_other_objects_over_the_same_memory_hold() -> None:
    tensors = [torch.randn(4, 4), torch.randn(3, 2).t()]
    noted = TensorFacts(tensors)
    assert noted.hold(tensor.detach() for tensor in tensors)


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
    native = passes.native_module()
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


@pytest.mark.parametrize(
    "now",
    [torch.empty(4, device="meta"), torch.zeros(4).to_sparse()],
    ids=["meta", "sparse"],
)
def test_a_tensor_that_became_something_else_does_not_hold(now: torch.Tensor) -> None:
    noted = TensorFacts([torch.zeros(4)])
    assert not noted.hold([now])


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


def test_views_are_made_again_where_their_storages_lie() -> None:
    view = torch.empty(16, device="meta")[4:12].view(2, 4)
    noted = TensorFacts([view])
    owner = torch.empty(16, device="meta")
    view.data = owner[4:8]
    assert noted.restore([view]) == []
    assert (view.device.type, view.shape, view.stride()) == ("meta", (2, 4), (4, 1))


def test_a_tensor_whose_storage_is_elsewhere_cannot_be_made_the_view_that_it_was() -> None:
    views = [torch.zeros(8), torch.arange(16.0)[4:12]]
    noted = TensorFacts(views)
    views[1].data = torch.zeros(8)
    assert noted.restore(views) == [1]

"""Tensors that are no longer what was noted of them are found out, in both ways to compare."""

import pytest
import torch

from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.memory import facts, passes
from rl_bridge.memory.facts import TensorFacts


@pytest.fixture(params=["compiled", "python"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to compare."""
    if request.param == "python":
        monkeypatch.setattr(facts, "native_module", lambda: None)
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

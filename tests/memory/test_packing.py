"""From a state dict to a packed arena: only a view's bytes, ties once, plans that fit."""

from collections.abc import Callable

import pytest
import torch

from rl_bridge.errors import UnknownDtype, WeightBridgeUnavailableError
from rl_bridge.manifest.digest import digest_bytes
from rl_bridge.memory import vm
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.places import CPUPlace
from rl_bridge.memory.views import anonymous_pin
from rl_bridge.testing.tensors import bytes_of

State = dict[str, torch.Tensor]
# torch calls half-precision complex numbers experimental, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def pack(tensors: State, plan: PackPlan | None = None) -> tuple[PackPlan, dict[str, bytes]]:
    """Pack and read back; the digests must be those of the bytes."""
    plan = plan or PackPlan(tensors)
    table = plan.table
    pin = anonymous_pin(table.arena_nbytes)
    digests = plan.pack(tensors, pin.address)
    arena = bytes(vm.tensor_at(pin.address, pin.nbytes).numpy())
    found = {}
    for row, name in enumerate(table.names):
        data = arena[table.offsets[row] : table.offsets[row] + table.nbytes[row]]
        assert digests[16 * row : 16 * (row + 1)] == digest_bytes(data), name
        found[name] = data
    return plan, found


def test_parameters_travel_like_tensors() -> None:
    class Tagged(torch.nn.Parameter):
        """A plain subclass."""

    tagged = Tagged(torch.arange(6.0).view(2, 3))
    tensors = {"dense": tagged, "strided": tagged.t(), "buffer": torch.nn.Buffer(torch.ones(2))}
    _, found = pack(tensors)
    assert found == {name: bytes_of(tensor) for name, tensor in tensors.items()}
    assert tagged.requires_grad


# ---- ties ---------------------------------------------------------------------------------------


def test_what_would_have_to_be_cast_cannot_be_read_where_it_lies() -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=r"'t' would be cast to torch\.bfloat16"):
        PackPlan({"t": torch.ones(2)}, dtype=torch.bfloat16).digest_in_place()


def test_three_views_of_one_address_are_tied_in_pairs() -> None:
    weight = torch.randn(4, 4)
    plan, _ = pack({"a": weight, "b": weight[:2], "c": weight[:2], "d": weight})
    assert dict(plan.table.ties) == {"c": "b", "d": "a"}


def test_empty_tensors_are_never_tied() -> None:
    plan, _ = pack({"a": torch.empty(0), "b": torch.empty(0)})
    assert not plan.table.ties


# ---- what cannot travel -------------------------------------------------------------------------


class _Hijacked(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        raise AssertionError


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "lazy-module": (
        lambda: torch.nn.LazyLinear(3).weight,
        WeightBridgeUnavailableError,
        "'t' is",
    ),
    "subclass-with-dispatch": (
        lambda: torch.randn(3).as_subclass(_Hijacked),
        WeightBridgeUnavailableError,
        "'t' is a _Hijacked: use plain tensors",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
        UnknownDtype,
        "'t': unknown dtype 'qint8'",
    ),
}


# Quantized tensors are deprecated in torch, and still what some users hold.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel_as_cpu_bytes_is_refused_by_name(case: str) -> None:
    make, error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        PackPlan({"t": make()})


def test_a_tied_trainable_name_flags_what_is_stored() -> None:
    weight = torch.randn(3)
    plan = PackPlan({"a": weight, "b": weight, "c": torch.randn(2)}, frozenset({"b"}))
    assert plan.table.trainable == "10"
    assert plan.fits({"a": weight, "b": weight}, frozenset({"a"})) is False


# ---- reuse of a plan ----------------------------------------------------------------------------


WEIGHT = torch.randn(4, 4)
COMPLEX = torch.randn(4, dtype=torch.complex64)
CHANGES: dict[str, tuple[State, State]] = {
    "another-address": ({"a": WEIGHT}, {"a": WEIGHT.clone()}),
    "another-shape": ({"a": WEIGHT}, {"a": WEIGHT.view(2, 8)}),
    "another-dtype": ({"a": WEIGHT}, {"a": WEIGHT.view(torch.int32)}),
    "another-stride": ({"a": WEIGHT}, {"a": WEIGHT.t()}),
    "no-stride-any-more": ({"a": WEIGHT.t()}, {"a": WEIGHT}),
    "an-offset": ({"a": WEIGHT[:3]}, {"a": WEIGHT[1:]}),
    "another-name": ({"a": WEIGHT}, {"b": WEIGHT}),
    "one-more": ({"a": WEIGHT}, {"a": WEIGHT, "b": WEIGHT}),
    "one-less": ({"a": WEIGHT, "b": COMPLEX}, {"a": WEIGHT}),
    "another-order": ({"a": WEIGHT, "b": COMPLEX}, {"b": COMPLEX, "a": WEIGHT}),
    "exchanged": ({"a": WEIGHT[0], "b": WEIGHT[1]}, {"a": WEIGHT[1], "b": WEIGHT[0]}),
    "a-lazy-conjugate": ({"a": COMPLEX}, {"a": COMPLEX.conj()}),
    "a-conjugate-that-is-lazy-no-more": ({"a": COMPLEX.conj()}, {"a": COMPLEX}),
    "a-lazy-negative": ({"a": COMPLEX.imag}, {"a": COMPLEX.conj().imag}),
    "a-lazy-negative-of-one": ({"a": COMPLEX[:1].imag}, {"a": COMPLEX[:1].conj().imag}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_does_not_fit_anything_else(change: str) -> None:
    before, after = CHANGES[change]
    plan = PackPlan(before)
    assert plan.fits(before, None)
    assert not plan.fits(after, None)


def test_a_plan_does_not_fit_another_declaration_of_trainable_tensors() -> None:
    tensors = {"a": WEIGHT, "b": COMPLEX}
    plan = PackPlan(tensors, frozenset({"a"}))
    assert plan.fits(tensors, frozenset({"a"}))
    assert not plan.fits(tensors, None)
    assert not plan.fits(tensors, frozenset({"b"}))


def test_lazy_views_travel_as_the_numbers_that_they_show() -> None:
    tensors = {
        "conj": COMPLEX.conj(),
        "conj-of-a-slice": torch.randn(4, 6, dtype=torch.complex128)[:, ::2].conj(),
        "neg": COMPLEX.conj().imag,
        "neg-of-one": COMPLEX[:1].conj().imag,
        "none": COMPLEX,
        "tied": COMPLEX.conj(),
    }
    plan, found = pack(tensors)
    shown = {name: tensor.resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    assert found == {name: bytes_of(shown[name]) for name in plan.table.names}
    assert dict(plan.table.ties) == {"tied": "conj"}
    with pytest.raises(WeightBridgeUnavailableError, match="strided or a lazy view"):
        PackPlan({"a": COMPLEX.conj()}).digest_in_place()


# ---- padding ------------------------------------------------------------------------------------


def test_clearing_the_padding_leaves_the_tensors_alone() -> None:
    sizes = {"a": 5, "b": 300, "c": 0}
    tensors = {name: torch.arange(size).to(torch.uint8) for name, size in sizes.items()}
    plan = PackPlan(tensors)
    pin = anonymous_pin(plan.table.arena_nbytes)
    arena = vm.tensor_at(pin.address, plan.table.arena_nbytes)
    arena.fill_(0xFF)
    plan.pack(tensors, pin.address)
    plan.clear_padding(pin.address)
    assert plan.table.leaves_offset == 768
    expected = torch.zeros(768 + 256, dtype=torch.uint8)
    block = plan.leaf_list
    assert len(block) == plan.table.leaves_nbytes == 2 * 16 + 3 * 8
    expected[768 : 768 + len(block)] = torch.from_numpy(block.copy())
    expected[:5] = tensors["a"]
    expected[256:556] = tensors["b"]
    assert torch.equal(arena, expected)


def test_a_digest_in_place_is_that_of_the_packed_bytes() -> None:
    tensors = {"a": torch.randn(300, 70), "b": torch.empty(0), "c": torch.arange(9)}
    plan = PackPlan(tensors)
    pin = anonymous_pin(plan.table.arena_nbytes)
    assert plan.digest_in_place() == plan.pack(tensors, pin.address)
    packed = plan.leaf_list.tobytes()
    plan.digest_in_place()
    list_at = anonymous_pin(plan.table.leaves_nbytes)
    plan.write_lists(list_at.address)
    assert bytes(list_at.buffer)[: len(packed)] == packed


def test_a_layout_names_the_memory_that_its_bytes_lie_in() -> None:
    class OnAGPU(CPUPlace):
        device = torch.device("cuda", 1)

        def not_plain(self, tensor: torch.Tensor, *, is_source: bool = False) -> str | None:
            del tensor, is_source
            return None

    tensors = {"w": torch.ones(2)}
    assert PackPlan(tensors).table.device == "cpu"
    assert PackPlan(tensors, place=OnAGPU()).table.device == "cuda"  # which one, its handle says

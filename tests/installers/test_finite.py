"""Numbers that are none are found in every dtype, and large ones are no such."""

from collections.abc import Iterable

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.engines import EngineCompat, ModelInstaller
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.errors import IncompatibleUpdate

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_refused_by_name(dtype: torch.dtype, bad: str) -> None:
    tensor = torch.zeros(1000, dtype=torch.float32)
    tensor[777] = float(bad)
    with pytest.raises(IncompatibleUpdate, match="'w': 1 of its 1000 numbers are NaN or Inf"):
        check_finite({"ok": torch.ones(3), "w": tensor.to(dtype)}, ["ok", "w"])


def test_infinities_of_both_signs_do_not_cancel_out() -> None:
    tensor = torch.tensor([1.0, float("inf"), float("-inf")])
    with pytest.raises(IncompatibleUpdate, match="2 of its 3 numbers"):
        check_finite({"w": tensor}, ["w"])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_numbers_are_numbers(dtype: torch.dtype) -> None:
    largest = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
    check_finite({"w": largest, "n": -largest.to(torch.float64)}, ["w", "n"])


def test_what_cannot_be_infinite_and_what_is_empty_is_passed_over() -> None:
    pairs = torch.full((4,), 0x7F, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    tensors = {"i": torch.ones(2, dtype=torch.int64), "e": torch.empty(0), "p": pairs}
    check_finite(tensors, tensors)


@pytest.mark.parametrize("num_threads", [1, 3, None])
@pytest.mark.parametrize("strided", [False, True])
def test_one_bad_number_is_found_in_any_piece_by_any_number_of_threads(
    num_threads: int | None, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_bridge.engines.load_checks._PIECE", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # else torch's own threads do it
    for place in (0, 63, 64, 500, 998, 999):
        bad = torch.zeros(1000)
        bad[place] = torch.nan
        bad = bad.view(2, 500).T if strided else bad
        good = torch.zeros_like(bad)
        check_finite({"a": good, "b": good}, ["a", "b"], num_threads=num_threads)
        with pytest.raises(IncompatibleUpdate, match="'b': 1 of its 1000 numbers"):
            check_finite({"a": good, "b": bad}, ["a", "b"], num_threads=num_threads)


class _Small(torch.nn.Module):
    """Small parameters of two dtypes, one of which holds no fractions."""

    def __init__(self) -> None:
        super().__init__()
        made = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64), "c": torch.zeros(5)}
        for name, tensor in made.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            getattr(self, name).data.copy_(tensor)


def test_of_an_imported_update_of_small_tensors_the_one_with_nan_is_named() -> None:
    installer = ModelInstaller(_Small(), EngineCompat())
    tensors = {name: tensor.detach() + 1 for name, tensor in _Small().named_parameters()}
    with make_weight_bridge("shared-memory", suspicious="off", nonfinite="off") as bridge:
        sound = bridge.publish(tensors, weight_version=1)
        given = bridge.import_update(sound)
        installer.prepare(sound, given)
        installer.install(sound, given)
        assert installer.prove().root == sound.root
        installer.commit()
        tensors["c"][2] = torch.nan
        bad = bridge.publish(tensors, weight_version=2)
        with pytest.raises(IncompatibleUpdate, match="'c': 1 of its 5 numbers are NaN or Inf"):
            installer.prepare(bad, bridge.import_update(bad))

"""Of what is cut up for ranks, together they take all: a loader does not see what is too long."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from rl_bridge.engines.load_checks import check_whole
from rl_bridge.engines.load_plan import learn
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.engines.vllm.compat import num_same
from rl_bridge.errors import IncompatibleUpdate

HIDDEN, HEAD_SIZE, HEADS, RANKS = 16, 8, 8, 4


class Attention(torch.nn.Module):
    """What the first of four ranks has of a fused query, key and value."""

    head_size, num_heads = HEAD_SIZE, HEADS // RANKS

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.num_kv_head_replicas = RANKS // kv_heads
        query = self.num_heads * HEAD_SIZE
        # name -> first row and number of rows here
        self.spans = {
            "q": (0, query),
            "k": (query, HEAD_SIZE),
            "v": (query + HEAD_SIZE, HEAD_SIZE),
        }
        shape = (query + 2 * HEAD_SIZE, HIDDEN)
        self.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)


class Model(torch.nn.Module):
    """Its loader takes the first rank's part of each tensor, however long that is."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(kv_heads)
        self.starts = {"q": 0, "k": HEADS * HEAD_SIZE, "v": (HEADS + kv_heads) * HEAD_SIZE}

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do."""
        for name, tensor in given:
            for part in self.starts if name == "qkv" else [name]:
                row, num = self.attention.spans[part]
                start = self.starts[part] if name == "qkv" else 0
                self.attention.weight.data.narrow(0, row, num).copy_(tensor.narrow(0, start, num))


def check(kv_heads: int, **rows: int) -> None:
    kinds = {name: (torch.float32, (num * HEAD_SIZE, HIDDEN)) for name, num in rows.items()}
    plan = learn(Model(kv_heads), kinds, EngineCompat(), admit=lambda *_: None)
    check_whole(plan, kinds, RANKS, num_same)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_ranks_share_are_taken_as_a_whole(kv_heads: int) -> None:
    check(kv_heads, q=HEADS, k=kv_heads, v=kv_heads)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parts_of_one_tensor_that_ranks_share_are_taken_as_a_whole(kv_heads: int) -> None:
    check(kv_heads, qkv=HEADS + 2 * kv_heads)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_tensor_that_is_too_long_by_one_head_is_refused(kv_heads: int, name: str) -> None:
    rows = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    rows[name] += 1
    with pytest.raises(IncompatibleUpdate, match=rf"tensor '{name}' .* the rest goes nowhere"):
        check(kv_heads, **rows)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_fused_tensor_that_is_too_long_by_one_head_is_refused(kv_heads: int) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"tensor 'qkv' .* the rest goes nowhere"):
        check(kv_heads, qkv=HEADS + 2 * kv_heads + 1)


def test_a_merged_layer_that_does_not_tell_its_heads_size_is_asked_nothing() -> None:
    layer: Any = torch.nn.Module()
    layer.num_kv_head_replicas = 2
    assert num_same(layer, 0) == 1

"""Of what is cut up for ranks, together they take all: a loader does not see what is too long."""

from collections.abc import Iterable

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.engines import check_covered
from rl_bridge.engines.load_plan import kinds_of, learn
from rl_bridge.engines.shards import shards_of
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import IncompatibleUpdate

HIDDEN, HEAD_SIZE, HEADS, RANKS = 16, 8, 8, 4


class Model(torch.nn.Module):
    """What a rank has of a fused query, key and value; ranks may share heads of the last two.

    Its loader takes this rank's part of each tensor, however long that is.
    """

    def __init__(self, rank: int, kv_heads: int) -> None:
        super().__init__()
        query, shared = HEADS // RANKS * HEAD_SIZE, rank * kv_heads // RANKS * HEAD_SIZE
        # name -> first row here, number of rows, first row in the tensor
        self.spans = {
            "q": (0, query, rank * query),
            "k": (query, HEAD_SIZE, shared),
            "v": (query + HEAD_SIZE, HEAD_SIZE, shared),
        }
        self.starts = {"q": 0, "k": HEADS * HEAD_SIZE, "v": (HEADS + kv_heads) * HEAD_SIZE}
        shape = (query + 2 * HEAD_SIZE, HIDDEN)
        self.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do."""
        for name, tensor in given:
            for part in self.starts if name == "qkv" else [name]:
                row, num, start = self.spans[part]
                start += self.starts[part] if name == "qkv" else 0
                self.weight.data.narrow(0, row, num).copy_(tensor.narrow(0, start, num))


def check(kv_heads: int, **heads: int) -> None:
    with make_weight_bridge("local-clone") as trainer:
        sent = {name: torch.zeros(num * HEAD_SIZE, HIDDEN) for name, num in heads.items()}
        manifest = trainer.publish(sent, weight_version=1)
        plans = [
            learn(Model(rank, kv_heads), kinds_of(manifest), EngineCompat(), admit=lambda *_: None)
            for rank in range(RANKS)
        ]
        check_covered(manifest, [shards_of(plan, manifest) for plan in plans])


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_ranks_share_are_taken_as_a_whole_and_not_one_more(
    kv_heads: int, *, is_fused: bool
) -> None:
    heads = {"q": HEADS, "k": kv_heads, "v": kv_heads}
    if is_fused:
        heads = {"qkv": sum(heads.values())}
    check(kv_heads, **heads)
    for name in heads:
        with pytest.raises(IncompatibleUpdate, match=rf"tensor '{name}' .* the rest goes nowhere"):
            check(kv_heads, **{**heads, name: heads[name] + 1})

"""What an engine's ranks say together, and what they say of the parts that they take."""

import pytest
import torch

from rl_bridge import WeightUpdateManifest, WeightUpdateRejectedError, make_weight_bridge
from rl_bridge.engines.load_plan import View
from rl_bridge.engines.sglang.plugin import reply_text
from rl_bridge.engines.shards import Shard, check_covered, parse_shards, part_digests
from rl_bridge.errors import IncompatibleUpdate, ProofFailed

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6)
TENSORS = {"a": WEIGHT, "b": torch.ones(3)}
# The columns of two ranks.
LEFT, RIGHT = View((4, 3), (6, 1), 0), View((4, 3), (6, 1), 3)


@pytest.fixture(scope="module")
def manifest() -> WeightUpdateManifest:
    with make_weight_bridge("local", source_worker="trainer") as bridge:
        return bridge.publish(TENSORS, weight_version=1)


def test_the_first_replicas_answer_is_read_where_there_are_several() -> None:
    numbers = [float(byte) for byte in b'{"ok": false}']
    assert reply_text(numbers) == '{"ok": false}'
    assert reply_text([numbers, numbers]) == '{"ok": false}'
    assert reply_text([None]) is None
    assert reply_text(None) is None


def test_an_element_that_no_rank_takes_is_told(manifest: WeightUpdateManifest) -> None:
    left, right = ([Shard(0, view, is_all=False)] for view in (LEFT, RIGHT))
    check_covered(manifest, [left, right])
    with pytest.raises(IncompatibleUpdate, match="takes 12 of its 24 elements"):
        check_covered(manifest, [left, left])


def test_parts_of_a_tensor_that_another_parameter_takes_whole_need_not_cover_it(
    manifest: WeightUpdateManifest,
) -> None:
    check_covered(manifest, [[Shard(0, LEFT, is_all=True)]])


@pytest.mark.parametrize(
    "given",
    [
        None,
        [[0, [4, 3], [6, 1], 4, False]],  # one element further than the tensor is
        [[0, [4, 3], [6, 1], -1, False]],
        [[0, [4, -3], [6, 1], 0, False]],
        [[7, [4, 3], [6, 1], 0, False]],
        [[0, [4, 3], [6], 0, False]],
        [[0, "x", [6, 1], 0, False]],
        [[0, [4, 3], [6, 1], 0]],
    ],
    ids=str,
)
def test_parts_that_are_none_are_refused(given: object, manifest: WeightUpdateManifest) -> None:
    with pytest.raises(WeightUpdateRejectedError, match="cannot be read"):
        parse_shards(given, manifest)


def test_bytes_that_went_bad_make_no_expectation(manifest: WeightUpdateManifest) -> None:
    bad = {**TENSORS, "a": WEIGHT.clone()}
    bad["a"][3, 5] = -1
    with pytest.raises(ProofFailed, match="tensor 'a' went bad"):
        part_digests(manifest, bad, [Shard(0, LEFT, is_all=False)], num_threads=1)

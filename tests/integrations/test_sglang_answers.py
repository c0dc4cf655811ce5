"""What an engine's ranks say together, and what they say of the parts that they take."""

from typing import Any

import pytest
import torch

from rl_bridge import WeightUpdateManifest, WeightUpdateRejectedError, make_weight_bridge
from rl_bridge.engines.evidence import digests_of
from rl_bridge.engines.load_plan import View
from rl_bridge.engines.sglang.cuts import Cut, check_covered, parse_cuts, part_digests
from rl_bridge.engines.sglang.plugin import reply_text
from rl_bridge.engines.sglang.shares import Shares
from rl_bridge.engines.sglang.votes import merged
from rl_bridge.errors import IncompatibleUpdate, ProofFailed

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6)
TENSORS = {"a": WEIGHT, "b": torch.ones(3)}
# The columns of two ranks.
LEFT, RIGHT = View((4, 3), (6, 1), 0), View((4, 3), (6, 1), 3)


@pytest.fixture(scope="module")
def manifest() -> WeightUpdateManifest:
    with make_weight_bridge("local", source_worker="trainer") as bridge:
        return bridge.publish(TENSORS, weight_version=1)


def said(view: View, row: int = 0) -> list[Any]:
    return Cut(row, view, is_all=False).to_json()


def yes(**more: Any) -> dict[str, Any]:
    return {"ok": True, "call": 1, **more}


def no(kind: str, message: str) -> dict[str, Any]:
    return {"ok": False, "call": 1, "type": kind, "message": message}


def test_the_first_replicas_answer_is_read_where_there_are_several() -> None:
    numbers = [float(byte) for byte in b'{"ok": false}']
    assert reply_text(numbers) == '{"ok": false}'
    assert reply_text([numbers, numbers]) == '{"ok": false}'
    assert reply_text([None]) is None
    assert reply_text(None) is None


def test_a_no_of_any_rank_is_the_answer_and_names_it() -> None:
    one = merged([yes(), no("ProofFailed", "wrong"), yes()])
    assert not one["ok"]
    assert one["type"] == "ProofFailed"
    assert one["message"] == "rank 1: wrong"


def test_a_torn_rank_is_told_before_others_that_refused() -> None:
    one = merged([no("ProofFailed", "wrong"), no("TornEngine", "it stays torn")])
    assert one["type"] == "TornEngine"
    assert one["message"] == "rank 1: it stays torn"


def test_an_update_that_any_rank_has_begun_is_begun() -> None:
    back = yes(begun=False, mine=False, pending=None, torn="")
    one = merged([back, yes(begun=True, mine=True, pending="u", torn="x")])
    assert one["begun"]
    assert one["mine"], "its driver could not undo it where one rank has done so"
    assert one["pending"] == "u"
    assert one["torn"] == "x"


def test_what_one_rank_alone_has_to_say_is_heard() -> None:
    assert merged([yes(), yes(not_told="the way back is gone")])["not_told"]


def test_a_cache_is_flushed_where_all_ranks_flushed_theirs() -> None:
    assert merged([yes(flushed=True), yes(flushed=True)])["flushed"] is True
    assert merged([yes(flushed=True), yes(flushed=False)])["flushed"] is False
    assert merged([yes(flushed=None), yes(flushed=True)])["flushed"] is None


def test_a_proof_counts_the_bytes_of_all_ranks() -> None:
    proof = {"method": "digest", "root": "r", "digested_nbytes": 3, "tensors": 2}
    one = merged([yes(proof=proof), yes(proof={**proof, "digested_nbytes": 4})])
    assert one["proof"] == {**proof, "digested_nbytes": 7}
    assert one["ranks"] == 2


def test_parts_of_all_ranks_that_cover_a_tensor_are_enough(manifest: WeightUpdateManifest) -> None:
    shares = Shares()
    shares.meet("engine")
    shares.learn(manifest, [[said(LEFT)], [said(RIGHT)]])
    assert shares.knows(manifest)
    assert shares.digests(manifest, TENSORS) == [
        [digests_of([WEIGHT[:, :3]], num_threads=1)[0].hex()],
        [digests_of([WEIGHT[:, 3:]], num_threads=1)[0].hex()],
    ]
    shares.meet("another one")
    assert not shares.knows(manifest)


def test_an_element_that_no_rank_takes_is_told(manifest: WeightUpdateManifest) -> None:
    cuts = [Cut(0, LEFT, is_all=False)]
    with pytest.raises(IncompatibleUpdate, match="takes 12 of its 24 elements"):
        check_covered(manifest, [cuts, cuts])
    shares = Shares()
    with pytest.raises(IncompatibleUpdate, match="tensor 'a'"):
        shares.learn(manifest, [[said(LEFT)], [said(LEFT)]])
    assert not shares.knows(manifest)


def test_parts_of_a_tensor_that_another_parameter_takes_whole_need_not_cover_it(
    manifest: WeightUpdateManifest,
) -> None:
    check_covered(manifest, [[Cut(0, LEFT, is_all=True)]])


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
        parse_cuts(given, manifest)


def test_bytes_that_went_bad_make_no_expectation(manifest: WeightUpdateManifest) -> None:
    bad = {**TENSORS, "a": WEIGHT.clone()}
    bad["a"][3, 5] = -1
    with pytest.raises(ProofFailed, match="tensor 'a' went bad"):
        part_digests(manifest, bad, [Cut(0, LEFT, is_all=False)], num_threads=1)

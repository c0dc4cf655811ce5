"""Whole modules and mappings: the same contract, with nothing to gather."""

from typing import Any

import pytest
import torch
from torch import nn

from rl_bridge import make_weight_bridge
from rl_bridge.errors import DuplicateTensorName, IncompatibleUpdate
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.trainers import FSDPWeightExtractor, StateDictExtractor
from tests.trainers_torch.fsdp_cases import plain
from tests.trainers_torch.worlds import described, local_report, placements_of, reference


@pytest.mark.parametrize("call", ["local", "full", "extract_weights"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_module_comes_out_as_its_state_dict(call: str, dtype: str | None) -> None:
    wanted = None if dtype is None else getattr(torch, dtype)
    extractor = StateDictExtractor(plain(), chunk_nbytes=300)
    assert described(list(getattr(extractor, call)(wanted))) == reference(plain(), dtype)


def test_weights_that_need_no_cast_are_the_module_s_own() -> None:
    model = nn.Linear(3, 2)
    (chunk,) = StateDictExtractor(model).local()
    assert chunk.tensors[0].data_ptr() == model.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in chunk.tensors)
    (cast,) = StateDictExtractor(model).local(torch.float16)
    assert cast.packing is not None
    assert cast.packed().buffer is cast.packing.buffer


def test_kept_buffers_are_written_again_in_the_next_update() -> None:
    model = nn.Linear(3, 2)
    extractor = StateDictExtractor(model, keep_buffers=True)
    (first,) = extractor.local(torch.bfloat16)
    with torch.no_grad():
        model.weight += 1
    (second,) = extractor.local(torch.bfloat16)
    assert [t.data_ptr() for t in first.tensors] == [t.data_ptr() for t in second.tensors]
    assert torch.equal(second.tensors[0], model.weight.bfloat16())
    (gathered,) = extractor.full(torch.bfloat16)
    assert gathered.tensors[0].data_ptr() != second.tensors[0].data_ptr()
    with make_weight_bridge("local-clone") as bridge:
        roots = [
            bridge.publish(extractor.local(torch.bfloat16), weight_version=version).root
            for version in (1, 2)
        ]
    assert roots[0] == roots[1]


def test_integers_keep_their_dtype() -> None:
    tensors = {"steps": torch.tensor(3), "w": torch.ones(2)}
    extractor = StateDictExtractor(tensors)
    chunks = list(extractor.local(torch.bfloat16))
    assert described(chunks)["steps"] == ["torch.int64", [], [3]]
    assert extractor.placements(torch.bfloat16)["steps"].dtype == "int64"
    assert extractor.metadata(torch.bfloat16)["w"].dtype == "bfloat16"


def test_tied_weights_are_cast_once() -> None:
    tied = [
        chunk.tensors[chunk.names.index(name)]
        for chunk in StateDictExtractor(plain(), chunk_nbytes=300).local(torch.float16)
        for name in ("embed.weight", "head.weight")
        if name in chunk.names
    ]
    assert len(tied) == 2
    assert tied[0] is tied[1]


@pytest.mark.parametrize("kind", [StateDictExtractor, FSDPWeightExtractor])
def test_weights_that_are_tied_no_longer_are_not_published_as_each_other(kind: Any) -> None:
    model = plain()
    extractor = kind(model)
    list(extractor.full())
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(kept, assign=True)  # a roll-back: each name has a tensor of its own now
    with torch.no_grad():
        model.get_parameter("head.weight").fill_(7.0)
    sent = {name: one for chunk in extractor.full() for name, one in chunk.items()}
    assert torch.equal(sent["head.weight"], model.get_parameter("head.weight"))
    assert torch.equal(sent["embed.weight"], kept["embed.weight"])


def test_copies_on_several_ranks_say_which_they_are() -> None:
    reports = [
        local_report(StateDictExtractor(plain(), rank=rank, world_size=3)) for rank in range(3)
    ]
    assert prove_coverage(held_pieces([placements_of(report) for report in reports]))
    assert reports[0]["metadata"]["gain"][2] == [0, 1, 2]


def test_a_module_that_gets_another_tensor_is_looked_at_anew() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    extractor = StateDictExtractor(model)
    assert len(described(list(extractor.local()))) == 2
    model.append(nn.Linear(2, 3))
    assert described(list(extractor.local())) == reference(model)
    assert "1.weight" in extractor.placements()
    model[1] = nn.Linear(2, 5)
    assert described(list(extractor.local(torch.float16))) == reference(model, "float16")


def test_trainable_names_reach_publish() -> None:
    model = plain()
    extractor = StateDictExtractor(model)
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    assert extractor.trainable_names() == names
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish(
            extractor.local(torch.float16),
            weight_version=1,
            trainable=extractor.trainable_names(),
        )
    assert manifest.tensor_count == len(reference(model))


@pytest.mark.parametrize(
    ("source", "words"),
    [(iter([]), "Pass dict"), (torch.ones(1), "expected a module"), ([], "Pass dict")],
)
def test_an_iterator_is_refused_as_a_source(source: object, words: str) -> None:
    with pytest.raises(IncompatibleUpdate, match=words):
        StateDictExtractor(source)  # type: ignore[arg-type]  # that is what is tried


@pytest.mark.parametrize("call", ["metadata", "placements", "local", "full"])
@pytest.mark.parametrize(
    ("layout", "words"),
    [(torch.sparse_coo, "of layout torch.sparse_coo"), (torch.jagged, "nested")],
)
def test_tensors_that_are_not_dense_are_refused_by_name(
    call: str, layout: torch.layout, words: str
) -> None:
    model = nn.Linear(2, 2)
    rows = [torch.ones(2), torch.ones(3)]
    odd = torch.eye(2).to_sparse()
    if layout is torch.jagged:
        odd = torch.nested.nested_tensor(rows, layout=layout)
    model.register_buffer("mask", odd)
    with pytest.raises(IncompatibleUpdate, match=f"'mask' is {words}.*persistent=False"):
        list(getattr(StateDictExtractor(model), call)())


@pytest.mark.parametrize("limit", [0, -1])
def test_a_threshold_below_one_byte_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        StateDictExtractor({}, chunk_nbytes=limit)
    with pytest.raises(TypeError, match="expected an int"):
        StateDictExtractor({}, chunk_nbytes=1.5)  # type: ignore[arg-type]  # that is what is tried


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, 16])
def test_only_floating_point_dtypes_can_be_asked_for(dtype: object) -> None:
    with pytest.raises(TypeError, match="or None"):
        next(StateDictExtractor({"w": torch.ones(1)}).local(dtype))  # type: ignore[arg-type]


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 <= rank"):
        StateDictExtractor({}, rank=1)


def test_wrappers_that_give_two_tensors_one_name_are_refused() -> None:
    model = nn.Module()
    model.a = nn.Linear(1, 1)
    model._orig_mod = nn.Module()
    model._orig_mod.a = nn.Linear(1, 1)
    with pytest.raises(DuplicateTensorName, match="appears twice"):
        StateDictExtractor(model).placements()

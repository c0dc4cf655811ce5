"""Megatron-Core on real ranks: what each holds, in its own names and in Hugging Face's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.testing.processes import free_port
from tests.trainers_torch.worlds import World, assembled, filled, placements_of, reference

CASES = "megatron_cases"
# Degrees of tensor and pipeline parallelism; ranks that are left hold copies.
DEGREES = [
    pytest.param(2, {"tp": 2}, id="tp2"),
    pytest.param(2, {"pp": 2}, id="pp2"),
    pytest.param(2, {}, id="copies"),
    pytest.param(4, {"tp": 2, "pp": 2}, id="tp2-pp2"),
    pytest.param(4, {"tp": 2}, id="tp2-copies"),
]
World2 = Callable[[int, str], World]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Where a checkpoint lies, and what is in it."""
    path: Path = tmp_path_factory.mktemp("models")
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {}),
        "tied": ("Qwen2", {"tie_word_embeddings": True}),
        "odd": ("Llama", {"vocab_size": 23}),
    }
    return {
        name: (str(path / name), saved(kind, path / name, **options))
        for name, (kind, options) in kinds.items()
    }


Models = dict[str, tuple[str, dict[str, Any]]]


@pytest.mark.parametrize(
    ("kind", "ranks", "degrees"),
    [pytest.param("llama", 2, {"tp": 2}, id="llama")]
    + [pytest.param("qwen2", *one.values, id=str(one.id)) for one in DEGREES],
)
def test_parts_and_gathers_through_a_bridge_are_the_checkpoint(
    worlds: World2, models: Models, kind: str, ranks: int, degrees: dict[str, int]
) -> None:
    path, whole = models[kind]
    reports = worlds(ranks, CASES).run("report", path=path, is_hf=True, **degrees)
    assert assembled(reports) == whole
    for report in reports:
        assert report["full"] == whole
        for_parts, for_wholes = report["asked"]
        assert for_parts == 0
        assert for_wholes > 0


@pytest.mark.parametrize(("ranks", "degrees"), DEGREES)
def test_without_a_bridge_they_are_what_one_rank_alone_would_hold(
    worlds: World2, models: Models, ranks: int, degrees: dict[str, int]
) -> None:
    """Of its own stage each rank gathers the whole."""
    path, _ = models["qwen2"]
    alone = worlds(1, CASES).run("report", path=path, is_hf=False)
    whole = alone[0]["tensors"]
    reports = worlds(ranks, CASES).run("report", path=path, is_hf=False, **degrees)
    assert assembled(reports) == assembled(alone) == whole
    gathered: dict[str, Any] = {}
    for report in reports:
        gathered |= report["full"]
        assert report["full"].items() <= whole.items()
        assert report["asked"][0] == 0
    assert gathered == whole


def test_a_gather_looks_at_the_model_once_however_many_tensors_there_are(
    worlds: World2, models: Models
) -> None:
    assert worlds(2, CASES).run("looks", path=models["llama"][0], tp=2) == [[1, 1]] * 2


def test_exported_tensors_come_in_chunks_cast_and_by_module(worlds: World2, models: Models) -> None:
    path, whole = models["qwen2"]
    answer = worlds(2, CASES).run("report", path=path, is_hf=True, dtype="bfloat16", tp=2)[0]
    assert {dtype for dtype, *_ in answer["full"].values()} == {"torch.bfloat16"}
    assert sum(answer["sizes"]) == sum(2 * len(values) for *_, values in whole.values())
    assert max(answer["sizes"]) <= 5000 < sum(answer["sizes"])
    assert list(answer["full"]) != sorted(answer["full"]), "in the exporter's order"


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}])
def test_the_padding_of_a_vocabulary_is_not_published(
    worlds: World2, models: Models, degrees: dict[str, int]
) -> None:
    path, whole = models["odd"]
    reports = worlds(2, CASES).run("report", path=path, is_hf=True, pad_to=16, **degrees)
    assert assembled(reports) == whole
    assert whole["lm_head.weight"][1][0] == 23


@pytest.mark.parametrize("is_hf", [False, True])
def test_publishing_as_a_group_takes_one_slot_of_the_shard_and_gathers_nothing(
    worlds: World2, models: Models, tmp_path: Path, *, is_hf: bool
) -> None:
    wide = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1536}
    model = written("Llama", tmp_path, **wide, num_hidden_layers=4)
    nbytes = 4 * sum(one.numel() for one in model.parameters())
    paths = {"small": models["llama"][0], "large": str(tmp_path)}
    ranks = worlds(4, CASES)
    for peak, shard, asked in ranks.run(
        "peak_of_publishing", **paths, port=free_port(), is_hf=is_hf
    ):
        assert asked == []
        assert shard // 2 < peak <= shard + (2 << 20)
        assert shard < nbytes // 4 + (1 << 20), "a quarter of the model, and a norm"


@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2}, {}])
def test_experts_have_their_numbers_in_the_whole_model(
    worlds: World2, degrees: dict[str, int]
) -> None:
    reports = worlds(2, CASES).run("experts", **degrees)
    found = assembled(reports)
    for number in range(4):
        prefix = f"decoder.layers.0.mlp.experts.local_experts.{number}"
        for name, shape in (("linear_fc1", [12, 8]), ("linear_fc2", [8, 6])):
            values = [number + 1.0] * (shape[0] * shape[1])
            assert found[f"{prefix}.{name}.weight"][1:] == [shape, values]


def test_gate_and_up_of_each_rank_lie_apart_in_the_whole(worlds: World2, models: Models) -> None:
    path, _ = models["llama"]
    for rank, report in enumerate(worlds(2, CASES).run("report", path=path, is_hf=False, tp=2)):
        placed = placements_of(report)["decoder.layers.0.mlp.linear_fc1.weight"]
        assert [piece.offset for piece in placed.pieces] == [(6 * rank, 0), (12 + 6 * rank, 0)]
        assert [piece.local_offset for piece in placed.pieces] == [(0, 0), (6, 0)]


def test_an_unknown_layout_is_refused(worlds: World2, models: Models) -> None:
    for answer in worlds(2, CASES).run("refusals", path=models["llama"][0]):
        assert "expected a module or a list" in answer["no_module"]
        assert "mbridge or Megatron-Bridge" in answer["no_bridge"]
        assert "a way of its own" in answer["own_conversion"]
        assert "initialize_model_parallel" in answer["no_groups"]


# The last one: mbridge's table of names, once changed for a tied model, stays so in the process.
def test_an_embedding_that_two_stages_hold_is_a_copy_on_the_second(
    worlds: World2, models: Models
) -> None:
    path, whole = models["tied"]
    reports = worlds(2, CASES).run("report", path=path, is_hf=True, pp=2)
    found = assembled(reports)  # compares copies
    assert found.keys() | {"lm_head.weight"} == whole.keys()
    assert found["model.embed_tokens.weight"] == whole["model.embed_tokens.weight"]
    (piece,) = placements_of(reports[1])["output_layer.weight"].pieces
    assert (piece.name, piece.replica) == ("model.embed_tokens.weight", 1)
    assembled(worlds(2, CASES).run("report", path=path, is_hf=False, pp=2))  # it covers


# ---- a checkpoint --------------------------------------------------------------------------------


def saved(kind: str, path: Path, **options: Any) -> dict[str, Any]:
    """Write a checkpoint to `path`, and tell what is in it."""
    return reference(written(kind, path, **options))


def written(kind: str, path: Path, **options: Any) -> torch.nn.Module:
    """Write a checkpoint to `path`; the model that it is of."""
    import transformers

    sizes = {
        "vocab_size": 26,
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32)
    filled(model)
    model.save_pretrained(path)
    return model  # type: ignore[no-any-return]

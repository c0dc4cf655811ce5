"""Updates that do not fit are refused before anything changes, by name, expected and got."""

import re
from collections.abc import Iterator

import pytest
import torch

from rl_bridge import WeightUpdateManifest
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.drive import Setting, executor_for, native_update
from tests.engines.engines import Bench, bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

KIND = Kind("qwen2", tied=True)


@pytest.fixture(scope="module")
def served(checkpoints: Checkpoints, references: References) -> Iterator[Bench]:
    with bench(Setting(KIND), checkpoints, references) as made:
        yield made


@pytest.fixture
def engine(served: Bench) -> Iterator[Bench]:
    """One that must not notice what is refused."""
    served.trainer.release_all()
    yield served
    served.check()


def refuse(engine: Bench, sent: dict[str, torch.Tensor], by: str = "executor") -> str:
    """The text of the refusal."""
    engine.trainer.release_all()
    manifest: WeightUpdateManifest = engine.trainer.publish(sent)
    if by == "executor":
        with pytest.raises(IncompatibleUpdate) as caught:
            engine.executor.update_weights(manifest)
    else:
        with pytest.raises(Exception, match="IncompatibleUpdate") as caught:  # type: ignore[assignment]
            native_update(engine.llm, manifest)
    assert all(
        report.state in {"rejected", "released"} for report in engine.trainer.holders(manifest)
    )
    return str(caught.value)


def fused(name: str) -> str:
    """The parameter of the engine that a tensor goes to."""
    return re.sub(r"\b(?:gate|up)_proj", "gate_up_proj", re.sub(r"\b[qkv]_proj", "qkv_proj", name))


@pytest.mark.parametrize("by", ["executor", "vLLM's calls"])
def test_every_tensor_is_looked_at_for_numbers_that_are_none(engine: Bench, by: str) -> None:
    for name in engine.weights[0]:
        damaged = engine.next()[name].clone()
        damaged.view(-1)[-1] = torch.nan
        text = refuse(engine, engine.next(**{name: damaged}), by)
        assert f"{name!r}: 1 of its {damaged.numel()}" in text.replace("\\'", "'")


def test_every_tensor_is_missed(engine: Bench) -> None:
    for name in engine.weights[0]:
        sent = engine.next()
        del sent[name]
        text = refuse(engine, sent)
        assert repr(fused(name)) in text, text


def test_a_tensor_too_many_is_named(engine: Bench) -> None:
    sent = engine.next()
    sent["model.layers.1.mlp.extra.weight"] = torch.ones(3)
    assert "model.layers.1.mlp.extra.weight" in refuse(engine, sent)


@pytest.mark.parametrize(
    "shaped",
    [
        lambda tensor: torch.cat([tensor, tensor]),
        lambda tensor: tensor[: len(tensor) // 2].clone(),
        lambda tensor: tensor[:-1].clone(),
        lambda tensor: torch.cat([tensor, tensor[:1]]),
        lambda tensor: torch.cat([tensor, tensor], -1),
        lambda tensor: tensor[..., :-1].clone(),
        lambda tensor: tensor.unsqueeze(0).contiguous(),
        lambda tensor: tensor.t().contiguous() if tensor.ndim > 1 else tensor[::2].clone(),
    ],
    ids=["twice", "half", "less", "more", "twice-across", "less-across", "deeper", "turned"],
)
def test_every_tensor_of_another_shape_is_refused(engine: Bench, shaped: object) -> None:
    assert callable(shaped)
    wrong = []
    for name, tensor in engine.next().items():
        changed = shaped(tensor)
        if changed.shape == tensor.shape:
            continue  # a square matrix
        got = f"{name!r}, shape {list(changed.shape)}, does not fit"
        try:
            engine.executor.update_weights(engine.trainer.publish(engine.next(**{name: changed})))
        except IncompatibleUpdate as error:
            leaf = name.rpartition(".")[0]
            is_named = leaf in str(error) or "qkv_proj" in str(error)
            if not is_named or ("its loader says" in str(error) and got not in str(error)):
                wrong.append(f"{name}: {error}")
        else:
            engine.holds = 1 - engine.holds
            wrong.append(f"{name}: {list(changed.shape)} for {list(tensor.shape)} was taken")
    assert wrong == []


def test_every_tensor_of_another_dtype_is_refused_with_both_names(engine: Bench) -> None:
    for name, tensor in engine.next().items():
        text = refuse(engine, engine.next(**{name: tensor.to(torch.bfloat16)}))
        assert name in text
        assert "bfloat16" in text
        assert "float32" in text


@pytest.mark.parametrize("family", ["qwen3", "llama", "moe"])
def test_another_familys_update_is_refused(
    engine: Bench, family: str, checkpoints: Checkpoints
) -> None:
    text = refuse(engine, checkpoints.weights(Kind(family), 1))
    assert "Publish" in text


def test_an_untied_update_of_a_tied_model_is_refused_by_the_name_of_its_head(
    engine: Bench,
) -> None:
    sent = engine.next()
    sent["lm_head.weight"] = torch.randn_like(sent["model.embed_tokens.weight"])
    text = refuse(engine, sent)
    assert "lm_head" in text
    assert "ties to ['model.embed_tokens.weight'] must have the same bytes" in text


def test_a_tied_head_that_is_published_as_a_tensor_of_its_own_is_taken(engine: Bench) -> None:
    sent = engine.next()
    sent["lm_head.weight"] = sent["model.embed_tokens.weight"].clone()
    engine.executor.update_weights(engine.trainer.publish(sent))
    engine.holds = 1 - engine.holds


def test_an_update_may_be_cast_where_that_is_said(engine: Bench) -> None:
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in engine.next().items()}
    with executor_for(engine.llm, cast=True) as casting:
        casting.update_weights(engine.trainer.publish(narrow))
        cast = engine.answers()
        wide = {name: tensor.to(torch.float32) for name, tensor in narrow.items()}
    engine.executor.update_weights(engine.trainer.publish(wide))
    assert engine.answers() == cast
    engine.executor.update_weights(engine.trainer.publish(engine.next()))
    engine.holds = 1 - engine.holds


@pytest.mark.parametrize("part", ["model.norm", "embed_tokens", "layers.0.self_attn.q_proj.bias"])
def test_a_number_that_the_engines_dtype_cannot_hold_is_refused(engine: Bench, part: str) -> None:
    sent = engine.next()
    name = next(name for name in sent if part in name)
    sent[name] = sent[name].double()
    sent[name].view(-1)[-1] = 1e300
    with (
        executor_for(engine.llm, cast=True) as casting,
        pytest.raises(IncompatibleUpdate, match=rf"{name!r} has numbers from .* to 1e\+300"),
    ):
        casting.update_weights(engine.trainer.publish(sent))

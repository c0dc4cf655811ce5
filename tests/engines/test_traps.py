"""What goes wrong where a vLLM engine is updated by hand, one trap a test.

Each test shows the trap where vLLM still has it, and that an update by rl_bridge does not fall in.
"""

from collections.abc import Iterator

import pytest
import torch

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.errors import IncompatibleUpdate, SessionRefused
from tests.engines.drive import (
    Answers,
    Setting,
    executor_for,
    greedy,
    model_of,
    prompts_for,
    read,
)
from tests.engines.engines import Bench, bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

KIND = Kind("qwen3", tied=True)
# Two blocks of the cache and more, which two requests share.
LONG = tuple((i * 7 + 3) % 500 + 3 for i in range(300))


@pytest.fixture(scope="module")
def long_answers(references: References) -> list[Answers]:
    return [references.of(Setting(KIND), version, (LONG,)) for version in (0, 1)]


@pytest.fixture(scope="module")
def engine(
    checkpoints: Checkpoints, references: References, long_answers: list[Answers]
) -> Iterator[Bench]:
    with bench(Setting(KIND), checkpoints, references) as made:
        yield made


@pytest.fixture(autouse=True)
def slots_are_free(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").trainer.release_all()


# ---- loading --------------------------------------------------------------------------------


def test_plain_load_weights_fails_on_packed_layers_and_an_update_mends_what_it_tore(
    engine: Bench,
) -> None:
    with pytest.raises(AssertionError, match="Attempted to load weight"):
        model_of(engine.llm).load_weights(engine.next().items())
    assert engine.answers() not in engine.fresh  # neither the one nor the other
    engine.update()
    engine.check()


def test_a_slot_that_is_written_again_right_after_the_update_changes_nothing(
    engine: Bench,
) -> None:
    for by in ("executor", "vLLM's calls"):
        manifest = engine.update(by)
        (worker,) = (r for r in engine.trainer.holders(manifest) if r.worker == "vllm")
        assert not worker.tensors_held  # it has memory of its own
        ids = engine.begin(f"slots-{by[0]}", steps=3)
        for value in range(8):  # twice over all slots
            engine.trainer.release_all()
            engine.trainer.publish(
                {name: torch.full_like(tensor, value) for name, tensor in engine.next().items()}
            )
            engine.llm.llm_engine.step()
        engine.finish(ids)
        engine.check(by)


def test_a_step_between_start_and_finish_sees_one_version_or_the_other(engine: Bench) -> None:
    ids = engine.begin("between", steps=5)
    engine.llm.start_weight_update()
    engine.llm.llm_engine.step()
    before = engine.fresh[engine.holds]
    manifest = engine.trainer.publish(engine.next())
    engine.llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    engine.llm.llm_engine.step()
    engine.llm.finish_weight_update("between")
    engine.holds = 1 - engine.holds
    for output, expected in zip(engine.finish(ids), before, strict=True):
        tokens = tuple(output.outputs[0].token_ids)
        assert tokens[:6] == expected[0][:6]
        assert len(tokens) == len(expected[0])
    engine.check()
    # Asked for whole answers in each gap, it gives those of one version.
    engine.llm.start_weight_update()
    engine.check("started")
    manifest = engine.trainer.publish(engine.next())
    engine.llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    engine.holds = 1 - engine.holds
    engine.check("not finished")
    engine.llm.finish_weight_update("finished")
    engine.check("finished")


def test_an_update_that_served_and_was_never_finished_stands(engine: Bench) -> None:
    manifest = engine.trainer.publish(engine.next())
    engine.llm.start_weight_update()
    engine.llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    engine.holds = 1 - engine.holds
    engine.check("served")
    # An executor is refused by name, and changes nothing.
    with pytest.raises(SessionRefused, match="vLLM's own calls"):
        engine.executor.update_weights(engine.trainer.publish(engine.next()))
    engine.check("behind a refusal")
    # vLLM's session is open still; it takes another update, and its end.
    manifest = engine.trainer.publish(engine.next())
    engine.llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    engine.llm.finish_weight_update("at last")
    engine.holds = 1 - engine.holds
    engine.check("finished")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_never_reach_the_cache_of_a_request(
    engine: Bench, value: float
) -> None:
    assert engine.llm.reset_prefix_cache()
    ids = engine.begin(f"nan-{value}", steps=5)
    sent = engine.next()
    name = "model.layers.0.self_attn.k_proj.weight"
    sent[name] = torch.full_like(sent[name], value)
    with pytest.raises(IncompatibleUpdate, match="NaN or Inf"):
        engine.executor.update_weights(engine.trainer.publish(sent))
    assert engine.rest(ids) == engine.fresh[engine.holds]
    engine.check()


# ---- what the old weights cached ------------------------------------------------------------


def ask_long(engine: Bench, salt: str | None = None) -> tuple[Answers, int]:
    """Answers to a long prompt, and how much of it was cached."""
    (output,) = engine.llm.generate(prompts_for((LONG,), salt), greedy(), use_tqdm=False)
    return read([output]), output.num_cached_tokens


@pytest.mark.parametrize("cache", ["recompute", "reset"])
def test_a_cached_prefix_of_the_old_weights_is_not_used_after_an_update(
    engine: Bench, long_answers: list[Answers], cache: str
) -> None:
    ask_long(engine)
    assert ask_long(engine)[1] >= 128
    with executor_for(engine.llm, serving={"cache": cache}) as executor:
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
        assert ask_long(engine) == (long_answers[engine.holds], 0)


def test_a_kept_cache_is_stale_unless_requests_carry_a_salt(
    engine: Bench, long_answers: list[Answers]
) -> None:
    with executor_for(engine.llm, serving={"cache": "keep"}) as executor:
        assert engine.llm.reset_prefix_cache()
        ask_long(engine, "before")
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
        stale, cached = ask_long(engine, "before")
        assert cached >= 128
        assert stale != long_answers[engine.holds]
        assert ask_long(engine, "after") == (long_answers[engine.holds], 0)
    engine.check()


def test_a_cache_that_requests_hold_refuses_to_be_reset_and_the_update_is_undone(
    engine: Bench,
) -> None:
    assert engine.llm.reset_prefix_cache()
    ids = engine.begin("held", steps=5)
    assert not engine.llm.reset_prefix_cache()  # vLLM says so, and does nothing
    with (
        executor_for(engine.llm, serving={"cache": "reset"}) as executor,
        pytest.raises(WeightUpdateRejectedError, match="requests hold cached blocks"),
    ):
        executor.update_weights(engine.trainer.publish(engine.next()))
    assert engine.rest(ids) == engine.fresh[engine.holds]
    engine.check()


# ---- vLLM's own reload ----------------------------------------------------------------------


def test_tied_embeddings_are_right_where_vllms_own_reload_is_wrong(
    engine: Bench, checkpoints: Checkpoints
) -> None:
    path = checkpoints.path(KIND, 1 - engine.holds)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    assert engine.answers() not in engine.fresh  # the head kept its packed copy of before
    engine.update()
    engine.check()
    engine.update("vLLM's calls")
    engine.check()

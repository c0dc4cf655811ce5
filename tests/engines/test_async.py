"""An ``AsyncLLM`` that serves while it is updated: no request sees a mixture, labels are exact."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
    WeightUpdateManifest,
)
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, executor_for
from tests.engines.looped import Looped, looped
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.trainer import Trainer

SETTING = Setting(Kind("qwen3"), in_process=False)
TOKENS = 300


@pytest.fixture(scope="module")
def fresh(references: References) -> list[Answers]:
    return [references.of(SETTING, version) for version in (0, 1)]


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints, fresh: list[Answers]) -> Iterator[Looped]:
    with looped(SETTING, checkpoints.path(SETTING.kind, 0)) as made:
        yield made


@pytest.fixture(scope="module")
def weights(checkpoints: Checkpoints) -> list[dict[str, torch.Tensor]]:
    return [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]


@pytest.fixture
def executor(engine: Looped) -> Iterator[RolloutExecutor]:
    with executor_for(engine.llm, loop=engine.loop) as made:
        yield made


def label(manifest: WeightUpdateManifest) -> str:
    return f"{manifest.weight_version}@{manifest.root}"


@pytest.mark.timeout(180)
def test_it_is_a_fresh_engine_after_each_update(
    engine: Looped,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    for step in range(1, 5):
        executor.update_weights(trainer.publish(weights[step % 2]))
        assert engine.answers() == fresh[step % 2]


def test_the_labels_of_requests_under_way_are_exact_to_the_token(
    engine: Looped,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    executor.update_weights(trainer.publish(weights[1]))
    new_alone = engine.answers(tokens=TOKENS)
    old = trainer.publish(weights[0])
    executor.update_weights(old)
    old_alone = engine.answers(tokens=TOKENS)
    requests = [engine.ask(prompt, TOKENS) for prompt in PROMPTS]
    for request in requests:
        request.reach(40)
    new = trainer.publish(weights[1])
    executor.update_weights(new)
    assert not any(request.is_done for request in requests)
    outputs = [request.result() for request in requests]
    for output, alone, other in zip(outputs, old_alone, new_alone, strict=True):
        tokens = tuple(output.outputs[0].token_ids)
        first, second = output.outputs[0].weight_versions
        assert (first.version, second.version) == (label(old), label(new))
        assert (first.start, first.end, second.end) == (0, second.start, TOKENS)
        cut = first.end
        assert tokens[:cut] == alone[0][:cut]
        assert tokens[cut:] not in {alone[0][cut:], other[0][cut:]}
        # What follows is what the new weights say behind these tokens, not behind old caches.
        ((rest, _),) = engine.answers(((*output.prompt_token_ids, *tokens[:cut]),), TOKENS - cut)
        assert tokens[cut:] == rest


@pytest.mark.parametrize(
    "policy",
    [("keep", "recompute"), ("wait", "reset"), ("abort", "reset"), (None, "recompute")],
    ids=str,
)
def test_every_pause_leads_to_the_new_version(
    engine: Looped,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
    policy: tuple[str | None, str],
) -> None:
    pause, cache = policy
    with executor_for(
        engine.llm, loop=engine.loop, serving={"pause": pause, "cache": cache}
    ) as executor:
        for version in (0, 1):
            requests = [engine.ask(prompt, 150) for prompt in PROMPTS]
            for request in requests:
                request.reach(10)
            executor.update_weights(trainer.publish(weights[version]))
            reasons = {request.result().outputs[0].finish_reason for request in requests}
            assert reasons == ({"abort"} if pause == "abort" else {"length"})
            assert engine.answers() == fresh[version]
    assert not engine.run(engine.llm.is_paused())


def test_many_updates_under_load_leave_every_request_with_a_whole_history(
    engine: Looped,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
    fresh: list[Answers],
) -> None:
    told = []
    requests = [engine.ask(prompt, 400) for prompt in PROMPTS]
    for step in range(12):
        manifest = trainer.publish(weights[step % 2])
        executor.update_weights(manifest)
        told.append(label(manifest))
        requests.append(engine.ask(PROMPTS[step % 3], 100))
        requests[-1].reach(5)
    for request in requests:
        output = request.result().outputs[0]
        spans = output.weight_versions
        assert spans[0].start == 0
        assert spans[-1].end == len(output.token_ids)
        assert all(one.end == other.start for one, other in itertools.pairwise(spans))
        order = [told.index(span.version) for span in spans if span.version in told]
        assert order == sorted(set(order))
        assert len(order) >= len(spans) - 1  # one may be from before
    assert engine.answers() == fresh[1]


def test_an_update_in_the_engines_own_loop_is_refused_with_what_to_do(
    engine: Looped,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    manifest = trainer.publish(weights[0])

    async def wrongly() -> None:
        executor.update_weights(manifest)

    with pytest.raises(WeightBridgeUnavailableError, match=r"asyncio\.to_thread"):
        engine.run(wrongly())

    async def rightly() -> None:
        await asyncio.to_thread(executor.update_weights, trainer.publish(weights[1]))

    engine.run(rightly())


# The last test of this file: there is no engine behind it.
def test_a_worker_that_died_between_updates_is_a_typed_error_within_its_deadline(
    engine: Looped,
    executor: RolloutExecutor,
    trainer: Trainer,
    weights: list[dict[str, torch.Tensor]],
) -> None:
    executor.update_weights(trainer.publish(weights[0]))
    (pid,) = engine.run(engine.llm.collective_rpc("tell_pid"))
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((EngineLost, TornEngine)):
        executor.update_weights(trainer.publish(weights[1]))
    until(lambda: engine.llm.errored, what="vLLM notices, too")
    with pytest.raises((EngineLost, TornEngine)):
        executor.update_weights(trainer.publish(weights[1]))

"""An ``AsyncLLM`` that serves while it is updated: no request sees a mixture, labels are exact."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from rl_bridge import (
    EngineLost,
    RolloutExecutor,
    TornEngine,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.processes import until
from tests.engines.drive import PROMPTS, Answers, Setting, executor_for
from tests.engines.looped import Looped, looped
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.engines.stand import Stand, label_of
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


@pytest.fixture
def stand(
    engine: Looped, trainer: Trainer, checkpoints: Checkpoints, fresh: list[Answers]
) -> Stand:
    weights = [checkpoints.weights(SETTING.kind, version) for version in (0, 1)]
    return Stand(engine, trainer, weights, fresh)


@pytest.fixture
def executor(engine: Looped) -> Iterator[RolloutExecutor]:
    with executor_for(engine.llm, loop=engine.loop) as made:
        yield made


def test_the_labels_of_requests_under_way_are_exact_to_the_token(
    stand: Stand, executor: RolloutExecutor
) -> None:
    engine = stand.engine
    stand.update(executor, 1)
    new_alone = engine.answers(tokens=TOKENS)
    old = stand.update(executor, 0)
    old_alone = engine.answers(tokens=TOKENS)
    requests = [engine.ask(prompt, TOKENS) for prompt in PROMPTS]
    for request in requests:
        request.reach(40)
    new = stand.update(executor, 1)
    assert not any(request.is_done for request in requests)
    outputs = [request.result() for request in requests]
    for output, alone, other in zip(outputs, old_alone, new_alone, strict=True):
        tokens = tuple(output.outputs[0].token_ids)
        first, second = output.outputs[0].weight_versions
        assert (first.version, second.version) == (label_of(old), label_of(new))
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
def test_every_pause_leads_to_the_new_version(stand: Stand, policy: tuple[str | None, str]) -> None:
    engine, (pause, cache) = stand.engine, policy
    with executor_for(
        engine.llm, loop=engine.loop, serving={"pause": pause, "cache": cache}
    ) as executor:
        for version in (0, 1):
            requests = [engine.ask(prompt, 150) for prompt in PROMPTS]
            for request in requests:
                request.reach(10)
            stand.update(executor, version)
            reasons = {request.result().outputs[0].finish_reason for request in requests}
            assert reasons == ({"abort"} if pause == "abort" else {"length"})
            stand.check()
    assert not engine.run(engine.llm.is_paused())


def test_many_updates_under_load_leave_every_request_with_a_whole_history(
    stand: Stand, executor: RolloutExecutor
) -> None:
    told, engine = [], stand.engine
    requests = [engine.ask(prompt, 400) for prompt in PROMPTS]
    for step in range(12):
        told.append(label_of(stand.update(executor, step % 2)))
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
    stand.check()


def test_an_update_in_the_engines_own_loop_is_refused_with_what_to_do(
    stand: Stand, executor: RolloutExecutor
) -> None:
    engine, manifest = stand.engine, stand.publish(0)

    async def wrongly() -> None:
        executor.update_weights(manifest)

    with pytest.raises(WeightBridgeUnavailableError, match=r"asyncio\.to_thread"):
        engine.run(wrongly())

    async def rightly() -> None:
        await asyncio.to_thread(executor.update_weights, stand.publish(1))

    engine.run(rightly())


# The last test of this file: there is no engine behind it.
def test_a_worker_that_died_between_updates_is_a_typed_error_within_its_deadline(
    stand: Stand, executor: RolloutExecutor
) -> None:
    engine = stand.engine
    stand.update(executor, 0)
    (pid,) = engine.run(engine.llm.collective_rpc("tell_pid"))
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((EngineLost, TornEngine)):
        executor.update_weights(stand.publish(1))
    until(lambda: engine.llm.errored, what="vLLM notices, too")
    with pytest.raises((EngineLost, TornEngine)):
        executor.update_weights(stand.publish(1))

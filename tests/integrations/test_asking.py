"""What a driver finds out about an engine's ranks before it asks anything else of them."""

import concurrent.futures
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge import TensorBridge, WeightBridgeUnavailableError
from rl_bridge.engines.vllm.client import LLMHandle, Replies
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import VLLMEngineAdapter
from tests.integrations.test_commit_fails import RanksOfOne, engine
from tests.integrations.test_engine_adapter import trainer
from tests.integrations.test_rank import publish

__all__ = ["engine", "trainer"]  # fixtures, for this file, too


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "org/model", ""])
def test_a_text_that_is_no_url_is_refused_before_any_update(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected a server's URL, such as"):
        VLLMEngineAdapter(url)


def test_who_reaches_some_of_the_ranks_only_is_refused_before_they_stage(
    engine: RanksOfOne, trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.call

    def call(verb: str, payload: dict[str, Any] | None = None) -> Replies:
        return real(verb, payload)[:1]

    monkeypatch.setattr(engine, "call", call)
    with pytest.raises(WeightBridgeUnavailableError, match="1 of the engine's ranks answered"):
        VLLMEngineAdapter(engine).prepare(publish(trainer, 1), {})
    assert engine.rank.describe()["pending"] is None


def test_what_is_aborted_in_an_engine_of_this_process_is_not_waited_for() -> None:
    requests = {"one": 1, "other": 2}

    def abort_request(names: list[str], *, internal: bool) -> None:
        assert internal
        for name in names:
            del requests[name]

    left: list[int] = []
    core = SimpleNamespace(pause_scheduler=lambda *_given: left.append(len(requests)))
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(request_states=requests),
        abort_request=abort_request,
        engine_core=SimpleNamespace(engine_core=core),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
    )
    LLMHandle(SimpleNamespace(llm_engine=engine), 5).pause("abort")
    assert left == [0]


def test_a_call_that_was_interrupted_is_waited_for_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers of an engine in this process answer in one queue: two that read it would mix them."""
    may_end, begun = threading.Event(), list[str]()

    def collective_rpc(_method: str, args: tuple[str, Any]) -> Replies:
        begun.append(args[0])
        assert may_end.wait(20)
        return [{"to": args[0]}]

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=None)),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)),
    )
    handle = LLMHandle(SimpleNamespace(llm_engine=engine, collective_rpc=collective_rpc), 0.3)
    real = concurrent.futures.wait

    def interrupted(futures: Sequence[Any], timeout_s: float) -> Any:
        if futures:
            raise KeyboardInterrupt
        return real(futures, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.call("prepare")
    with pytest.raises(DeadlineExceeded, match="is still at an earlier call"):
        handle.call("abandon")
    may_end.set()
    handle.timeout_s = 20
    assert handle.call("describe") == [{"to": "describe"}]
    assert begun == ["prepare", "describe"]


def test_a_pause_that_waits_for_requests_keeps_no_other_call_from_its_answer() -> None:
    """vLLM answers by a call's name where the engine is in another process."""
    drained = threading.Event()

    def call_utility(name: str, *_: object) -> bool:
        return name != "pause_scheduler" or drained.wait(60)

    core = SimpleNamespace(call_utility=call_utility, resources=None)
    engine = SimpleNamespace(engine_core=core)
    calls = SimpleNamespace(llm_engine=engine, collective_rpc=lambda _, args: [{"to": args[0]}])
    handle = LLMHandle(calls, 0.3)
    try:
        with pytest.raises(DeadlineExceeded, match="did not pause_scheduler"):
            handle.pause("wait")
        handle.timeout_s = 5
        assert handle.call("abandon") == [{"to": "abandon"}]
        handle.resume()
    finally:
        drained.set()

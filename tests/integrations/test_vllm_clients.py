"""How a vLLM engine is called, paused and cleared. No vLLM is needed here."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rl_bridge import (
    TensorBridge,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.engines.rpc import Replies
from rl_bridge.engines.vllm import plugin
from rl_bridge.engines.vllm.client import LLMClient
from rl_bridge.engines.vllm.engine_adapter import CachePolicy, PauseMode, VLLMServing
from rl_bridge.errors import DeadlineExceeded
from rl_bridge.vllm import RLBridgeTrainerInitInfo, VLLMEngineAdapter
from tests.integrations.threaded_engine import Engine, publish, update
from tests.integrations.vllm_engine import Client


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


# ---- what requests see --------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "kept"), [("recompute", 0), ("reset", 0), ("keep", 1)])
def test_image_caches_are_dropped_even_if_prefixes_stay(
    engine: Engine, trainer: TensorBridge, policy: CachePolicy, kept: int
) -> None:
    client = Client(engine)
    update(VLLMEngineAdapter(client, serving=VLLMServing(cache=policy)), publish(trainer, 1))
    assert (len(client.media), len(client.prefixes)) == (0, kept)


def test_prefixes_that_requests_hold_refuse_a_reset(engine: Engine, trainer: TensorBridge) -> None:
    engine.keeps = "requests hold blocks"
    adapter = VLLMEngineAdapter(Client(engine), serving=VLLMServing(cache="reset"))
    with pytest.raises(WeightUpdateRejectedError, match="requests hold cached blocks"):
        update(adapter, publish(trainer, 1))
    adapter.undo()
    assert engine.is_idle()
    assert engine.version == 0


@pytest.mark.parametrize(
    ("mode", "at_undo"), [("keep", "keep"), ("wait", "keep"), ("abort", "abort")]
)
def test_no_request_is_waited_for_that_runs_with_what_is_undone(
    engine: Engine, trainer: TensorBridge, mode: PauseMode, at_undo: str
) -> None:
    """It would end with it, and might take longer than the call that waits."""
    client, manifest = Client(engine), publish(trainer, 1)
    adapter = VLLMEngineAdapter(client, serving=VLLMServing(pause=mode))
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    adapter.resume()
    adapter.undo()
    assert client.modes == [mode, at_undo]
    assert engine.is_idle()


# ---- what is refused before any update ----------------------------------------------------------


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost:8000", "org/model", ""])
def test_a_text_that_is_no_url_is_refused_before_any_update(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected a server's URL, such as"):
        VLLMEngineAdapter(url)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pause": "stop"}, "pause='stop': expected 'keep', 'wait', 'abort' or None"),
        ({"cache": "flush"}, "cache='flush': expected 'recompute', 'reset' or 'keep'"),
        ({"keep": 0}, "keep=0: expected 1 or more"),
    ],
)
def test_a_pause_or_a_cache_that_vllm_does_not_have_is_refused(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        VLLMServing(**options)


@pytest.mark.parametrize(
    "options", [{"cast": True}, {"serving": VLLMServing(pause=None)}], ids=["cast", "no_pause"]
)
def test_a_reload_needs_a_pause_and_no_cast(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="staging='reload': expected a pause, and no cast"):
        VLLMEngineAdapter(Client(engine), staging="reload", **options)


def test_a_wrong_budget_is_told_before_any_update(engine: Engine) -> None:
    wrong: Any = "1"
    with pytest.raises(TypeError, match="memory_budget_nbytes='1': expected"):
        VLLMEngineAdapter(Client(engine), memory_budget_nbytes=wrong)


# ---- an LLM of this process ---------------------------------------------------------------------


def test_aborted_requests_of_an_engine_in_this_process_are_not_waited_for() -> None:
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
    LLMClient(SimpleNamespace(llm_engine=engine), 5).pause("abort")
    assert left == [0]


def test_a_call_that_was_given_up_is_waited_for_before_the_next_one_begins() -> None:
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
    client = LLMClient(SimpleNamespace(llm_engine=engine, collective_rpc=collective_rpc), 0.3)
    with pytest.raises(DeadlineExceeded, match="did not prepare within"):
        client.call("prepare", {}, 0.3)
    with pytest.raises(DeadlineExceeded, match="is still at an earlier call"):
        client.call("abandon", {}, 0.3)
    may_end.set()
    assert client.call("describe", {}, 20) == [{"to": "describe"}]
    assert begun == ["prepare", "describe"]


def test_a_pause_that_waits_for_requests_keeps_no_other_call_from_its_answer() -> None:
    """vLLM answers by a call's name where the engine is in another process."""
    drained = threading.Event()

    def call_utility(name: str, *_: object) -> bool:
        return name != "pause_scheduler" or drained.wait(60)

    core = SimpleNamespace(call_utility=call_utility, resources=None)
    engine = SimpleNamespace(engine_core=core)
    calls = SimpleNamespace(llm_engine=engine, collective_rpc=lambda _, args: [{"to": args[0]}])
    client = LLMClient(calls, 0.3)
    try:
        with pytest.raises(DeadlineExceeded, match="did not pause_scheduler"):
            client.pause("wait")
        client.timeout_s = 5
        assert client.call("abandon", {}, 5) == [{"to": "abandon"}]
        client.resume()
    finally:
        drained.set()


def test_an_engine_that_died_is_told_at_once() -> None:
    core = SimpleNamespace(
        call_utility=lambda *_: threading.Event().wait(60),
        resources=SimpleNamespace(engine_dead=True),
    )
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=core),
        collective_rpc=lambda *_, **__: threading.Event().wait(60),
    )
    from rl_bridge import EngineLost

    with pytest.raises(EngineLost, match="its process ended"):
        LLMClient(llm, 60).call("describe", {}, 60)


def test_where_vllm_is_missing_or_too_old_a_trainers_init_info_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "require", lambda _: SimpleNamespace())
    with pytest.raises(WeightBridgeUnavailableError, match=r"expected 0\.27\.1 or later"):
        RLBridgeTrainerInitInfo(rank=0)


def test_a_trainers_init_info_registers_the_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, tuple[str, ...]] = {}

    class Factory:
        _registry = registered

        @staticmethod
        def register_engine(name: str, *where: str) -> None:
            assert name not in registered
            registered[name] = where

    module = SimpleNamespace(WeightTransferTrainerFactory=Factory)
    monkeypatch.setattr(plugin, "require", lambda _: module)
    assert [RLBridgeTrainerInitInfo(rank=rank).is_sender for rank in (0, 1)] == [True, False]
    assert list(registered) == ["rl_bridge"] == [RLBridgeTrainerInitInfo.backend]

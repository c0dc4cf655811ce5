"""Updates that are cut off between two steps: by an interrupt, a dead driver, a failing call.

Whatever was cut off where, the engine answers as a fresh one of the version that it reports, goes
on serving, and takes the next update.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.engines.vllm.client import LLMClient
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter, VLLMServing
from rl_bridge.errors import IncompatibleUpdate
from tests.engines.drive import Setting, executor_for
from tests.engines.engines import Bench, bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints, references: References) -> Iterator[Bench]:
    with bench(Setting(Kind("qwen3", tied=True)), checkpoints, references) as made:
        yield made


def refused(engine: Bench, executor: RolloutExecutor) -> None:
    """Send an update that is staged in part and then refused: spares are written to."""
    bad = engine.next()
    name = next(name for name in sorted(bad, reverse=True) if "proj" in name)
    bad[name] = bad[name].clone().index_fill_(0, torch.tensor([0]), torch.nan)
    with pytest.raises(IncompatibleUpdate, match="NaN"):
        executor.update_weights(engine.trainer.publish(bad))


def interrupted_once(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    """Raise KeyboardInterrupt at the first call of a method, in front of it or behind it."""
    real, calls = getattr(owner, name), [0]

    def cut(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        raise KeyboardInterrupt

    patch.setattr(owner, name, cut)


@pytest.mark.parametrize("after", [False, True], ids=["in front", "behind"])
@pytest.mark.parametrize("method", ["forget", "keep"])
def test_an_interrupted_commit_of_vllms_calls_ends_forward(
    engine: Bench, monkeypatch: pytest.MonkeyPatch, method: str, *, after: bool
) -> None:
    from rl_bridge.engines.staging import Exchange, SpareMemory

    owner = {"forget": Exchange, "keep": SpareMemory}[method]
    manifest = engine.trainer.publish(engine.next())
    engine.llm.start_weight_update()
    engine.llm.update_weights({"update_info": {"manifest": manifest.to_json()}})
    engine.holds = 1 - engine.holds
    with monkeypatch.context() as patch:
        interrupted_once(patch, owner, method, after=after)
        with pytest.raises(KeyboardInterrupt):
            engine.llm.finish_weight_update("cut off")
    engine.executor.recover()
    (rank,) = engine.llm.collective_rpc("rl_bridge", args=("describe",))
    assert rank["update_id"] == manifest.update_id
    engine.check("committed all the same")
    with pytest.raises(Exception, match="no update is installed"):  # vLLM's session is still open
        engine.llm.finish_weight_update()
    engine.update("vLLM's calls")
    engine.check("the next one")


def test_finishing_without_an_update_is_an_error_and_ends_the_session(engine: Bench) -> None:
    engine.llm.start_weight_update()
    with pytest.raises(Exception, match="no update is installed"):
        engine.llm.finish_weight_update("nothing")
    engine.update("vLLM's calls")
    engine.check()


def test_what_a_dead_driver_left_uncommitted_is_committed_by_the_next(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = engine.trainer.publish(engine.next())
    adapter = VLLMEngineAdapter(engine.llm, take_over=True)
    monkeypatch.setattr(adapter, "commit", lambda: None)  # it died behind its acknowledgement
    bridge = make_weight_bridge("shared-memory", source_worker="dead driver")
    dead = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
    dead.update_weights(manifest)
    engine.holds = 1 - engine.holds
    with executor_for(engine.llm) as executor:
        refused(engine, executor)
        engine.check("neither taken back nor written to")
        assert engine.llm.get_weight_version() == f"{manifest.weight_version}@{manifest.root}"
        (rank,) = engine.llm.collective_rpc("rl_bridge", args=("describe",))
        assert (rank["update_id"], rank["pending"]) == (manifest.update_id, None)
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
        engine.check("the next one")
    dead.close()
    bridge.close()


def test_a_driver_that_starts_anew_may_send_the_current_version_again(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = engine.trainer.publish(engine.next())
    adapter = VLLMEngineAdapter(engine.llm, take_over=True)
    monkeypatch.setattr(adapter, "commit", lambda: None)
    bridge = make_weight_bridge("shared-memory", source_worker="dead driver")
    dead = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
    dead.update_weights(manifest)
    engine.holds = 1 - engine.holds
    with executor_for(engine.llm) as executor:
        executor.update_weights(manifest)
        executor.check_servable()
        assert executor.active_weight_version == manifest.weight_version
        engine.check()
    dead.close()
    bridge.close()


def test_a_pause_that_a_dead_driver_left_ends_with_the_next_update_refused_or_not(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine.llm.llm_engine.engine_core.engine_core
    real = LLMClient.call

    def dies(client: LLMClient, verb: str, *given: Any) -> Any:
        if verb == "install":
            raise ConnectionError(verb)
        return real(client, verb, *given)

    dead, manifest = (
        VLLMEngineAdapter(engine.llm, take_over=True),
        engine.trainer.publish(engine.next()),
    )
    dead.prepare(manifest, {})
    with monkeypatch.context() as patch:
        patch.setattr(LLMClient, "call", dies)
        with pytest.raises(ConnectionError):
            dead.install(manifest, {})
    assert core.is_scheduler_paused()
    with executor_for(engine.llm) as executor:
        refused(engine, executor)
    assert not core.is_scheduler_paused()
    engine.check()


def test_a_pause_of_the_users_own_ends_with_no_update(engine: Bench) -> None:
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", False)
    with executor_for(engine.llm) as executor:
        refused(engine, executor)
        assert core.is_scheduler_paused()
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
    assert core.is_scheduler_paused()
    core.resume_scheduler()
    engine.check()


def test_a_pause_of_the_users_own_is_not_taken_for_that_of_a_driver_that_died_before_its_pause(
    engine: Bench,
) -> None:
    core = engine.llm.llm_engine.engine_core.engine_core
    VLLMEngineAdapter(engine.llm, take_over=True).prepare(engine.trainer.publish(engine.next()), {})
    core.pause_scheduler("keep", False)
    with executor_for(engine.llm) as executor:
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
    assert core.is_scheduler_paused()
    core.resume_scheduler()
    engine.check()


def test_an_exchange_that_a_dead_driver_left_unproven_is_taken_back_by_the_next(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller

    dead, manifest = (
        VLLMEngineAdapter(engine.llm, take_over=True),
        engine.trainer.publish(engine.next()),
    )
    dead.prepare(manifest, {})
    with monkeypatch.context() as patch:
        interrupted_once(patch, VLLMModelInstaller, "prove", after=False)
        with pytest.raises(KeyboardInterrupt):
            dead.install(manifest, {})
    with executor_for(engine.llm) as executor:
        refused(engine, executor)
        engine.check("taken back")
        executor.update_weights(engine.trainer.publish(engine.next()))
        engine.holds = 1 - engine.holds
        engine.check("the next one")


def test_an_engine_whose_pause_fails_does_not_stay_paused(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LLMClient.stop

    def fails(client: LLMClient, mode: str) -> None:
        real(client, mode)
        raise RuntimeError("behind the pause")

    manifest = engine.trainer.publish(engine.next())
    with monkeypatch.context() as patch:
        patch.setattr(LLMClient, "stop", fails)
        with (
            pytest.raises(RuntimeError, match="behind the pause"),
            executor_for(engine.llm) as executor,
        ):
            executor.update_weights(manifest)
    assert not engine.llm.llm_engine.engine_core.engine_core.is_scheduler_paused()
    engine.check()


def test_requests_that_ran_before_an_undo_leave_nothing_in_the_cache(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = [list(range(1, 161))]
    real = LLMClient.resume
    told: list[Any] = []

    def runs_and_fails(client: LLMClient) -> None:
        real(client)
        if not told:
            told.append(engine.llm.generate([{"prompt_token_ids": prefix[0]}], use_tqdm=False))
            raise RuntimeError("behind the resume")

    expected = ask(engine, prefix[0])
    adapter = VLLMEngineAdapter(engine.llm, serving=VLLMServing(label=None), take_over=True)
    bridge = make_weight_bridge("shared-memory", source_worker="rollout")
    with RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor:
        monkeypatch.setattr(LLMClient, "resume", runs_and_fails)
        with pytest.raises(RuntimeError, match="behind the resume"):
            executor.update_weights(engine.trainer.publish(engine.next()))
        assert ask(engine, prefix[0], reset=False) == expected
        assert told
    bridge.close()


def ask(engine: Bench, prompt: list[int], *, reset: bool = True) -> list[int]:
    from tests.engines.drive import greedy

    if reset:
        assert engine.llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt}]
    (output,) = engine.llm.generate(prompts, greedy(8), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_bytes_that_go_bad_behind_the_import_are_found_before_the_install(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
    from rl_bridge.errors import ProofFailed

    real = VLLMModelInstaller._stage

    def spoils(self: Any, plan: Any, tensors: Any, *rest: Any) -> Any:
        # Weights that are packed straight from the imported memory: nobody else reads these.
        name = next(name for name in tensors if "o_proj" in name)
        tensors[name].view(torch.uint8)[0, 0] ^= 1
        return real(self, plan, tensors, *rest)

    manifest = engine.trainer.publish(engine.next())
    with executor_for(engine.llm) as executor:
        monkeypatch.setattr(VLLMModelInstaller, "_stage", spoils)
        with pytest.raises(ProofFailed, match="went bad"):
            executor.update_weights(manifest)
    engine.check()


def test_processing_that_does_nothing_is_not_taken_for_an_install(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from rl_bridge.errors import ProofFailed

    real = UnquantizedLinearMethod.process_weights_after_loading

    def forgets(method: Any, layer: torch.nn.Module) -> None:
        if getattr(layer, "prefix", "").endswith("o_proj"):
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        else:
            real(method, layer)

    manifest = engine.trainer.publish(engine.next())
    with executor_for(engine.llm) as executor:
        monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", forgets)
        with pytest.raises((ProofFailed, IncompatibleUpdate), match="o_proj"):
            executor.update_weights(manifest)
    engine.check()

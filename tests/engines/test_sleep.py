"""An engine that sleeps takes no update; one that threw its weights away serves none of ours.

vLLM's CPU build ignores sleep, so `FaultyWorker.sleep_as_on_a_gpu` stands in for it below the calls
that vLLM's executor makes.
"""

from collections.abc import Iterator

import pytest

from rl_bridge import WeightBridgeUnavailableError, WeightUpdateRejectedError
from rl_bridge.errors import EngineAsleep
from tests.engines.drive import Setting, executor_for, model_of, native_update
from tests.engines.engines import Bench, bench
from tests.engines.faults import plant, uproot
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

DEEP, LIGHT = 2, 1


@pytest.fixture(scope="module", params=["beside", "through"])
def engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References
) -> Iterator[Bench]:
    setting = Setting(Kind("qwen3", tied=True))
    with (
        bench(setting, checkpoints, references) as made,
        executor_for(made.llm, staging=request.param) as made.executor,
    ):
        made.llm.collective_rpc("sleep_as_on_a_gpu")
        yield made


@pytest.fixture(autouse=True)
def awake(engine: Bench) -> Iterator[None]:
    engine.trainer.release_all()
    engine.update()
    yield
    uproot()
    engine.llm.wake_up()


@pytest.mark.parametrize("level", [LIGHT, DEEP])
def test_an_update_of_an_engine_that_sleeps_is_refused_and_goes_in_when_it_is_awake(
    engine: Bench, level: int
) -> None:
    engine.llm.sleep(level)
    following = engine.publish()
    with pytest.raises(EngineAsleep, match="Wake it first, its weights at least"):
        engine.executor.update_weights(following)
    assert all(one.isnan().all() for one in model_of(engine.llm).parameters())
    engine.llm.wake_up()
    engine.executor.update_weights(following)
    engine.holds = 1 - engine.holds
    engine.check()


def test_a_light_sleep_keeps_the_version(engine: Bench) -> None:
    version = engine.executor.active_weight_version
    engine.llm.sleep(LIGHT)
    with pytest.raises(EngineAsleep):
        engine.executor.check_servable()
    engine.llm.wake_up()
    engine.executor.check_servable()
    assert engine.executor.active_weight_version == version
    engine.check()


def test_what_a_deep_sleep_threw_away_is_not_servable_until_it_is_installed_and_proven_again(
    engine: Bench,
) -> None:
    manifest = engine.update(number=engine.holds)
    engine.llm.sleep(DEEP)
    engine.llm.wake_up()
    with pytest.raises(WeightBridgeUnavailableError, match="threw its weights away to sleep"):
        engine.executor.check_servable()
    assert engine.executor.active_weight_version is None
    engine.executor.update_weights(manifest)
    engine.executor.check_servable()
    ack = engine.executor.last_ack
    assert ack is not None
    assert (ack.update_id, ack.proof.root) == (manifest.update_id, manifest.root)
    engine.check()


def test_weights_are_woken_and_updated_before_the_kv_cache_is_woken(engine: Bench) -> None:
    engine.llm.sleep(DEEP)
    engine.llm.wake_up(tags=["weights"])
    engine.update()
    engine.llm.wake_up(tags=["kv_cache"])
    engine.check()


@pytest.mark.parametrize("step", ["stage", "install"])
def test_an_update_that_fails_after_a_deep_sleep_leaves_nothing_that_may_serve(
    engine: Bench, step: str
) -> None:
    ack = engine.executor.last_ack
    assert ack is not None
    in_install = {"beside": "corrupt", "through": "layer"}[ack.proof.staging]
    engine.llm.sleep(DEEP)
    engine.llm.wake_up()
    following = engine.publish()
    plant("digest" if step == "stage" else in_install, 0)
    with pytest.raises(WeightUpdateRejectedError, match=r"Planted|expected"):
        engine.executor.update_weights(following)
    uproot()
    with pytest.raises(WeightBridgeUnavailableError):
        engine.executor.check_servable()
    engine.update()
    engine.check()


def test_vllms_own_calls_are_refused_while_it_sleeps(engine: Bench) -> None:
    engine.llm.sleep(DEEP)
    with pytest.raises(Exception, match="Wake it first"):
        native_update(engine.llm, engine.publish())
    engine.llm.wake_up()

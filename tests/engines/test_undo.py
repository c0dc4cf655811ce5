"""An install that fails, wherever it does, leaves the engine at the version that it reports.

Every step that can fail is made to, one after the other: each exchange, each assembled parameter,
each of vLLM's own steps. Afterwards tokens and log-probabilities are to the bit what they were.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from rl_bridge import TornEngine, WeightUpdateRejectedError
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.errors import IncompatibleUpdate, ProofFailed
from tests.engines.drive import Setting, answers, executor_for, model_of, native_update
from tests.engines.engines import Bench, bench
from tests.engines.faults import PlantedError, plant, uproot
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

POINTS = ("exchange", "assemble", "process", "pack", "canary", "digest")


@pytest.fixture(
    scope="module",
    params=[Kind("qwen3", tied=True), Kind("qwen2", dtype="bfloat16"), Kind("moe")],
    ids=str,
)
def engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References
) -> Iterator[Bench]:
    with bench(Setting(request.param), checkpoints, references) as made:
        yield made


@pytest.fixture(autouse=True)
def no_fault_stays(engine: Bench) -> Iterator[None]:
    engine.trainer.release_all()
    yield
    uproot()


def every(point: str, attempt: Callable[[], bool]) -> int:
    """Fail at the first, second, ... call until an attempt makes fewer; how many there were."""
    for nth in range(400):
        plant(point, nth)
        try:
            if attempt():
                return nth
        finally:
            uproot()
    pytest.fail(f"{point}: no end of calls")


@pytest.mark.parametrize("by", ["executor", "vLLM's calls"])
@pytest.mark.parametrize("point", POINTS)
def test_an_update_that_fails_anywhere_leaves_the_version_it_reports(
    engine: Bench, point: str, by: str
) -> None:
    told: list[str] = []
    engine.update(by)  # (another way's version is none of the executor's)

    def attempt() -> bool:
        before = engine.executor.active_weight_version
        try:
            engine.update(by)
        except (PlantedError, WeightUpdateRejectedError) as error:
            uproot()
            told.append(str(error))
            assert engine.executor.active_weight_version == before
            (rank,) = engine.llm.collective_rpc("rl_bridge", args=("describe",))
            assert (rank["pending"], rank["torn"]) == (None, "")
            engine.check(f"{point}, {by}")
            return False
        uproot()
        engine.check(f"{point}, {by}, not failed")
        return True

    assert every(point, attempt) > 5
    assert all("planted" in text for text in told)


@pytest.mark.parametrize("point", ["exchange", "assemble"])
def test_requests_under_way_do_not_notice_an_update_that_fails(engine: Bench, point: str) -> None:
    runs = iter(range(1000))

    def attempt() -> bool:
        assert engine.llm.reset_prefix_cache()
        ids = engine.begin(f"live{next(runs)}", steps=7)
        try:
            engine.update()
        except PlantedError:
            pytest.fail("the worker's error came out unchanged from another process")
        except WeightUpdateRejectedError:
            uproot()
            assert engine.rest(ids) == engine.fresh[engine.holds]
            return False
        engine.rest(ids)
        return True

    assert every(point, attempt) > 5


def test_a_wrong_shape_in_the_middle_is_refused_and_leaves_nothing(engine: Bench) -> None:
    engine.update()
    sent = engine.next()
    name = sorted(sent)[len(sent) // 2]
    sent[name] = sent[name].repeat_interleave(2, dim=0)
    with pytest.raises(IncompatibleUpdate, match=name.replace(".", r"\.")):
        engine.executor.update_weights(engine.trainer.publish(sent))
    engine.check()
    engine.update()
    engine.check("the next one")


@pytest.mark.parametrize("call", ["update_weight_version", "reset_prefix_cache"])
def test_what_fails_between_proof_and_acknowledgement_is_undone_with_its_label(
    engine: Bench, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.update()
    label = engine.llm.get_weight_version()
    ids = engine.begin(f"resume-{call}", steps=5)
    original = getattr(engine.llm, call)
    failures = iter([True])

    def failing(*args: object, **kwargs: object) -> object:
        if next(failures, False):
            raise PlantedError(call)
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.llm, call, failing, raising=False)
    with pytest.raises(PlantedError, match=call):
        engine.update()
    assert engine.llm.get_weight_version() == label
    assert not engine.llm.llm_engine.engine_core.engine_core.is_scheduler_paused()
    assert engine.rest(ids) == engine.fresh[engine.holds]
    monkeypatch.undo()
    engine.check()


def test_an_undo_that_fails_too_is_torn_until_it_is_recovered(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_bridge.engines.staging import Exchange

    engine.update()
    original = Exchange.undo
    fails = [True]

    def undo(self: Exchange) -> None:
        if fails[0]:
            raise PlantedError("planted in the undo")
        original(self)

    monkeypatch.setattr(Exchange, "undo", undo)
    plant("exchange", 9)
    with pytest.raises(TornEngine):
        engine.update()
    with pytest.raises(TornEngine):
        engine.executor.check_servable()
    with pytest.raises(TornEngine):
        engine.executor.recover()
    fails[0] = False
    uproot()
    engine.executor.recover()
    engine.executor.check_servable()
    engine.check()


@pytest.mark.parametrize(
    "look", [lambda tensor: tensor.data[1:], torch.Tensor.untyped_storage], ids=["view", "storage"]
)
def test_a_view_of_a_version_that_was_undone_keeps_its_bytes(
    engine: Bench, caplog: pytest.LogCaptureFixture, look: Callable[[torch.Tensor], Any]
) -> None:
    adapter = VLLMEngineAdapter(engine.llm, take_over=True)
    manifest = engine.trainer.publish(engine.next())
    adapter.prepare(manifest, {})
    adapter.install(manifest, {})
    view = look(dict(model_of(engine.llm).named_parameters())["model.norm.weight"])
    storage = view.untyped_storage() if isinstance(view, torch.Tensor) else view
    adapter.undo()
    adapter.close()
    assert [r.args for r in caplog.records if "took a view" in r.msg] == [("model.norm.weight",)]
    bytes_then = bytes(storage)
    for _ in range(3):
        engine.check()
        engine.trainer.release_all()
        engine.update()
        assert bytes(storage) == bytes_then
    engine.check()


def test_a_corrupted_parameter_is_caught_and_undone_with_requests_under_way(
    engine: Bench,
) -> None:
    assert engine.llm.reset_prefix_cache()
    ids = engine.begin("corrupt", steps=9)
    plant("corrupt", 2)
    with pytest.raises(ProofFailed):
        engine.update()
    uproot()
    assert engine.rest(ids) == engine.fresh[engine.holds]


def test_refused_updates_give_their_slots_back_whoever_keeps_the_logs_records(
    engine: Bench,
) -> None:
    kept: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)

    handler = Keeper()
    log = logging.getLogger("rl_bridge")
    log.addHandler(handler)
    try:
        for point in (*POINTS, *POINTS):
            for by in ("executor", "vLLM's calls"):
                plant(point, 1)
                with suppress(WeightUpdateRejectedError, PlantedError):
                    engine.update(by)
                    pytest.fail(f"{point} was not reached")
                uproot()
                engine.trainer.release_all()  # raises where too many are held
    finally:
        log.removeHandler(handler)
    assert [record for record in kept if record.exc_info]
    engine.update()
    engine.check()


def test_a_fresh_executor_takes_over_an_engine_that_was_updated_before(engine: Bench) -> None:
    engine.update()
    with executor_for(engine.llm) as other:
        other.update_weights(engine.trainer.publish(engine.next()))
        assert answers(engine.llm) == engine.fresh[1 - engine.holds]
        native_update(engine.llm, engine.trainer.publish(engine.weights[engine.holds]))
    engine.check()

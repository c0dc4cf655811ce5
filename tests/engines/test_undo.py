"""An install that fails, wherever it does, leaves the engine at the version that it reports.

Every step that can fail is made to, one after the other: each exchange, each assembled parameter,
each of vLLM's own steps. Afterwards tokens and log-probabilities are to the bit what they were.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rl_bridge import WeightUpdateRejectedError
from rl_bridge.engines.vllm.client import LLMClient
from tests.engines.drive import Setting, executor_for, greedy
from tests.engines.engines import Bench, bench
from tests.engines.faults import PlantedError, plant, uproot
from tests.engines.matrix import few_of
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References

POINTS = ("exchange", "assemble", "process", "pack", "canary", "digest")


@pytest.fixture(
    scope="module",
    params=[
        Kind("qwen3", tied=True),
        pytest.param(Kind("qwen2", dtype="bfloat16"), marks=pytest.mark.full),
        pytest.param(Kind("moe"), marks=pytest.mark.full),
    ],
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


@pytest.mark.parametrize(
    ("point", "by"),
    few_of(
        itertools.product(POINTS, ("executor", "vLLM's calls")),
        *((point, "executor") for point in POINTS),
        ("exchange", "vLLM's calls"),
    ),
)
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


@pytest.mark.parametrize("point", ["exchange", "corrupt"])
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


def test_requests_that_ran_before_an_undo_leave_nothing_in_the_cache(
    engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt_token_ids": list(range(1, 161))}
    real = LLMClient.resume
    ran: list[Any] = []

    def ask() -> list[int]:
        (output,) = engine.llm.generate([prompt], greedy(8), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def runs_and_fails(client: LLMClient) -> None:
        real(client)
        if not ran:
            ran.append(ask())
            raise RuntimeError("behind the resume")

    assert engine.llm.reset_prefix_cache()
    expected = ask()
    with executor_for(engine.llm, serving={"label": None}) as executor:
        monkeypatch.setattr(LLMClient, "resume", runs_and_fails)
        with pytest.raises(RuntimeError, match="behind the resume"):
            executor.update_weights(engine.trainer.publish(engine.next()))
        assert ask() == expected
        assert ran

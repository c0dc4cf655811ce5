"""`EngineSuite`: what every engine with ranks must keep, as tests that its class inherits."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import pytest
import torch
import torch.distributed as dist

from rl_bridge.bridge import ConsumerReport
from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rpc import EngineClient, Replies
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    IncompatibleUpdate,
    ProofFailed,
    SessionRefused,
    StaleUpdate,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.groups.publish import GroupPublisher
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.testing.engine_faults import FAULT

Weights = Mapping[str, torch.Tensor]

_VERSIONS = itertools.count(1)
_NAMED = rf"driver .*process {os.getpid()} on .* has this engine"
_PHASES = {"attach", "verify", "prepare", "pause", "install", "prove", "cache", "resume", "total"}
_METHODS = ("pause", "resume", "is_paused", "drop_caches", "label", "set_label")


class _Killed(Exception):
    """The driver ends here."""


def _fail(*_: object) -> None:
    raise DeadlineExceeded("planted in the driver")


class _Calls:
    """The calls that one driver makes of its engine. One of them may go wrong."""

    def __init__(self, client: EngineClient, around: Callable[[], None]) -> None:
        """Stand in front of `client`; `around` comes before and after each call."""
        self.made: list[str] = []
        self._around = around
        self._at: int | str | None = None
        self._then: Callable[[], object] = lambda: None
        self._is_behind = self.is_dead = False
        call = client.call
        vars(client)["call"] = lambda verb, *given: self._do(verb, partial(call, verb, *given))
        for name in _METHODS:
            vars(client)[name] = partial(self._method, name, getattr(client, name))

    def plant(
        self, at: int | str, then: Callable[[], object] = _fail, *, behind: bool = False
    ) -> None:
        """Do something before a call or after it: the `at`-th from now, or one by name."""
        self._at = at if isinstance(at, str) else len(self.made) + at
        self._then, self._is_behind = then, behind

    def kill(self, at: int) -> None:
        """The driver ends in front of that call: none is made any more."""

        def die() -> None:
            self.is_dead = True
            raise _Killed

        self.plant(at, die)

    def uproot(self) -> None:
        """Nothing goes wrong from here on."""
        self._at = None

    def _method(self, name: str, action: Callable[..., Any], *given: Any, **options: Any) -> Any:
        return self._do(name, partial(action, *given, **options))

    def _do(self, name: str, action: Callable[[], Any]) -> Any:
        if self.is_dead:
            raise _Killed
        self.made.append(name)
        is_it = self._at in {name, len(self.made)}
        if is_it:
            self._at = None
        self._around()
        if is_it and not self._is_behind:
            self._then()
        done = action()
        self._around()
        if is_it and self._is_behind:
            self._then()
        return done


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """A running engine, and what fresh engines answer.

    Attributes:
        engine: whatever `EngineSuite.make_driver` takes.
        fresh: answers of fresh engines with each of the two `EngineSuite.weights`.

    """

    engine: Any
    fresh: tuple[object, object]


class EngineSuite:
    """Inherit, say how your engine is driven and asked, and the whole protocol is tested.

    ::

        class TestMyEngine(EngineSuite):
            @pytest.fixture(scope="module")
            def running(self): ...  # yield EngineUnderTest(engine, (answers of 0, of 1))

            def start(self): ...
            def make_driver(self, engine, **options): ...
            def weights(self, number): ...
            def answers(self, engine): ...
            def in_ranks(self, engine, text): ...

    Tests share one engine; those that kill a rank start one of their own. What an engine answers is
    compared to the bit: a request must come to the same tokens and scores whenever it is asked.
    """

    ranks: ClassVar[int] = 2
    """How many ranks the engine has, in all of its replicas."""
    replicas: ClassVar[int] = 1
    """How many replicas it has."""
    publishers: ClassVar[int] = 1
    """How many trainer ranks publish each version; if several, each holds a shard of it."""
    transport: ClassVar[str] = "shared-memory"
    """By which versions travel."""
    kills: ClassVar[tuple[str, ...]] = ("prepare", "install", "prove", "commit")
    """Steps at which a rank is killed; each takes an engine."""
    every: ClassVar[int] = 1
    """Of the places at which a driver ends, each `every`-th is tried."""
    asks_each_call: ClassVar[bool] = True
    """Whether the engine is asked for answers before and after each call of a driver."""

    # ---- to be supplied -------------------------------------------------------------------------

    def start(self) -> AbstractContextManager[Any]:
        """Start an engine with ``weights(0)``; it ends with the block."""
        raise NotImplementedError

    def make_driver(self, engine: Any, **options: Any) -> EngineDriver:
        """A driver of the engine, whose pause keeps requests and whose updates drop caches.

        Options are ``take_over``, ``label`` and ``memory_budget_nbytes``, as of the adapters of
        vLLM and SGLang.
        """
        raise NotImplementedError

    def weights(self, number: int) -> Weights:
        """The weights of a version, 0 or 1; they differ in every tensor."""
        raise NotImplementedError

    def answers(self, engine: Any) -> object:
        """What the engine answers to some requests now, cached prefixes used; it is not paused."""
        raise NotImplementedError

    def in_ranks(self, engine: Any, text: str) -> list[str]:
        """Call `rl_bridge.testing.in_rank` with each rank's model and this text, in its process."""
        raise NotImplementedError

    def is_paused(self, engine: Any) -> bool:
        """Whether the engine is paused; to be supplied where its client does not tell."""
        return bool(self.make_driver(engine).client.is_paused())

    # ---- what the tests use ---------------------------------------------------------------------

    @pytest.fixture
    def trainer(self) -> Iterator["Trainer"]:
        """Publishes."""
        with self.published() as trainer:
            yield trainer

    @contextmanager
    def published(self) -> Iterator["Trainer"]:
        """A trainer that publishes versions to the engine."""
        with ExitStack() as stack:
            bridges = [
                stack.enter_context(
                    make_weight_bridge(
                        self.transport, source_worker="trainer", source_rank=rank, max_slots=4
                    )
                )
                for rank in range(self.publishers)
            ]
            yield bridges[0] if len(bridges) == 1 else ShardedTrainer(bridges)

    @pytest.fixture
    def rig(self, running: EngineUnderTest, trainer: "Trainer") -> Iterator["Rig"]:
        """The engine, at a version of ``weights(0)``, without a fault and without a driver."""
        rig = Rig(self, running.engine, running.fresh, trainer)
        rig.uproot()
        rig.reset()
        yield rig
        rig.uproot()

    # ---- installing -----------------------------------------------------------------------------

    def test_version_after_version_the_engine_answers_as_a_fresh_one(self, rig: "Rig") -> None:
        """With what requests had cached before; and all ranks tell the trainer."""
        with rig.driven() as (executor, _, driver):
            for number in (1, 0, 1):
                manifest = rig.publish(number)
                executor.update_weights(manifest)
                executor.check_servable()
                rig.check(number, manifest)
                done = executor.last_ack
                assert done is not None
                assert (done.update_id, done.total_nbytes) == (
                    manifest.update_id,
                    manifest.total_nbytes,
                )
                assert done.weight_version == executor.active_weight_version
                assert done.root == done.proof.root == manifest.root
                assert done.proof.tensors == manifest.tensor_count
                timings = dict(done.timings_ms)
                # The driver attaches nothing of a group.
                phases = _PHASES if self.publishers == 1 else _PHASES - {"attach"}
                assert timings.keys() >= phases
                assert 0 < sum(timings.values()) - timings["total"] <= timings["total"]
                mine = rig.told_by_driver(manifest)
                assert (mine.state, mine.presence) == ("acknowledged", "alive")
                assert mine.timings_ms.keys() >= phases - {"total"}
                assert mine.proof is not None
                assert (mine.proof["root"], mine.proof["method"]) == (done.root, done.proof.method)
                told = {report.rank: report for report in rig.told(manifest)}
                if driver.imports_itself:
                    assert set(told) == set(range(self.ranks))
                for report in told.values():
                    assert dict(report.proof or {})["root"] == manifest.root
                    assert report.tensors_held == 0

    def test_an_update_that_does_not_fit_touches_nothing(self, rig: "Rig") -> None:
        """A tensor is missing, of another size or kind, one too many, or holds no number."""
        good = dict(self.weights(1))
        name, tensor = max(good.items(), key=lambda item: item[1].numel())
        bad: list[dict[str, torch.Tensor]] = [
            {key: value for key, value in good.items() if key != name},
            {**good, name: torch.cat([tensor, tensor])},
            {**good, name: tensor[1:]},
            {**good, name: tensor.int()},
            {**good, "no.such.weight": torch.zeros(3)},
            {**good, name: torch.full_like(tensor, torch.nan)},
        ]
        with rig.driven() as (executor, _, driver):
            for sent in bad:
                before = rig.contents()
                with pytest.raises(WeightUpdateRejectedError) as caught:
                    executor.update_weights(rig.publish(sent))
                if driver.imports_itself:
                    assert "ranks hold version" in "".join(caught.value.__notes__)
                assert executor.active_weight_version is None
                rig.check_back(before)
            executor.update_weights(rig.publish(1))
            rig.check(1)

    def test_an_update_over_the_memory_budget_is_refused_before_it_is_staged(
        self, rig: "Rig"
    ) -> None:
        """And the next driver's budget counts, not the last one's."""
        before = rig.contents()
        with rig.driven(memory_budget_nbytes=1) as (executor, _, _):
            with pytest.raises(IncompatibleUpdate, match="budget"):
                executor.update_weights(rig.publish(1))
            rig.check_back(before)
        with rig.driven(memory_budget_nbytes=1 << 40) as (executor, _, _):
            executor.update_weights(rig.publish(1))
            rig.check(1)

    # ---- all ranks or none ----------------------------------------------------------------------

    @pytest.mark.parametrize("step", ["prepare", "install", "prove"])
    def test_a_rank_that_fails_takes_the_others_back_and_the_next_update_works(
        self, rig: "Rig", step: str
    ) -> None:
        """Each rank, at first and later; to the byte, and the error names rank and version."""
        with rig.driven() as (executor, _, _):
            for rank in (self.ranks - 1, *range(self.ranks)):
                before, version = rig.contents(), executor.active_weight_version
                stood, refused = executor.last_ack, rig.publish(1)
                rig.plant(step, "raises", rank)
                with pytest.raises(WeightUpdateRejectedError, match=rig.says(rank)) as caught:
                    executor.update_weights(refused)
                rig.uproot()
                rig.check_back(before)
                assert (executor.active_weight_version, executor.last_ack) == (version, stood)
                mine = rig.told_by_driver(refused)
                assert mine.state == "rejected"
                told = " ".join([str(caught.value), *caught.value.__notes__])
                assert (mine.reason or "-").split(": ")[-1] in told
                if version is not None:
                    assert f"version {version}" in told
                    executor.check_servable()
                executor.update_weights(rig.publish(0))
            executor.update_weights(rig.publish(1))
            rig.check(1)

    def test_an_engine_whose_update_was_released_is_undone_all_the_same(self, rig: "Rig") -> None:
        """It goes on with the bytes that it has, and gets them back."""
        with rig.driven() as (executor, _, _):
            executor.update_weights(rig.publish(0))
            executor.release_weights()
            before = rig.contents()
            rig.plant("prove", "raises", self.ranks - 1)
            with pytest.raises(WeightUpdateRejectedError):
                executor.update_weights(rig.publish(1))
            rig.uproot()
            rig.check_back(before)

    def test_a_late_manifest_leaves_the_engine_as_it_is(self, rig: "Rig") -> None:
        """Nor is the version that it holds installed again."""
        with rig.driven() as (executor, _, _):
            early, late = rig.publish(0), rig.publish(1)
            executor.update_weights(late)
            for manifest in (early, late):
                with pytest.raises(StaleUpdate):
                    executor.update_weights(manifest)
                rig.check(1, late)

    def test_ranks_go_back_within_the_call_that_failed(self, rig: "Rig") -> None:
        """No step of the model comes in between, whatever becomes of the driver.

        Other replicas go back with its undo, and are paused until then.
        """
        together = self.ranks // self.replicas
        before, (driver, _) = rig.contents(), rig.driver()
        manifest, tensors = rig.publish(1), dict(self.weights(1))
        driver.prepare(manifest, tensors)
        rig.plant("prove", "raises", 0)
        with pytest.raises(WeightUpdateRejectedError, match=FAULT):
            driver.install(manifest, tensors)
        assert rig.contents()[:together] == before[:together]
        assert rig.is_paused()
        rig.uproot()
        driver.undo()
        driver.close()
        rig.check_back(before)

    def test_what_a_rank_refused_is_told_to_the_trainer_and_never_let_in_again(
        self, rig: "Rig"
    ) -> None:
        """By no driver."""
        manifest, last = rig.publish(1), self.ranks - 1
        rig.plant("prepare", "raises", last)
        with rig.driven() as (executor, _, driver):
            with pytest.raises(WeightUpdateRejectedError):
                executor.update_weights(manifest)
            imports = driver.imports_itself
        rig.uproot()
        told = {report.rank: report.reason or "" for report in rig.told(manifest)}
        if not imports:
            return  # the executor's own process told it
        assert FAULT in told[last]
        assert all("another rank refused it" in told[rank] for rank in range(last))
        with (
            rig.driven() as (executor, _, _),
            pytest.raises(WeightUpdateRejectedError, match="was rejected"),
        ):
            executor.update_weights(manifest)

    @pytest.mark.parametrize("step", ["prepare", "install", "prove"])
    def test_what_a_rank_is_short_of_costs_no_update(self, rig: "Rig", step: str) -> None:
        """The same one comes again."""
        before, manifest = rig.contents(), rig.publish(1)
        with rig.driven() as (executor, _, _):
            rig.plant(step, "runs short", self.ranks - 1)
            with pytest.raises(WeightBridgeUnavailableError, match=FAULT):
                executor.update_weights(manifest)
            rig.uproot()
            rig.check_back(before)
            executor.update_weights(manifest)
            rig.check(1, manifest)

    @pytest.mark.parametrize("behind", [False, True], ids=["call_lost", "answer_lost"])
    def test_an_update_whose_engine_does_not_answer_before_it_is_installed_may_come_again(
        self, rig: "Rig", *, behind: bool
    ) -> None:
        """Nobody refused it."""

        def lose() -> None:
            raise EngineLost("planted")

        manifest = rig.publish(1)
        with rig.driven() as (executor, calls, _):
            calls.plant("prepare", lose, behind=behind)
            with pytest.raises(EngineLost, match="planted"):
                executor.update_weights(manifest)
            executor.update_weights(manifest)
            executor.check_servable()
            rig.check(1, manifest)

    def test_one_byte_changed_behind_an_install_is_found_and_undone(self, rig: "Rig") -> None:
        """On any rank."""
        with rig.driven() as (executor, _, _):
            for rank in range(self.ranks):
                before = rig.contents()
                rig.plant("prove", "damages", rank)
                refused = rig.publish(1)
                with pytest.raises(ProofFailed, match="" if self.ranks == 1 else f"rank {rank}: "):
                    executor.update_weights(refused)
                rig.uproot()
                rig.check_back(before)
                assert executor.last_ack is None
                assert rig.told_by_driver(refused).state == "rejected"

    def test_an_undo_that_fails_on_one_rank_tears_the_engine_until_it_is_recovered(
        self, rig: "Rig"
    ) -> None:
        """The torn rank's error comes first, and requests wait. A later version mends it, too."""
        last = self.ranks - 1
        with rig.driven() as (executor, calls, _):
            executor.update_weights(rig.publish(0))
            before = rig.contents()
            calls.plant("serves")
            rig.plant("undo", "raises", last)
            with pytest.raises(TornEngine, match=rig.says(last)):
                executor.update_weights(rig.publish(1))
            assert executor.is_torn
            assert executor.active_weight_version is None
            with pytest.raises(TornEngine):
                executor.check_servable()
            with pytest.raises(TornEngine):
                executor.recover()
            assert rig.is_paused()
            rig.uproot()
            executor.recover()
            executor.check_servable()
            rig.check_back(before)
            calls.plant("serves")
            rig.plant("undo", "raises", last)
            with pytest.raises(TornEngine):
                executor.update_weights(rig.publish(1))
            rig.uproot()
            executor.update_weights(rig.publish(1))
            executor.check_servable()
            rig.check(1)

    def test_a_driver_that_hears_only_some_of_the_ranks_is_refused(self, rig: "Rig") -> None:
        """Before they stage; the others would be waited for in a vote."""
        if self.ranks == 1:
            pytest.skip("this engine has one rank")
        driver = self.make_driver(rig.engine)
        call = driver.client.call
        vars(driver.client)["call"] = lambda *given: call(*given)[:1]
        with pytest.raises(WeightBridgeUnavailableError, match="1 of the engine's ranks answered"):
            driver.prepare(rig.publish(1), {})
        assert rig.is_idle()
        driver.client.close()

    def test_an_answer_to_another_call_is_not_taken(self, rig: "Rig") -> None:
        """A late one, after a deadline."""
        driver = self.make_driver(rig.engine)
        call, said = driver.client.call, list[Replies]()

        def one_behind(*given: Any) -> Replies:
            said.append(call(*given))
            return said[-2] if len(said) > 1 else said[-1]

        vars(driver.client)["call"] = one_behind
        driver.describe()
        with pytest.raises(EngineLost, match="out of step"):
            driver.describe()
        driver.client.close()

    def test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version(
        self, running: EngineUnderTest
    ) -> None:
        """At each step; nothing is servable, and nobody waits for ever."""
        if not self.kills:
            pytest.skip("no rank of this engine is killed here")
        dead = (EngineLost, TornEngine)
        for step in self.kills:
            with self._started(running) as rig, rig.driven(asks=False) as (executor, _, _):
                executor.update_weights(rig.publish(0))
                rig.plant(step, "dies", self.ranks - 1)
                # (A commit is acknowledged by then: the next call tells.)
                with suppress(WeightBridgeError) if step == "commit" else _raises(dead):
                    executor.update_weights(rig.publish(1))
                with pytest.raises(dead):
                    executor.recover()
                with pytest.raises(dead):
                    executor.update_weights(rig.publish(1))
                if step in {"install", "prove"}:
                    with pytest.raises(dead):
                        executor.check_servable()
        with self._started(running) as rig, rig.driven() as (executor, _, _):
            executor.update_weights(rig.publish(1))
            rig.check(1)

    @contextmanager
    def _started(self, running: EngineUnderTest) -> Iterator["Rig"]:
        """An engine of a test's own."""
        with self.published() as trainer, self.start() as engine:
            yield Rig(self, engine, running.fresh, trainer)

    # ---- one driver at a time -------------------------------------------------------------------

    def test_a_second_driver_is_refused_by_the_name_of_the_first_and_touches_nothing(
        self, rig: "Rig"
    ) -> None:
        """Its update may come again, once it has the engine."""
        with rig.driven() as (one, _, _), rig.driven(take_over=False) as (other, calls, _):
            one.update_weights(rig.publish(0))
            manifest = rig.publish(1)
            with pytest.raises(SessionRefused, match=_NAMED) as caught:
                other.update_weights(manifest)
            assert "recover()" in str(caught.value)
            assert set(calls.made) == {"describe"}
            one.check_servable()
            rig.check(0)
            other.recover()
            other.update_weights(manifest)
            rig.check(1, manifest)
            with pytest.raises(SessionRefused, match=_NAMED):
                one.update_weights(rig.publish(0))
            assert one.active_weight_version is None
            with pytest.raises(WeightBridgeUnavailableError):
                one.check_servable()
            rig.check(1, manifest)

    def test_a_driver_that_leaves_leaves_the_engine_to_the_next_one(self, rig: "Rig") -> None:
        """The epoch grows with each session, and what they installed stays."""
        epochs = []
        for number in (1, 0, 1):
            with rig.driven(take_over=False) as (executor, _, driver):
                executor.update_weights(rig.publish(number))
                epochs.append(driver.client.epoch)
        rig.check(1)
        assert [epoch - epochs[0] for epoch in epochs] == [0, 1, 2]

    @pytest.mark.parametrize("step", ["prepare", "install", "resume", "undo", "commit"])
    def test_each_step_of_a_driver_that_was_taken_over_is_refused_by_name_and_changes_nothing(
        self, rig: "Rig", step: str
    ) -> None:
        """Wherever it had got to."""
        late = self.make_driver(rig.engine)
        successor = self.make_driver(rig.engine, take_over=True)
        mine, theirs = rig.publish(0), rig.publish(1)
        tensors = dict(self.weights(0))
        steps: dict[str, Callable[[], object]] = {
            "prepare": lambda: late.prepare(mine, tensors),
            "install": lambda: late.install(mine, tensors),
            "resume": late.resume,
            "commit": late.commit,
            "undo": late.undo,
        }
        upto = "commit" if step == "undo" else step
        for name in itertools.takewhile(lambda name: name != upto, steps):
            steps[name]()
        rig.update(successor, theirs, 1)
        with pytest.raises(SessionRefused, match=_NAMED):
            steps[step]()
        assert late.is_overtaken
        assert not successor.is_overtaken
        rig.check(1, theirs)
        assert rig.is_idle()
        late.close()
        successor.close()

    @pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
    def test_an_executor_that_is_overtaken_in_an_install_is_refused_by_name_and_not_torn(
        self, rig: "Rig", *, behind: bool
    ) -> None:
        """The other one ends the update, which may come again; this one holds no version."""
        with rig.driven() as (late, calls, _), rig.driven() as (successor, _, _):
            late.update_weights(rig.publish(0))
            manifest = rig.publish(1)
            calls.plant("install", successor.recover, behind=behind)
            with pytest.raises(SessionRefused, match=_NAMED):
                late.update_weights(manifest)
            assert rig.is_idle()
            rig.check(1 if rig.is_proven(manifest) else 0)
            assert not late.is_torn
            assert late.active_weight_version is None
            with pytest.raises(WeightBridgeUnavailableError):
                late.check_servable()
            late.recover()
            late.update_weights(manifest)
            rig.check(1)

    def test_a_driver_that_was_taken_over_ends_no_pause_of_its_successors(self, rig: "Rig") -> None:
        """Nor does its undo."""
        late, successor = (self.make_driver(rig.engine, take_over=True) for _ in range(2))
        mine, theirs, tensors = rig.publish(0), rig.publish(1), dict(self.weights(1))
        late.prepare(mine, dict(self.weights(0)))
        successor.prepare(theirs, tensors)
        successor.install(theirs, tensors)
        with pytest.raises(SessionRefused, match=_NAMED):
            late.install(mine, dict(self.weights(0)))
        with pytest.raises(SessionRefused, match=_NAMED):
            late.undo()
        assert rig.is_paused()
        successor.resume()
        successor.commit()
        rig.check(1, theirs)
        late.close()
        successor.close()

    def test_recovering_an_engine_that_is_ones_own_changes_nothing(self, rig: "Rig") -> None:
        """Not even the session."""
        with rig.driven() as (executor, _, driver):
            executor.update_weights(rig.publish(1))
            before = executor.active_weight_version, driver.client.epoch
            executor.recover()
            executor.check_servable()
            assert (executor.active_weight_version, driver.client.epoch) == before

    def test_a_session_that_only_some_ranks_heard_of_is_taken_over(self, rig: "Rig") -> None:
        """By a driver that failed at it once, too."""
        epoch = 7 + max(reply["epoch"] for reply in rig.described())
        rig.ask_ranks(ask="open", rank=self.ranks - 1, epoch=epoch)
        with rig.driven(take_over=False) as (executor, calls, driver):
            with pytest.raises(SessionRefused, match="driver somebody lost has this engine"):
                executor.update_weights(rig.publish(1))
            calls.plant("open")
            with pytest.raises(DeadlineExceeded):
                executor.recover()
            executor.recover()
            executor.update_weights(rig.publish(1))
            rig.check(1)
            assert driver.client.epoch == epoch + 1

    def test_a_call_that_comes_without_a_session_is_refused(self, rig: "Rig") -> None:
        """Whatever it asks for."""
        given = {"driver": "nobody", "epoch": 0}
        client = self.make_driver(rig.engine).client
        for verb in ("prepare", "pauses", "install", "undo", "abandon", "commit", "leave"):
            for reply in client.call(verb, {**given, "call": verb}, 60.0):
                assert (reply["ok"], reply["type"]) == (False, "SessionRefused")
        client.close()

    def test_taking_over_is_for_the_first_update_alone(self, rig: "Rig") -> None:
        """Else two drivers would take the engine from each other for ever."""
        with rig.driven() as (one, _, _), rig.driven() as (other, _, _):
            one.update_weights(rig.publish(1))
            other.update_weights(rig.publish(0))
            with pytest.raises(SessionRefused, match=_NAMED):
                one.update_weights(rig.publish(1))
            rig.check(0)

    # ---- what a driver left half-way ------------------------------------------------------------

    def test_a_driver_that_was_killed_anywhere_is_taken_over(self, rig: "Rig") -> None:
        """All ranks have proven its update: it is committed. Else it is taken back."""
        for at in rig.each_call():
            rig.reset()
            dead, calls = rig.driver()
            rig.update(dead, rig.publish(0), 0)
            calls.kill(at)
            second = rig.publish(1)
            with suppress(_Killed):
                rig.update(dead, second, 1)
            number = 1 if rig.is_proven(second) else 0
            with rig.driven(take_over=False) as (executor, _, _):
                executor.recover()
                rig.check(number, what=at)
                executor.update_weights(rig.publish(1 - number))
                executor.check_servable()
                rig.check(1 - number, what=at)

    @pytest.mark.parametrize("doing", ["undo", "take_over"])
    def test_a_driver_that_was_killed_as_it_undid_or_took_over_is_taken_over(
        self, rig: "Rig", doing: str
    ) -> None:
        """Whatever was left, all ranks come to one version."""
        for at in rig.each_call():
            rig.reset()
            dead, calls = rig.driver()
            manifest, tensors = rig.publish(1), dict(self.weights(1))
            dead.prepare(manifest, tensors)
            dead.install(manifest, tensors)
            dead.resume()
            if doing == "take_over":
                dead, calls = rig.driver()
            calls.kill(at)
            with suppress(_Killed):
                getattr(dead, doing)()
            with rig.driven(take_over=False) as (executor, _, _):
                executor.recover()
                held = 1 if rig.is_proven(manifest) else 0
                assert held or doing == "undo"
                rig.check(held, what=at)
            if not calls.is_dead:
                break  # it makes no more calls than that

    @pytest.mark.parametrize("behind", [False, True], ids=["call_lost", "answer_lost"])
    def test_a_call_that_fails_anywhere_leaves_an_engine_that_recovers(
        self, rig: "Rig", *, behind: bool
    ) -> None:
        """The driver lives on: its update is undone, or its undo is due until it is made."""
        for at in rig.each_call():
            with rig.driven() as (executor, calls, _):
                executor.update_weights(rig.publish(0))
                before = executor.active_weight_version
                calls.plant(at, behind=behind)
                with suppress(WeightBridgeError):
                    executor.update_weights(rig.publish(1))
                calls.uproot()
                if at % 2:  # else the next update does what is due
                    executor.recover()
                    executor.check_servable()
                    rig.check(0 if executor.active_weight_version == before else 1, what=at)
                executor.update_weights(rig.publish(0))
                rig.check(0, what=at)

    def test_what_was_only_staged_is_released_and_may_come_again(self, rig: "Rig") -> None:
        """It was refused by nobody."""
        dead, _ = rig.driver()
        manifest = rig.publish(1)
        dead.prepare(manifest, dict(self.weights(1)))
        with rig.driven(take_over=False) as (executor, _, _):
            executor.recover()
            rig.check(0)
            assert all(not r.tensors_held for r in rig.trainer.holders(manifest))
            executor.update_weights(manifest)
            rig.check(1, manifest)

    def test_what_only_some_ranks_hold_is_taken_back_on_all(self, rig: "Rig") -> None:
        """They took a vote that they did not hear for a no."""
        for rank in range(self.ranks):
            dead, _ = rig.driver()
            manifest, tensors = rig.publish(1), dict(self.weights(1))
            dead.prepare(manifest, tensors)
            dead.install(manifest, tensors)
            rig.ask_ranks(ask="take back", rank=rank)
            with rig.driven(take_over=False) as (executor, _, _):
                executor.recover()
                rig.check(0)

    def test_a_commit_that_fails_on_one_rank_is_made_again_and_never_undone(
        self, rig: "Rig"
    ) -> None:
        """Requests have been served by it."""
        with rig.driven() as (executor, _, _):
            rig.plant("commit", "raises", self.ranks - 1)
            manifest = rig.publish(1)
            with suppress(WeightBridgeError):
                executor.update_weights(manifest)
            rig.uproot()
            executor.recover()
            rig.check(1, manifest)
            executor.update_weights(rig.publish(0))
            rig.check(0)

    # ---- the pause, the caches, the label -------------------------------------------------------

    @pytest.mark.parametrize("fails", ["", "prepare", "prove", "acknowledge", "killed"])
    def test_a_pause_of_the_users_own_outlasts_an_update_whatever_becomes_of_it(
        self, rig: "Rig", fails: str
    ) -> None:
        """It is not the update's to end."""
        if self.make_driver(rig.engine).client.is_paused() is None:
            pytest.skip("drivers of this engine cannot tell whether it is paused")
        number = 0 if fails else 1
        if fails in {"prepare", "prove"}:
            rig.plant(fails, "raises", self.ranks - 1)
        rig.pause()
        if fails == "killed":
            dead, _ = rig.driver()
            manifest, tensors = rig.publish(0), dict(self.weights(0))
            dead.prepare(manifest, tensors)
            dead.install(manifest, tensors)
        with rig.driven() as (executor, calls, _):
            if fails == "acknowledge":
                calls.plant("serves")
            with suppress(WeightBridgeError) if fails not in {"", "killed"} else _nothing():
                executor.update_weights(rig.publish(number if fails == "killed" else 1))
        assert rig.is_paused()
        rig.go_on()
        rig.check(number)

    def test_caches_that_cannot_be_dropped_have_the_update_undone(self, rig: "Rig") -> None:
        """The weights are in by then, proven: all of it goes back."""
        before = rig.contents()
        with rig.driven() as (executor, _, driver):
            drop = driver.client.drop_caches
            vars(driver.client)["drop_caches"] = lambda policy: (
                drop(policy) if policy is None else "planted"
            )
            with pytest.raises(WeightUpdateRejectedError, match="could not be dropped: planted"):
                executor.update_weights(rig.publish(1))
            rig.check_back(before)
            vars(driver.client)["drop_caches"] = drop
            executor.update_weights(rig.publish(1))
            rig.check(1)

    def test_what_cannot_be_undone_with_its_caches_is_kept_and_not_served(self, rig: "Rig") -> None:
        """Requests may have computed with it, and hold what they cached."""
        driver, _ = rig.driver()
        manifest, tensors = rig.publish(1), dict(self.weights(1))
        driver.prepare(manifest, tensors)
        driver.install(manifest, tensors)
        driver.resume()
        drop = driver.client.drop_caches
        vars(driver.client)["drop_caches"] = lambda _: "requests hold some"
        for _ in range(2):
            with pytest.raises(TornEngine, match="keeps what the version that is undone cached"):
                driver.undo()
            assert rig.is_paused()
            assert rig.is_proven(manifest)
        vars(driver.client)["drop_caches"] = drop
        driver.undo()
        driver.close()
        rig.check(0)

    def test_a_label_is_taken_back_with_its_version(self, rig: "Rig") -> None:
        """And one that somebody set meanwhile stays."""
        before = rig.label()
        for meanwhile in (None, "another's"):
            driver, _ = rig.driver(asks=False)
            manifest, tensors = rig.publish(1), dict(self.weights(1))
            driver.prepare(manifest, tensors)
            driver.install(manifest, tensors)
            driver.resume()
            assert rig.label() in {None, f"{manifest.weight_version}@{manifest.root}"}
            if meanwhile is not None:
                driver.client.set_label(meanwhile)
            driver.undo()
            driver.close()
            assert rig.label() == (before if before is None or meanwhile is None else meanwhile)

    def test_a_label_that_cannot_be_set_is_an_update_that_is_undone(self, rig: "Rig") -> None:
        """An engine would take one that is no text, and answer no request any more."""
        before = rig.contents()
        if rig.label() is not None:
            with rig.driven() as (executor, calls, _):
                calls.plant("set_label")
                with pytest.raises(DeadlineExceeded):
                    executor.update_weights(rig.publish(1))
                rig.check_back(before)
        with rig.driven(label=lambda manifest: manifest.weight_version) as (executor, _, _):
            with pytest.raises(TypeError, match="expected a str"):
                executor.update_weights(rig.publish(1))
            rig.check_back(before)

    def test_a_driver_without_a_label_leaves_it_alone(self, rig: "Rig") -> None:
        """Whatever it says."""
        before = rig.label()
        driver, _ = rig.driver(asks=False, label=None)
        rig.update(driver, rig.publish(1), 1)
        driver.close()
        assert rig.label() == before


def _raises(kinds: tuple[type[Exception], ...]) -> AbstractContextManager[object]:
    return pytest.raises(kinds, match="fresh engine")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Trainer(Protocol):
    """A trainer as the suite uses it."""

    def publish(
        self, source: dict[str, torch.Tensor], *, weight_version: int
    ) -> WeightUpdateManifest:
        """Publish a version."""

    def release(self, update_id: str) -> None:
        """Release it."""

    def holders(self, update_id: WeightUpdateManifest) -> list[ConsumerReport]:
        """What consumers told."""


class ShardedTrainer:
    """Several ranks, which publish together: each a thread with a bridge of its own.

    They hold rows of one tensor, columns of the next, and single numbers all of them.
    """

    def __init__(self, bridges: Sequence[TensorBridge]) -> None:
        """Publish through these, one for each rank."""
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
        self._world = len(bridges)
        self._publishers = [
            GroupPublisher(bridge, StoreExchange(store, rank=rank, world_size=self._world))
            for rank, bridge in enumerate(bridges)
        ]

    def publish(
        self, source: dict[str, torch.Tensor], *, weight_version: int
    ) -> WeightUpdateManifest:
        """Cut the tensors up, and publish them on all ranks."""
        shards = [self._shard(source, rank) for rank in range(self._world)]

        def one(rank: int) -> WeightUpdateManifest:
            return self._publishers[rank].publish(*shards[rank], weight_version=weight_version)

        with ThreadPoolExecutor(self._world) as pool:
            manifest, *_ = pool.map(one, range(self._world))
        return manifest

    def _shard(
        self, source: dict[str, torch.Tensor], rank: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, Placement]]:
        tensors, placements = {}, {}
        for place, (name, whole) in enumerate(sorted(source.items())):
            dims, zeros = whole.dim(), [0] * whole.dim()
            offset, mine = list(zeros), whole
            if dims:
                dim = place % 2 if dims > 1 else 0
                mine = whole.tensor_split(self._world, dim)[rank].contiguous()
                sizes = [one.shape[dim] for one in whole.tensor_split(self._world, dim)]
                offset[dim] = sum(sizes[:rank])
            piece = Piece(
                name=name,
                global_shape=tuple(whole.shape),
                offset=tuple(offset),
                shape=tuple(mine.shape),
                local_offset=tuple(zeros),
                replica=0 if dims else rank,
            )
            dtype = str(whole.dtype).removeprefix("torch.")
            tensors[name] = mine
            placements[name] = Placement(dtype=dtype, shape=tuple(mine.shape), pieces=(piece,))
        return tensors, placements

    def release(self, update_id: str) -> None:
        """On all ranks."""
        for publisher in self._publishers:
            publisher.release(update_id)

    def holders(self, update_id: WeightUpdateManifest) -> list[ConsumerReport]:
        """What consumers told the first rank; each tells all of them."""
        assert isinstance(update_id, GroupManifest)
        return self._publishers[0].consumers(update_id)


class Rig:
    """One engine, a trainer, and drivers as a test wants them."""

    def __init__(
        self, suite: EngineSuite, engine: Any, fresh: tuple[object, object], trainer: "Trainer"
    ) -> None:
        """Put them together; `fresh` are the answers of both weights."""
        self._suite, self.engine, self._fresh, self.trainer = suite, engine, fresh, trainer
        self._held: list[WeightUpdateManifest] = []
        self._user = suite.make_driver(engine)  # asks and pauses, and updates nothing

    def publish(self, sent: int | Weights) -> WeightUpdateManifest:
        """The next version: one of the suite's, or others."""
        while len(self._held) > 2:
            self.trainer.release(self._held.pop(0).update_id)
        weights = self._suite.weights(sent) if isinstance(sent, int) else sent
        manifest = self.trainer.publish(dict(weights), weight_version=next(_VERSIONS))
        self._held.append(manifest)
        return manifest

    def told(self, manifest: WeightUpdateManifest) -> list[ConsumerReport]:
        """What the ranks told the trainer."""
        return [one for one in self.trainer.holders(manifest) if one.worker != "driver"]

    def told_by_driver(self, manifest: WeightUpdateManifest) -> ConsumerReport:
        """What the executor's process told the trainer."""
        (report,) = (one for one in self.trainer.holders(manifest) if one.worker == "driver")
        return report

    def driver(self, *, asks: bool = True, **options: Any) -> tuple[EngineDriver, _Calls]:
        """A driver, and its calls."""
        driver = self._suite.make_driver(self.engine, **{"take_over": True, **options})
        is_asked = asks and self._suite.asks_each_call
        return driver, _Calls(driver.client, self._ask if is_asked else lambda: None)

    @contextmanager
    def driven(self, **options: Any) -> Iterator[tuple[RolloutExecutor, _Calls, EngineDriver]]:
        """An executor with a driver of its own."""
        driver, calls = self.driver(**options)
        with (
            make_weight_bridge(self._suite.transport, source_worker="driver") as bridge,
            RolloutExecutor(
                weight_bridge=bridge, weight_install_adapter=driver, suspicious="off"
            ) as executor,
        ):
            try:
                yield executor, calls, driver
            finally:
                driver.close()

    def update(self, driver: EngineDriver, manifest: WeightUpdateManifest, number: int) -> None:
        """One update, step by step, as an executor takes it."""
        tensors = dict(self._suite.weights(number))
        driver.prepare(manifest, tensors)
        driver.install(manifest, tensors)
        driver.prove()
        driver.resume()
        driver.commit()

    def reset(self) -> None:
        """Install ``weights(0)``, whoever has the engine, and leave it to whoever comes next."""
        driver = self._suite.make_driver(self.engine)
        driver.take_over()
        if self.is_paused():
            self.go_on()
        self.update(driver, self.publish(0), 0)
        driver.close()
        self.check(0)

    def each_call(self) -> range:
        """Positions of the calls that an update makes, or of those that are tried."""
        driver, calls = self.driver()
        self.update(driver, self.publish(0), 0)
        driver.close()
        return range(1, len(calls.made) + 1, self._suite.every)

    # ---- the engine -----------------------------------------------------------------------------

    def plant(self, step: str, fault: str, rank: int) -> None:
        """Plant a fault in one rank: see `rl_bridge.testing.engine_faults`."""
        self.ask_ranks(ask="plant", step=step, fault=fault, rank=rank)

    def uproot(self) -> None:
        """Take it out."""
        self.ask_ranks(ask="uproot")

    def contents(self) -> list[Any]:
        """Digests of all tensors, by rank and name."""
        return self.ask_ranks(ask="contents")

    def ask_ranks(self, **given: Any) -> list[Any]:
        """Ask each rank what `rl_bridge.testing.in_rank` answers."""
        return [json.loads(s) for s in self._suite.in_ranks(self.engine, json.dumps(given))]

    def says(self, rank: int) -> str:
        """What a planted failure of that rank looks like."""
        return FAULT if self._suite.ranks == 1 else rf"rank {rank}: .*{FAULT}"

    def described(self) -> Replies:
        """What each rank says of itself."""
        return self._user.describe()

    def is_idle(self) -> bool:
        """Nothing of any update is left, and requests go on."""
        said = {(r["pending"], r["paused"], r["stage"], r["torn"]) for r in self.described()}
        return said == {(None, False, "idle", "")} and not self.is_paused()

    def is_proven(self, manifest: WeightUpdateManifest) -> bool:
        """Whether all ranks hold it, proven or committed."""
        said = self.described()
        return all(
            r["update_id"] == manifest.update_id
            or (r["pending"] == manifest.update_id and r["manifest"])
            for r in said
        )

    def label(self) -> str | None:
        """The engine's."""
        return self._user.client.label()

    def is_paused(self) -> bool:
        """Whether it is, whoever paused it."""
        return self._suite.is_paused(self.engine)

    def pause(self) -> None:
        """As a user does."""
        self._user.client.pause(None)

    def go_on(self) -> None:
        """As a user does."""
        self._user.client.resume()

    def _ask(self) -> None:
        """Whatever it answers now, it answers as a fresh engine of one of the versions."""
        if not self.is_paused():
            assert self._suite.answers(self.engine) in self._fresh

    def check(
        self, number: int, manifest: WeightUpdateManifest | None = None, what: object = ""
    ) -> None:
        """It is idle, and answers as a fresh engine of that version; its label says so."""
        assert self.is_idle(), (what, self.described())
        assert self._suite.answers(self.engine) == self._fresh[number], what
        said = self.described()
        assert len({reply["root"] for reply in said}) == 1, what
        if manifest is not None:
            assert {reply["update_id"] for reply in said} == {manifest.update_id}
            assert self.label() in {None, f"{manifest.weight_version}@{manifest.root}"}

    def check_back(self, before: list[Any]) -> None:
        """Every byte is what it was, and the engine is at ``weights(0)``."""
        assert self.contents() == before
        self.check(0)

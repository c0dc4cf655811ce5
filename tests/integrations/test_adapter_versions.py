"""Versions of an adapter in an engine: which stay, which are offered, and over which base."""

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.engines.adapters import (
    AdapterDriver,
    AdapterFrontEnd,
    AdapterHost,
    AdapterInstaller,
    Resident,
)
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank import answer, rank_of, ranks_of
from rl_bridge.engines.rpc import Replies, Reply
from rl_bridge.errors import (
    DeadlineExceeded,
    EngineLost,
    IncompatibleUpdate,
    SessionRefused,
    SlotsExhausted,
    StaleUpdate,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest import AdapterSpec
from rl_bridge.manifest.adapter import LoRAPair
from rl_bridge.memory.views import ImportedTensors
from tests.integrations.threaded_engine import FREEZE, WAIT_S, Client, Engine

PLACES = 4
_PATH = "base_model.model.layers.0.q_proj"


class Slots(AdapterInstaller):
    """Places that hold a version's bytes."""

    def __init__(self, base: Any, all_of_rank: "list[Slots]") -> None:
        super().__init__(base)
        self.held: dict[str, bytes] = {}
        self.all = all_of_rank
        all_of_rank.append(self)

    def check(self, spec: AdapterSpec, pairs: Sequence[LoRAPair]) -> None:
        """All is served."""

    def stage(
        self,
        version: Resident,
        spec: AdapterSpec,
        pairs: Sequence[LoRAPair],
        tensors: ImportedTensors,
    ) -> None:
        if not self.free_places():
            raise SlotsExhausted("no place is free. Let requests end.")
        self.held[version.update_id] = b"".join(one.numpy().tobytes() for one in tensors.values())

    def read(self, version: Resident) -> int:
        return len(self.held[version.update_id])

    def holds(self, version: Resident) -> bool:
        return version.update_id in self.held

    def drop(self, version: Resident) -> None:
        self.held.pop(version.update_id, None)

    def free_places(self) -> int:
        return PLACES - sum(len(one.held) for one in self.all)


class Front:
    """What the process that takes the requests knows."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.held: set[int] = set()
        self.offered: dict[str, Sequence[Resident]] = {}


class Mortal(Engine):
    """An engine whose calls fail when it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.slots: list[Slots] = []


class Adapting(Client, AdapterFrontEnd):
    """An engine of one rank that has adapters."""

    engine: Mortal
    front: Front

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        (base,) = self.engine.ranks
        if self.engine.is_gone:
            raise EngineLost("planted: the engine is gone. Start it anew.")
        rank = base
        if name := payload.get("adapter"):
            host = base.host
            rank = rank_of(
                host.model,
                lambda: AdapterHost(base, lambda of: Slots(of, self.engine.slots)),
                str(name),
            )
        reply: Reply = json.loads(json.dumps(answer(rank, verb, json.loads(json.dumps(payload)))))
        return [reply]

    def adapters_in_use(self) -> AbstractSet[int]:
        return frozenset(self.front.used)

    def adapters_held(self) -> AbstractSet[int]:
        return frozenset(self.front.held)

    def offer_adapter(
        self, adapter: str, active: Resident | None, residents: Sequence[Resident]
    ) -> None:
        self.front.offered[adapter] = residents if active is not None else ()

    def lora_request(self, version: Resident) -> Resident:
        return version


class Rig:
    """An engine, its front end, and what publishes into it."""

    def __init__(self, trainer: TensorBridge, weights: TensorBridge) -> None:
        self.engine, self.front = Mortal(), Front()
        self.trainer, self.weights = trainer, weights
        (host,) = self.engine.hosts  # whose model knows its ranks, as that of real engines
        self.engine.ranks = [rank_of(host.model, lambda: host)]
        self.count = 0

    @contextmanager
    def executor(
        self, *, keep: int = 2, timeout_s: float = WAIT_S, take_over: bool = True
    ) -> Iterator[RolloutExecutor]:
        """An executor with a driver of its own."""
        client = Adapting(self.engine)
        client.timeout_s = timeout_s
        driver = Driver(client, self.front, keep, take_over=take_over)
        with RolloutExecutor(weight_install_adapter=driver, suspicious="off") as made:
            yield made

    def publish(
        self, seed: int = 0, *, base_root: str = "", name: str = "policy", **given: int
    ) -> WeightUpdateManifest:
        self.count += 1
        draw = torch.Generator().manual_seed(seed)
        sizes = {"lora_A": (2, 8), "lora_B": (4, 2)}
        pair = {
            f"{_PATH}.{word}.weight": torch.randn(size, generator=draw)
            for word, size in sizes.items()
        }
        shapes = {name: tuple(one.shape) for name, one in pair.items()}
        spec = AdapterSpec.inferred(name, shapes, lora_alpha=4, base_root=base_root)
        version = given.get("version", self.count)
        return self.trainer.publish(pair, weight_version=version, adapter=spec)

    def update(self, executor: RolloutExecutor, **given: Any) -> int:
        manifest = self.publish(**given)
        executor.update_weights(manifest)
        self.trainer.release(manifest.update_id)
        return manifest.weight_version

    @property
    def offered(self) -> list[int]:
        return sorted(one.weight_version for one in self.front.offered.get("policy", ()))

    @property
    def held(self) -> set[str]:
        """Updates whose bytes the rank holds."""
        return set(self._slots.held)

    def drop_all(self) -> None:
        """Drop all, behind the back of those who have installed them."""
        self._slots.held.clear()

    @property
    def _slots(self) -> Slots:
        installer = ranks_of(self.engine.hosts[0].model)["policy"].installer
        assert isinstance(installer, Slots)
        return installer


class Driver(EngineDriver):
    """Of the engine's weights, and of its adapters."""

    def __init__(
        self, client: Adapting, front: Front, keep: int, *, take_over: bool = True
    ) -> None:
        serving = replace(FREEZE, keep=keep)
        super().__init__(client, serving=serving, options={}, take_over=take_over)
        client.front = front

    def for_adapter(self, name: str) -> AdapterDriver:
        return AdapterDriver(self, name)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with (
        make_weight_bridge("shared-memory", suspicious="off", max_slots=8) as trainer,
        make_weight_bridge("shared-memory", suspicious="off", max_slots=8) as weights,
    ):
        made = Rig(trainer, weights)
        yield made
        made.engine.close()


# ---- which stay ----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_versions_stay_as_the_user_wants_kept(rig: Rig, keep: int) -> None:
    with rig.executor(keep=keep) as executor:
        for _ in range(6):
            rig.update(executor)
        assert rig.offered == list(range(7 - keep, 7))
        assert len(rig.held) == keep


def test_no_more_stay_than_there_are_places_for_beside_the_next_one(rig: Rig) -> None:
    with rig.executor(keep=9) as executor:
        for _ in range(6):
            rig.update(executor)
        assert rig.offered == [3, 4, 5, 6]


def test_a_version_of_which_somebody_holds_a_request_stays_and_others_go(rig: Rig) -> None:
    with rig.executor() as executor:
        rig.update(executor)
        rig.front.held = {executor.lora_request("policy").number}
        for _ in range(4):
            rig.update(executor)
        assert rig.offered == [1, 4, 5]
        rig.front.held.clear()
        rig.update(executor)
        assert rig.offered == [5, 6]
        with pytest.raises(UnknownUpdate):
            executor.lora_request("policy", 1)


def test_versions_that_one_adapter_keeps_give_way_to_another_adapter(rig: Rig) -> None:
    with rig.executor(keep=9) as executor:
        for _ in range(PLACES):
            rig.update(executor)
        for count in (1, 2):  # of all places, each has half in the end
            rig.update(executor, name="other")
            assert len(rig.offered) == PLACES - count
        rig.update(executor, name="other")
        assert (rig.offered, len(rig.front.offered["other"])) == ([3, 4], 2)
        held = [*rig.front.offered["policy"], *rig.front.offered["other"]]
        rig.front.used = {held[0].number, held[1].number}
        rig.front.held = {one.number for one in held[2:]}
        with pytest.raises(SlotsExhausted) as refused:
            rig.update(executor, name="third")
        notes = " ".join(refused.value.__notes__)
        assert "['other@6', 'other@7', 'policy@3', 'policy@4']" in notes
        assert "['other@6', 'other@7'] stay as long as" in notes


def test_what_a_request_kept_goes_with_the_next_recovery_when_the_request_has_ended(
    rig: Rig,
) -> None:
    with rig.executor() as executor:
        rig.update(executor)
        rig.front.used = {executor.lora_request("policy").number}
        rig.update(executor)
        rig.update(executor)
        assert rig.offered == [1, 2, 3]
        executor.recover()
        assert rig.offered == [1, 2, 3]
        rig.front.used.clear()
        executor.recover()
        assert rig.offered == [2, 3]
        assert len(rig.held) == 2


def test_a_number_that_comes_again_is_never_the_same_name(rig: Rig) -> None:
    with rig.executor() as executor:
        names = []
        for seed in range(4):
            with make_weight_bridge("shared-memory", suspicious="off") as rig.trainer:
                rig.update(executor, seed=seed, version=7)
            one = executor.lora_request("policy")
            assert one.label.startswith("policy@7")
            names.append(one.own_name)
            executor.drop_adapter("policy")
        assert len(set(names)) == 4


# ---- the base below ------------------------------------------------------------------------------


def base_of(rig: Rig, version: int) -> WeightUpdateManifest:
    return rig.weights.publish({"w": torch.full((4,), float(version))}, weight_version=version)


def test_weights_that_an_adapter_in_the_engine_does_not_belong_to_are_refused(rig: Rig) -> None:
    with rig.executor() as executor:
        first = base_of(rig, 1)
        executor.update_weights(first)
        rig.update(executor, base_root=first.root)
        with pytest.raises(IncompatibleUpdate, match=r"'policy@1'.*drop_adapter\('policy'\)"):
            executor.update_weights(base_of(rig, 2))
        assert (executor.active_weight_version, rig.engine.version, rig.offered) == (1, 1, [1])
        rig.update(executor)  # names none, and the one before is there still
        with pytest.raises(IncompatibleUpdate, match="'policy@1'"):
            executor.update_weights(base_of(rig, 3))
        executor.drop_adapter("policy")
        executor.update_weights(base_of(rig, 4))
        rig.update(executor)
        executor.update_weights(base_of(rig, 5))  # an adapter that names no base goes with any
        assert (executor.active_weight_version, rig.offered) == (5, [3])


def test_a_root_that_could_not_be_compared_is_at_the_next_update_of_the_weights(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with rig.executor() as executor:
        manifest = base_of(rig, 1)
        rig.update(executor, base_root="0" * 32)
        assert "names the root of its base" in caplog.text
        with pytest.raises(IncompatibleUpdate, match=f"{'0' * 32}.*{manifest.root}"):
            executor.update_weights(manifest)


def test_neither_an_adapter_nor_its_base_changes_under_the_other_once_both_are_prepared(
    rig: Rig,
) -> None:
    with rig.executor() as executor:
        first = base_of(rig, 1)
        executor.update_weights(first)
        base = Driver(Adapting(rig.engine), rig.front, 2)
        lora = base.for_adapter("policy")
        second, manifest = base_of(rig, 2), rig.publish(base_root=first.root)
        base.prepare(second, {})
        lora.prepare(manifest, {})
        with pytest.raises(IncompatibleUpdate, match="belongs to base weights"):
            base.install(second, {})
        base.undo()
        lora.undo()
        third = base_of(rig, 3)
        base.prepare(third, {})
        base.install(third, {})  # and is not committed yet
        with pytest.raises(WeightBridgeUnavailableError, match="update of the engine's weights"):
            lora.prepare(manifest, {})
        base.undo()
        assert rig.engine.version == 1


def test_an_adapter_that_a_driver_before_left_is_dropped_by_whoever_has_the_engine(
    rig: Rig,
) -> None:
    with rig.executor() as before, rig.executor(take_over=False) as after:
        first = base_of(rig, 1)
        before.update_weights(first)
        rig.update(before, base_root=first.root)  # and here its process would have died
        second = base_of(rig, 2)
        with pytest.raises(SessionRefused, match=r"recover\(\)"):
            after.update_weights(second)
        with pytest.raises(SessionRefused):
            after.drop_adapter("policy")  # of a driver that may be alive
        assert rig.offered == [1]
        after.recover()
        with pytest.raises(IncompatibleUpdate, match=r"drop_adapter\('policy'\)"):
            after.update_weights(second)
        number = rig.front.offered["policy"][0].number
        rig.front.used = {number}
        with pytest.raises(DeadlineExceeded):
            after.drop_adapter("policy", timeout_s=0.0)
        assert (after.adapter_version("policy"), rig.offered) == (None, [])
        rig.front.used.clear()
        after.drop_adapter("policy")
        assert rig.held == set()
        third = base_of(rig, 3)
        after.update_weights(third)
        rig.update(after, base_root=third.root)
        assert (after.active_weight_version, after.adapter_version("policy")) == (3, 2)


def test_an_adapter_that_the_engine_does_not_hold_is_not_dropped_and_leaves_no_trace(
    rig: Rig,
) -> None:
    with rig.executor() as executor:
        executor.update_weights(base_of(rig, 1))
        for _ in range(2):
            with pytest.raises(UnknownUpdate, match="'policy', expected one of \\[\\]"):
                executor.drop_adapter("policy")
    with RolloutExecutor() as alone, pytest.raises(UnknownUpdate):
        alone.drop_adapter("policy")


# ---- what a drop that does not end leaves --------------------------------------------------------


def test_a_drop_that_did_not_end_is_ended_or_taken_back_and_all_calls_agree(rig: Rig) -> None:
    with rig.executor() as executor:
        manifest = rig.publish()
        executor.update_weights(manifest)
        number = executor.lora_request("policy").number
        for again in (executor.recover, lambda: executor.update_weights(manifest)):
            rig.front.used = {number}
            with pytest.raises(DeadlineExceeded, match=r"'policy@1'\].*requests have them still"):
                executor.drop_adapter("policy", timeout_s=0.0)
            assert (executor.adapter_version("policy"), rig.offered) == (None, [])
            with pytest.raises(UnknownUpdate, match=r"not offered.*recover\(\)"):
                executor.lora_request("policy")
            again()
            assert (executor.adapter_version("policy"), rig.offered) == (1, [1])
            assert executor.lora_request("policy").number == number
        with pytest.raises(StaleUpdate, match="is active already"):
            executor.update_weights(manifest)
        with pytest.raises(DeadlineExceeded):
            executor.drop_adapter("policy", timeout_s=0.0)
        rig.front.used.clear()
        executor.drop_adapter("policy")
        assert rig.held == set()


def test_a_version_that_something_else_dropped_is_not_said_to_be_active(rig: Rig) -> None:
    with rig.executor() as executor:
        manifest = rig.publish()
        executor.update_weights(manifest)
        rig.drop_all()
        executor.recover()
        assert executor.adapter_version("policy") is None
        with pytest.raises(StaleUpdate, match="requests cannot ask for it"):
            executor.update_weights(manifest)
        rig.update(executor)
        assert executor.adapter_version("policy") == 2


def test_no_version_is_claimed_of_an_engine_that_is_gone(rig: Rig) -> None:
    with rig.executor() as executor:
        rig.update(executor)
        manifest, rig.engine.is_gone = rig.publish(), True
        with pytest.raises(EngineLost, match="not known before recover"):
            executor.update_weights(manifest)
        assert executor.adapter_version("policy") is None
        rig.engine.is_gone = False
        executor.recover()
        assert executor.adapter_version("policy") == 1


@pytest.mark.parametrize("notices", ["weights", "adapter", "recover", "drop"])
def test_a_loss_that_any_call_notices_is_one_of_all_versions_until_the_engine_answers(
    rig: Rig, notices: str
) -> None:
    with rig.executor() as executor:
        executor.update_weights(base_of(rig, 1))
        rig.update(executor)
        later = {"weights": base_of(rig, 2), "adapter": rig.publish()}
        rig.engine.is_gone = True
        calls: dict[str, Callable[[], object]] = {
            "weights": lambda: executor.update_weights(later["weights"]),
            "adapter": lambda: executor.update_weights(later["adapter"]),
            "recover": executor.recover,
            "drop": lambda: executor.drop_adapter("policy"),
        }
        call = calls[notices]
        with pytest.raises(EngineLost):
            call()
        assert (executor.active_weight_version, executor.adapter_version("policy")) == (None, None)
        with pytest.raises(EngineLost, match=r"recover\(\)"):
            executor.check_servable()
        with pytest.raises(EngineLost, match=r"recover\(\)"):
            executor.lora_request("policy")
        rig.engine.is_gone = False
        if notices == "adapter":
            rig.update(executor)  # by the same engine's answer
            assert executor.adapter_version("policy") == 3
        else:
            executor.recover()
            assert executor.adapter_version("policy") == 1
        assert executor.active_weight_version == 1
        executor.check_servable()
        assert executor.lora_request("policy").weight_version == executor.adapter_version("policy")

"""What a driver makes of its ranks' answers, and what it asks of its engine: no rank is there."""

import errno
import logging
import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rl_bridge import (
    InstallProof,
    TensorBridge,
    TornEngine,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.engines import EngineClient, EngineDriver, Replies, Reply, ServingOptions
from rl_bridge.engines.rpc import OTHER_RANK, failure_reply
from rl_bridge.engines.serving import Serving, default_label
from rl_bridge.engines.session import Session
from rl_bridge.errors import DriverError, IncompatibleUpdate, SessionRefused, TransportUnavailable

IDLE = {"driver": "", "driver_name": "", "epoch": 0, "world_size": 1, "stage": "idle"}
IDLE |= dict.fromkeys(("update_id", "weight_version", "root", "pending", "manifest"))
IDLE |= {"loads": False, "paused": False, "torn": "", "shards": []}
IDLE |= {"asleep": False, "may_sleep": False}


class Client(EngineClient):
    """Notes what it is asked, and answers what it was given."""

    def __init__(self, *failures: Exception | None, is_paused: bool = False, **told: Any) -> None:
        super().__init__(20.0)
        self.failures = failures or (None,)
        self.told: Mapping[str, Any] = told
        self.paused = is_paused
        self.asked: list[str] = []
        self.modes: list[str | None] = []
        self.payload: Mapping[str, Any] = {}  # of the last call
        self.each: list[Reply] = []  # what a rank says beside what all say

    def call(self, verb: str, payload: Reply, timeout_s: float) -> Replies:
        self.asked.append(verb)
        self.payload = payload
        replies: Replies = []
        for rank, failure in enumerate(self.failures):
            who = {"rank": rank, "call": payload["call"]}
            who |= self.each[rank] if rank < len(self.each) else {}
            said: Mapping[str, Any] = {"ok": True, **IDLE, **self.told}
            if verb == "describe" and self.epoch:
                said = {**said, "driver": self.driver, "epoch": self.epoch}
            replies.append({**(said if failure is None else failure_reply(failure)), **who})
        return replies

    def pause(self, mode: str | None, *, undoes: bool = False) -> None:
        self.modes.append(mode)

    def resume(self) -> None:
        self.asked.append("resume")

    def is_paused(self) -> bool:
        return self.paused

    def drop_caches(self, policy: str | None) -> str:
        self.asked.append("drop_caches")
        return ""


# ---- failures -----------------------------------------------------------------------------------


class Elsewhere(WeightBridgeUnavailableError):
    """Of a transport of somebody's own: the driver does not have it."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "no memory is left", "Free some."),
        TransportUnavailable("cuda-vmm", "no device is left", "Use another one."),
        Elsewhere("nothing is left. Use less."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_rank_is_short_of_is_told_as_a_shortage(error: Exception) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=r"^rank 1: "):
        Client(None, error).ask("prepare")


SHORT, REFUSED = OSError(errno.EMFILE, "planted"), IncompatibleUpdate("planted")
AFTER_ANOTHER, TORN = IncompatibleUpdate(f"{OTHER_RANK} failed"), TornEngine("planted")


@pytest.mark.parametrize(
    ("failures", "kind", "rank"),
    [
        ((SHORT, REFUSED), IncompatibleUpdate, 1),
        ((AFTER_ANOTHER, REFUSED), IncompatibleUpdate, 1),
        ((AFTER_ANOTHER, SHORT), WeightBridgeUnavailableError, 1),
        ((REFUSED, TORN), TornEngine, 1),
        ((None, REFUSED), IncompatibleUpdate, 1),
    ],
)
def test_the_gravest_of_several_ranks_failures_is_raised(
    failures: Any, kind: type[Exception], rank: int
) -> None:
    with pytest.raises(kind, match=f"^rank {rank}: "):
        Client(*failures).ask("prepare")


def test_a_trainer_that_cannot_be_told_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Client(not_told="the way back is gone").ask("commit")
    assert "the way back is gone" in caplog.text


def test_the_parts_that_ranks_take_are_asked_for_once_in_a_session_and_must_be_all(
    trainer: TensorBridge,
) -> None:
    sent = {"w": torch.ones(4)}
    client = Client(None, None, world_size=2, timings_ms={}, verified="")
    driver = EngineDriver(client, serving=ServingOptions(None, "drop", None), options={})
    halves = [[[0, [2], [1], start, False]] for start in (0, 2)]

    def prepare(version: int, *parts: object) -> bool:
        client.each = [{"shards": one} for one in parts]
        driver.prepare(trainer.publish(sent, weight_version=version), {})
        return bool(client.payload["shards"])

    with pytest.raises(IncompatibleUpdate, match="takes 2 of its 4 elements"):
        prepare(1, halves[0], halves[0])
    assert prepare(2, *halves)
    assert not prepare(3)
    driver.leave()
    client.told = {**client.told, "epoch": 7}  # others had it since, or it is another engine
    assert prepare(4, *halves)


# ---- sessions -----------------------------------------------------------------------------------


def test_an_opening_that_comes_late_opens_nothing() -> None:
    session = Session()
    session.open("one", "driver 1", 3, take_over=False)
    session.leave()
    with pytest.raises(SessionRefused, match="too late"):
        session.open("other", "driver 2", 3, take_over=True)
    session.open("other", "driver 2", 4, take_over=False)
    assert (session.driver, session.epoch) == ("other", 4)


def test_an_engine_that_a_driver_has_left_and_one_that_was_started_anew_are_told_apart() -> None:
    session, call = Session(), {"driver": "late", "epoch": 1}
    with pytest.raises(SessionRefused, match="started anew"):
        session.require(call)
    session.open("one", "driver 1", 3, take_over=False)
    session.leave()
    with pytest.raises(SessionRefused, match=r"no driver has this engine \(driver driver 1 had it"):
        session.require(call)


# ---- the pause, the caches, the options ---------------------------------------------------------


def test_what_the_user_froze_stays_frozen_whatever_the_driver_pauses_by() -> None:
    client = Client(is_paused=True)
    serving = Serving(client, ServingOptions("abort", "drop"))
    serving.stop()
    serving.end_pause()
    assert client.modes == [None]
    assert "resume" not in client.asked


def test_an_update_without_a_pause_leaves_nothing_cached_when_it_is_undone(
    trainer: TensorBridge,
) -> None:
    proof = InstallProof(method="digest", root="").to_dict()
    told = {"proof": proof, "timings_ms": {"prove": 0.0}, "verified": ""}
    client = Client()
    client.told = told
    driver = EngineDriver(client, serving=ServingOptions(None, "drop", None), options={})
    manifest = trainer.publish({"w": torch.ones(4)}, weight_version=1)
    driver.prepare(manifest, {})
    driver.install(manifest, {})
    driver.undo()
    at = client.asked.index("undo")
    assert client.asked[at - 1 : at + 2] == ["drop_caches", "undo", "drop_caches"]
    assert not client.modes


def test_options_that_an_engine_does_not_have_are_refused_by_name() -> None:
    known: Any = (("keep", None), ("recompute", "keep"))
    ServingOptions("keep", "keep").check(*known)
    with pytest.raises(ValueError, match="pause='stop': expected 'keep' or None"):
        ServingOptions("stop", "keep").check(*known)
    with pytest.raises(ValueError, match="cache='drop': expected 'recompute' or 'keep'"):
        ServingOptions(None, "drop").check(*known)
    wrong: Any = "v1"
    with pytest.raises(TypeError, match="label='v1': expected a function"):
        ServingOptions(None, "keep", wrong).check(*known)
    assert ServingOptions(None, "keep").label is default_label


def test_a_refusal_of_the_session_is_noted_until_an_update_is_committed() -> None:
    client = Client(SessionRefused("planted"))
    with pytest.raises(SessionRefused):
        client.ask("install")
    assert client.is_lost
    with pytest.raises(WeightBridgeError):
        client.ask("undo")

"""The steps of a vLLM worker's rank, by stand-ins for its model and for the group of its ranks.

What real engines make of them is asked in `tests/engines/test_ranks.py`.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import (
    TensorBridge,
    WeightUpdateManifest,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.engines.vllm import rank as rank_module
from rl_bridge.engines.vllm import votes
from rl_bridge.engines.vllm.calls import answer
from rl_bridge.engines.vllm.rank import VLLMRank
from rl_bridge.errors import DigestMismatch, WeightBridgeUnavailableError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter

RANKS = 2
WAIT_S = 20
ALONE = SimpleNamespace(
    parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1)
)


class Model(TransactionalAdapter):
    """A model that holds a version's number."""

    def __init__(self) -> None:
        self.version = 0
        self.before: int | None = None
        self.manifest: WeightUpdateManifest | None = None

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        del tensors
        self.manifest = manifest

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        del tensors
        self.before, self.version = self.version, manifest.weight_version

    def prove(self) -> InstallProof:
        assert self.manifest is not None
        return InstallProof(method="digest", root=self.manifest.root)

    def undo(self) -> None:
        if self.before is not None:
            self.version, self.before = self.before, None

    def commit(self) -> None:
        self.before = None

    def abandon(self) -> None:
        """Nothing was staged."""

    def release(self, update_id: str) -> None:
        """Nothing is kept."""


class Group:
    """Ranks that are threads: each knows its number, and all hear what all say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._said: list[Any] = [None] * ranks
        self._own = threading.local()
        self._own.rank = 0
        self.world_size = ranks
        monkeypatch.setattr(rank_module, "group", lambda: self)
        monkeypatch.setattr(rank_module, "all_agree", lambda *, ok: all(self._hear(ok)))
        monkeypatch.setattr(rank_module, "first_said", self._first_said)
        monkeypatch.setattr(votes, "group", lambda: self)
        monkeypatch.setattr(votes, "_all_say", self._hear)

    @property
    def rank_in_group(self) -> int:
        return int(self._own.rank)

    def each(self, calls: Sequence[Callable[[], str]]) -> list[str]:
        """Make one call on each rank, at once."""

        def call(rank: int) -> str:
            self._own.rank = rank
            return calls[rank]()

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(call, range(len(calls)), timeout=WAIT_S))

    def _hear(self, said: Any) -> list[Any]:
        if self.world_size == 1:
            return [said]
        self._said[self.rank_in_group] = said
        self._barrier.wait(WAIT_S)
        heard = list(self._said)
        self._barrier.wait(WAIT_S)
        return heard

    def _first_said(self, problem: str, *, echo: tuple[str, ...] = ()) -> str:
        own = "" if problem.startswith(echo) else problem
        return next(filter(None, self._hear(own)), problem)


@pytest.fixture
def trainer() -> Iterator[TensorBridge]:
    with make_weight_bridge("shared-memory", source_worker="trainer") as bridge:
        yield bridge


def rank_with(model: Model) -> VLLMRank:
    rank = VLLMRank(torch.nn.Linear(1, 1), ALONE)
    rank._installer = model
    return rank


def publish(trainer: TensorBridge, version: int) -> WeightUpdateManifest:
    return trainer.publish({"w": torch.full((4,), float(version))}, weight_version=version)


def test_ranks_hold_one_version_where_one_of_them_cannot_read_the_next(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, models = Group(monkeypatch, RANKS), [Model() for _ in range(RANKS)]
    ranks = [rank_with(model) for model in models]
    first, second = publish(trainer, 1).to_json(), publish(trainer, 2).to_json()

    def receive(*texts: str) -> list[str]:
        pairs = zip(ranks, texts, strict=True)
        return group.each([partial(rank.receive, text) for rank, text in pairs])

    assert receive(first, first) == ["", ""]  # and its finish_weight_update never comes
    one, other = receive(second, second[:-5])
    assert one == other != ""
    assert [model.version for model in models] == [1, 1]
    assert receive(second, second) == ["", ""]
    assert [model.version for model in models] == [2, 2]
    for rank in ranks:
        rank.close()


def test_a_worker_that_was_short_of_descriptors_takes_the_same_update_later(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 1)
    rank, manifest = rank_with(Model()), publish(trainer, 1)

    def exhausted(*_args: Any, **_kwargs: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", exhausted)
        with pytest.raises((OSError, WeightBridgeUnavailableError)):
            rank.prepare(manifest)
    rank.prepare(manifest)
    rank.close()


def test_a_manifest_that_was_altered_on_its_way_does_not_cost_a_worker_the_update(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 1)
    rank, manifest = rank_with(Model()), publish(trainer, 1)
    with pytest.raises(DigestMismatch):
        rank.prepare(manifest.model_copy(update={"weight_version": 2}))
    rank.prepare(manifest)
    rank.close()


def test_an_update_that_was_undone_is_told_to_its_trainer_and_never_let_in_again(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 1)
    rank, manifest = rank_with(Model()), publish(trainer, 1)
    rank.prepare(manifest)
    rank.undo("not wanted")
    (report,) = [report for report in trainer.holders(manifest) if report.worker == "vllm"]
    assert report.reason == "not wanted"
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        rank.prepare(manifest)
    rank.close()


def test_an_undo_of_what_another_driver_has_committed_is_refused(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 1)
    model = Model()
    rank, first, second = rank_with(model), publish(trainer, 1), publish(trainer, 2)
    mine = {"update_id": first.update_id}
    rank.prepare(first)
    assert answer(rank, "install", mine)["ok"]
    assert answer(rank, "commit", {"if_installed": True})["ok"]  # the other driver's look
    for _ in range(2):  # also behind that driver's next update
        reply = answer(rank, "undo", mine)
        assert not reply["ok"]
        assert "another driver has committed it" in reply["message"]
        if rank.describe()["pending"] is None:
            rank.prepare(second)
            rank.install(second.update_id)
    assert model.version == 2
    rank.close()


def test_an_undo_by_the_driver_that_committed_itself_changes_nothing(
    trainer: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    Group(monkeypatch, 1)
    model = Model()
    rank, manifest = rank_with(model), publish(trainer, 1)
    mine = {"update_id": manifest.update_id}
    rank.prepare(manifest)
    for verb in ("install", "commit", "undo"):
        assert answer(rank, verb, mine)["ok"]
    assert model.version == 1
    rank.close()

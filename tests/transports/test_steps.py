"""Steps of ``files``: an orchestrator that knows nothing of rl_bridge follows both protocols.

`Outside` is that orchestrator: it polls and loads with what Python and safetensors have.
"""

import itertools
import os
import re
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from rl_bridge import make_weight_bridge
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.compat.prime_rl import (
    FileSystemWeightBroadcast,
    FileSystemWeightBroadcastConfig,
    receive_step,
)
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    GroupAborted,
    IncompatibleUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import Piece, Placement
from rl_bridge.testing.processes import DEADLINE_S, Child, until
from rl_bridge.transports.files.steps import StepReceiver, Steps
from rl_bridge.transports.files.store import FileContent
from tests.groups.meshes import Shards
from tests.groups.rig import Trainers
from tests.helpers import die_before_a_change, stop

HANDSHAKES = ("stable", "stages")
DONE = {"stable": "STABLE", "stages": ".finished"}
OFFERED, READY, STARTED = ".sender_ready", ".receiver_ready", ".started"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def files(run: Path | str, **options: Any) -> FilesTensorBridge:
    bridge = make_weight_bridge("files", url=run, suspicious="off", timeout_s=0.05, **options)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


def weights(life: int, step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64,), float(1000 * life + step)), "life": torch.tensor([life])}


def publish(trainer: FilesTensorBridge, step: int, life: int = 0) -> None:
    trainer.release(trainer.publish(weights(life, step), weight_version=step))


class Outside:
    """Answers each offer, and loads each step that has the last marker.

    Attributes:
        loaded: life of the trainer, and step, of all that was loaded, one after the other.

    """

    def __init__(self, run: Path, handshake: str) -> None:
        self.run, self.handshake = run, handshake
        self.loaded: list[tuple[int, int]] = []
        self._is_over = threading.Event()

    def look(self) -> None:
        for folder in sorted(self.run.glob("step_*")):
            if self.handshake == "stages" and (folder / OFFERED).exists():
                try:
                    (folder / READY).touch()
                except FileNotFoundError:
                    continue  # it was taken back
            if (folder / DONE[self.handshake]).exists():
                self.load(folder)

    def load(self, folder: Path) -> None:
        try:
            found = load((folder / "model.safetensors").read_bytes())
        except FileNotFoundError:
            return  # it was taken back since
        life, step = int(found["life"]), int(folder.name.removeprefix("step_"))
        assert found["w"].equal(weights(life, step)["w"])
        if self.loaded[-1:] != [(life, step)]:
            self.loaded.append((life, step))

    def wait_for(self, life: int, step: int) -> None:
        until(lambda: (life, step) in self.loaded, what=f"step {step} is loaded")

    def follow(self) -> None:
        while not self._is_over.is_set():
            self.look()

    @contextmanager
    def following(self) -> Iterator["Outside"]:
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(self.follow)
            try:
                yield self
            finally:
                self._is_over.set()
            told.result(DEADLINE_S)


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_an_orchestrator_that_knows_nothing_of_rl_bridge_gets_each_version(
    run: Path, handshake: Any
) -> None:
    with Outside(run, handshake).following() as outside, files(run, steps=handshake) as trainer:
        for step in (0, 1, 5):
            publish(trainer, step)
            outside.wait_for(0, step)
    with files(run) as reader:  # the same version, as bridges read it
        newest = reader.newest()
        assert newest is not None
        assert reader.import_update(newest)["w"].equal(weights(0, 5)["w"])


def test_a_version_is_written_once_its_receiver_is_ready_and_the_stages_follow_each_other(
    run: Path,
) -> None:
    folder = run / "step_3"
    with files(run, steps="stages") as trainer, ThreadPoolExecutor(1) as pool:
        done = pool.submit(publish, trainer, 3)
        until((folder / OFFERED).exists, what="version 3 is offered")
        assert list(folder.iterdir()) == [folder / OFFERED]
        assert not list(run.glob("0*"))
        (folder / READY).touch()
        done.result(DEADLINE_S)
        markers = {OFFERED, READY, STARTED, ".finished"}
        assert {path.name for path in folder.iterdir()} >= {*markers, "model.safetensors"}
        assert all(not (folder / one).read_bytes() for one in markers - {".finished"})


# ---- a receiver that does not come ---------------------------------------------------------------


def test_a_receiver_that_never_comes_is_an_error_in_time_and_the_next_version_is_published(
    run: Path,
) -> None:
    with files(run, steps="stages", ready_timeout_s=0.05) as trainer:
        with pytest.raises(DeadlineExceeded) as caught:
            publish(trainer, 1)
        said = str(caught.value)
        assert all(word in said for word in ("version 1", str(run / "step_1"), READY, OFFERED))
        assert not list(run.glob("*step_*"))
        assert trainer.versions() == []
    with files(run, steps="stages") as trainer, Outside(run, "stages").following() as outside:
        publish(trainer, 1)
        outside.wait_for(0, 1)


def test_a_trainer_that_waits_answers_others_and_is_ended_by_close(run: Path) -> None:
    trainer, folder = files(run, steps="stages", ready_timeout_s=600.0), run / "step_1"
    with closing(trainer), ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(publish, trainer, 1)
        until((folder / OFFERED).exists, what="version 1 is offered")
        behind = pool.submit(publish, trainer, 2)
        assert trainer.consumers() == []
        trainer.release("0" * 32)
        assert not any(one.done() for one in (waiting, behind))
        trainer.close()
        for one in (waiting, behind):
            with pytest.raises(BridgeClosed):
                one.result(DEADLINE_S)
    assert not list(run.glob("*step_*"))
    with files(run, steps="stable") as other:  # the right to publish was given back
        publish(other, 1)


def test_a_publication_that_fails_takes_its_offer_back(run: Path) -> None:
    with (
        files(run, steps="stages") as trainer,
        Outside(run, "stages").following(),
        pytest.raises(IncompatibleUpdate),
    ):
        trainer.publish({"w": "no tensor"}, weight_version=1)
    assert not list(run.glob("*step_*"))


# ---- kills ---------------------------------------------------------------------------------------


class Lives:
    """Forks lives of a training, each of which is killed at a later step than the one before."""

    def __init__(self, *, run: str, handshake: str) -> None:
        self.run, self.handshake = run, handshake

    def live(self, *, life: int, first: int) -> bool:
        """Publish two versions from `first` on; returns whether it was killed."""
        child = os.fork()
        if not child:
            try:
                die_before_a_change(itertools.count(life, -1))
                with files(self.run, steps=self.handshake, ready_timeout_s=20.0) as trainer:
                    for step in (first, first + 1):
                        publish(trainer, step, life)
                os._exit(0)
            finally:  # an error: the child must not go on as its parent
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or not os.WEXITSTATUS(status)
        return os.WIFSIGNALED(status)


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_an_orchestrator_believes_no_attempt_of_a_trainer_that_was_killed(
    run: Path, handshake: str
) -> None:
    firsts = [1 + (5 * life) % 4 for life in range(1000)]  # forwards, and back again
    with (
        Child(Lives, run=str(run), handshake=handshake) as child,
        Outside(run, handshake).following() as outside,
    ):
        for life, first in enumerate(firsts):
            was_killed = child.ready().call("live", life=life, first=first)
            for folder in run.glob("step_*"):  # nobody writes now
                is_finished = (folder / DONE[handshake]).exists()
                assert is_finished or was_killed
                assert (folder / "model.safetensors").exists() or not is_finished
            if not was_killed:
                break
        outside.look()
    assert life > 30  # so many changes were there to die at
    assert {(life, first), (life, first + 1)} <= set(outside.loaded)
    seen: set[int] = set()
    for life, step in outside.loaded:
        assert all(step < firsts[later] for later in seen if later > life), outside.loaded
        seen.add(life)


class Trainer:
    def __init__(self, *, run: str) -> None:
        self.bridge = files(run, steps="stages")

    def publish(self, *, step: int, life: int) -> None:
        publish(self.bridge, step, life)


def test_a_receiver_leaves_the_attempt_of_a_killed_trainer_and_takes_the_next_one(
    run: Path,
) -> None:
    folder = run / "step_1"
    with Child(Trainer, run=str(run)) as child, ThreadPoolExecutor(1) as pool:
        child.ready().tell("publish", step=1, life=0)
        until((folder / OFFERED).exists, what="version 1 is offered")
        stop(child.pid)  # it does not go on when it is answered
        received = pool.submit(receive_step, folder, timeout_s=DEADLINE_S)
        until((folder / READY).exists, what="the receiver is ready")
        child.kill()
        with files(run, steps="stages") as trainer:
            assert trainer.publisher_id  # it opens the directory
            assert not folder.exists()
            publish(trainer, 1, life=1)
            assert received.result(DEADLINE_S) == folder
            assert load_file(folder / "model.safetensors")["w"].equal(weights(1, 1)["w"])


@pytest.mark.parametrize("handshake", ["stable", "stages"])
def test_an_older_trainer_that_loses_its_lock_while_it_publishes_takes_back_no_step_of_the_next_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, handshake: Any
) -> None:
    linking = Steps.linked
    newer: list[FilesTensorBridge] = []

    def linked(steps: Steps, name: str, contents: Iterable[FileContent]) -> Iterator[FileContent]:
        if not newer:
            (run / ".writer-0").unlink()
            newer.append(files(run, steps=handshake))
            with received(handshake, run / "step_2"):
                publish(newer[0], 2, life=1)
        yield from linking(steps, name, contents)

    monkeypatch.setattr(Steps, "linked", linked)
    with files(run, steps=handshake) as older:
        # (Where the links are made first it is told of the step, else of the place.)
        with received(handshake, run / "step_2"), pytest.raises(WeightBridgeError):
            publish(older, 2)
        found = load_file(run / "step_2" / "model.safetensors")
        assert found["w"].equal(weights(1, 2)["w"])
    assert (run / "step_2").exists()
    newer[0].close()


@contextmanager
def received(handshake: str, folder: Path) -> Iterator[None]:
    """Answer the offer of a step meanwhile, where it is made in stages."""
    if handshake == "stable":
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(receive_step, folder, timeout_s=DEADLINE_S)
        yield
        answered.result(DEADLINE_S)


def test_a_version_that_is_not_offered_or_not_finished_in_time_is_an_error(run: Path) -> None:
    folder = run / "step_1"
    with pytest.raises(DeadlineExceeded, match=r"step_1.*expected \.sender_ready.*got no marker"):
        receive_step(folder, timeout_s=0.05)
    folder.mkdir(parents=True)
    (folder / OFFERED).touch()
    with pytest.raises(DeadlineExceeded, match=r"expected \.finished.*got .*\.receiver_ready"):
        receive_step(folder, timeout_s=0.05)


# ---- what goes, and what stays -------------------------------------------------------------------


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_a_step_goes_with_its_version_and_stays_with_one_that_is_kept(
    run: Path, handshake: Any
) -> None:
    with (
        Outside(run, handshake).following(),
        files(run, steps=handshake, keep_last=1) as trainer,
    ):
        for step in (1, 2, 3):
            publish(trainer, step)
            if step == 1:
                trainer.keep(trainer.newest() or "")
        assert sorted(path.name for path in run.glob("step_*")) == ["step_1", "step_3"]
        trainer.keep(trainer.versions()[0], False)
        publish(trainer, 4)
        assert [path.name for path in run.glob("*step_*")] == ["step_4"]


def test_steps_before_the_first_of_a_new_life_stay(run: Path) -> None:
    with files(run, steps="stable", keep_last=9) as trainer:
        for step in (1, 2, 3):
            publish(trainer, step, life=0)
    with files(run, steps="stages", keep_last=9) as trainer:
        assert (run / "step_3" / "STABLE").exists()
        with Outside(run, "stages").following():
            publish(trainer, 2, life=1)
    assert sorted(path.name for path in run.glob("step_*")) == ["step_1", "step_2"]
    assert load_file(run / "step_1" / "model.safetensors")["life"].item() == 0
    assert load_file(run / "step_2" / "model.safetensors")["life"].item() == 1


def test_a_directory_of_another_making_is_left_alone_but_for_its_markers(run: Path) -> None:
    for step, marker in ((0, OFFERED), (1, "STABLE"), (2, "STABLE")):
        (run / f"step_{step}").mkdir(parents=True)
        for name in (marker, "model.safetensors"):
            (run / f"step_{step}" / name).touch()
    with files(run, steps="stable") as trainer:
        with pytest.raises(WeightBridgeUnavailableError, match=r"step_1 cannot be a step"):
            publish(trainer, 1)
        publish(trainer, 3)
    for step in (0, 1, 2):
        assert [path.name for path in (run / f"step_{step}").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": "both"}, "steps='both': expected one of"),
        ({"steps": "stable", "fenced": False}, "the only publisher, of rank 0"),
        ({"steps": "stages", "source_rank": 1}, "the only publisher, of rank 0"),
        ({"steps": "stable", "url": "memory://run"}, "expected a directory"),
    ],
)
def test_steps_that_cannot_be_are_refused(
    tmp_path: Path, options: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_weight_bridge("files", **{"url": tmp_path / "run", **options})


def test_a_version_of_several_ranks_is_no_step(run: Path) -> None:
    with files(run, steps="stable") as first, files(run, source_rank=1) as second:
        told = Trainers([first, second]).try_publish([half(0), half(1)], 1)
    assert all(isinstance(one, IncompatibleUpdate | GroupAborted) for one in told)
    assert "a step has whole weights" in str(told[0])
    assert not list(run.glob("*step_*"))


def half(rank: int) -> Shards:
    piece = Piece(name="w", global_shape=(4,), offset=(2 * rank,), shape=(2,), local_offset=(0,))
    return {"w": torch.zeros(2)}, {"w": Placement(dtype="float32", shape=(2,), pieces=(piece,))}


def test_a_receiver_that_stopped_waiting_answers_no_offer(run: Path) -> None:
    with StepReceiver(run / "step_1", timeout_s=DEADLINE_S) as receiver:
        assert not receiver.look()
    with files(run, steps="stages", ready_timeout_s=0.2) as trainer:
        with pytest.raises(DeadlineExceeded):
            publish(trainer, 1)
        assert not trainer.versions()


def test_ctrl_c_ends_the_wait_for_a_receiver_and_takes_the_offer_back(run: Path) -> None:
    offered = run / "step_1" / OFFERED

    def interrupt() -> None:
        until(offered.exists, what="an offer")
        os.kill(os.getpid(), signal.SIGINT)

    with (
        files(run, steps="stages", ready_timeout_s=10 * DEADLINE_S) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        sending = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            publish(trainer, 1)
        sending.result()
        assert not trainer.versions()
        assert not offered.exists()


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_input_that_is_refused_takes_no_step_back(run: Path, handshake: Any) -> None:
    with files(run, steps="stable") as trainer:
        publish(trainer, 1)
    with files(run, steps=handshake, ready_timeout_s=0.2) as trainer:
        with pytest.raises(IncompatibleUpdate):
            trainer.publish({"w": "no tensor"}, weight_version=1)
        assert (run / "step_1" / "STABLE").exists()


def test_an_offer_that_a_killed_trainer_left_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    left = tmp_path / "broadcasts" / "step_5" / OFFERED
    left.parent.mkdir(parents=True)
    left.touch()
    config = FileSystemWeightBroadcastConfig(handshake="stages")
    with FileSystemWeightBroadcast(tmp_path, config):
        assert not left.exists()

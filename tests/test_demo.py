"""The demo: whole short runs with planted faults, rollouts that lie, and what cannot run."""

import importlib.util
import io
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_bridge.demo import DemoResult, run_demo
from rl_bridge.demo.learning import Learner, LearnerConfig, SortTask
from rl_bridge.demo.model import ModuleSampler, build_model, sample
from rl_bridge.demo.rollout import (
    Engine,
    InstallReply,
    Rollout,
    RolloutConfig,
    RolloutWorker,
)
from rl_bridge.demo.stored import FAULTS, StoreRank, StoreRollout, StoreTrainer, StoreWorker
from rl_bridge.demo.trainer import (
    MIN_STEPS,
    USUAL_FAULTS,
    Fault,
    PromiseBroken,
    Trainer,
    VersionShelf,
    examine,
    logprob_tolerance,
    plan_faults,
)
from rl_bridge.errors import EngineLost, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest

SMALL = SortTask(num_digits=3, base=4)
LOCAL = RolloutConfig(transport="local-clone", seed=3, task=SMALL)
TOLERANCE = logprob_tolerance(Engine.MODULE)

# ---- whole runs ---------------------------------------------------------------------------------


def run(transport: str, out: Path, steps: int = MIN_STEPS) -> tuple[DemoResult, str]:
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    result = run_demo(
        transport=transport, steps=steps, seed=1, out=out, console=console, plain=True
    )
    return result, screen.getvalue()


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, str, Path]:
    out = tmp_path_factory.mktemp("local") / "made" / "on-demand"
    return *run("local-clone", out), out


@pytest.mark.full  # CI runs `make demo`, which is this
def test_a_run_over_shared_memory_keeps_every_promise_and_earns_the_same(
    tmp_path: Path, local_run: tuple[DemoResult, str, Path]
) -> None:
    result, _ = run("shared-memory", tmp_path)
    assert multiprocessing.active_children() == []
    found = result.summary
    assert (found["refused"], found["undone"], result.num_processes) == (2, 1, 2)
    # The corrupted and the undone version were never served: the version before them was.
    assert [row.update for row in result.rows].count("installed") == MIN_STEPS - 2
    assert found["versions_installed"] == MIN_STEPS - 2
    assert found["logprob_max_abs_diff"] <= TOLERANCE
    assert found["logprob_min_diff_if_stale"] > 100 * TOLERANCE
    # And a large model, in a few updates of its own.
    assert {row.update for row in result.large.rows} == {"installed"}
    assert result.large.nbytes > 20_000_000 * 4 > 100 * result.total_nbytes
    data = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert len(data["large"]["rows"]) == len(result.large.rows)
    local = local_run[0]
    assert [row.reward for row in result.rows] == [row.reward for row in local.rows]
    assert [row.root for row in result.rows] == [row.root for row in local.rows]


def test_the_files_have_what_was_promised(local_run: tuple[DemoResult, str, Path]) -> None:
    result, _, out = local_run
    text = (out / "demo.json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, indent=2) + "\n"
    assert (data["refused"], data["undone"]) == (2, 1)
    assert data["reward_first"] == data["rows"][0]["reward"] < 0.3
    assert data["reward_last"] == data["rows"][-1]["reward"]
    assert data["versions_installed"] == MIN_STEPS - 2
    assert data["logprob_max_abs_diff"] <= TOLERANCE < data["logprob_min_diff_if_stale"]
    assert len(data["rows"]) == data["steps"] == MIN_STEPS
    assert [fault["kind"] for fault in data["faults"]] == [fault.value for fault in USUAL_FAULTS]
    assert data["seconds"] == result.seconds > 0
    assert (data["engine_name"], data["events"], data["lost"], data["url"]) == ("", [], 0, "")
    assert [row["step"] for row in data["bare"]] == [row["step"] for row in data["rows"]]
    png = (out / "demo.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000


def test_the_screen_names_steps_faults_and_files(local_run: tuple[DemoResult, str, Path]) -> None:
    result, screen, out = local_run
    for word in ("REFUSED", "UNDONE", "ChecksumMismatch", "StaleUpdate", "EngineFault"):
        assert word in screen
    assert f"{out / 'demo.json'} {out / 'demo.png'}" in screen
    assert "\x1b" not in screen
    lines = [line for line in screen.splitlines() if line.startswith("step ")]
    assert len(lines) == len(result.rows)
    for line, row in zip(lines, result.rows, strict=True):
        assert f"version {row.version:>3}" in line
        assert f"update {row.update_ms:.1f} ms" in line


def test_without_the_bridge_the_same_faults_pass_unnoticed(
    local_run: tuple[DemoResult, str, Path],
) -> None:
    result, screen, _ = local_run
    first, planted = result.faults[0].step, {fault.step for fault in result.faults}
    both = list(zip(result.rows, result.bare, strict=True))
    # The same run, to the bit, until the first fault.
    assert [row.reward for row, _ in both[: first - 1]] == [
        bare.reward for _, bare in both[: first - 1]
    ]
    wrong = {bare.step for _, bare in both if bare.logprob_max_abs_diff > 100 * TOLERANCE}
    assert wrong == planted
    assert all(bare.logprob_max_abs_diff <= TOLERANCE for _, bare in both if bare.step not in wrong)
    assert "without the bridge" in screen


@pytest.fixture
def is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest task that is learned in 18 steps; the demo's own takes twice as many."""
    monkeypatch.setattr("rl_bridge.demo.run.RolloutConfig", partial(RolloutConfig, task=SMALL))


@pytest.mark.full
@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("transport", ["local-clone", "files"])
def test_the_policy_learns_to_sort(transport: str, tmp_path: Path) -> None:
    result, _ = run(transport, tmp_path, steps=18)
    assert result.rows[0].reward < 0.3
    assert result.rows[-1].reward > 0.8


# ---- a store between trainer and engines --------------------------------------------------------


@pytest.mark.usefixtures("is_small")
def test_over_files_training_goes_on_when_its_trainer_is_killed_and_an_engine_joins(
    tmp_path: Path,
) -> None:
    result, screen = run("files", tmp_path, steps=8)
    assert multiprocessing.active_children() == []
    data = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert (data["refused"], data["undone"], data["lost"], data["num_processes"]) == (2, 1, 1, 4)
    assert data["logprob_max_abs_diff"] <= TOLERANCE < data["logprob_min_diff_if_stale"] / 100
    assert data["reward_last"] > data["reward_first"] + 0.1

    killed, joined, resumed = data["events"]
    assert [one["kind"] for one in data["events"]] == ["killed", "joined", "resumed"]
    step = killed["step"]
    before = data["rows"][step - 2]["version"]
    assert (killed["version"], joined["version"], resumed["version"]) == (
        before + 1,
        before,
        before,
    )
    assert len({killed["pid"], joined["pid"], resumed["pid"], os.getpid()}) == 4

    stale, lost, corrupted, half_way = data["faults"]
    assert [one["kind"] for one in data["faults"]] == [fault.value for fault in FAULTS]
    assert [stale["error"], corrupted["error"]] == ["StaleUpdate", "ChecksumMismatch"]
    assert half_way["outcome"] == "undone"
    assert "model.safetensors, and no marker" in lost["message"]
    # The step samples with the version before, and the new trainer gives the lost number anew.
    updates = [row["update"] for row in data["rows"]]
    assert updates[step - 1] == "lost"
    assert [row["version"] for row in data["rows"]][step - 1 :] == [
        before,
        before,
        before,
        before + 3,
    ]

    for word in ("LOST", "KILLED", "JOINED", "RESUMED", "REFUSED", "UNDONE", data["url"]):
        assert word in screen
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(WeightBridgeUnavailableError, match="of another run"):
        run_demo(
            url=data["url"], steps=MIN_STEPS, out=tmp_path, console=Console(file=io.StringIO())
        )
    assert result.url == data["url"]


class ForgetfulRank(StoreRank):
    """A trainer that goes on from the newest version's number, and with other weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.version():
            with torch.no_grad():
                self._policy.tokens.weight[0, 0] += 1e-7


def test_a_trainer_that_goes_on_with_other_weights_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_bridge.demo.stored.StoreRank", ForgetfulRank)
    config = replace(LOCAL, transport="files", url=str(tmp_path / "run"))
    with StoreRollout(config) as engine, closing(StoreTrainer(config, engine, num_steps=9)) as made:
        made.step(1, None)
        made.step(2, None)
        with pytest.raises(PromiseBroken, match="goes on from version 2 or with other weights"):
            made.step(3, Fault.KILLED)


class StubbornWorker(StoreWorker):
    """An engine whose installs fail once version 2 is active."""

    def update(self, *, is_stale: bool, fail_half_way: bool) -> dict[str, Any]:
        fails = self._active_version() == 2 or fail_half_way
        return super().update(is_stale=is_stale, fail_half_way=fails)


def test_engines_that_do_not_agree_on_an_update_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LOCAL, transport="files", url=str(tmp_path / "run"))
    with StoreRollout(config) as engine, closing(StoreTrainer(config, engine, num_steps=9)) as made:
        made.step(1, None)
        made.step(2, None)
        monkeypatch.setattr("rl_bridge.demo.stored.StoreWorker", StubbornWorker)
        made.step(3, Fault.KILLED)
        with pytest.raises(PromiseBroken, match="two engines, two outcomes"):
            made.step(4, None)


def test_a_place_that_is_no_store_is_refused_with_the_trainers_reason(tmp_path: Path) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=r"did not start.*in one that exists"):
        run_demo(
            url=str(tmp_path / "not" / "there"),
            steps=MIN_STEPS,
            out=tmp_path,
            console=Console(file=io.StringIO()),
        )


# ---- what cannot run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"steps": MIN_STEPS - 1}, ValueError, "too few"),
        ({"engine": "abacus"}, ValueError, "no engine 'abacus'"),
        ({"transport": "pigeon"}, WeightBridgeUnavailableError, "pigeon"),
        ({"transport": "files", "engine": "vllm"}, WeightBridgeUnavailableError, "--engine module"),
        ({"transport": "local", "url": "run"}, WeightBridgeUnavailableError, "--transport files"),
        ({"url": "run", "engine": "vllm", "lora": True}, WeightBridgeUnavailableError, "nixl"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        run_demo(**options, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    screen = io.StringIO()
    with pytest.raises(WeightBridgeUnavailableError, match=r"file/out: .*--out"):
        run_demo(out=tmp_path / "file" / "out", console=Console(file=screen))
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("engine", "extras"),
    [("vllm", "demo,vllm"), ("sglang", "demo,sglang"), ("vllm-http", "demo,vllm,remote")],
)
@pytest.mark.parametrize("installed", [False, True])
def test_an_engine_that_cannot_sample_is_refused_before_anything_starts(
    engine: str, extras: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if installed or name == "matplotlib" else None

    monkeypatch.setattr(importlib.util, "find_spec", found)
    words = "local-clone does not leave this one.*--transport" if installed else rf"\[{extras}\]"
    with pytest.raises(WeightBridgeUnavailableError, match=words):
        run_demo(engine=engine, transport="local-clone", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM would start")
def test_an_engine_that_does_not_start_says_why_and_where_it_printed(tmp_path: Path) -> None:
    log = str(tmp_path / "vllm.log")
    config = replace(LOCAL, transport="shared-memory", engine=Engine.VLLM, engine_log=log)
    with Rollout(config) as rollout:
        with pytest.raises(WeightBridgeUnavailableError, match=r"did not start.*vllm") as caught:
            rollout.wait_until_ready()
        assert log in str(caught.value)


def test_a_killed_rollout_is_noticed_at_once_and_its_log_is_named(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    config = replace(LOCAL, transport="shared-memory", engine_log=str(log))
    with Rollout(config) as rollout:
        rollout.wait_until_ready()
        assert log.exists()
        os.kill(rollout.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"ended with -9.*engine\.log"):
            rollout.sample(num_groups=1, group_size=1)


# ---- rollouts that lie --------------------------------------------------------------------------


class StaleRollout(RolloutWorker):
    """Acknowledges every update, but from the third on it installs none."""

    def install(self, manifest_json: str, *, fail_half_way: bool) -> dict[str, Any]:
        manifest = WeightUpdateManifest.from_json(manifest_json)
        self.acknowledged = manifest.weight_version
        if self.acknowledged < 3:
            return super().install(manifest_json, fail_half_way=fail_half_way)
        return {"active_version": self.acknowledged, "root": manifest.root}

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        honest = super().sample(num_groups=num_groups, group_size=group_size)
        return {**honest, "version": self.acknowledged}


class TornRollout(RolloutWorker):
    """Installs, and then one tensor is scaled behind everybody's back."""

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        assert isinstance(self.sampler, ModuleSampler)
        with torch.no_grad():
            self.sampler.model.tokens.weight.mul_(1.01)
        return super().sample(num_groups=num_groups, group_size=group_size)


class ForgetfulRollout(RolloutWorker):
    """Says that it holds another version than the one that it acknowledged."""

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        return {**super().sample(num_groups=num_groups, group_size=group_size), "version": None}


class LabelledRollout(RolloutWorker):
    """An engine that labels its outputs with the root that it acknowledged."""

    wrong: Mapping[str, int] = {}

    def install(self, manifest_json: str, *, fail_half_way: bool) -> dict[str, Any]:
        reply = super().install(manifest_json, fail_half_way=fail_half_way)
        self.labels = {f"1@{reply['root']}": 512, **self.wrong}
        return reply

    def sample(self, *, num_groups: int, group_size: int) -> dict[str, Any]:
        reply = super().sample(num_groups=num_groups, group_size=group_size)
        return {**reply, "labels": self.labels}


class MislabelledRollout(LabelledRollout):
    """The same, with another version's root on one of them."""

    wrong: Mapping[str, int] = {f"1@{'0' * 32}": 1}


class WrongRootRollout(RolloutWorker):
    """Acknowledges with the root of something else."""

    def install(self, manifest_json: str, *, fail_half_way: bool) -> dict[str, Any]:
        reply = super().install(manifest_json, fail_half_way=fail_half_way)
        return {**reply, "root": "0" * 32}


@pytest.mark.parametrize(
    ("kind", "words", "in_step"),
    [
        (StaleRollout, "stale or torn", 3),
        (TornRollout, "stale or torn", 1),
        (ForgetfulRollout, "reports version None", 1),
        (MislabelledRollout, "labelled", 1),
        (WrongRootRollout, "rollout acknowledged", 1),
    ],
)
def test_a_rollout_that_does_not_hold_what_it_says_is_found_out(
    kind: type[RolloutWorker], words: str, in_step: int
) -> None:
    rollout = Rollout(LOCAL, kind)
    with rollout, closing(Trainer(LOCAL, rollout, num_steps=9)) as trainer:
        for number in range(1, in_step):
            trainer.step(number, None)
        with pytest.raises(PromiseBroken, match=words):
            trainer.step(in_step, None)


def test_labels_of_the_right_version_are_counted() -> None:
    rollout = Rollout(LOCAL, LabelledRollout)
    with rollout, closing(Trainer(LOCAL, rollout, num_steps=9)) as trainer:
        trainer.step(1, None)
        assert trainer.labels_checked == 512


def test_a_healthy_update_that_is_refused_stops_the_run() -> None:
    rollout = Rollout(LOCAL)
    with rollout, closing(Trainer(LOCAL, rollout, num_steps=9)) as trainer:
        trainer.step(1, None)
        with closing(
            Trainer(replace(LOCAL, task=SortTask(num_digits=3, base=5)), rollout, num_steps=9)
        ) as other:
            with pytest.raises(PromiseBroken, match="IncompatibleUpdate"):
                other.step(1, None)
            with pytest.raises(PromiseBroken, match="has not acknowledged"):
                _ = other.held
        trainer.step(2, None)


# ---- planted faults -----------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [USUAL_FAULTS, FAULTS], ids=["usual", "store"])
@pytest.mark.parametrize("steps", [MIN_STEPS, 7, 10, 80, 501])
def test_each_fault_is_planted_once_with_two_versions_before_it(
    steps: int, faults: tuple[Fault, ...]
) -> None:
    planned = plan_faults(steps, faults)
    assert sorted(planned.values()) == sorted(faults)
    assert min(planned) > 2
    assert max(planned) <= steps


@pytest.mark.parametrize(
    "reply",
    [
        InstallReply(active_version=5, root="00"),
        InstallReply(active_version=4, error="SegmentError", message="gone"),
        InstallReply(active_version=5, error="ChecksumMismatch", message="but installed"),
    ],
    ids=["installed", "refused-for-another-reason", "refused-yet-installed"],
)
def test_a_fault_that_is_not_refused_as_it_should_be_is_noticed(reply: InstallReply) -> None:
    with pytest.raises(PromiseBroken):
        examine(Fault.CORRUPTED, reply, active_version=4, engine=Engine.MODULE)


# ---- reinforcement learning ---------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_shelf_judges_by_its_own_copies_and_forgets_the_oldest() -> None:
    model = build_model(SMALL, seed=1, width=32, num_layers=1, num_heads=2)
    shelf = VersionShelf(model, capacity=2)
    shelf.keep(7, model.state_dict())
    batch = sample(model, num_groups=16, group_size=8, generator=generator())
    with torch.no_grad():
        model.head.weight.mul_(200.0)  # far from uniform, as after training: rounding weighs more
    shelf.keep(8, model.state_dict())
    agreement = shelf.compare(7, batch)
    assert agreement.max_abs_diff <= TOLERANCE
    assert agreement.max_abs_diff_older is None
    newer = shelf.compare(8, batch)
    assert newer.max_abs_diff > 100 * TOLERANCE
    assert newer.max_abs_diff_older == agreement.max_abs_diff
    # One pass agrees with token by token over a cache.
    sharp = sample(model, num_groups=16, group_size=8, generator=generator())
    assert shelf.compare(8, sharp).max_abs_diff <= TOLERANCE / 10
    shelf.keep(9, model.state_dict())
    with pytest.raises(KeyError, match="no weights of version 7"):
        shelf.compare(7, batch)


def test_the_reward_rises_on_a_small_task_and_the_seed_decides_it() -> None:
    before = torch.random.get_rng_state()
    rewards: list[list[float]] = []
    for steps in (30, 2):
        model = build_model(SMALL, seed=0, width=32, num_layers=1, num_heads=2)
        learner = Learner(model, num_steps=30, config=LearnerConfig(learning_rate=3e-3))
        draws = generator(1)
        rewards.append([])
        for _ in range(steps):
            batch = sample(model, num_groups=32, group_size=8, generator=draws)
            rewards[-1].append(batch.mean_reward)
            learner.update(batch)
    assert rewards[0][0] < 0.4
    assert rewards[0][-1] > 0.75
    assert rewards[1] == rewards[0][:2]
    assert torch.equal(before, torch.random.get_rng_state())

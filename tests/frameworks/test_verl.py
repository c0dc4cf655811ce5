"""verl's sync of weights by its own manager, workers and Ray; what a rollout gets is a version."""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.compat.verl import BridgeCheckpointEngine
from rl_bridge.errors import WeightBridgeError, WeightBridgeUnavailableError
from tests.engines.served import Served

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "frameworks" / "stand_ins"
"""Says that vLLM is installed: its CPU build has another name, which verl does not look for."""
RANKS = 2
SECONDS = 60.0
START_S = 240


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, whose workers see this package and a vLLM of the name that verl looks for."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written into the home directory
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    variables = {"PYTHONPATH": f"{ROOT}:{STAND_INS}", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=32, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        yield
    finally:
        ray.shutdown()


def configured(checkpoint: str, **options: Any) -> tuple[Any, Any, Any]:
    """verl's three configurations: two lines of the first are what a user adds."""
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

    sync = CheckpointEngineConfig(
        backend="rl_bridge",
        custom_backend_module="rl_bridge.compat.verl",
        engine_kwargs={
            "rl_bridge": {
                "timeout_s": SECONDS,
                "engine_options": options.pop("engine_options", None),
            }
        },
    )
    rollout = RolloutConfig(
        name="vllm",
        checkpoint_engine=sync,
        tensor_model_parallel_size=options.pop("workers", 1),
        free_cache_engine=options.pop("free_cache_engine", False),
    )
    return sync, rollout, HFModelConfig(path=checkpoint)


class Synced:
    """A trainer of two ranks and one rollout, under verl's manager."""

    def __init__(self, checkpoint: str, kind: type | None = None, workers: int = 1, **options: Any):
        from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker

        from tests.frameworks.verl_ranks import TrainerRank, group, replica

        sync, rollout, model = configured(checkpoint, workers=workers, **options)
        more = {} if kind else {"replica_rank": 0}
        self.trainer = group(TrainerRank, RANKS, config=sync)
        self.rollout = group(
            kind or CheckpointEngineWorker,
            workers,
            rollout_config=rollout,
            model_config=model,
            **more,
        )
        rollouts = [replica(self.rollout.workers, rollout, model)]
        self.manager = CheckpointEngineManager(sync, self.trainer, rollouts)

    def update(self, step: int | None, weights: dict[str, torch.Tensor], fault: str = "") -> Any:
        self.trainer.set_weights(weights, fault)
        return self.manager.update_weights(global_steps=step)

    def end(self) -> None:
        import ray

        for worker in (*self.trainer.workers, *self.rollout.workers):
            ray.kill(worker)


@pytest.fixture
def named_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS)


def test_the_engine_has_the_methods_of_verls_contract_as_verl_calls_them(named_vllm: None) -> None:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.workers.rollout import BaseRollout, get_rollout_class

    assert CheckpointEngineRegistry.get("rl_bridge") is BridgeCheckpointEngine
    assert BridgeCheckpointEngine.wire_format == CheckpointEngine.wire_format
    for name in CheckpointEngine.__abstractmethods__ - {"init_process_group"}:  # takes anything
        theirs = inspect.signature(getattr(CheckpointEngine, name)).parameters
        ours = inspect.signature(getattr(BridgeCheckpointEngine, name)).parameters
        assert list(ours) == list(theirs), name
    assert issubclass(get_rollout_class("vllm"), BaseRollout)


def numbers(value: float) -> dict[str, torch.Tensor]:
    return {f"layer.{one}": torch.full((300, 200), value + one) for one in range(3)}


@pytest.fixture(scope="module")
def kept(cluster: None, checkpoint: str) -> Iterator[Synced]:
    from tests.frameworks.verl_ranks import Rollout

    made = Synced(checkpoint, Rollout, workers=2)
    yield made
    made.end()


def loaded(synced: Synced) -> list[dict[str, torch.Tensor]]:
    return list(synced.rollout.loaded())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.timeout(START_S)
def test_verls_manager_brings_each_global_step_as_a_version_to_every_worker(kept: Synced) -> None:
    for step in (0, 1, 5):
        told = kept.update(step, numbers(step))
        assert told["rl_bridge/weight_version"] == step
        assert told["rl_bridge/engines_proven"] == 0
        assert all(same(one, numbers(step)) for one in loaded(kept))
        assert kept.trainer.read_to_end() == [True] * RANKS


@pytest.mark.timeout(START_S)
def test_damaged_bytes_reach_no_rollout_and_the_next_step_does(kept: Synced) -> None:
    kept.update(10, numbers(10))
    with pytest.raises(WeightBridgeError, match=r"checksum mismatch for 'layer\.0'"):
        kept.update(11, numbers(11), "damaged")
    assert all(same(one, numbers(10)) for one in loaded(kept))
    kept.update(12, numbers(12))
    assert all(same(one, numbers(12)) for one in loaded(kept))


@pytest.mark.timeout(START_S)
def test_a_trainer_that_fails_half_way_delivers_nothing_and_its_ranks_read_on(kept: Synced) -> None:
    kept.update(20, numbers(20))
    with pytest.raises((OSError, WeightBridgeError), match="a shard is missing"):
        kept.update(21, numbers(21), "raises")
    assert all(same(one, numbers(20)) for one in loaded(kept))
    assert kept.trainer.read_to_end()[1:] == [True]
    kept.update(22, numbers(22))
    assert all(same(one, numbers(22)) for one in loaded(kept))


@pytest.mark.timeout(START_S)
def test_a_step_that_was_sent_already_is_refused(kept: Synced) -> None:
    kept.update(30, numbers(30))
    with pytest.raises(WeightBridgeError, match="30"):
        kept.update(30, numbers(31))
    assert all(same(one, numbers(30)) for one in loaded(kept))


# ---- several servers -----------------------------------------------------------------------------


@pytest.mark.timeout(START_S)
def test_a_step_that_one_of_two_servers_refuses_is_installed_by_none(
    cluster: None, checkpoint: str
) -> None:
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager

    from tests.frameworks.verl_ranks import Server, TrainerRank, Updating, group, replica

    sync, rollout, model = configured(checkpoint)
    kind = ray.remote(Server)
    servers = [
        kind.options(name=f"vllm_server_{one}_0", num_cpus=0).remote("127.0.0.1", 1)
        for one in (0, 1)
    ]
    trainer = group(TrainerRank, 1, config=sync)
    facts = {"rollout_config": rollout, "model_config": model}
    groups = [group(Updating, 1, **facts, replica_rank=one) for one in (0, 1)]
    rollouts = [replica(one.workers, rollout, model, number) for number, one in enumerate(groups)]
    manager = CheckpointEngineManager(sync, trainer, rollouts)
    held = []
    try:
        for step, fails in enumerate(("", "prepare", "install", "")):
            groups[1].fail(fails)
            value = float(step + 1)
            weights = {"weight": torch.full((4, 4), value), "bias": torch.zeros(4)}
            trainer.set_weights(weights)
            if fails:
                with pytest.raises((RuntimeError, WeightBridgeError), match=f"planted in {fails}"):
                    manager.update_weights(global_steps=step)
            else:
                assert manager.update_weights(global_steps=step)["rl_bridge/engines_proven"] == 2
            held.append([one.held()[0] for one in groups])
        assert held == [[1, 1], [1, 1], [3, 1], [4, 4]]
    finally:
        workers = [one for group_ in (trainer, *groups) for one in group_.workers]
        for one in (*workers, *servers):
            ray.kill(one)


# ---- a real vLLM server --------------------------------------------------------------------------


@pytest.fixture
def served_model(checkpoint: str) -> dict[str, torch.Tensor]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def answers_of(server: Served) -> list[int]:
    """What it answers to a prompt, computed anew."""
    assert server.call("reset_prefix_cache").is_success
    return list(server.generate([5, 6], tokens=8)["token_ids"])


@pytest.fixture
def server_actor(cluster: None, server: Served) -> Iterator[Any]:
    """What verl looks its server up by, with the address of a real one."""
    import ray

    from tests.frameworks.verl_ranks import Server

    host, port = server.url.removeprefix("http://").split(":")
    kind = ray.remote(Server).options(name="vllm_server_0_0", num_cpus=0)
    made = kind.remote(host, int(port))
    ray.get(made.get_server_address.remote(), timeout=START_S)
    yield made
    ray.kill(made)


@pytest.mark.timeout(400)  # the server starts
def test_verls_worker_updates_a_vllm_server_as_a_transaction(
    server: Served, server_actor: Any, checkpoint: str, served_model: dict[str, torch.Tensor]
) -> None:
    import ray

    synced = Synced(checkpoint, engine_options={"take_over": True})
    try:
        told = synced.update(0, served_model)
        assert told == {"rl_bridge/weight_version": 0, "rl_bridge/engines_proven": 1}
        assert server.label().startswith("0@")
        before = answers_of(server)
        other = {**served_model, "lm_head.weight": served_model["lm_head.weight"].flip(0)}
        synced.update(7, other)
        label, answers = server.label(), answers_of(server)
        assert label.startswith("7@")
        assert answers != before
        assert ray.get(server_actor.get_global_steps.remote()) == 7

        with pytest.raises(WeightBridgeError, match="checksum mismatch"):
            synced.update(8, served_model, "damaged")
        assert (server.label(), answers_of(server)) == (label, answers)
        short = {name: one for name, one in served_model.items() if name != "lm_head.weight"}
        with pytest.raises(WeightBridgeError, match=r"lm_head\.weight"):
            synced.update(9, short)
        assert (server.label(), answers_of(server)) == (label, answers)
        assert ray.get(server_actor.get_global_steps.remote()) == 7

        assert synced.update(10, served_model)["rl_bridge/engines_proven"] == 1
        assert answers_of(server) == before
        with pytest.raises(ray.exceptions.RayActorError):
            synced.update(11, other, "killed")
        assert server.label().startswith("10@")
        assert answers_of(server) == before
    finally:
        synced.end()


def test_a_rollout_whose_sync_drops_its_weights_is_refused(
    named_vllm: None, checkpoint: str
) -> None:
    from verl.workers.rollout import get_rollout_class

    _, rollout, model = configured(checkpoint, free_cache_engine=True)
    with pytest.raises(WeightBridgeUnavailableError, match="free_cache_engine=False"):
        get_rollout_class("vllm")(config=rollout, model_config=model, device_mesh=None)

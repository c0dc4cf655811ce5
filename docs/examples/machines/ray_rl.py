"""Reinforcement learning on a Ray cluster: a trainer's actor, rollouts' actors, a fleet.

Ray places the actors: the trainer where the resource `trainer` is, the rollouts where `rollout` is.
Weights go from one to the others by what each pair shares; batches come back as JSON.
`python ray_rl.py [--address HOST:PORT] [--steps N] [--rollouts N]`
"""

import argparse
import json
from typing import Any

import ray
import torch

from rl_bridge import TransactionalAdapter
from rl_bridge.demo.learning import Learner, SampleBatch, SortTask
from rl_bridge.demo.model import ModuleSampler, build_model
from rl_bridge.demo.trainer import VersionShelf
from rl_bridge.ray import RolloutActor, RolloutFleet, WeightPublisherActor

TASK = SortTask(num_digits=6, base=10)
GROUP_SIZE = 8
TIMEOUT_S = 60.0
# One pass over whole sequences against one token after the other: only rounding differs.
TOLERANCE = 1e-4


class Trainer(WeightPublisherActor):
    """Learns from what the rollouts sampled, and publishes."""

    def __init__(self, num_steps: int) -> None:
        torch.set_num_threads(1)
        self.model = build_model(TASK, seed=0)
        self.learner = Learner(self.model, num_steps=num_steps)
        self.shelf = VersionShelf(self.model)

    def weights_to_publish(self) -> torch.nn.Module:
        return self.model

    def nbytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.model.state_dict().values())

    def keep(self, version: int) -> None:
        """Keep a copy of the weights of now, to check by it what is sampled with them."""
        self.shelf.keep(version, self.model.state_dict())

    def learn(self, *sampled: str) -> list[float]:
        """Take one step; the mean reward, and how far the log-probabilities were off."""
        batches, found = [], []
        for text in sampled:
            answer = json.loads(text)
            tokens, log_probs = torch.tensor(answer["tokens"]), torch.tensor(answer["log_probs"])
            batches.append(SampleBatch.graded(TASK, tokens, log_probs, GROUP_SIZE))
            found.append(self.shelf.compare(answer["version"], batches[-1]).max_abs_diff)
        whole = SampleBatch(
            tokens=torch.cat([batch.tokens for batch in batches]),
            log_probs=torch.cat([batch.log_probs for batch in batches]),
            rewards=torch.cat([batch.rewards for batch in batches]),
            group_size=GROUP_SIZE,
        )
        self.learner.update(whole)
        return [whole.mean_reward, max(found)]


class Rollout(RolloutActor):
    """Samples with the weights that it was given."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        # Other random weights than the trainer's: none may be left over.
        self.sampler = ModuleSampler(TASK, model_seed=1_000_003 + seed, seed=seed)

    def weight_adapter(self) -> TransactionalAdapter:
        return self.sampler.adapter

    def sample(self, num_groups: int) -> str:
        version = self.check_weights()  # raises where it must not answer
        batch = self.sampler.sample(num_groups=num_groups, group_size=GROUP_SIZE)
        answer = {
            "version": version,
            "tokens": batch.tokens.tolist(),
            "log_probs": batch.log_probs.tolist(),
        }
        return json.dumps(answer)


def start_trainer(num_steps: int) -> Any:
    return ray.remote(Trainer).options(num_cpus=0.1, resources={"trainer": 0.1}).remote(num_steps)


def start_rollout(seed: int) -> Any:
    return ray.remote(Rollout).options(num_cpus=0.1, resources={"rollout": 1}).remote(seed)


def train_step(trainer: Any, fleet: RolloutFleet, actors: dict[str, Any], step: int) -> float:
    """Publish, sample with every rollout that has the version, learn; the mean reward."""
    ray.get(trainer.keep.remote(step), timeout=TIMEOUT_S)
    update = fleet.update(step)
    assert update.routable, update.lost
    num_groups = 64 // len(update.routable)
    asked = {name: actors[name].sample.remote(num_groups) for name in update.routable}
    batches = []
    for name, reference in asked.items():
        try:
            batches.append(ray.get(reference, timeout=TIMEOUT_S))
        except ray.exceptions.RayActorError:
            print(f"step {step}: {name} died over its batch")
    reward, diff = ray.get(trainer.learn.remote(*batches), timeout=TIMEOUT_S)
    # Whatever the rollouts sampled with, it was this version: the trainer computed it again.
    assert diff <= TOLERANCE, f"step {step}: log-probabilities differ by {diff:.3g}"
    print(f"step {step}: reward {reward:.3f} from {', '.join(update.routable)}", flush=True)
    return float(reward)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--address", default=None)
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--rollouts", type=int, default=2)
    given = options.parse_args()
    if given.address is None:
        resources = {"trainer": 1, "rollout": given.rollouts}
        ray.init(num_cpus=2, resources=resources, include_dashboard=False)
    else:
        ray.init(address=given.address)
    trainer = start_trainer(given.steps)
    fleet = RolloutFleet(trainer, timeout_s=TIMEOUT_S)
    actors = {f"rollout-{seed}": start_rollout(seed) for seed in range(given.rollouts)}
    for name, actor in actors.items():
        print(f"{name} gets weights by {fleet.join(name, actor)}", flush=True)
    rewards = [train_step(trainer, fleet, actors, step) for step in range(1, given.steps + 1)]
    nbytes = ray.get(trainer.nbytes.remote(), timeout=TIMEOUT_S)
    print(
        f"{given.steps} versions of {nbytes} bytes in {len(actors)} rollouts, reward "
        f"{rewards[0]:.3f} -> {rewards[-1]:.3f}, every batch from the version that it names"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()

"""The demo's reinforcement learning: task, sampler, judge, learner, messages, planned faults."""

import numpy as np
import pytest
import torch

from rl_bridge.demo.engines import logprob_tolerance
from rl_bridge.demo.failures import BadFrame, FaultUnnoticed
from rl_bridge.demo.faults import Fault, examine, plan_faults
from rl_bridge.demo.frames import Array, Frame, decode, encode
from rl_bridge.demo.learner import Learner, LearnerConfig, group_advantages
from rl_bridge.demo.model import CausalTransformer, ModelConfig, build_model
from rl_bridge.demo.options import MIN_STEPS, Engine
from rl_bridge.demo.policy import log_probs
from rl_bridge.demo.rollout import InstallReply
from rl_bridge.demo.sampler import SampleBatch, sample
from rl_bridge.demo.task import SortTask
from rl_bridge.demo.versions import VersionShelf

LOGPROB_TOLERANCE = logprob_tolerance(Engine.MODULE)
SMALL = ModelConfig(task=SortTask(num_digits=3, base=4), width=32, num_layers=1, num_heads=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(model: CausalTransformer, seed: int = 0) -> SampleBatch:
    return sample(model, num_groups=16, group_size=8, generator=generator(seed))


def sharpened(model: CausalTransformer, factor: float = 200.0) -> CausalTransformer:
    """A policy far from uniform, as after training: rounding weighs more there."""
    with torch.no_grad():
        model.head.weight.mul_(factor)
    return model


# ------------------------------------------------------------------------------ task


def test_a_sorted_answer_earns_one_and_every_wrong_position_costs_its_share() -> None:
    task = SortTask(num_digits=3, base=10)
    tokens = torch.tensor([[9, 1, 5, 10, 1, 5, 9], [9, 1, 5, 10, 1, 9, 5], [2, 2, 0, 10, 9, 9, 9]])
    assert task.rewards(tokens).tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_prompts_end_with_the_separator_and_hold_digits_only() -> None:
    task = SortTask(num_digits=4, base=7)
    prompts = task.prompts(50, generator())
    assert prompts.shape == (50, 5)
    assert (prompts[:, -1] == task.separator).all()
    assert 0 <= int(prompts[:, :-1].min()) <= int(prompts[:, :-1].max()) < task.base


@pytest.mark.parametrize(("num_digits", "base"), [(0, 10), (3, 1)])
def test_a_task_without_anything_to_sort_is_refused(num_digits: int, base: int) -> None:
    with pytest.raises(ValueError, match="num_digits"):
        SortTask(num_digits=num_digits, base=base)


# ------------------------------------------------------------------------------ sampler and judge


def test_log_probs_over_the_cache_agree_with_a_single_pass() -> None:
    model = sharpened(build_model(SMALL, seed=1))
    batch = draw(model)
    with torch.no_grad():
        again = log_probs(model, batch.tokens)
    assert batch.log_probs.shape == (128, 3)
    torch.testing.assert_close(again, batch.log_probs, rtol=0, atol=LOGPROB_TOLERANCE / 10)


def test_the_same_seed_gives_the_same_model_and_the_same_samples() -> None:
    before = torch.random.get_rng_state()
    one, two = (draw(build_model(SMALL, seed=5), seed=2) for _ in range(2))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.log_probs, two.log_probs)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_shelf_judges_by_its_own_copies() -> None:
    model = build_model(SMALL, seed=1)
    shelf = VersionShelf(model, capacity=2)
    shelf.keep(7, model)
    batch = draw(model)
    sharpened(model)
    shelf.keep(8, model)
    agreement = shelf.compare(7, batch)
    assert agreement.max_abs_diff <= LOGPROB_TOLERANCE
    assert agreement.max_abs_diff_older is None
    newer = shelf.compare(8, batch)
    assert newer.max_abs_diff > 100 * LOGPROB_TOLERANCE
    assert newer.max_abs_diff_older == agreement.max_abs_diff


def test_the_shelf_forgets_the_oldest_version_and_says_so() -> None:
    model = build_model(SMALL, seed=1)
    shelf = VersionShelf(model, capacity=2)
    for version in (1, 2, 3):
        shelf.keep(version, model)
    with pytest.raises(KeyError, match="no weights of version 1"):
        shelf.compare(1, draw(model))


# ------------------------------------------------------------------------------ learner


def test_a_group_that_agrees_teaches_nothing() -> None:
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    advantages = group_advantages(rewards, group_size=2)
    assert advantages[:, 0].tolist() == [0, 0, 0, 0]
    assert advantages[:2, 1].sum() == pytest.approx(0)
    assert advantages[1, 1] > 0 > advantages[0, 1]


def test_the_reward_rises_on_a_small_task() -> None:
    model = build_model(SMALL, seed=0)
    learner = Learner(model, num_steps=30, config=LearnerConfig(learning_rate=3e-3))
    draws = generator(1)
    rewards = []
    for _ in range(30):
        batch = sample(model, num_groups=32, group_size=8, generator=draws)
        rewards.append(batch.mean_reward)
        learner.update(batch)
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.75


# ------------------------------------------------------------------------------ frames


def test_a_frame_comes_back_as_it_was() -> None:
    arrays: dict[str, Array] = {
        "tokens": np.arange(6, dtype=np.int64).reshape(2, 3),
        "log_probs": np.array([[0.5, -1.25]], dtype=np.float32),
        "none": np.zeros((0, 3), dtype=np.float32),
    }
    back = decode(encode(Frame({"do": "sample", "version": None}, arrays)))
    assert back.values == {"do": "sample", "version": None}
    assert back.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array, strict=True)
        assert back.arrays[name].flags.writeable


def damaged(old: bytes, new: bytes) -> bytes:
    data = encode(Frame({"x": 1}, {"a": np.zeros((2, 2), np.float32)}))
    assert data.count(old) == 1
    return data.replace(old, new)


DAMAGED = {
    "empty": b"",
    "no-header": b"\xff\xff\xff\xff{}",
    "no-json": b"\x02\x00\x00\x00[}",
    "other-json": b"\x02\x00\x00\x00[]",
    "values-are-a-list": damaged(b'{"x": 1}', b"[120, 1]"),
    "unknown-dtype": damaged(b"float32", b"objects"),
    "negative-shape": damaged(b"[2, 2]", b"[2,-2]"),
    "not-a-shape": damaged(b"[2, 2]", b'"2x2" '),
    "larger-than-it-is": damaged(b"[2, 2]", b"[2, 3]"),
    "smaller-than-it-is": damaged(b"[2, 2]", b"[2, 1]"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_frame_is_refused(damage: str) -> None:
    with pytest.raises(BadFrame):
        decode(DAMAGED[damage])


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("steps", [MIN_STEPS, 7, 10, 80, 501])
def test_each_fault_is_planted_once_with_two_versions_before_it(steps: int) -> None:
    planned = plan_faults(steps)
    assert sorted(planned.values()) == sorted(Fault)
    assert min(planned) > 2
    assert max(planned) <= steps


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        plan_faults(MIN_STEPS - 1)


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
    with pytest.raises(FaultUnnoticed):
        examine(Fault.CORRUPTED, reply, active_version=4)

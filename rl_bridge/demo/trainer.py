"""The trainer's loop: publish a version, have it sampled with, check the answer, learn, repeat.

It is also the judge. A `VersionShelf` keeps a copy of each recent version: log-probabilities that
the rollout reports under a version are computed again under exactly that version. If they differ by
more than rounding, the rollout sampled with other weights than it says, and the run ends.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from rl_bridge.demo.learning import Learner, LearnerConfig, Policy, SampleBatch, log_probs
from rl_bridge.demo.lora import ADAPTER, LoRARanks, build_adapted
from rl_bridge.demo.model import ModuleSampler, build_model, engine_seed
from rl_bridge.demo.qwen import LEARNER, build_qwen
from rl_bridge.demo.ranks import EXPONENT_BYTE, OneRank, TrainerRanks
from rl_bridge.demo.report import BareRow, EventRow, FaultRow, StepRow, Update
from rl_bridge.demo.rollout import Engine, InstallReply, Rollout, RolloutConfig, SampleReply
from rl_bridge.engines.serving import default_label
from rl_bridge.errors import WeightBridgeError
from rl_bridge.manifest.model import WeightUpdateManifest

MIN_STEPS = 6
"""Fewer leave no room for three faults after the two versions that a replay needs."""

_GROUP_SIZE = 8
CHECK_GROUPS = 8
"""Enough to tell one version from another, and cheap."""


class PromiseBroken(WeightBridgeError):
    """An update was lost, a fault did harm, or the rollout holds other weights than it says."""


def logprob_tolerance(engine: Engine) -> float:
    """How far log-probabilities may be apart: only rounding differs; other versions are far away.

    For the module it is one pass against token by token. Real engines also have other kernels, and
    their policy grows sharper, which makes more of the same rounding.
    """
    return 1e-4 if engine is Engine.MODULE else 3e-4


# ---- the judge ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a rollout's log-probabilities lie from the trainer's own."""

    version: int
    max_abs_diff: float
    """Against the version that the rollout reports: float rounding, if it told the truth."""
    max_abs_diff_older: float | None
    """Against the version before it: what one stale version would have looked like."""


class VersionShelf:
    """Independent copies of the last few published versions."""

    def __init__(self, model: Policy, *, capacity: int = 4) -> None:
        """Take over the model's shape; nothing is on the shelf yet."""
        self._scratch = copy.deepcopy(model)
        self._capacity = capacity
        self._kept: dict[int, dict[str, Tensor]] = {}

    def keep(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Copy what was trained under a version; the oldest copy beyond the capacity goes."""
        self._kept[version] = {name: tensor.clone() for name, tensor in state.items()}
        while len(self._kept) > self._capacity:
            del self._kept[min(self._kept)]

    def holds(self, version: int, state: Mapping[str, Tensor]) -> bool:
        """Whether these are, bit for bit, the weights of a version."""
        kept = self._kept[version]
        return kept.keys() == state.keys() and all(
            torch.equal(tensor, state[name]) for name, tensor in kept.items()
        )

    def compare(self, version: int, batch: SampleBatch) -> Agreement:
        """Measure a batch against the reported version, and against the one before as control."""
        older = max((kept for kept in self._kept if kept < version), default=None)
        return Agreement(
            version=version,
            max_abs_diff=self._max_abs_diff(version, batch),
            max_abs_diff_older=None if older is None else self._max_abs_diff(older, batch),
        )

    def _max_abs_diff(self, version: int, batch: SampleBatch) -> float:
        if version not in self._kept:
            raise KeyError(f"no weights of version {version} are kept; kept are {list(self._kept)}")
        # (The base below an adapter is not kept: it does not change.)
        self._scratch.load_state_dict(self._kept[version], strict=False)
        with torch.no_grad():
            computed = log_probs(self._scratch, batch.tokens)
        return float((computed - batch.log_probs).abs().max())


# ---- the planted faults -------------------------------------------------------------------------


class Fault(StrEnum):
    """What is done to an update."""

    CORRUPTED = "corrupted"
    """One byte of the published memory is flipped before the rollout looks."""
    STALE = "stale"
    """Behind the step's own update, the version before it is sent again."""
    HALF_WAY = "half-way install"
    """The engine fails after half of the tensors have been written."""
    KILLED = "killed trainer"
    """The trainer is killed in the middle of its publication; another one goes on."""


USUAL_FAULTS = (Fault.CORRUPTED, Fault.STALE, Fault.HALF_WAY)


# Each fault's expected outcome, the type of its error, and words of the error where the type alone
# does not tell.
_EXPECTED: dict[Fault, tuple[Update, str, str]] = {
    Fault.CORRUPTED: ("refused", "ChecksumMismatch", ""),
    Fault.STALE: ("refused", "StaleUpdate", ""),
    # The engine's own exception comes out as it is, after the undo.
    Fault.HALF_WAY: ("undone", "EngineFault", ""),
}
# From the processes of real engines it comes as text.
_HALF_WAY_ELSEWHERE: tuple[Update, str, str] = (
    "undone",
    "WeightUpdateRejectedError",
    "EngineFault: ",
)


def plan_faults(num_steps: int, faults: Sequence[Fault] = USUAL_FAULTS) -> dict[int, Fault]:
    """Say in which step which fault is planted: the second in the middle."""
    if num_steps < MIN_STEPS:
        raise ValueError(f"{num_steps} steps are too few for the demo, at least {MIN_STEPS}")
    middle, gap = num_steps // 2 + 1, max(1, num_steps // 10)
    return {middle + (index - 1) * gap: fault for index, fault in enumerate(faults)}


def examine(
    fault: Fault, reply: InstallReply, *, active_version: int | None, engine: Engine
) -> Update:
    """Return what became of the fault, or raise if that is not what was to be expected."""
    outcome, error, words = _EXPECTED[fault]
    if fault is Fault.HALF_WAY and engine is not Engine.MODULE:
        outcome, error, words = _HALF_WAY_ELSEWHERE
    if reply.error != error or words not in reply.message:
        raise PromiseBroken(
            f"the {fault} update should have been {outcome} with {error}, the rollout says "
            f"{reply.error or 'installed'}: {reply.message}"
        )
    if reply.active_version != active_version:
        raise PromiseBroken(
            f"the {fault} update was {outcome}, yet the rollout went from version "
            f"{active_version} to {reply.active_version}"
        )
    return outcome


# ---- the loop -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One manifest's way to the rollout."""

    manifest: WeightUpdateManifest
    reply: InstallReply
    publish_ms: dict[str, float]
    update_ms: float


class Trainer:
    """The loop around the trainer's ranks, with a copy of each recent version."""

    def __init__(self, config: RolloutConfig, rollout: Rollout, *, num_steps: int) -> None:
        """Start with random weights; the rollout is the caller's and has no version yet."""
        self._rollout = rollout
        self._engine = config.engine
        self._is_lora = config.lora
        self._num_groups = config.num_groups
        policy, self._ranks = self._started(config, num_steps)
        self._shelf = VersionShelf(policy)
        self.events: list[EventRow] = []
        """What became of processes on the way."""
        self._version = 0
        self.labels_checked = 0
        """How many outputs carried the engine's own label of the version that was asked for."""
        self._held: WeightUpdateManifest | None = None
        self._held_before: WeightUpdateManifest | None = None

    def _started(self, config: RolloutConfig, num_steps: int) -> tuple[Policy, TrainerRanks]:
        """Start the ranks; the policy is what their versions are weights of."""
        task, transport, seed = config.task, config.transport, config.seed
        if config.lora:
            ranks = LoRARanks(task, transport=transport, seed=seed, num_steps=num_steps)
            return build_adapted(task, seed), ranks
        is_module = config.engine is Engine.MODULE
        policy: Policy
        policy = build_model(task, seed, **config.sizes) if is_module else build_qwen(task, seed)
        settings = LearnerConfig() if is_module else LEARNER
        return policy, OneRank(policy, transport=transport, num_steps=num_steps, config=settings)

    @property
    def held(self) -> WeightUpdateManifest:
        """The update that the rollout has acknowledged last."""
        if self._held is None:
            raise PromiseBroken("the rollout has not acknowledged any update yet")
        return self._held

    def close(self) -> None:
        """Take back everything that was published."""
        self._ranks.close()

    def step(self, number: int, fault: Fault | None) -> tuple[StepRow, FaultRow | None]:
        """Do one step: an update, a batch, a lesson; with a fault planted, if one is given.

        If the fault costs the step its own update, the rollout samples with the version that it
        has, one behind, and training goes on: the learner's clipped ratio allows for it.
        """
        fault_row = None
        if fault is None or fault is Fault.STALE:
            over = self._update()
        if fault is not None:
            fault_row, planted = self._plant(number, fault)
            over = over if fault is Fault.STALE else planted
        sampled, agreement = self.sample(self._num_groups)
        start = time.perf_counter()
        entropy = self._ranks.learn(sampled.batch)
        row = StepRow(
            step=number,
            version=agreement.version,
            root=self.held.root,
            update="installed" if fault_row is None or over.reply.root else fault_row.outcome,
            reward=sampled.batch.mean_reward,
            exact=float(sampled.batch.rewards.min(dim=1).values.mean()),
            entropy=entropy,
            logprob_max_abs_diff=agreement.max_abs_diff,
            logprob_max_abs_diff_older=agreement.max_abs_diff_older,
            publish_ms=over.publish_ms,
            install_ms=over.reply.timings_ms,
            update_ms=over.update_ms,
            sample_ms=sampled.sample_ms,
            learn_ms=(time.perf_counter() - start) * 1e3,
        )
        return row, fault_row

    def _update(self) -> HandOver:
        """Publish the weights of now and have them installed."""
        over = self._hand_over(*self._publish())
        reply, manifest = over.reply, over.manifest
        if reply.error is not None:
            raise PromiseBroken(
                f"the rollout did not install version {manifest.weight_version}: "
                f"{reply.error}: {reply.message}"
            )
        if (reply.active_version, reply.root) != (manifest.weight_version, manifest.root):
            raise PromiseBroken(
                f"version {manifest.weight_version} with root {manifest.root} was handed over, the "
                f"rollout acknowledged version {reply.active_version} with root {reply.root}"
            )
        self._held_before, self._held = self._held, manifest
        if self._held_before is not None:
            self._ranks.release(self._held_before)
        return over

    def _plant(self, number: int, fault: Fault) -> tuple[FaultRow, HandOver]:
        """Plant a fault and see that it does no harm: what became of it, and how it was sent."""
        before = self.held.weight_version
        if fault is Fault.STALE:
            assert self._held_before is not None, "faults are planted after two versions"
            over = self._hand_over(self._held_before, {}, time.perf_counter())
        else:
            manifest, timings_ms, start = self._publish()
            if fault is Fault.CORRUPTED:
                self._ranks.damage(manifest)
            is_failing = fault is Fault.HALF_WAY
            over = self._hand_over(manifest, timings_ms, start, fail_half_way=is_failing)
            self._ranks.release(manifest)
        outcome = examine(fault, over.reply, active_version=before, engine=self._engine)
        _, agreement = self.sample(CHECK_GROUPS)
        row = FaultRow(
            step=number,
            kind=fault.value,
            outcome=outcome,
            version=over.manifest.weight_version,
            active_version=agreement.version,
            error=over.reply.error or "",
            message=over.reply.message,
            logprob_max_abs_diff=agreement.max_abs_diff,
        )
        return row, over

    def _publish(self) -> tuple[WeightUpdateManifest, dict[str, float], float]:
        """Publish what was learnt: its manifest, what that took, and when it began."""
        self._version += 1
        self._shelf.keep(self._version, self._ranks.state())  # the judge's copy costs no update
        start = time.perf_counter()
        return (*self._ranks.publish(self._version), start)

    def _hand_over(
        self,
        manifest: WeightUpdateManifest,
        timings_ms: Mapping[str, float],
        start: float,
        *,
        fail_half_way: bool = False,
    ) -> HandOver:
        sending_ms, reply = self._send(manifest, fail_half_way=fail_half_way)
        update_ms = (time.perf_counter() - start) * 1e3
        timings = {**timings_ms, **sending_ms}
        timings.pop("publish", None)  # the sum of its phases
        return HandOver(manifest=manifest, reply=reply, publish_ms=timings, update_ms=update_ms)

    def _send(
        self, manifest: WeightUpdateManifest, *, fail_half_way: bool
    ) -> tuple[dict[str, float], InstallReply]:
        """Have the rollout install a version: what this side needed for it, and the outcome."""
        start = time.perf_counter()
        # The layout, by far the larger part, travels once; later manifests refer to it.
        text = manifest.to_json(layout=self._held is None)
        to_json_ms = (time.perf_counter() - start) * 1e3
        return {"to_json": to_json_ms}, self._rollout.install(text, fail_half_way=fail_half_way)

    def sample(self, num_groups: int) -> tuple[SampleReply, Agreement]:
        """Get a batch and insist that it comes from the version that the rollout reports.

        Raises:
            PromiseBroken: version, labels or log-probabilities are not those of that version.

        """
        sampled = self._draw(num_groups, _GROUP_SIZE)
        expected = self.held.weight_version
        if sampled.version != expected:
            raise PromiseBroken(
                f"the rollout reports version {sampled.version}, it acknowledged {expected}"
            )
        label = f"{ADAPTER}@{expected}" if self._is_lora else default_label(self.held)
        wrong = {found: count for found, count in sampled.batch.labels.items() if found != label}
        if wrong:
            raise PromiseBroken(
                f"outputs of the engine are labelled {wrong}, expected {label!r} on each: they "
                "were not sampled with the version that the rollout reports"
            )
        self.labels_checked += sum(sampled.batch.labels.values())
        agreement = self._shelf.compare(expected, sampled.batch)
        tolerance = logprob_tolerance(self._engine)
        if not agreement.max_abs_diff <= tolerance:  # so that NaN fails too
            raise PromiseBroken(
                f"the rollout's log-probabilities differ by {agreement.max_abs_diff:.3g} from "
                f"those of version {expected}, which it reports (tolerance {tolerance:g}): "
                "it samples with stale or torn weights"
            )
        return sampled, agreement

    def _draw(self, num_groups: int, group_size: int) -> SampleReply:
        return self._rollout.sample(num_groups=num_groups, group_size=group_size)


# ---- the same without the bridge ----------------------------------------------------------------


class BareTrainer:
    """The same loop where weights are copied into the engine, as scripts do it: no bridge.

    Seeds, faults and their steps are those of a `Trainer`, so the two agree to the bit until the
    first fault. Nothing is verified: the trainer believes that what it sent is what samples, and
    that an install that raised has left the version before.
    """

    def __init__(self, config: RolloutConfig, *, num_steps: int) -> None:
        """Start with the weights that a `Trainer` starts with."""
        self._num_groups = config.num_groups
        self._num_steps = num_steps
        self._policy = build_model(config.task, config.seed)
        self._learner = Learner(self._policy, num_steps=num_steps)
        self._engine = ModuleSampler(
            config.task, model_seed=engine_seed(config.seed), seed=config.seed
        )
        self._shelf = VersionShelf(self._policy)
        self._sent: dict[str, Tensor] = {}

    def run(self) -> list[dict[str, Any]]:
        """Do all steps; the rows are JSON values, for whoever has it in a process of its own."""
        faults = plan_faults(self._num_steps)
        numbers = range(1, self._num_steps + 1)
        return [asdict(self.step(number, faults.get(number))) for number in numbers]

    def step(self, number: int, fault: Fault | None) -> BareRow:
        """Do one step: copy the weights, sample, learn; with a fault planted, if one is given."""
        before = self._sent
        self._shelf.keep(number, self._policy.state_dict())
        self._sent = {name: one.clone() for name, one in self._policy.state_dict().items()}
        arriving = dict(self._sent)
        if fault is Fault.CORRUPTED:
            name = max(arriving, key=lambda one: (arriving[one].nbytes, one))
            arriving[name] = arriving[name].clone()
            bits = arriving[name].view(torch.uint8).view(-1)
            bits[len(bits) // 2 + EXPONENT_BYTE] ^= 255
        elif fault is Fault.HALF_WAY:
            arriving = dict(list(arriving.items())[: len(arriving) // 2])
        elif fault is Fault.STALE:
            arriving = before
        self._engine.model.load_state_dict(arriving, strict=False)
        if fault is not None:  # the batch of a `Trainer`'s check, or the prompts would differ
            self._engine.sample(num_groups=CHECK_GROUPS, group_size=_GROUP_SIZE)
        batch = self._engine.sample(num_groups=self._num_groups, group_size=_GROUP_SIZE)
        believed = number - (fault is Fault.HALF_WAY)
        agreement = self._shelf.compare(believed, batch)
        self._learner.update(batch)
        return BareRow(
            step=number,
            version=believed,
            reward=batch.mean_reward,
            logprob_max_abs_diff=agreement.max_abs_diff,
        )

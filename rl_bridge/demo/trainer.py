"""The trainer: publishes each version, has it sampled with, checks the answer, learns, repeats."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from rl_bridge.demo.config import RolloutConfig
from rl_bridge.demo.engines import build_policy, learner_config, logprob_tolerance
from rl_bridge.demo.failures import LabelMismatch, LogprobMismatch, UpdateLost
from rl_bridge.demo.faults import Fault, examine
from rl_bridge.demo.learner import Learner
from rl_bridge.demo.records import FaultRow, StepRow
from rl_bridge.demo.rollout import InstallReply, Rollout, SampleReply
from rl_bridge.demo.versions import Agreement, VersionShelf
from rl_bridge.engines.serving import default_label
from rl_bridge.manifest.compare import Policy
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.registry import transport_class

__all__ = ["Trainer"]

_NUM_GROUPS = 64
_GROUP_SIZE = 8
# Enough to tell one version from another, and cheap.
_CHECK_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandOver:
    """One manifest's way to the rollout."""

    manifest: WeightUpdateManifest
    reply: InstallReply
    publish_ms: Mapping[str, float]
    update_ms: float


class Trainer:
    """Owns the policy, the publisher's end of the bridge, and a copy of each recent version."""

    def __init__(self, config: RolloutConfig, rollout: Rollout, *, num_steps: int) -> None:
        """Start with random weights; the rollout is the caller's and has no version yet."""
        self._rollout = rollout
        self._engine = config.engine
        self._model = build_policy(config.engine, config.task, config.seed)
        self._learner = Learner(
            self._model, num_steps=num_steps, config=learner_config(config.engine)
        )
        self._shelf = VersionShelf(self._model)
        # The transport itself, wrapped so that a byte can be damaged behind a manifest's back.
        self._transport = FaultInjecting(transport_class(config.transport).create(num_threads=1))
        self._bridge = BridgeOver(self._transport, source_worker="trainer", suspicious=Policy.WARN)
        self._version = 0
        self._labels_checked = 0
        self._held: WeightUpdateManifest | None = None
        self._held_before: WeightUpdateManifest | None = None

    @property
    def held(self) -> WeightUpdateManifest:
        """The update that the rollout has acknowledged last."""
        if self._held is None:
            raise UpdateLost("the rollout has not acknowledged any update yet")
        return self._held

    @property
    def labels_checked(self) -> int:
        """How many outputs carried the engine's own label of the version that was asked for."""
        return self._labels_checked

    def close(self) -> None:
        """Take back everything that was published."""
        self._bridge.close()

    def step(self, number: int, fault: Fault | None) -> tuple[StepRow, FaultRow | None]:
        """Do one step: an update, a batch, a lesson; with a fault planted, if one is given.

        Where the fault costs the step its own update, the rollout samples with the version that it
        has, one behind, and training goes on: the learner's clipped ratio allows for it.
        """
        fault_row, over = None, None
        if fault is not None:
            fault_row, over = self._plant(number, fault)
        if over is None:
            over = self._update()
        sampled, agreement = self._sample(_NUM_GROUPS)
        start = time.perf_counter()
        stats = self._learner.update(sampled.batch)
        row = StepRow(
            step=number,
            version=agreement.version,
            root=self.held.root,
            update="installed" if fault_row is None or over.reply.root else fault_row.outcome,
            reward=sampled.batch.mean_reward,
            exact=sampled.batch.exact_share,
            entropy=stats.entropy,
            logprob_max_abs_diff=agreement.max_abs_diff,
            logprob_max_abs_diff_older=agreement.max_abs_diff_older,
            publish_ms=over.publish_ms,
            install_ms=over.reply.timings_ms,
            update_ms=over.update_ms,
            sample_ms=sampled.sample_ms,
            learn_ms=(time.perf_counter() - start) * 1e3,
        )
        return row, fault_row

    def _update(self) -> _HandOver:
        """Publish the weights of now and have them installed."""
        start = time.perf_counter()
        over = self._hand_over(self._publish(), start)
        reply, manifest = over.reply, over.manifest
        if reply.error is not None:
            raise UpdateLost(
                f"the rollout did not install version {manifest.weight_version}: "
                f"{reply.error}: {reply.message}"
            )
        if (reply.active_version, reply.root) != (manifest.weight_version, manifest.root):
            raise UpdateLost(
                f"version {manifest.weight_version} with root {manifest.root} was handed over, the "
                f"rollout acknowledged version {reply.active_version} with root {reply.root}"
            )
        self._held_before, self._held = self._held, manifest
        if self._held_before is not None:
            self._bridge.release(self._held_before.update_id)
        return over

    def _plant(self, number: int, fault: Fault) -> tuple[FaultRow, _HandOver | None]:
        """Plant a fault and see that it does no harm.

        Returns:
            What became of it, and the step's own update where the fault has spoilt that.

        """
        before = self.held.weight_version
        start = time.perf_counter()
        if fault is Fault.STALE:
            if self._held_before is None:
                raise UpdateLost("nothing is stale yet: the rollout has had one version only")
            over = self._hand_over(self._held_before, start)
        else:
            manifest = self._publish()
            if fault is Fault.CORRUPTED:
                table = manifest.table
                largest = max(range(len(table.nbytes)), key=table.nbytes.__getitem__)
                middle = table.offsets[largest] + table.nbytes[largest] // 2
                self._transport.corrupt(manifest, middle)
            over = self._hand_over(manifest, start, fail_half_way=fault is Fault.HALF_WAY)
            self._bridge.release(manifest.update_id)
        expected = examine(fault, over.reply, active_version=before, engine=self._engine)
        _, agreement = self._sample(_CHECK_GROUPS)
        row = FaultRow(
            step=number,
            kind=fault.value,
            outcome=expected.outcome,
            version=over.manifest.weight_version,
            active_version=agreement.version,
            error=expected.error,
            message=over.reply.message,
            logprob_max_abs_diff=agreement.max_abs_diff,
        )
        return row, None if fault is Fault.STALE else over

    def _publish(self) -> WeightUpdateManifest:
        self._version += 1
        manifest = self._bridge.publish(self._model.weights, weight_version=self._version)
        self._shelf.keep(self._version, self._model)
        return manifest

    def _hand_over(
        self, manifest: WeightUpdateManifest, start: float, *, fail_half_way: bool = False
    ) -> _HandOver:
        published = time.perf_counter()
        # The layout, by far the larger part, travels once; later manifests refer to it.
        text = manifest.to_json(layout=self._held is None)
        to_json_ms = (time.perf_counter() - published) * 1e3
        reply = self._rollout.install(text, fail_half_way=fail_half_way)
        update_ms = (time.perf_counter() - start) * 1e3
        timings = self._bridge.timings(manifest.update_id)
        timings.pop("publish", None)  # the sum of its phases
        return _HandOver(
            manifest=manifest,
            reply=reply,
            publish_ms={**timings, "to_json": to_json_ms},
            update_ms=update_ms,
        )

    def _sample(self, num_groups: int) -> tuple[SampleReply, Agreement]:
        """Get a batch and insist that it comes from the version that the rollout reports."""
        sampled = self._rollout.sample(num_groups=num_groups, group_size=_GROUP_SIZE)
        expected = self.held.weight_version
        if sampled.version != expected:
            raise LogprobMismatch(
                f"the rollout reports version {sampled.version}, it acknowledged {expected}"
            )
        self._check_labels(sampled)
        agreement = self._shelf.compare(expected, sampled.batch)
        # Written so that NaN fails too.
        tolerance = logprob_tolerance(self._engine)
        if not agreement.max_abs_diff <= tolerance:
            raise LogprobMismatch(
                f"the rollout's log-probabilities differ by {agreement.max_abs_diff:.3g} from "
                f"those of version {expected}, which it reports (tolerance {tolerance:g}): "
                "it samples with stale or torn weights"
            )
        return sampled, agreement

    def _check_labels(self, sampled: SampleReply) -> None:
        """Insist that each output, where the engine labels them, names the version asked for."""
        expected = default_label(self.held)
        wrong = {label: count for label, count in sampled.labels.items() if label != expected}
        if wrong:
            raise LabelMismatch(
                f"outputs of the engine are labelled {wrong}, expected {expected!r} on each: they "
                "were not sampled with the version that the rollout reports"
            )
        self._labels_checked += sum(sampled.labels.values())

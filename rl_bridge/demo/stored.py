"""The demo over files: a trainer and two engines that share nothing but the url of a store.

Each is a process of its own. Engines find versions in the store, and no manifest is sent to them.
In the middle of a run the trainer is killed in a publication, an engine joins while no trainer
lives, and a new trainer goes on from the newest version: its weights and its number are in the
store, the optimizer's moments begin anew.

The judge stays in the process that started all of them. The samples go through it, and it asks the
trainer for a copy of each version, by a pipe and not by the bridge.
"""

import base64
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_bridge.bridge.bridges import FilesTensorBridge, make_weight_bridge
from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.demo.learning import Learner, Policy, SampleBatch, SortTask
from rl_bridge.demo.model import build_model
from rl_bridge.demo.ranks import Published, TrainerRanks
from rl_bridge.demo.report import EventKind, EventRow, FaultRow
from rl_bridge.demo.rollout import (
    InstallReply,
    Rollout,
    RolloutConfig,
    RolloutWorker,
    SampleReply,
)
from rl_bridge.demo.trainer import CHECK_GROUPS, Fault, HandOver, PromiseBroken, Trainer
from rl_bridge.errors import DeadlineExceeded, WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.testing.faults import damage_stored, die_in_publication
from rl_bridge.testing.processes import Child, ChildDied, ChildError
from rl_bridge.transports.files.transport import Files

FAULTS = (Fault.STALE, Fault.KILLED, Fault.CORRUPTED, Fault.HALF_WAY)
"""In this order: that a new trainer goes on from the newest version is checked by its number, and a
damaged version would be skipped."""

_WATCH_S = 30.0
_Answer = TypeVar("_Answer")


def _open(url: str, worker: str) -> FilesTensorBridge:
    bridge = make_weight_bridge("files", url=url, source_worker=worker, num_threads=1)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


# ---- the trainer's process ----------------------------------------------------------------------


class StoreRank:
    """The trainer, in a process of its own; it begins with what the store has."""

    def __init__(self, *, url: str, task: dict[str, int], seed: int, num_steps: int) -> None:
        """Go on from the newest version, or begin with random weights if there is none."""
        self._task = SortTask(**task)
        self._policy = build_model(self._task, seed)
        self._bridge = _open(url, "trainer")
        # First the right to publish: what is the newest version then stays the newest.
        self._end = self._bridge.publisher.end
        self._version = 0
        newest = self._bridge.newest_verified()
        if newest is not None:
            self._policy.load_state_dict(dict(self._bridge.import_update(newest)))
            self._bridge.release_imported(newest)
            self._version = newest.weight_version
        # One lesson was learned between a version and the next one.
        self._learner = Learner(
            self._policy, num_steps=num_steps, num_done=max(self._version - 1, 0)
        )

    def version(self) -> int:
        """The number of the version that it published last, or began with; 0 if none."""
        return self._version

    def publish(self) -> dict[str, float]:
        """Publish the weights of now: what each phase took."""
        manifest = self._bridge.publish(self._policy.weights, weight_version=self._version + 1)
        self._version = manifest.weight_version
        timings = self._bridge.timings(manifest.update_id)
        timings["write"] = timings.pop("seal")  # nearly all of it: durably, before it is visible
        return timings

    def die_in_publication(self) -> None:
        """Have the next `publish` end this process."""
        die_in_publication(self._end)

    def release(self, update_id: str) -> None:
        """Let a version go, unless a trainer before this one published it."""
        self._bridge.release(update_id)

    def learn(self, tokens: list[Any], log_probs: list[Any], group_size: int) -> float:
        """Improve the policy on a batch, and return its entropy."""
        batch = (torch.tensor(tokens), torch.tensor(log_probs), group_size)
        return self._learner.update(SampleBatch.graded(self._task, *batch))

    def weights(self) -> str:
        """The weights of now, for the judge: the bytes of all parameters, one behind the other."""
        flat = nn.utils.parameters_to_vector(self._policy.parameters()).detach()
        return base64.b64encode(flat.numpy().tobytes()).decode("ascii")

    def close(self) -> None:
        """Let others publish."""
        self._bridge.close()


class StoreRanks(TrainerRanks):
    """The judge's view of the trainer's process, and of the store that it writes to."""

    def __init__(self, policy: Policy, *, url: str, seed: int, num_steps: int) -> None:
        """Start the process.

        Raises:
            WeightBridgeUnavailableError: the url cannot be used, or holds versions already.

        """
        self._policy, self._files = policy, Files(url=url)
        task = {"num_digits": policy.task.num_digits, "base": policy.task.base}
        self._options = {"url": url, "task": task, "seed": seed, "num_steps": num_steps}
        self._child = self._started()
        found = self._child.call("version")
        if found:
            self.close()
            raise WeightBridgeUnavailableError(
                f"{url} holds version {found} of another run, expected none. Name another place "
                "with url= (--url), or remove that run."
            )

    def _started(self) -> Child:
        child = Child(StoreRank, **self._options)
        with ExitStack() as stack:
            stack.enter_context(child)
            try:
                child.ready()
            except ChildError as error:
                raise WeightBridgeUnavailableError(
                    f"the trainer did not start: {error.message}"
                ) from error
            stack.pop_all()
        return child

    @property
    def pid(self) -> int:
        """Of the trainer that lives, or did last."""
        return self._child.pid

    def publish(self, version: int) -> Published:
        """See `TrainerRanks`; the manifest is what the store shows now."""
        timings_ms = self._child.call("publish")
        manifest = self.newest()
        if manifest.weight_version != version:
            raise PromiseBroken(
                f"version {version} was published, the newest one in {self._files.store} is "
                f"{manifest.weight_version}"
            )
        return Published(manifest, timings_ms)

    def newest(self) -> WeightUpdateManifest:
        """The newest version of the store."""
        for _, manifest in self._files.stored():
            return manifest
        raise PromiseBroken(f"no version is visible in {self._files.store}, expected one")

    def state(self) -> dict[str, Tensor]:
        """See `TrainerRanks`."""
        content = base64.b64decode(self._child.call("weights"))
        flat = torch.from_numpy(np.frombuffer(content, np.float32).copy())
        nn.utils.vector_to_parameters(flat, self._policy.parameters())
        return self._policy.state_dict()

    def damage(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        damage_stored(self._files.store, manifest.update_id)

    def release(self, manifest: WeightUpdateManifest) -> None:
        """See `TrainerRanks`."""
        self._child.call("release", update_id=manifest.update_id)

    def learn(self, batch: SampleBatch) -> float:
        """See `TrainerRanks`."""
        entropy: float = self._child.call("learn", **batch.document())
        return entropy

    def kill_in_publication(self) -> str:
        """Have the trainer killed while it publishes; says what it left.

        Raises:
            PromiseBroken: it published, or began nothing.

        """
        self._child.call("die_in_publication")
        try:
            self._child.call("publish")
        except ChildDied as error:
            if error.exitcode != -signal.SIGKILL:
                raise
        else:
            raise PromiseBroken("the trainer was to be killed in its publication, and published")
        store = self._files.store
        left = [file for name in store.unfinished() for file in store.files(name)]
        if not left:
            raise PromiseBroken(f"the trainer was killed, and had written nothing into {store}")
        return f"SIGKILL while it published; it left {', '.join(left)}, and no marker"

    def resume(self) -> int:
        """Start a new trainer: the version that it goes on from."""
        dead, self._child = self._child, self._started()
        with dead:  # its pipe is given back
            version: int = self._child.call("version")
        return version

    def close(self) -> None:
        """See `TrainerRanks`. A process that does not end in time is killed."""
        with self._child, suppress(ChildDied, DeadlineExceeded):
            self._child.tell("close")
            self._child.stop()


# ---- the engines --------------------------------------------------------------------------------


class StoreWorker(RolloutWorker):
    """An engine that finds versions in the store by itself."""

    def _updated(self, config: RolloutConfig) -> RolloutExecutor:
        self._bridge = _open(config.url, "rollout")
        self._found = self._versions(self._bridge.newest_verified())
        return RolloutExecutor(
            weight_bridge=self._bridge, weight_install_adapter=self.sampler.adapter
        )

    def _versions(self, first: WeightUpdateManifest | None) -> Iterator[WeightUpdateManifest]:
        """What was there when this engine started, whole, and then each newer version."""
        if first is not None:
            yield first
        for manifest in self._bridge.watch(timeout_s=_WATCH_S):
            if first is None or manifest.update_id != first.update_id:
                yield manifest

    def update(self, *, is_stale: bool, fail_half_way: bool) -> dict[str, Any]:
        """Install the next version that the store shows, or try the one before the newest.

        Raises:
            DeadlineExceeded: none becomes visible.

        """
        start = time.perf_counter()
        manifest = self._bridge.versions()[-2] if is_stale else next(self._found, None)
        found_ms = (time.perf_counter() - start) * 1e3
        if manifest is None:
            raise DeadlineExceeded(
                f"no version became visible within {_WATCH_S:g} s behind "
                f"{self._engine.active_weight_version}, which is active: see to the trainer"
            )
        reply = self.install(manifest.to_json(), fail_half_way=fail_half_way)
        reply["timings_ms"] = {"find": found_ms, **reply["timings_ms"]}
        return reply

    def close(self) -> None:
        """See `RolloutWorker`."""
        super().close()
        self._bridge.close()


class StoreRollout(Rollout):
    """The judge's view of an engine that finds versions by itself."""

    def __init__(self, config: RolloutConfig) -> None:
        """Start the engine."""
        super().__init__(config, StoreWorker)

    def update(self, *, is_stale: bool = False, fail_half_way: bool = False) -> InstallReply:
        """Have it look into the store."""
        return InstallReply(**self._call("update", is_stale=is_stale, fail_half_way=fail_half_way))


# ---- the judge ----------------------------------------------------------------------------------


class StoreTrainer(Trainer):
    """The loop around a trainer and engines that meet at a store."""

    _ranks: StoreRanks

    def __init__(self, config: RolloutConfig, rollout: StoreRollout, *, num_steps: int) -> None:
        """Start the trainer; the first engine is the caller's and has no version yet."""
        self._config = config
        self._engines = [rollout]
        super().__init__(config, rollout, num_steps=num_steps)

    def _started(self, config: RolloutConfig, num_steps: int) -> tuple[Policy, TrainerRanks]:
        policy = build_model(config.task, config.seed)
        return policy, StoreRanks(policy, url=config.url, seed=config.seed, num_steps=num_steps)

    def close(self) -> None:
        """Stop the trainer, and the engines that joined."""
        with ExitStack() as stack:
            for one in self._engines[1:]:
                stack.callback(one.close)
            super().close()

    def _send(
        self, manifest: WeightUpdateManifest, *, fail_half_way: bool
    ) -> tuple[dict[str, float], InstallReply]:
        """Have all engines look into the store; the manifest stays here."""
        is_stale = self._held is not None and manifest.weight_version < self._held.weight_version
        first, *others = self._from_all(
            lambda one: one.update(is_stale=is_stale, fail_half_way=fail_half_way)
        )
        for reply in others:
            if _outcome(reply) != _outcome(first):
                raise PromiseBroken(f"two engines, two outcomes: {first} and {reply}")
        return {}, first

    def _draw(self, num_groups: int, group_size: int) -> SampleReply:
        """Sample with all engines, each a share of the groups."""
        share = num_groups // len(self._engines)
        found = self._from_all(lambda one: one.sample(num_groups=share, group_size=group_size))
        versions = {one.version for one in found}
        if len(versions) > 1:
            raise PromiseBroken(f"the engines report versions {versions}, expected the same one")
        tokens, log_probs = (
            torch.cat([getattr(one.batch, name) for one in found])
            for name in ("tokens", "log_probs")
        )
        return SampleReply(
            batch=SampleBatch.graded(self._config.task, tokens, log_probs, group_size),
            version=found[0].version,
            sample_ms=max(one.sample_ms for one in found),
        )

    def _from_all(self, ask: Callable[[StoreRollout], _Answer]) -> list[_Answer]:
        """Ask all engines at once."""
        with ThreadPoolExecutor(len(self._engines)) as pool:
            return list(pool.map(ask, self._engines))

    def _plant(self, number: int, fault: Fault) -> tuple[FaultRow, HandOver]:
        """Plant a fault; `Fault.KILLED` costs the step its own update, as a lost one does."""
        if fault is not Fault.KILLED:
            return super()._plant(number, fault)
        before, lost = self.held.weight_version, self._version + 1
        message = self._kill(number, lost)
        self._join(number)
        _, agreement = self.sample(CHECK_GROUPS)
        self._resume(number)
        row = FaultRow(
            step=number,
            kind=fault.value,
            outcome="lost",
            version=lost,
            active_version=before,
            error="ChildDied",
            message=message,
            logprob_max_abs_diff=agreement.max_abs_diff,
        )
        reply = InstallReply(active_version=before, error=row.error, message=message)
        return row, HandOver(manifest=self.held, reply=reply, publish_ms={}, update_ms=0.0)

    def _kill(self, number: int, version: int) -> str:
        """Kill the trainer while it publishes; the store must show what it showed before."""
        pid, start = self._ranks.pid, time.perf_counter()
        message = self._ranks.kill_in_publication()
        if self._ranks.newest().update_id != self.held.update_id:
            raise PromiseBroken(
                f"the trainer was killed while it published, and version "
                f"{self._ranks.newest().weight_version} became visible, expected "
                f"{self.held.weight_version}"
            )
        self._note(number, "killed", who="trainer", pid=pid, version=version, start=start)
        self.sample(CHECK_GROUPS)  # engines serve on
        return message

    def _join(self, number: int) -> None:
        """Have one more engine join, which finds the newest version while no trainer lives."""
        start = time.perf_counter()
        # Its seed is another one, or it would answer the prompts of the first.
        config = replace(self._config, seed=self._config.seed + len(self._engines))
        engine = StoreRollout(config)
        self._engines.append(engine)
        engine.wait_until_ready()
        reply = engine.update()
        if (reply.active_version, reply.root) != (self.held.weight_version, self.held.root):
            raise PromiseBroken(
                f"version {self.held.weight_version} is the newest one, the engine that joined "
                f"installed {reply.active_version}: {reply.error}: {reply.message}"
            )
        version = self.held.weight_version
        self._note(number, "joined", who="engine", pid=engine.pid, version=version, start=start)

    def _resume(self, number: int) -> None:
        """Start a new trainer; it must have the weights of the newest version, and its number."""
        start = time.perf_counter()
        self._version = version = self._ranks.resume()
        pid = self._ranks.pid
        self._note(number, "resumed", who="trainer", pid=pid, version=version, start=start)
        newest = self.held.weight_version
        if version != newest or not self._shelf.holds(newest, self._ranks.state()):
            raise PromiseBroken(
                f"the trainer goes on from version {version} or with other weights than it had: "
                f"expected version {newest}, the newest one, and its weights"
            )

    def _note(
        self, step: int, kind: EventKind, *, who: str, pid: int, version: int, start: float
    ) -> None:
        seconds = time.perf_counter() - start
        self.events.append(
            EventRow(step=step, kind=kind, who=who, pid=pid, version=version, seconds=seconds)
        )


def _outcome(reply: InstallReply) -> tuple[int | None, str | None, str | None]:
    return reply.active_version, reply.root, reply.error

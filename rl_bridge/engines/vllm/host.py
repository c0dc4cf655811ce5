"""A vLLM worker as a rank, and its part in updates by vLLM's own calls.

These calls are a driver like any other: one call installs and proves, the next one commits, with a
session from the first to the second. There is no way to ask all ranks one step at a time, so within
each call the ranks decide by votes of their own.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_bridge.engines.adapters import AdapterHost
from rl_bridge.engines.rank import (
    EngineRank,
    RankHost,
    RankInstaller,
    Stage,
    rank_of,
    ranks_of,
)
from rl_bridge.engines.rpc import OTHER_RANK, RankGroup, clear_frames
from rl_bridge.engines.session import second_driver_error
from rl_bridge.engines.shards import check_covered, parse_shards
from rl_bridge.engines.vllm import require
from rl_bridge.engines.vllm.lora import VLLMAdapterInstaller
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.engines.vllm.reload import VLLMReloadAdapter
from rl_bridge.errors import (
    MalformedManifest,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    describe,
    is_shortage,
)
from rl_bridge.manifest.canonical import canonical_json
from rl_bridge.manifest.model import WeightUpdateManifest

_LOG = logging.getLogger(__name__)

_DRIVER = "vLLM's own calls"
_REFUSED = f"{OTHER_RANK} refused it"


class VLLMHost(RankHost):
    """One worker of a vLLM engine."""

    name = "vllm"

    def __init__(self, model: torch.nn.Module, vllm_config: Any, group: RankGroup) -> None:
        """Look at a worker's model."""
        self.model = model
        self.group = group
        # (An older vLLM has no such number.)
        self.replica = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))
        self._config = vllm_config

    def make_installer(self, options: Mapping[str, Any]) -> RankInstaller:
        """What installs beside the serving version; with ``reload``, by vLLM's own reload."""
        options = dict(options)
        if options.get("reload"):
            _require_no_adapters(self.model)
        kind = VLLMReloadAdapter if options.pop("reload", False) else VLLMModelInstaller
        made: RankInstaller = kind(self.model, self._config, **options)
        return made

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse pipeline stages, and replicas that no driver holds together."""
        parallel = self._config.parallel_config
        if parallel.data_parallel_size != 1:
            raise WeightBridgeUnavailableError(
                f"the engine has data_parallel_size={parallel.data_parallel_size}, and its "
                "replicas take each step of the model together, as those of a model of experts "
                "do; expected replicas that each compute alone. Use tensor parallelism for such a "
                "model, and one executor for each engine."
            )
        if self._has_others() and given.get("replicas", 1) == 1:
            raise WeightBridgeUnavailableError(
                f"the engine is replica {self.replica} of a data-parallel group, and this call "
                "does not see to it that all replicas install, or none. Use VLLMEngineAdapter, "
                "with an AsyncLLM or a server that starts all of its replicas itself."
            )
        if parallel.pipeline_parallel_size != 1:
            raise WeightBridgeUnavailableError(
                f"the engine has pipeline_parallel_size={parallel.pipeline_parallel_size}, "
                "expected 1: its ranks cannot decide together here. Use tensor parallelism, and "
                "one executor for each engine."
            )

    @property
    def may_sleep(self) -> bool:
        """Whether vLLM was started with its sleep mode."""
        return bool(self._config.model_config.enable_sleep_mode)

    def _has_others(self) -> bool:
        """Whether it is one of several replicas; vLLM has set their number to 1 in each."""
        parallel = self._config.parallel_config
        # (vLLM does not change this number in a replica's configuration.)
        most = getattr(parallel, "elastic_ep_max_dp_size", 1)
        return self.replica > 0 or (most > 1 and not parallel.enable_elastic_ep)


def _require_no_adapters(model: torch.nn.Module) -> None:
    """Refuse updates after which vLLM drops all adapters, while the engine has some of ours."""
    for name, rank in ranks_of(model).items():
        if name and rank.host.facts()["residents"]:
            raise WeightBridgeUnavailableError(
                f"the engine has LoRA adapter {name!r}, which vLLM drops when it reloads its "
                "weights, and requests ask for it. Update the weights by an executor that stages "
                "them."
            )


def vllm_rank(model: torch.nn.Module, vllm_config: Any, adapter: str = "") -> EngineRank:
    """The rank whose model this is, for its weights or for one of its adapters.

    vLLM's backend and drivers' calls share it.
    """
    if adapter:
        base = vllm_rank(model, vllm_config)

        def make(root: Callable[[], str]) -> VLLMAdapterInstaller:
            return VLLMAdapterInstaller(model, root)

        return rank_of(model, lambda: AdapterHost(base, make), adapter)

    def make_host() -> VLLMHost:
        state = require("vllm.distributed.parallel_state")
        inner = getattr(state, "_INNER_DP_WORLD", None)
        found = inner if inner is not None else state.get_world_group()
        size = int(found.world_size)
        if inner is None:  # replicas that compute together are in one group, and are refused
            size //= int(vllm_config.parallel_config.data_parallel_size)
        group = RankGroup(int(found.rank_in_group) % size, size, found.cpu_group)
        return VLLMHost(model, vllm_config, group)

    return rank_of(model, make_host)


# ---- updates by vLLM's own calls -----------------------------------------------------------------


def manifest_of(given: object) -> WeightUpdateManifest:
    """Read a manifest from its JSON text, or from that text parsed."""
    if isinstance(given, dict):
        given = canonical_json(given)
    if not isinstance(given, str):
        raise MalformedManifest(
            f"update_info has a {type(given).__name__} for its manifest. Pass "
            "{'manifest': manifest.to_json()}."
        )
    return WeightUpdateManifest.from_json(given)


def heard(group: RankGroup, problem: str, word: str = "") -> tuple[str, list[str]]:
    """The first cause that any rank tells, and each rank's word; all ranks must ask."""
    if group.size == 1:
        return problem, [word]
    where = f"rank {group.rank}: " if problem and not problem.startswith("rank ") else ""
    try:
        said = [json.loads(text) for text in group.hear(json.dumps([where + problem, word]))]
    except RuntimeError as error:
        return str(error), []
    problems = sorted((told for told, _ in said if told), key=lambda told: OTHER_RANK in told)
    return next(iter(problems), ""), [told for _, told in said]


class NativeUpdates:
    """One worker's part in updates by vLLM's own calls."""

    def __init__(self, rank: EngineRank) -> None:
        """Use the worker's rank."""
        self._rank = rank
        self._group = rank.host.group

    @property
    def is_last(self) -> bool:
        """Whether it is the last of the workers, which tells for all."""
        return self._group.rank == self._group.size - 1

    def receive(self, given: object) -> str:
        """Prepare and install, on all ranks or on none; all must call it.

        Returns:
            Why no rank has it now, the same text on all ranks; empty if all have.

        """
        read: list[WeightUpdateManifest] = []

        def reads() -> str:
            read.append(self._read(given))
            return read[0].update_id

        # Told first: nobody takes anything back for what another rank cannot read.
        problem, ids = self._together(reads)
        if problem:
            return problem
        if len(set(ids)) > 1:
            return (
                f"the ranks were given different updates: {sorted(ids)}, expected one for all of "
                "them. Pass each rank the same manifest."
            )
        session = self._rank.session
        session.open(_DRIVER, _DRIVER, session.epoch + 1, take_over=False)
        problem = self._received(read[0])
        if problem:
            session.leave()
        return problem

    def _received(self, manifest: WeightUpdateManifest) -> str:
        problem, words = self._together(lambda: self._take(manifest))
        if not problem and self._group.size > 1 and self._rank.covered != manifest.table.digest:
            problem, words = self._together(lambda: json.dumps(self._rank.shards(manifest)))
            if not problem:
                told = words
                problem, words = self._together(lambda: _check_covered(manifest, told))
            if not problem:  # on all ranks, or on none: they must ask each other in step
                self._rank.covered = manifest.table.digest
        if problem:
            # What no rank refused, and one only was short of something for, may come again.
            _tried(lambda: self._rank.undo(_REFUSED if _REFUSED in words else None))
            return problem
        _, problem, _ = _tried(lambda: self._rank.install(manifest.update_id))
        return heard(self._group, problem)[0] if problem else ""  # all failed, or none

    def _together(self, step: Callable[[], object]) -> tuple[str, list[str]]:
        """Take a step: the first cause that any rank tells, and what each rank's step returned.

        Instead of that, a rank that refuses the update says so.
        """
        word, problem, is_refused = _tried(step)
        return heard(self._group, problem, _REFUSED if is_refused else str(word or ""))

    def commit(self) -> None:
        """Acknowledge."""
        pending, session = self._rank.pending, self._rank.session
        if pending is None or session.driver != _DRIVER:
            raise WeightUpdateRejectedError(
                "no update is installed by vLLM's own calls. Call update_weights first."
            )
        self._rank.commit(pending.update_id)
        session.leave()

    def take_back(self, update_id: str) -> str:
        """Undo an update that is installed and not finished; all ranks must call it.

        Returns:
            Why it could not be undone here; empty if this rank is at the version before.

        """
        pending = self._rank.pending
        if pending is None or pending.update_id != update_id:
            return ""
        reason = "it was installed, and taken back: another engine of this trainer refused it"
        _, problem, _ = _tried(lambda: self._rank.undo(reason))
        self._rank.session.leave()
        return problem

    def close(self) -> None:
        """Take back what is not committed, and close the bridges."""
        self._rank.close()

    def _read(self, given: object) -> WeightUpdateManifest:
        session = self._rank.session
        if session.driver not in {"", _DRIVER}:
            raise second_driver_error(session.name)
        _require_no_adapters(self._rank.host.model)
        if self._rank.options.get("reload"):
            raise WeightUpdateRejectedError(
                "the executor updates this engine by reloads. Use the executor, which pauses it."
            )
        return manifest_of(given)

    def _take(self, manifest: WeightUpdateManifest) -> None:
        self._make_way(manifest)
        self._rank.prepare(manifest)

    def _make_way(self, manifest: WeightUpdateManifest) -> None:
        """Take an unfinished update back, and say so: requests may have been served by it."""
        earlier, reason = self._rank.pending, None
        if earlier is not None and self._rank.is_begun and self._rank.stage != Stage.COMMITTING:
            reason = (
                f"it was installed, and taken back: version {manifest.weight_version} came before "
                "finish_weight_update. Requests may have been served by it."
            )
            _LOG.warning("version %d: %s", earlier.weight_version, reason)
            if earlier.update_id == manifest.update_id:
                reason = None  # it comes again
        self._rank.undo(reason)


def _check_covered(manifest: WeightUpdateManifest, told: Sequence[str]) -> None:
    """Refuse an update of which no rank takes some elements, by what each of them takes."""
    check_covered(manifest, [parse_shards(json.loads(text), manifest) for text in told])


def _tried(step: Callable[[], object]) -> tuple[object, str, bool]:
    """What a step returns; why it failed, to be told after a vote; whether that is a refusal."""
    try:
        return step(), "", False
    except Exception as error:  # noqa: BLE001 - its text is the answer
        _LOG.warning("an update is refused", exc_info=True)
        problem = describe(error)
        clear_frames(error)
        return None, problem, not is_shortage(error)

"""vLLM's weight-transfer backend ``rl_bridge``: for those who drive an engine by vLLM's own calls.

``start_weight_update`` begins nothing, ``update_weights`` with a manifest installs and proves it on
all ranks or on none, ``finish_weight_update`` commits. Requests may run in between: they see the
old version or the new one. Prefix cache and version label are the caller's, as with every backend.

From ``update_weights`` to the finish vLLM's own calls are the driver that has the engine; while an
executor has it, they are refused by its name.

vLLM reads the ranks' answers in order and stops at the first error: an answer behind it would be
taken for the answer to the next call. So whatever goes wrong on any rank, the last one tells for
all. Its workers check by themselves whether an update is under way, and raise on every rank: calls
at the wrong moment are refused before a worker sees them (`call_together`).
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_bridge.engines.rank import EngineRank
from rl_bridge.engines.rank_bridges import checked_transports
from rl_bridge.engines.vllm.host import NativeUpdates, heard, vllm_rank
from rl_bridge.errors import WeightBridgeUnavailableError, WeightUpdateRejectedError, describe

_LOG = logging.getLogger(__name__)


@dataclass
class RLBridgeInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Options of `VLLMModelInstaller`, and of transports; all may be left out."""

    cast: bool | None = None
    staging: str | None = None
    memory_budget_nbytes: int | None = None
    num_threads: int | None = None
    transports: dict[str, dict[str, Any]] | None = None


@dataclass
class RLBridgeUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """The manifest that the trainer's ``publish`` returned: its JSON text, or that text parsed."""

    manifest: str | dict[str, Any]


class RLBridgeTransferEngine(
    WeightTransferEngine[RLBridgeInitInfo, RLBridgeUpdateInfo]  # type: ignore[misc]  # as above
):
    """The backend's worker side: one in each worker."""

    init_info_cls = RLBridgeInitInfo
    update_info_cls = RLBridgeUpdateInfo

    @property
    def rank(self) -> EngineRank:
        """This worker's part in any update."""
        return vllm_rank(self.model, self.vllm_config)

    @property
    def updates(self) -> NativeUpdates:
        """Its part in updates by vLLM's own calls."""
        return NativeUpdates(self.rank)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Leave it to `init_transfer_engine`, where a mistake is told by all ranks together."""
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Take the options; there is no connection to make."""

        def configure() -> None:
            options = RLBridgeInitInfo(**init_info)
            given = dict(vars(options))
            if options.transports is not None:
                given["transports"] = checked_transports(options.transports)
            if self.rank.is_begun:
                raise WeightUpdateRejectedError(
                    "an update is installed and not finished. Call finish_weight_update first."
                )
            self.rank.configure({key: value for key, value in given.items() if value is not None})

        self._together(configure)

    def start_weight_update(self) -> None:
        """Begin. What was left half-way before is undone when the next update comes."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install and prove, on all ranks or on none.

        ``{"abandoned": update_id}`` takes back what was installed and not finished, since another
        engine refused it, and ends the session.
        """
        if isinstance(update_info, dict) and set(update_info) == {"abandoned"}:
            self._together(lambda: self.updates.take_back(str(update_info["abandoned"])))
            _end_session(self)
            return
        self._together(lambda: self.updates.receive(_manifest_in(update_info)))

    def receive_weights(self, update_info: RLBridgeUpdateInfo) -> None:
        """Do the same, for a caller that parsed the info."""
        self._together(lambda: self.updates.receive(update_info.manifest))

    def finish_weight_update(self) -> None:
        """Acknowledge."""
        self._together(self.updates.commit)

    def shutdown(self) -> None:
        """Let go of the trainer."""
        self.updates.close()

    def _together(self, action: Callable[[], str | None]) -> None:
        """Do something on all ranks; what went wrong on any is told by the last one."""
        try:
            problem = action() or ""
        except Exception as error:  # noqa: BLE001 - raised below, by one rank
            _LOG.warning("a call of vLLM's failed", exc_info=True)
            problem = describe(error)
        problem, _ = heard(self.rank.host.group, problem)
        if not problem:
            return
        _end_session(self)
        if self.updates.is_last:
            raise WeightUpdateRejectedError(problem)

    @staticmethod
    def trainer_send_weights(*_args: Any, **_kwargs: Any) -> None:
        """Trainers publish over a bridge (vLLM up to 0.27.1 asks every backend for this)."""
        raise WeightBridgeUnavailableError(
            "the backend rl_bridge sends nothing. Publish over a bridge: "
            "make_weight_bridge(...).publish(model, weight_version=...)"
        )


def _manifest_in(update_info: Any) -> Any:
    """What stands for the manifest; what is none is refused where manifests are read."""
    if isinstance(update_info, dict) and set(update_info) == {"manifest"}:
        return update_info["manifest"]
    return {"update_info": update_info}


def _end_session(engine: RLBridgeTransferEngine) -> None:
    """Let this rank's worker forget the session, as it does by itself where a rank raises.

    vLLM gives an engine no way to its worker but the frames of the call that it is in.
    """
    frame = inspect.currentframe()
    while frame is not None:
        worker: Any = frame.f_locals.get("self")
        if getattr(worker, "weight_transfer_engine", None) is engine:
            worker._weight_update_active = False  # noqa: SLF001 - as `Worker.update_weights` does
            return
        frame = frame.f_back


# ---- calls at the wrong moment ------------------------------------------------------------------

_BEGINS = frozenset({"start_weight_update", "shutdown_weight_transfer_engine"})


def call_together(
    worker: Any, name: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call one of a worker's methods, on all ranks or on none."""
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, RLBridgeTransferEngine):
        given = arguments[0] if arguments else options.get("update_info")
        group = engine.rank.host.group
        problem, _ = heard(group, _problem(worker, name, given))
        if problem:
            if name == "update_weights":
                worker._weight_update_active = False  # noqa: SLF001 - as where it is refused itself
            if engine.updates.is_last:
                raise WeightUpdateRejectedError(problem)
            return None
    return getattr(worker, name)(*arguments, **options)


def _problem(worker: Any, name: str, given: object) -> str:
    """Why this worker must not be called so now; empty if it may."""
    is_active = bool(getattr(worker, "_weight_update_active", False))
    if name == "start_draft_weight_update":
        return (
            "rl_bridge updates no draft model. Start a fresh engine for another draft, or leave "
            "this one: it only costs speed."
        )
    if name in _BEGINS:
        return (
            f"{name} was called while a weight update is already active. Call "
            "finish_weight_update first."
            if is_active
            else ""
        )
    if not is_active:
        return (
            f"{name} was called without a matching start_weight_update: it must be called before, "
            "and again after a refused update. Call start_weight_update and update_weights first."
        )
    ranks = worker.vllm_config.parallel_config.world_size
    if name == "update_weights" and isinstance(given, list) and len(given) != ranks:
        return (
            f"update_info is a list of {len(given)}, expected one for each of {ranks} ranks. Pass "
            "one update_info for all of them: {'manifest': manifest.to_json()}."
        )
    return ""

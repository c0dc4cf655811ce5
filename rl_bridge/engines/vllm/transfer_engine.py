"""vLLM's weight-transfer backend ``rl_bridge``: for those who drive an engine by vLLM's own calls.

``start_weight_update`` begins nothing, ``update_weights`` with a manifest installs and proves it on
all ranks or on none, ``finish_weight_update`` commits. Requests may run in between: they see the
old version or the new one. Prefix cache and version label are the caller's, as with every backend.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_bridge.engines.rank_bridges import checked_transports
from rl_bridge.engines.vllm.rank import VLLMRank, rank_of
from rl_bridge.engines.vllm.votes import first_said
from rl_bridge.errors import WeightBridgeUnavailableError, WeightUpdateRejectedError, describe

__all__ = [
    "RLBridgeInitInfo",
    "RLBridgeTransferEngine",
    "RLBridgeUpdateInfo",
]

_LOG = logging.getLogger(__name__)


@dataclass
class RLBridgeInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Options of `VLLMModelInstaller`, and of transports; all may be left out."""

    cast: bool | None = None
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
    def rank(self) -> VLLMRank:
        """This worker's part."""
        return rank_of(self.model, self.vllm_config)

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Leave it to `init_transfer_engine`, where a mistake is told by all ranks together."""
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Take the options; there is no connection to make.

        Raises:
            WeightUpdateRejectedError: an option that there is not, or that is wrong; or an update
                is installed and not finished.

        """

        def configure() -> str:
            options = RLBridgeInitInfo(**init_info)
            given = dict(vars(options))
            if options.transports is not None:
                given["transports"] = checked_transports(options.transports)
            _require_idle(self.rank)
            self.rank.configure({key: value for key, value in given.items() if value is not None})
            return ""

        self._together(configure)

    def start_weight_update(self) -> None:
        """Begin. What was left half-way before is undone when the next update comes."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Install and prove, on all ranks or on none.

        Raises:
            WeightUpdateRejectedError: the engine is at its version, on all ranks.

        """
        self._together(lambda: self.rank.receive(_manifest_in(update_info)))

    def receive_weights(self, update_info: RLBridgeUpdateInfo) -> None:
        """Do the same, for a caller that parsed the info.

        Raises:
            WeightUpdateRejectedError: the engine is at its version, on all ranks.

        """
        self._together(lambda: self.rank.receive(update_info.manifest))

    def finish_weight_update(self) -> None:
        """Acknowledge.

        Raises:
            WeightUpdateRejectedError: no update is installed.

        """

        def commit() -> str:
            self.rank.commit()
            return ""

        self._together(commit)

    def shutdown(self) -> None:
        """Let go of the trainer."""
        self.rank.close()

    def _together(self, action: Callable[[], str]) -> None:
        """Do something on all ranks; what went wrong on any is told by the last one.

        vLLM reads the ranks' answers in order and stops at the first error: an answer behind it
        would be taken for the answer to the next call. So the last rank tells for all.
        """
        try:
            problem = action()
        except Exception as error:  # noqa: BLE001 - raised below, by one rank
            _LOG.warning("a call of vLLM's failed", exc_info=True)
            problem = describe(error)
        problem = first_said(problem)
        if not problem:
            return
        _end_session(self)
        if self.rank.is_last:
            raise WeightUpdateRejectedError(problem)

    @staticmethod
    def trainer_send_weights(*_args: Any, **_kwargs: Any) -> None:
        """Trainers publish over a bridge (vLLM up to 0.27.1 asks every backend for this).

        Raises:
            WeightBridgeUnavailableError: always.

        """
        msg = (
            "the backend rl_bridge sends nothing. Publish over a bridge: "
            "make_weight_bridge(...).publish(model, weight_version=...)"
        )
        raise WeightBridgeUnavailableError(msg)


def _require_idle(rank: VLLMRank) -> None:
    """Refuse other options for an update that is installed with those before."""
    if rank.describe()["exchanged"]:
        msg = "an update is installed and not finished. Call finish_weight_update first."
        raise WeightUpdateRejectedError(msg)


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

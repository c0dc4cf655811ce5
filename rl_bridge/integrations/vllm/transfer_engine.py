"""vLLM's weight-transfer backend ``rl_bridge``: for those who drive an engine by vLLM's own calls.

``start_weight_update`` begins nothing, ``update_weights`` with a manifest installs and proves it on
all ranks or on none, ``finish_weight_update`` commits. Requests may run in between: they see the
old version or the new one. Prefix cache and version label are the caller's, as with every backend.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_bridge.errors import WeightUpdateRejectedError
from rl_bridge.integrations.vllm.rank import VLLMRank, rank_of
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["RLBridgeInitInfo", "RLBridgeTransferEngine", "RLBridgeUpdateInfo"]


@dataclass
class RLBridgeInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """Options of `VLLMModelInstaller`; all may be left out."""

    cast: bool = False
    memory_budget_nbytes: int | None = None
    num_threads: int | None = None


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

    def init_transfer_engine(self, init_info: RLBridgeInitInfo) -> None:
        """Take the options; there is no connection to make."""
        self.rank.configure({key: value for key, value in vars(init_info).items() if value})

    def start_weight_update(self) -> None:
        """Begin: an update that was left half-way before is undone."""
        self.rank.undo("the next update began before it was finished")

    def receive_weights(self, update_info: RLBridgeUpdateInfo) -> None:
        """Install and prove, on all ranks or on none.

        Raises:
            WeightBridgeError: the engine is at its version, on all ranks.

        """
        given = update_info.manifest
        if isinstance(given, str):
            manifest = WeightUpdateManifest.from_json(given)
        else:
            manifest = WeightUpdateManifest.model_validate(given)
        problem = self.rank.receive(manifest)
        if not problem:
            return
        if not self.rank.is_last:
            # vLLM reads the ranks' answers in order and stops at the first error: what is behind it
            # would be taken for the answer to the next call. So the last rank tells for all.
            _end_session(self)
            return
        msg = f"version {manifest.weight_version}: {problem}"
        raise WeightUpdateRejectedError(msg)

    def finish_weight_update(self) -> None:
        """Acknowledge.

        Raises:
            WeightUpdateRejectedError: no update is installed.

        """
        self.rank.commit()

    def shutdown(self) -> None:
        """Let go of the trainer."""
        self.rank.close()

    @staticmethod
    def trainer_send_weights(*_args: Any, **_kwargs: Any) -> None:
        """Trainers publish over a bridge (vLLM up to 0.27.1 asks every backend for this).

        Raises:
            NotImplementedError: always.

        """
        msg = "publish over a bridge: make_weight_bridge(...).publish(model, weight_version=...)"
        raise NotImplementedError(msg)


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

"""miles' external weight transfer: each sync of weights is a version of this library.

One option of miles' command line chooses it, in the trainer's processes:

    --custom-weight-transfer-protocol-path rl_bridge.compat.miles.build_protocol

The trainer's first rank publishes the whole tensors that miles gathers, and each SGLang server
takes them as a transaction: it verifies, installs and proves the version on all of its ranks, or it
serves the version before. A sync that fails raises on all of the trainer's ranks.

Names are those of miles' ``WeightTransferProtocol`` of September 2026. miles is on no package
index: the tests drive this class by that contract, over real SGLang servers.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_bridge.compat.servers import EngineServers, raise_on_all_ranks
from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.engine_adapter import PauseMode, SGLangInstallAdapter, SGLangServing
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.manifest import WeightUpdateManifest

__all__ = ["build_protocol"]

_OPTIONS = "rl_bridge"


def build_protocol(args: Namespace) -> Any:
    """Return the ``WeightTransferProtocol`` that miles asks for.

    Args:
        args: of miles. ``args.rl_bridge``, which ``--custom-config-path`` can set, has options:
            ``transport``, which is ``shared-memory`` unless given, and those that
            `SGLangInstallAdapter` takes. ``args.pause_generation_mode`` is what running requests do
            in an update.

    Raises:
        WeightBridgeUnavailableError: no such transport, or not on this machine; ``--colocate``,
            where miles asks for no protocol.
        TypeError: options that are no mapping.

    """
    from miles.backends.training_utils.weight_update.hf_weight_iterator import WeightUpdatePlacement
    from miles.backends.training_utils.weight_update.protocol import WeightTransferProtocol

    class BridgeProtocol(_Protocol, WeightTransferProtocol):  # type: ignore[misc]  # miles has no types here
        required_placement = WeightUpdatePlacement(gather_pp=True)
        supports_lora = False
        # An update pauses, labels and resumes the engine by itself, when all is verified.
        use_weight_update_session = False

    return BridgeProtocol(args)


class _Protocol:
    """miles' protocol, whose own class it stands before."""

    # Set by miles' constructor.
    args: Namespace
    rollout_engines: Sequence[Any] | None
    is_sender: bool | None
    update_weight_metrics: dict[str, float]

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)  # type: ignore[call-arg]  # miles' own
        options = getattr(args, _OPTIONS, None) or {}
        if not isinstance(options, Mapping):
            raise TypeError(
                f"args.{_OPTIONS} is a {type(options).__name__}, expected a mapping such as "
                "{'transport': 'nixl', 'timeout_s': 120}. Set it in the file of "
                "--custom-config-path."
            )
        if getattr(args, "colocate", False):
            raise WeightBridgeUnavailableError(
                "miles moves weights of colocated engines by CUDA IPC, whatever protocol it is "
                "given. Run without --colocate."
            )
        self.group_name = _OPTIONS
        self._options = dict(options)
        self._transport = str(self._options.pop("transport", "shared-memory"))
        self._servers: EngineServers | None = None  # on the first rank
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def connect(  # noqa: PLR0917 - miles' own signature
        self,
        rollout_engines: Sequence[Any],
        engine_gpu_counts: Sequence[int] | None,
        engine_gpu_offsets: Sequence[int] | None,
        parallel_state: Any,
        placement: Any,
        selector: str,
    ) -> None:
        """Take miles' servers; called again when one of them was replaced."""
        del engine_gpu_counts, engine_gpu_offsets, parallel_state, placement, selector
        self.rollout_engines = rollout_engines
        self.is_sender = torch.distributed.get_rank() == 0
        self._tensors.clear()
        if not self.is_sender:
            return
        if self._servers is None:
            self._servers = EngineServers(self._transport)
        self._servers.connect({one.server_url: self._adapter(one) for one in rollout_engines})

    def _adapter(self, server: Any) -> SGLangInstallAdapter:
        pause: PauseMode = getattr(self.args, "pause_generation_mode", "retract")
        serving = SGLangServing(
            pause=pause, cache="keep" if pause == "in_place" else "flush", label=_label
        )
        timeout_s = self._options.get("timeout_s", 600.0)
        key = getattr(server, "api_key", None)
        client = connect(server.server_url, timeout_s=timeout_s, api_key=key)
        return SGLangInstallAdapter(client, **{"serving": serving, **self._options})

    def send_bucket(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy a bucket's tensors to the host: their memory is miles' next bucket's."""
        self._tensors += [(name, one.to("cpu", copy=True)) for name, one in bucket]

    def finalize(self, weight_version: int) -> None:
        """Publish what was sent as this version, and return when every server has proven it.

        Raises:
            WeightBridgeError: it was not published, or a server refused or undid it.

        """
        from miles.utils.distributed_utils import get_gloo_group

        problem: Exception | None = None
        tensors, self._tensors = self._tensors, []
        if self._servers is not None:
            try:
                self._servers.update(tensors, weight_version)
            except Exception as error:  # noqa: BLE001 - raised below, when the others know of it
                problem = error
        raise_on_all_ranks(problem, get_gloo_group())

    def close(self) -> None:
        """Leave the servers to the next trainer. Idempotent; miles itself never calls it."""
        if self._servers is not None:
            self._servers.close()


def _label(manifest: WeightUpdateManifest) -> str:
    # miles reads the versions of tokens as numbers.
    return str(manifest.weight_version)

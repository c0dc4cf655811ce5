"""The trainer's side of vLLM's weight transfer, for the backend ``rl_bridge``.

vLLM's own flow, by another name of the backend: `WeightTransferTrainerFactory.trainer_init` makes
the engine, and each ``send_weights()`` is one update. The weights do not go through vLLM's client:
they are published over a bridge, the client's calls carry the manifest, and the workers read the
bytes themselves. Nothing has to run at the same time as those calls.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.engines.serving import default_label
from rl_bridge.engines.vllm.plugin import RLBridgeTrainerInitInfo
from rl_bridge.errors import WeightBridgeError, WeightUpdateRejectedError, describe
from rl_bridge.manifest.model import WeightUpdateManifest

_LOG = logging.getLogger(__name__)


class RLBridgeTrainerTransferEngine(
    TrainerWeightTransferEngine[RLBridgeTrainerInitInfo]  # type: ignore[misc]  # vLLM has no types here
):
    """The backend's trainer side: one on each rank of the trainer, of which rank 0 publishes.

    Attributes:
        bridge: the trainer's, on rank 0; None on the others. `TensorBridge.holders` tells which
            worker has a version, and by what proof.
        manifest: of the version that the engines acknowledged last; None before the first.

    """

    init_info_cls = RLBridgeTrainerInitInfo

    def __init__(
        self, *, client: Any, source: Any, bridge: TensorBridge | None, rank: int = 0
    ) -> None:
        """Use what `trainer_init` made; without a bridge this rank only takes part in gathers."""
        super().__init__(client=client, source=source, is_sender=bridge is not None)
        self.rank = rank
        self.bridge = bridge
        self.manifest: WeightUpdateManifest | None = None

    @classmethod
    def trainer_init(
        cls, init_info: RLBridgeTrainerInitInfo, *, client: Any, source: Any = None
    ) -> Self:
        """Make the bridge, and give the workers their options; called on each rank.

        Args:
            init_info: this rank's.
            client: any object with the four methods of vLLM's ``VLLMWeightSyncClient``.
            source: vLLM's ``WeightSource``, whole tensors under the checkpoint's names.

        Raises:
            ValueError: no source, or one of which a rank holds a part only.
            WeightBridgeUnavailableError: no such transport.
            TypeError: no such option of the transport.
            Exception: the client's own; the bridge is closed again.

        """
        if what := _in_parts(source):
            raise ValueError(
                f"trainer_init got {what}, expected one that gives rank 0 every tensor whole, such "
                "as ModuleSource(model). Shards are published by "
                "rl_bridge.groups.GroupPublisher."
            )
        if not init_info.is_sender:
            return cls(client=client, source=source, bridge=None, rank=init_info.rank)
        options = dict(init_info.bridge_options)
        options.setdefault("source_worker", "trainer")
        bridge = make_weight_bridge(init_info.transport, **options)
        try:
            client.init_weight_transfer_engine(dict(init_info.engine_options))
        except BaseException:
            bridge.close()
            raise
        return cls(client=client, source=source, bridge=bridge, rank=init_info.rank)

    def send_weights(self) -> None:
        """Send the source's tensors as the next version; called on each rank, raises on rank 0.

        On return every worker has proven that it holds the version, and the version before is
        released. vLLM's label is then ``version@root``; the prefix cache is the caller's, as with
        each of vLLM's backends.

        Raises:
            WeightUpdateRejectedError: an engine refused it, in the engine's words. Those that had
                it already went back, as far as they answer: the version before serves.
            WeightBridgeError: it could not be published; no engine was asked.
            Exception: the source's own.

        """
        pairs = _whole(self.source)
        if self.bridge is None:
            _exhaust(pairs)
            return
        last = self.bridge.publisher.last_version
        try:
            manifest = self.bridge.publish(
                self._readable(pairs), weight_version=1 if last is None else last + 1
            )
        finally:
            _exhaust(pairs)  # the other ranks gather in step with this one
        try:
            self._install(manifest)
        except BaseException:
            self.bridge.release(manifest.update_id)
            raise
        previous, self.manifest = self.manifest, manifest
        if previous is not None:
            self.bridge.release(previous.update_id)

    def shutdown(self) -> None:
        """Close the bridge. The engines keep what they have."""
        if self.bridge is not None:
            self.bridge.close()

    def _readable(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in memory that the transport carries."""
        assert self.bridge is not None
        carries_cuda = self.bridge.transport.startswith("cuda")
        for name, tensor in pairs:
            is_there = carries_cuda or not isinstance(tensor, torch.Tensor)  # which publish refuses
            yield name, tensor if is_there else tensor.cpu()

    def _install(self, manifest: WeightUpdateManifest) -> None:
        """Have all engines install, prove and acknowledge a version, or none."""
        client, version = self.client, manifest.weight_version
        label = {"weight_version": default_label(manifest)}
        if "weight_version" not in inspect.signature(client.finish_weight_update).parameters:
            label = {}  # a client of an older vLLM, or of one's own
        _asked(version, client.start_weight_update)
        try:
            _asked(version, client.update_weights, {"manifest": manifest.to_json()})
        except WeightBridgeError:
            # One engine of several refused it: those that installed it go back.
            try:
                client.update_weights({"abandoned": manifest.update_id})
            except Exception as error:  # noqa: BLE001 - an engine that refused has no session
                _LOG.info("version %d was given up: %s", version, _told_by(error))
            raise
        _asked(version, client.finish_weight_update, **label)


def _asked(version: int, call: Callable[..., None], *given: object, **more: object) -> None:
    """Call the engines; what they refuse is an error of this library, in their words."""
    try:
        call(*given, **more)
    except WeightBridgeError:
        raise
    except Exception as error:
        name = getattr(call, "__name__", "a call")
        raise WeightUpdateRejectedError(
            f"version {version} was refused in {name}: {_told_by(error)}. The engines' log says "
            "more; mend the cause, and send the weights again."
        ) from error


def _told_by(error: Exception) -> str:
    """What an engine said: an error of HTTP has it in the response, and not in its own text."""
    text = getattr(getattr(error, "response", None), "text", "")
    return f"{describe(error)}: {text.strip()}" if text else describe(error)


def _in_parts(source: Any) -> str:
    """What is wrong with a source that does not give rank 0 every tensor whole; empty if it does.

    The same on all ranks: they refuse it together, and none waits for another in a gather.
    """
    if source is None:
        return "no WeightSource"
    if hasattr(source, "implements_iter_full"):  # since vLLM 0.33
        if not source.implements_iter_full():
            return "a source that gives pieces of tensors only"
        owned, total = len(source.owned_names(0)), len(source.metadata)
        return "" if owned == total else f"a source of which rank 0 owns {owned} of {total} names"
    held = getattr(source, "held_names", lambda: None)()
    return "" if held is None else f"a source that holds {len(held)} names"


def _whole(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """One pass over a source's whole tensors; before vLLM 0.33 it is iterated itself."""
    give = getattr(source, "iter_full", None)
    return iter(source) if give is None else iter(give())


def _exhaust(pairs: Iterator[Any]) -> None:
    for _ in pairs:
        pass

"""Publish after the optimizer's step: one line in a plain PyTorch loop, or a callback.

    publisher = StepPublisher(bridge, model, send=lambda manifest: queue.put(manifest.to_json()))
    publisher.publish()                 # the initial sync, before the first rollout
    publisher.after_steps_of(optimizer)

`weight_sync_callback` does the same in trainers of Hugging Face's kind, TRL's among them: the
initial weights are published when training begins, then after every so many optimizer steps.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.installers.base import require_done, require_plain
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import checked_dtype
from rl_bridge.strategies.sender import InferenceClient, WeightTransferSender
from rl_bridge.trainers.base import WeightExtractor
from rl_bridge.trainers.state_dict import Source

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = [
    "StepHook",
    "StepPublisher",
    "StepSender",
    "weight_sync_callback",
]


class _Optimizer(Protocol):
    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook` called after each step."""


class StepHook(ABC):
    """Does one thing after every so many optimizer steps. Failures come out of the step.

    Attributes:
        step: how many steps were taken since it was made, or what the trainer said last.

    """

    def __init__(self, *, every: int = 1) -> None:
        """Act after each `every` steps.

        Raises:
            ValueError: less than 1.

        """
        if every < 1:
            raise ValueError(f"every={every}: expected 1 or more steps.")
        self.step = 0
        self._every = every

    @abstractmethod
    def publish(self) -> WeightUpdateManifest | None:
        """Publish now: before the first step it is the initial sync."""

    def after_step(self, step: int | None = None) -> None:
        """Count a step, and publish if it is time.

        Args:
            step: the trainer's own count; None counts here.

        """
        self.step = self.step + 1 if step is None else step
        if self.step % self._every == 0:
            self.publish()

    def after_steps_of(self, optimizer: torch.optim.Optimizer | _Optimizer) -> RemovableHandle:
        """Have `after_step` called after each step of an optimizer; ``remove()`` ends that."""
        return optimizer.register_step_post_hook(lambda *_: self.after_step())


class StepPublisher(StepHook):
    """Publishes over a bridge and hands the manifest on.

    Versions count on from the bridge's last; the step is in ``metadata["step"]``. `send` returns
    when the engines have the new version: then the version before is released.
    """

    def __init__(
        self,
        bridge: TensorBridge,
        source: Source | Callable[[], Source],
        send: Callable[[WeightUpdateManifest], object] | None = None,
        *,
        every: int = 1,
        trainable: Iterable[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Publish `source` through `bridge`.

        Args:
            bridge: of the trainer; the caller closes it.
            source: a module or a state dict, or what gives one (or chunks) each time.
            send: has to be given. It gets each manifest, returns when the engines have the version,
                and raises if they did not take it, which ends the optimizer's step with that error.
            every: steps from one update to the next.
            trainable: as for `TensorBridge.publish`.
            dtype: as for `TensorBridge.publish`.

        Raises:
            ValueError: `every` below 1.
            TypeError: no `send`, or a coroutine function, which nothing would await.

        """
        super().__init__(every=every)
        if not callable(send):
            raise TypeError(
                f"send={send!r}: expected a function that gets each manifest and returns when the "
                "engines have the version. Pass executor.update_weights where the engine is in "
                "this process, or a function that hands manifest.to_json() to the other one; "
                "lambda manifest: None where engines look for versions themselves (files)."
            )
        require_plain(send, "send=")
        self._bridge = bridge
        self._source = source
        self._send = send
        self._trainable = None if trainable is None else frozenset(trainable)
        self._dtype = checked_dtype(dtype)
        self._latest: WeightUpdateManifest | None = None

    def publish(self) -> WeightUpdateManifest:
        """Publish now, and send the manifest.

        Raises:
            TypeError: `send` returned what nothing awaits; the update is withdrawn.
            Exception: whatever failed; the update is withdrawn.

        """
        source = self._source
        if callable(source) and not isinstance(source, torch.nn.Module):
            source = source()
        manifest = self._bridge.publish(
            source, metadata={"step": self.step}, trainable=self._trainable, dtype=self._dtype
        )
        try:
            require_done(self._send(manifest), "send=")
        except BaseException:
            self._bridge.release(manifest.update_id)
            raise
        previous, self._latest = self._latest, manifest
        if previous is not None:
            self._bridge.release(previous.update_id)
        return manifest


class StepSender(StepHook):
    """Sends by a transfer strategy. Every rank of the trainer has one, and steps in step."""

    def __init__(
        self,
        sender: WeightTransferSender,
        extractor: WeightExtractor,
        inference_client: InferenceClient,
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Send what `extractor` gathers.

        Args:
            sender: of this rank.
            extractor: of this rank.
            inference_client: reaches the engines.
            every: steps from one update to the next.
            dtype: in which weights travel; None for the trainer's own.

        Raises:
            ValueError: `every` below 1.

        """
        super().__init__(every=every)
        self._sender = sender
        self._extractor = extractor
        self._client = inference_client
        self._dtype = dtype

    def publish(self) -> WeightUpdateManifest | None:
        """Send now; returns when the engines have it.

        Raises:
            WeightBridgeUnavailableError: an event loop runs in this thread.
            Exception: whatever failed; see `WeightTransferSender.send_chunks`.

        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # By the names that travel: an extractor may give whole tensors other names.
            known = self._extractor.metadata(self._dtype).values()
            trainable = frozenset(one.name for one in known if one.is_trainable)
            return asyncio.run(
                self._sender.send_chunks(
                    self._extractor.extract_weights(self._dtype),
                    self._client,
                    metadata={"step": self.step},
                    trainable=trainable,
                )
            )
        raise WeightBridgeUnavailableError(
            "an event loop runs in this thread, which a step would block. Run the training in a "
            "thread of its own, or await sender.send_chunks(...) after each step."
        )


def weight_sync_callback(hook: StepHook) -> "TrainerCallback":
    """A callback that publishes by `hook`; the trainer's global step is the hook's step.

    In a trainer of many ranks every rank adds one, with a `StepSender` of its own, or rank 0 alone
    adds one with a `StepPublisher` where each rank has all weights.

    Args:
        hook: what publishes, and how often.

    Raises:
        WeightBridgeUnavailableError: transformers is not installed.

    """
    try:
        base: Any = import_module("transformers").TrainerCallback
    except ImportError as error:
        raise WeightBridgeUnavailableError(
            f"transformers cannot be imported ({error}). Install it in the trainer's environment, "
            "or use StepPublisher.after_steps_of(optimizer)."
        ) from error

    class WeightSyncCallback(base):  # type: ignore[misc]  # made where the library is
        """Publishes when training begins, and after optimizer steps."""

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            hook.step = state.global_step  # above 0 in a resumed run
            hook.publish()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            hook.after_step(state.global_step)

    made: TrainerCallback = WeightSyncCallback()
    return made

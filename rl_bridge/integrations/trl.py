"""Publish from Hugging Face's trainers, TRL's among them: one callback.

    trainer.add_callback(weight_sync_callback(StepPublisher(bridge, model, send=send)))

The initial weights are published when training begins, then after every so many optimizer steps.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.integrations.step_hooks import StepHook

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["weight_sync_callback"]


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
        msg = (
            f"transformers cannot be imported ({error}). Install it in the trainer's environment, "
            "or use StepPublisher.after_steps_of(optimizer)."
        )
        raise WeightBridgeUnavailableError(msg) from error

    class WeightSyncCallback(base):  # type: ignore[misc]  # made where the library is
        """Publishes when training begins, and behind optimizer steps."""

        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            hook.step = state.global_step  # above 0 where a run is resumed
            hook.publish()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            hook.after_step(state.global_step)

    made: TrainerCallback = WeightSyncCallback()
    return made

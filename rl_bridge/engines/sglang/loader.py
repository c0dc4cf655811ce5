"""`SGLangWeightLoader`: loads requests of a transfer strategy into an SGLang engine.

    receiver = await strategy.create_receiver(init_info, rank_offset=offset)
    loader = SGLangWeightLoader(engine, receiver)
    await loader.load_weights(receiver, request)        # for each request, in order

The engine reads the update itself when the last batch is there, as with
`rl_bridge.sglang.SGLangInstallAdapter`.
"""

from typing import Any

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.strategies.receiver import BridgeTransferReceiver, ExecutorWeightLoader

__all__ = [
    "SGLangWeightLoader",
]


class SGLangWeightLoader(ExecutorWeightLoader):
    """Loads into an ``Engine`` or a server by its URL.

    A prefix cache of the old weights is dropped within the update: nothing has to be reset
    afterwards. An ``Engine`` must not generate while it loads: both need its event loop.
    """

    def __init__(self, engine: Any, receiver: BridgeTransferReceiver, **options: Any) -> None:
        """Load into `engine` what `receiver` receives.

        Args:
            engine: an ``Engine``, or a server's URL.
            receiver: this engine's.
            options: what `SGLangInstallAdapter` takes beside the engine.

        Raises:
            TypeError: no engine, or no such option.
            ValueError: an option out of its range.
            WeightBridgeUnavailableError: a URL without httpx.

        """
        adapter = SGLangInstallAdapter(engine, **options)
        executor = RolloutExecutor(weight_bridge=receiver.bridge, weight_install_adapter=adapter)
        # In a thread: an Engine runs its own event loop, which a thread with another one cannot.
        super().__init__(executor, in_thread=True)

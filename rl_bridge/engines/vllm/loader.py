"""`VLLMWeightLoader`: loads requests of a transfer strategy into a vLLM engine.

    receiver = await strategy.create_receiver(init_info, rank_offset=offset)
    loader = VLLMWeightLoader(llm, receiver)
    await loader.load_weights(receiver, request)        # for each request, in order

The engine's workers read the update themselves when the last batch is there: one staging pass on
each rank, all ranks before any of them installs, as with `rl_bridge.vllm.VLLMEngineAdapter`.
"""

from typing import Any

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.engines.vllm.client import LLMClient, connect
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.strategies.receiver import BridgeTransferReceiver, ExecutorWeightLoader

__all__ = [
    "VLLMWeightLoader",
]


class VLLMWeightLoader(ExecutorWeightLoader):
    """Loads into an ``LLM``, an ``AsyncLLM`` or a server by its URL.

    A prefix cache of the old weights is dropped within the update: nothing has to be reset
    afterwards.
    """

    def __init__(
        self,
        engine: Any,
        receiver: BridgeTransferReceiver,
        *,
        timeout_s: float = 600.0,
        loop: Any = None,
        **options: Any,
    ) -> None:
        """Load into `engine` what `receiver` receives.

        Args:
            engine: an ``LLM``, an ``AsyncLLM``, a server's URL, or a client.
            receiver: this engine's.
            timeout_s: deadline of each call to the engine.
            loop: of an ``AsyncLLM``; None takes the running one.
            options: what `VLLMEngineAdapter` takes beside these.

        Raises:
            TypeError: no engine, or no such option.
            ValueError: an option out of its range.
            WeightBridgeUnavailableError: a URL without httpx, an ``AsyncLLM`` without a loop.

        """
        client = connect(engine, timeout_s=timeout_s, loop=loop)
        adapter = VLLMEngineAdapter(client, **options)
        executor = RolloutExecutor(weight_bridge=receiver.bridge, weight_install_adapter=adapter)
        # vLLM's rule: an LLM is called from the thread that generates. The others must not be
        # called from the thread of their event loop.
        super().__init__(executor, in_thread=not isinstance(client, LLMClient))

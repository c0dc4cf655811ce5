"""`VLLMEngineAdapter`: a whole vLLM engine, all of its ranks, behind the executor's adapter.

The transaction is `rl_bridge.engines.driver.EngineDriver`'s. `VLLMWeightLoader` drives one by the
requests of a transfer strategy.
"""

from dataclasses import dataclass
from typing import Any, Literal

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.engines.adapters import AdapterDriver
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank_bridges import TransportOptions, checked_transports
from rl_bridge.engines.serving import KEPT, LabelMaker, ServingOptions, default_label
from rl_bridge.engines.staging import Staging, checked_budget, checked_staging
from rl_bridge.engines.vllm.client import LLMClient, connect
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.strategies.receiver import BridgeTransferReceiver, ExecutorWeightLoader

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to running requests: they freeze, are waited for, or are aborted."""

CachePolicy = Literal["recompute", "reset", "keep"]
"""What becomes of keys and values that the old weights made.

``recompute``: all go, running requests' too; these are computed anew with the new weights.
``reset``: cached prefixes go; refused while requests hold blocks.
``keep``: all stay: for those who give each request a ``cache_salt`` of its version. Only what was
made of images and other media goes all the same: vLLM looks it up without the salt.
"""


@dataclass(frozen=True, slots=True)
class VLLMServing(ServingOptions):
    """What a vLLM engine's requests see of an update.

    Attributes:
        pause: what running requests do during the install. None does not pause: the install is
            atomic between two steps of the model all the same, but tokens of the steps beside it
            may carry the other label, and use keys and values of the old weights.
        cache: what becomes of cached keys and values.
        label: makes the version label that vLLM puts on outputs; None leaves it alone.
        keep: most versions of each LoRA adapter that stay while nothing is installed, the active
            one among them, as far as the engine has places; what requests have stays anyhow.

    """

    pause: PauseMode | None = "keep"
    cache: CachePolicy = "recompute"
    label: LabelMaker | None = default_label
    keep: int = KEPT

    def __post_init__(self) -> None:
        """Check the words."""
        self.check(("keep", "wait", "abort", None), ("recompute", "reset", "keep"))


class VLLMEngineAdapter(EngineDriver):
    """Installs updates into a vLLM engine: an ``LLM``, an ``AsyncLLM``, or a server by its URL.

    The engine's environment needs rl_bridge, no option, and for a server
    ``VLLM_SERVER_DEV_MODE=1``. Its workers read the update themselves, so the transport must reach
    their processes. One driver at a time has the engine: see `rl_bridge.engines.session`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        serving: VLLMServing = VLLMServing(),
        cast: bool = False,
        staging: Staging | Literal["reload"] | None = None,
        memory_budget_nbytes: int | None = None,
        transports: TransportOptions | None = None,
        timeout_s: float = 600.0,
        take_over: bool = False,
    ) -> None:
        """Configure; the engine is not called.

        Args:
            engine: an ``LLM``, an ``AsyncLLM`` whose loop runs here, a server's URL, or what
                `rl_bridge.vllm.connect` made.
            serving: what requests see of an update: pause, caches, label.
            cast: True lets an update's dtype differ from the engine's.
            staging: ``beside`` makes the next version beside the serving one, and the install
                exchanges them. ``through`` writes it into the memory that serves, layer by layer,
                while requests wait: where weights have no room twice. None takes ``beside`` where
                there is room. ``reload`` lets vLLM reload the model, with a copy to go back to: for
                quantized models and others that are refused without it. A layer that cannot
                be read back makes the proof ``unproven``. Requests wait for all of it; vLLM's
                loader casts.
            memory_budget_nbytes: what staging, or the copy that an undo needs, may take on each
                rank; None takes what there is.
            transports: name of a transport -> options of the ranks' bridges, such as
                ``{"shared-memory": {"directory": path}}``; they travel to the engine as JSON.
            timeout_s: deadline of each call to the engine.
            take_over: True takes the engine from a driver that has it, such as one that died, in
                the first update; False refuses that update with the name of the driver.

        Raises:
            ValueError: a reload without a pause, or with a cast; no such staging; a negative
                budget; a text that is no URL.
            TypeError: a budget that is no int; no such option of a transport.
            WeightBridgeUnavailableError: a URL without httpx, an ``AsyncLLM`` without a loop; no
                such transport.

        """
        options: dict[str, Any] = {"reload": True}
        if staging != "reload":
            options = {"cast": cast, "staging": checked_staging(staging)}
        elif serving.pause is None or cast:
            raise ValueError(
                "staging='reload': expected a pause, and no cast; vLLM's loader casts."
            )
        options["memory_budget_nbytes"] = checked_budget(memory_budget_nbytes)
        if transports:
            options["transports"] = checked_transports(transports)
        client = connect(engine, timeout_s=timeout_s)
        super().__init__(client, serving=serving, options=options, take_over=take_over)

    def for_adapter(self, name: str) -> AdapterDriver:
        """What brings versions of a LoRA adapter into the engine, beside its weights.

        Raises:
            IncompatibleUpdate: updates of the weights reload the model, which drops all adapters.
            WeightBridgeUnavailableError: a server without our routes.

        """
        if self.options.get("reload"):
            raise IncompatibleUpdate(
                f"LoRA adapter {name!r}: updates of this engine's weights reload the model, and "
                "vLLM drops all adapters then, expected another staging than 'reload'. Publish it "
                "merged into the weights: merged=True."
            )
        return AdapterDriver(self, name)


class VLLMWeightLoader(ExecutorWeightLoader):
    """Loads requests of a transfer strategy into an ``LLM``, an ``AsyncLLM`` or a server.

    The engine's workers read the update themselves when the last batch is there. A prefix cache of
    the old weights is dropped within the update: nothing has to be reset afterwards.
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

"""`SGLangInstallAdapter`: a whole SGLang engine behind the executor's adapter.

The transaction is `rl_bridge.engines.driver.EngineDriver`'s. What SGLang answers to a load is not
believed: the engine's own parameters are read, on all of its ranks, and after any failure put
back, byte for byte. `SGLangWeightLoader` drives an engine by the requests of a transfer strategy.
"""

from dataclasses import dataclass
from typing import Any, Literal

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.engines.adapters import AdapterDriver
from rl_bridge.engines.driver import EngineDriver
from rl_bridge.engines.rank_bridges import TransportOptions, checked_transports
from rl_bridge.engines.serving import KEPT, LabelMaker, ServingOptions, default_label
from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.loaders import DiskRoute, DistributedRoute, RouteName, loader_for
from rl_bridge.engines.staging import Staging, checked_budget, checked_staging
from rl_bridge.strategies.receiver import BridgeTransferReceiver, ExecutorWeightLoader

PauseMode = Literal["retract", "in_place", "abort"]
"""What becomes of running requests: computed anew from their tokens, frozen, or ended."""

CachePolicy = Literal["flush", "keep"]
"""What becomes of cached prefixes that the old weights made: dropped, or left as they are."""


@dataclass(frozen=True, slots=True)
class SGLangServing(ServingOptions):
    """What an SGLang engine's requests see of an update.

    Attributes:
        pause: what running requests do. ``retract``: they go on with the new weights, computed anew
            from their tokens. ``in_place``: they freeze and keep what the old weights cached, so
            while there are any, ``cache="flush"`` refuses the update. ``abort``: they end.
        cache: what becomes of cached prefixes.
        label: makes the version label that SGLang puts on outputs; None leaves it alone.
        keep: most versions of each LoRA adapter that stay while nothing is installed, the active
            one among them, as far as the engine has places; what requests have stays anyhow.

    """

    pause: PauseMode = "retract"
    cache: CachePolicy = "flush"
    label: LabelMaker | None = default_label
    keep: int = KEPT

    def __post_init__(self) -> None:
        """Check the words."""
        self.check(("retract", "in_place", "abort"), ("flush", "keep"))


class SGLangInstallAdapter(EngineDriver):
    """Installs updates into an SGLang engine: an ``Engine``, or a server by its URL.

    The engine's environment needs rl_bridge, and no option: SGLang finds it as a plugin. One driver
    at a time has the engine: see `rl_bridge.engines.session`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        route: RouteName | DistributedRoute | DiskRoute = "import",
        serving: SGLangServing = SGLangServing(),
        staging: Staging | None = None,
        memory_budget_nbytes: int | None = None,
        transports: TransportOptions | None = None,
        timeout_s: float = 600.0,
        take_over: bool = False,
    ) -> None:
        """Configure; the engine is not called.

        Args:
            engine: an ``Engine``, a server's URL, or what `rl_bridge.sglang.connect` made, such as
                for a server with an API key.
            route: how bytes get into the engine. ``import``: its process reads the trainer's memory
                by the update's transport. ``tensor``: SGLang's ``update_weights_from_tensor`` with
                a flattened bucket in shared memory, for transports that reach only this process.
                ``distributed``, or a `DistributedRoute`: its ``update_weights_from_distributed``,
                one bucket over a process group. A `DiskRoute`: its ``update_weights_from_disk``.
            serving: what requests see of an update: pause, cached prefixes, label.
            staging: for ``import``: ``beside`` makes the next version beside the serving one, and
                the install exchanges them. ``through`` writes it into the memory that serves, layer
                by layer, while requests wait: where weights have no room twice, or code of your own
                in the engine keeps their addresses. None takes ``beside`` where there is room.
            memory_budget_nbytes: what the next version, or the copy of the engine's weights that an
                undo needs, may take on each rank; None takes what there is.
            transports: for ``import``: name of a transport -> options of the ranks' bridges, such
                as ``{"shared-memory": {"directory": path}}``; they travel as JSON.
            timeout_s: deadline of each call to the engine.
            take_over: True takes the engine from a driver that has it, such as one that died, in
                the first update; False refuses that update with the name of the driver.

        Raises:
            TypeError: no engine; a budget that is no int; no such option of a transport.
            ValueError: no such route or staging, or ``disk`` without a folder; transports without
                ``import``.
            WeightBridgeUnavailableError: what the engine or the route needs is missing here.

        """
        options: dict[str, Any] = {"staging": checked_staging(staging)}
        options["memory_budget_nbytes"] = checked_budget(memory_budget_nbytes)
        client = connect(engine, timeout_s=timeout_s)
        loader = loader_for(route, client, drops=serving.cache == "flush")
        if transports:
            if not loader.imports:
                raise ValueError(
                    f"route={route!r} with transports={sorted(transports)}: expected 'import'; by "
                    "other routes the executor's own bridge imports. Give them to "
                    "make_weight_bridge."
                )
            options["transports"] = checked_transports(transports)
        super().__init__(
            client, serving=serving, options=options, loader=loader, take_over=take_over
        )

    def for_adapter(self, name: str) -> AdapterDriver:
        """What brings versions of a LoRA adapter into the engine, beside its weights.

        Raises:
            WeightBridgeUnavailableError: the engine does not have our plugin.

        """
        return AdapterDriver(self, name)


class SGLangWeightLoader(ExecutorWeightLoader):
    """Loads requests of a transfer strategy into an ``Engine`` or a server by its URL.

    The engine reads the update itself when the last batch is there. A prefix cache of the old
    weights is dropped within the update: nothing has to be reset afterwards. An ``Engine`` must not
    generate while it loads: both need its event loop.
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

"""Engines that are refused, by how they were started."""

from rl_bridge.engines.sglang.compat import require
from rl_bridge.errors import WeightBridgeUnavailableError

__all__ = [
    "require_droppable",
    "require_supported",
]

_STORES = (
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",  # somebody's own: nobody knows what it keeps
)


def require_supported(device: str) -> None:
    """Refuse engines of which some processes would not be asked, or hold what is not proven.

    Raises:
        WeightBridgeUnavailableError: this one is such an engine.

    """
    context = require("sglang.srt.runtime_context")
    parallel, speculative = context.get_parallel(), context.get_spec()
    # (Of --dp-size with --enable-dp-attention SGLang makes attn_dp_size.)
    for name in ("pp_size", "dp_size", "attn_dp_size", "ep_size"):
        degree = int(getattr(parallel, name, None) or 1)
        if degree != 1:
            msg = (
                f"the engine has {name}={degree}, expected 1: only the ranks of tensor "
                "parallelism decide together here. Use one engine and one executor for each "
                "replica, and tp_size to spread a model."
            )
            raise WeightBridgeUnavailableError(msg)
    workers = int(getattr(context.get_serving(), "tokenizer_worker_num", None) or 1)
    if workers != 1:
        msg = (
            f"the engine has tokenizer_worker_num={workers}, expected 1: each of these processes "
            "has a version label of its own, and SGLang sets that of one alone. Start it with one."
        )
        raise WeightBridgeUnavailableError(msg)
    if speculative.speculative_algorithm:
        msg = (
            f"the engine speculates by {speculative.speculative_algorithm}, expected none: the "
            "draft model's weights are not proven. Start it without a draft model."
        )
        raise WeightBridgeUnavailableError(msg)
    if device == "cpu" and context.get_flags().capture.enable_torch_compile:
        msg = (
            "the engine was started with enable_torch_compile, expected without: on the CPU SGLang "
            "compiles a model's weights into its code as constants, and no update reaches them. "
            "Start it without."
        )
        raise WeightBridgeUnavailableError(msg)


def require_droppable() -> None:
    """Refuse to drop prefixes of an engine that keeps some outside of its memory.

    SGLang's flush leaves those, and finds them by their tokens, whatever the weights are by then.

    Raises:
        WeightBridgeUnavailableError: this one is such an engine.

    """
    memory = require("sglang.srt.runtime_context").get_memory()
    for name in _STORES:
        store = getattr(memory, name, None)  # a store of HiCache's comes and goes while it runs
        if store:
            msg = (
                f"the engine keeps cached prefixes outside of its memory ({name}={store}), "
                "expected none: SGLang does not drop them with the others, so requests would go on "
                "from what other weights computed. Start it without, or detach it; or use "
                "cache='keep', if they may."
            )
            raise WeightBridgeUnavailableError(msg)

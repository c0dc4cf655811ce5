"""An SGLang scheduler's process as a rank: its model, what installs into it, what is refused."""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rl_bridge.engines.adapters import AdapterHost
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.rank import RankHost, RankInstaller, answer, rank_of
from rl_bridge.engines.rpc import RankGroup, Reply, failure_reply
from rl_bridge.engines.sglang import require, version
from rl_bridge.engines.sglang.lora import SGLangAdapterInstaller
from rl_bridge.engines.skeleton import EngineCompat, processed_by
from rl_bridge.engines.staging import Staging
from rl_bridge.errors import EngineLost, WeightBridgeUnavailableError, WeightUpdateRejectedError
from rl_bridge.memory.tensors import not_plain

_LOG = logging.getLogger(__name__)

_STORES = (
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",  # somebody's own: nobody knows what it keeps
)


class SGLangCompat(EngineCompat):
    """What SGLang does with the weights of its layers: nothing, unless `unsupported` says it."""

    elsewhere = (
        "starting a fresh engine from its checkpoint: SGLangInstallAdapter does not serve such "
        "models"
    )

    def unsupported(self, layer: torch.nn.Module) -> str | None:
        """Why a layer's weights cannot be followed into the engine, or None if they can."""
        name, reason = type(layer).__name__, None
        if method := processed_by(layer):
            reason = f"is processed by {method}"
        elif getattr(layer, "use_intel_amx_backend", False):
            reason = "keeps its weight packed for AMX"
        elif getattr(layer, "w_kc", None) is not None:
            reason = "keeps tensors derived from its weights"
        return None if reason is None else f"{name} {reason}, so what it holds cannot be read"


class SGLangModelInstaller(ModelInstaller):
    """Installs updates into one engine's model. Call it between two steps of the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, tied, padded) is learned once from the engine's own loader. An update that is not
    imported here is written by SGLang's loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        staging: Staging | None = None,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the model that SGLang loaded.
            staging: ``beside`` makes the next version beside the serving one, ``through`` writes it
                into what parameters have; None takes ``beside`` where the budget allows it.
            memory_budget_nbytes: what the next version may take, or the copy of the model that an
                undo needs; None takes what the machine has to give.
            num_threads: threads that copy and digest; None takes the usable cores, at most 8.
            num_ranks: over how many ranks the model is spread: see `ModelInstaller`.

        Raises:
            ValueError: less than one thread, a negative budget, or no such staging.

        """
        super().__init__(
            model,
            SGLangCompat(),
            staging=staging,
            memory_budget_nbytes=memory_budget_nbytes,
            num_threads=num_threads,
            num_ranks=num_ranks,
        )

    def _why_not_exchange(self, plan: LoadPlan) -> str | None:
        for index in plan.steps:
            target = plan.targets[index]
            live = target.serving()
            reason = not_plain(live)
            if reason is None and live.is_inference():
                reason = "was made in inference mode: torch lets nobody give it other memory"
            if reason is not None:
                return f"parameter {target.name!r} {reason}"
        return None


class SGLangHost(RankHost):
    """One rank of an SGLang engine."""

    name = "sglang"

    may_sleep = False

    def __init__(
        self,
        model: torch.nn.Module,
        flush: Callable[[], bool | None],
        group: RankGroup,
        *,
        may_sleep: bool = False,
    ) -> None:
        """Look at a rank; `flush` drops cached prefixes, and says None if that is not all."""
        self.model, self.group, self.may_sleep = model, group, may_sleep
        self._flush = flush

    def make_installer(self, options: Mapping[str, Any]) -> RankInstaller:
        """What installs into this rank's model."""
        return SGLangModelInstaller(self.model, num_ranks=self.group.size, **options)

    def check(self, given: Mapping[str, Any]) -> None:
        """Refuse engines that cannot decide together; or keep prefixes that are to be dropped."""
        require_supported(self._device())
        if given.get("drops"):
            require_droppable()  # here already: nothing is installed that had to be undone

    def facts(self) -> Reply:
        """SGLang's version, and the kind of device that the model is on."""
        return {"sglang": version(), "device": self._device()}

    @property
    def verbs(self) -> Mapping[str, Callable[[Mapping[str, Any]], Reply]]:
        """``flush`` drops cached prefixes; the memory that they are in stays SGLang's."""
        return {"flush": self._flushed}

    def _flushed(self, given: Mapping[str, Any]) -> Reply:
        if given.get("all"):
            require_droppable()
        return {"flushed": self._flush()}

    def _device(self) -> str:
        return next(self.model.parameters()).device.type


def tensor_group() -> RankGroup:
    """The ranks that compute one model together."""
    found = require("sglang.srt.runtime_context").get_parallel().tp_group
    return RankGroup(int(found.rank_in_group), int(found.world_size), found.cpu_group)


def answer_text(
    model: torch.nn.Module,
    flush: Callable[[], bool | None],
    text: str,
    lora: Any = None,
    *,
    may_sleep: bool = False,
) -> str:
    """Do what a driver asks, on all ranks: their answers, by rank, as JSON. Never raises.

    `lora` is the rank's manager of adapters, if the engine has one; `may_sleep` is whether SGLang
    was started so that it can release the memory of its weights.

    SGLang would end for a failure. It hands each control request to all ranks, and lets the first
    one alone reply: so the ranks tell each other what they would reply.
    """
    given: Any = None
    try:
        given = json.loads(text)
        if not isinstance(given, dict) or not isinstance(given.get("verb"), str):
            msg = f"{text[:80]!r} is no call. Pass an object with a verb."
            raise WeightUpdateRejectedError(msg)  # noqa: TRY301 - answered like all others
        rank = rank_of(model, lambda: SGLangHost(model, flush, tensor_group(), may_sleep=may_sleep))
        if name := str(given.get("adapter", "")):
            base = rank
            make = partial(SGLangAdapterInstaller, lora)
            rank = rank_of(model, lambda: AdapterHost(base, make), name)
        reply = answer(rank, given["verb"], given)
        group = rank.host.group
    except Exception as error:  # noqa: BLE001 - it is the answer
        _LOG.warning("a call of rl_bridge failed", exc_info=True)
        call = given.get("call") if isinstance(given, dict) else None
        return json.dumps([{"rank": 0, "call": call, **failure_reply(error)}])
    try:
        return f"[{','.join(group.hear(json.dumps(reply)))}]"
    except EngineLost as error:
        return json.dumps([{**reply, **failure_reply(error)}])


# ---- engines that are refused, by how they were started ------------------------------------------


def require_supported(device: str) -> None:
    """Refuse engines of which some processes would not be asked, or hold what is not proven."""
    context = require("sglang.srt.runtime_context")
    parallel, speculative = context.get_parallel(), context.get_spec()
    # (Of --dp-size with --enable-dp-attention SGLang makes attn_dp_size.)
    for name in ("pp_size", "dp_size", "attn_dp_size", "ep_size"):
        degree = int(getattr(parallel, name, None) or 1)
        if degree != 1:
            raise WeightBridgeUnavailableError(
                f"the engine has {name}={degree}, expected 1: only the ranks of tensor "
                "parallelism decide together here. Use one engine and one executor for each "
                "replica, and tp_size to spread a model."
            )
    workers = int(getattr(context.get_serving(), "tokenizer_worker_num", None) or 1)
    if workers != 1:
        raise WeightBridgeUnavailableError(
            f"the engine has tokenizer_worker_num={workers}, expected 1: each of these processes "
            "has a version label of its own, and SGLang sets that of one alone. Start it with one."
        )
    if speculative.speculative_algorithm:
        raise WeightBridgeUnavailableError(
            f"the engine speculates by {speculative.speculative_algorithm}, expected none: the "
            "draft model's weights are not proven. Start it without a draft model."
        )
    if device == "cpu" and context.get_flags().capture.enable_torch_compile:
        raise WeightBridgeUnavailableError(
            "the engine was started with enable_torch_compile, expected without: on the CPU SGLang "
            "compiles a model's weights into its code as constants, and no update reaches them. "
            "Start it without."
        )


def require_droppable() -> None:
    """Refuse to drop prefixes of an engine that keeps some outside of its memory.

    SGLang's flush leaves those, and finds them by their tokens, whatever the weights are by then.
    """
    memory = require("sglang.srt.runtime_context").get_memory()
    for name in _STORES:
        store = getattr(memory, name, None)  # a store of HiCache's comes and goes while it runs
        if store:
            raise WeightBridgeUnavailableError(
                f"the engine keeps cached prefixes outside of its memory ({name}={store}), "
                "expected none: SGLang does not drop them with the others, so requests would go on "
                "from what other weights computed. Start it without, or detach it; or use "
                "cache='keep', if they may."
            )

"""`SGLangModelInstaller`: installs updates into the model of one SGLang rank, all or nothing."""

import torch

from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.memory.tensors import not_plain

__all__ = ["SGLangModelInstaller"]

# Quantization methods that leave a weight as it was loaded.
_METHODS = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)


class SGLangCompat(EngineCompat):
    """What SGLang does with the weights of its layers: nothing, unless `unsupported` says it."""

    elsewhere = (
        "starting a fresh engine from its checkpoint: SGLangInstallAdapter does not serve such "
        "models"
    )

    def unsupported(self, layer: torch.nn.Module) -> str | None:
        """Why a layer's weights cannot be followed into the engine, or None if they can."""
        name = type(layer).__name__
        method = getattr(layer, "quant_method", None)
        processes = hasattr(method, "process_weights_after_loading")
        reason = None
        if processes and not _METHODS & {kind.__name__ for kind in type(method).__mro__}:
            reason = f"is processed by {type(method).__name__}"
        elif getattr(layer, "use_intel_amx_backend", False):
            reason = "keeps its weight packed for AMX"
        elif getattr(layer, "w_kc", None) is not None:
            reason = "keeps tensors derived from its weights"
        return None if reason is None else f"{name} {reason}, so what it holds cannot be read"


class SGLangModelInstaller(ModelInstaller):
    """Installs updates into one engine's model. Call it between two steps of the model.

    The update's names, shapes and dtypes are those of a checkpoint of the model; where each tensor
    goes (fused, tied, padded) is learned once from the engine's own loader. On the CPU an update
    that is imported here is made beside the serving version; else SGLang's loader writes it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        exchange: bool = True,
        memory_budget_nbytes: int | None = None,
        num_threads: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        """Configure; the model is only looked at.

        Args:
            model: the model that SGLang loaded.
            exchange: whether parameters may get other memory; False lets SGLang's loader write into
                what they have.
            memory_budget_nbytes: what the next version may take, or the copy of the model that an
                undo needs where SGLang's loader writes; None takes what the machine has to give.
            num_threads: threads that copy and digest; None takes the usable cores.
            num_ranks: over how many ranks the model is spread: see `ModelInstaller`.

        Raises:
            TypeError: `exchange` is no bool.
            ValueError: less than one thread, or a negative budget.

        """
        super().__init__(
            model,
            SGLangCompat(),
            exchange=exchange,
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

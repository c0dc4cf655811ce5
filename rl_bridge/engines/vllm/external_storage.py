"""`VLLMCUDAVMMExternalStorageAdapter`: an engine of this process computes with imported memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rl_bridge.cuda.devices import cuda_cause, driver_at
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.errors import IncompatibleUpdate, WeightBridgeUnavailableError
from rl_bridge.installers.module import ModuleInstallAdapter, require_imported
from rl_bridge.manifest.model import WeightUpdateManifest


class VLLMCUDAVMMExternalStorageAdapter(ModuleInstallAdapter):
    """Points an in-process engine's parameters at imported CUDA tensors; nothing is copied.

    It is `ModuleInstallAdapter` in mode ``alias`` for the model of a vLLM engine. An update must
    have the engine's own names, shapes and dtypes: the fused layers of vLLM, not those of a
    checkpoint. Addresses change with every version, so the engine must run eagerly: captured graphs
    would go on with the old weights. Install between two steps of the engine, and drop its cached
    prefixes afterwards.
    """

    def __init__(self, engine: Any, *, strict: bool = True, _device: str = "cuda") -> None:
        """Find the engine's model; nothing is touched.

        Args:
            engine: an ``LLM`` whose engine runs in this process, a worker, a model runner, or the
                model.
            strict: False allows parameters of the engine that an update does not hold: they stay
                what they are. A name that the engine does not have is refused all the same.

        Raises:
            WeightBridgeUnavailableError: no CUDA here, the engine runs in another process, or it
                replays captured graphs.
            TypeError: no engine.

        """
        cause = cuda_cause() if _device == "cuda" else None
        if cause is not None:
            raise WeightBridgeUnavailableError(
                f"external storage needs CUDA: {cause}. Use VLLMEngineAdapter, which installs CPU "
                "tensors."
            )
        self._device = _device
        self._model = _model_of(engine)
        super().__init__(self._model, mode="alias", strict=strict, quiesce=self._drained)

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare names, shapes, dtypes, layout in memory and devices with the engine's."""
        where = require_imported(tensors).pin.place.device
        if where.type != self._device:
            raise IncompatibleUpdate(
                f"the update is on {where}, expected {self._device}. Import it over a transport "
                "that shares GPU memory, such as cuda-vmm."
            )
        state = self._model.state_dict(keep_vars=True)
        live = {name: state[name] for name in tensors if name in state}
        for name, tensor in live.items():
            here, there = tensor.stride(), tensors[name].stride()
            if here != there and tensor.shape == tensors[name].shape:
                raise IncompatibleUpdate(
                    f"tensor {name!r} has strides {list(there)}, the engine's {list(here)}. Use "
                    "VLLMEngineAdapter, which fuses, packs and copies."
                )
        # (Buffers may hold masks, of -Inf.)
        check_finite(tensors, [n for n, one in live.items() if isinstance(one, torch.nn.Parameter)])
        super().prepare(manifest, tensors)

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Drain the GPUs that the engine computes on, whichever is torch's current one."""
        tensors = self._model.state_dict().values()
        for ordinal in sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}):
            driver_at("cuda", ordinal).fence()
        yield


def _model_of(engine: Any) -> torch.nn.Module:
    """The model behind what users have in their hands."""
    config = None
    if hasattr(engine, "llm_engine"):
        core = engine.llm_engine.engine_core
        if not hasattr(core, "engine_core"):
            raise WeightBridgeUnavailableError(
                "the engine runs in another process, whose memory cannot be exchanged from here. "
                "Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts, or use VLLMEngineAdapter."
            )
        config = engine.llm_engine.vllm_config
        models = engine.apply_model(lambda model: model)
        if len(models) != 1:
            raise WeightBridgeUnavailableError(
                f"the engine has {len(models)} workers, expected one, in this process. Use "
                "VLLMEngineAdapter."
            )
        engine = models[0]
    elif hasattr(engine, "model_runner"):
        config, engine = getattr(engine, "vllm_config", None), engine.model_runner.get_model()
    elif hasattr(engine, "get_model"):
        config, engine = getattr(engine, "vllm_config", None), engine.get_model()
    if not isinstance(engine, torch.nn.Module):
        raise TypeError(
            f"engine is a {type(engine).__name__}, expected an LLM, a worker, a model runner or a "
            "model. Pass one of these."
        )
    if config is not None and not config.model_config.enforce_eager:
        raise WeightBridgeUnavailableError(
            "the engine may replay captured graphs, which know the addresses of its weights. Start "
            "it with enforce_eager=True, or use VLLMEngineAdapter."
        )
    return engine

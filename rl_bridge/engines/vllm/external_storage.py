"""`VLLMCUDAVMMExternalStorageAdapter`: an engine of this process computes with the imported memory.

Nothing is copied: each parameter's storage is exchanged for the imported tensor's, and back if
anything fails.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rl_bridge.cuda.devices import driver_at
from rl_bridge.engines.load_checks import check_finite
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, WeightBridgeUnavailableError
from rl_bridge.installers.base import InstallProof, TransactionalAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.cuda import cuda_cause

__all__ = [
    "VLLMCUDAVMMExternalStorageAdapter",
]

_SHOWN = 5
_ELSEWHERE = "Use VLLMEngineAdapter, which fuses, packs and copies"


class VLLMCUDAVMMExternalStorageAdapter(TransactionalAdapter):
    """Points an in-process engine's parameters at imported CUDA tensors.

    An update must have the engine's own names, shapes and dtypes: the fused layers of vLLM, not
    those of a checkpoint. Addresses change with every version, so the engine must run eagerly:
    captured graphs would go on with the old weights. Install between two steps of the engine, and
    drop its cached prefixes afterwards.
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
            msg = (
                f"external storage needs CUDA: {cause}. Use VLLMEngineAdapter, which installs CPU "
                "tensors."
            )
            raise WeightBridgeUnavailableError(msg)
        self._device = _device
        self._strict = strict
        self._model = _model_of(engine)
        self._prepared = ""
        self._exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._installed: tuple[WeightUpdateManifest, dict[str, torch.Tensor]] | None = None
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare names, shapes, dtypes, layout in memory and devices with the engine's.

        Raises:
            IncompatibleUpdate: they do not fit, or numbers are not finite; nothing was touched.

        """
        live = self._live()
        missing = self._missing(live, tensors) if self._strict else []
        strange = [name for name in tensors if name not in live]
        if missing or strange:
            or_else = "" if strange else ", or say strict=False if the rest never changes"
            msg = (
                f"version {manifest.weight_version}: the engine has {len(live)} parameters; "
                f"{missing[:_SHOWN]} are not in the update, {strange[:_SHOWN]} not in the engine. "
                f"{_ELSEWHERE}{or_else}."
            )
            raise IncompatibleUpdate(msg)
        given: dict[int, tuple[str, int]] = {}
        for name, tensor in tensors.items():
            expected, found = _described(live[name]), _described(tensor)
            if found != expected:
                msg = f"tensor {name!r} is {found}, the engine's {expected}. {_ELSEWHERE}."
                raise IncompatibleUpdate(msg)
            if tensor.device.type != self._device:
                msg = (
                    f"tensor {name!r} is on {tensor.device}, expected {self._device}. Import the "
                    "update over a transport that shares GPU memory, such as cuda-vmm."
                )
                raise IncompatibleUpdate(msg)
            if tensor.device != live[name].device:
                msg = (
                    f"tensor {name!r} is on {tensor.device} and the engine's on "
                    f"{live[name].device}. Publish on the engine's GPU."
                )
                raise IncompatibleUpdate(msg)
            other, address = given.setdefault(id(live[name]), (name, tensor.data_ptr()))
            if address != tensor.data_ptr():
                msg = (
                    f"tensors {other!r} and {name!r} are one parameter of the engine and two of "
                    "the update. Tie them in the trainer, or leave one out."
                )
                raise IncompatibleUpdate(msg)
        # (Buffers may hold masks, of -Inf.)
        check_finite(tensors, [n for n in tensors if isinstance(live[n], torch.nn.Parameter)])
        self._prepared = manifest.update_id

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchange the storages. Prepares by itself where that was not done.

        Raises:
            IncompatibleUpdate: as `prepare` does.
            DeadlineExceeded: the engine's GPU did not come to rest in time; nothing was exchanged.
            DriverError: the driver refuses; nothing was exchanged.

        """
        if self._prepared != manifest.update_id:
            self.prepare(manifest, tensors)
        live, given = self._live(), dict(tensors)
        self._kept[manifest.update_id] = given
        self._installed = manifest, given
        self._wait(live.values())
        for name, tensor in given.items():
            parameter = live[name]
            # Noted before it is taken: an interrupt at any line can be undone.
            self._exchanged.append((parameter, parameter.data))
            parameter.data = tensor.detach()

    def prove(self) -> InstallProof:
        """Look where the engine's parameters lie: in the memory that was verified.

        Raises:
            ProofFailed: one lies elsewhere.

        """
        if self._installed is None:
            msg = "nothing was installed that could be proven. Call install first."
            raise ProofFailed(msg)
        manifest, given = self._installed
        live = self._live()
        for name, tensor in given.items():
            found, expected = (_place(live[name]) if name in live else None), _place(tensor)
            if found != expected:
                msg = (
                    f"parameter {name!r} of the engine lies at {found}, expected {expected}: it is "
                    "not the imported tensor. Install the update again."
                )
                raise ProofFailed(msg)
        return InstallProof(
            method="identity",
            root=manifest.root,
            identical_nbytes=manifest.total_nbytes,
            tensors=len(given),
        )

    def undo(self) -> None:
        """Give the parameters the storages that they had. May be called again."""
        self._wait(parameter for parameter, _ in self._exchanged)
        while self._exchanged:
            parameter, before = self._exchanged[-1]
            parameter.data = before
            self._exchanged.pop()
        if self._installed is not None:
            self._kept.pop(self._installed[0].update_id, None)
        self._installed, self._prepared = None, ""

    def abandon(self) -> None:
        """Forget what was prepared."""
        self._prepared = ""

    def commit(self) -> None:
        """Let go of the storages that the engine had."""
        self._exchanged = []
        self._installed, self._prepared = None, ""

    def release(self, update_id: str) -> None:
        """Let go of an update's tensors; those that the engine computes with live on in it."""
        self._kept.pop(update_id, None)

    # ---- inside ---------------------------------------------------------------------------------

    def _live(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers, under all of their names."""
        state = self._model.state_dict(keep_vars=True)
        return {name: item for name, item in state.items() if isinstance(item, torch.Tensor)}

    @staticmethod
    def _missing(
        live: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> list[str]:
        """Names of parameters that get nothing under any of their names."""
        served = {id(live[name]) for name in tensors if name in live}
        return [name for name, tensor in live.items() if id(tensor) not in served]

    @staticmethod
    def _wait(tensors: Iterable[torch.Tensor]) -> None:
        """Drain the GPUs that the engine computes on, whichever is torch's current one."""
        for ordinal in sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}):
            driver_at("cuda", ordinal).fence()


def _model_of(engine: Any) -> torch.nn.Module:
    """The model behind what users have in their hands."""
    config = None
    if hasattr(engine, "llm_engine"):
        core = engine.llm_engine.engine_core
        if not hasattr(core, "engine_core"):
            msg = (
                "the engine runs in another process, whose memory cannot be exchanged from here. "
                "Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it starts, or use VLLMEngineAdapter."
            )
            raise WeightBridgeUnavailableError(msg)
        config = engine.llm_engine.vllm_config
        models = engine.apply_model(lambda model: model)
        if len(models) != 1:
            msg = (
                f"the engine has {len(models)} workers, expected one, in this process. Use "
                "VLLMEngineAdapter."
            )
            raise WeightBridgeUnavailableError(msg)
        engine = models[0]
    elif hasattr(engine, "model_runner"):
        config, engine = getattr(engine, "vllm_config", None), engine.model_runner.get_model()
    elif hasattr(engine, "get_model"):
        config, engine = getattr(engine, "vllm_config", None), engine.get_model()
    if not isinstance(engine, torch.nn.Module):
        msg = (
            f"engine is a {type(engine).__name__}, expected an LLM, a worker, a model runner or a "
            "model. Pass one of these."
        )
        raise TypeError(msg)
    if config is not None and not config.model_config.enforce_eager:
        msg = (
            "the engine may replay captured graphs, which know the addresses of its weights. Start "
            "it with enforce_eager=True, or use VLLMEngineAdapter."
        )
        raise WeightBridgeUnavailableError(msg)
    return engine


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype

"""prime-rl's configuration of a weight broadcast: the sections of its TOML that are read here.

    [weight_broadcast]
    type = "nixl"                        # or "nccl", "filesystem"
    port = 6000
    server_name = "lora_param_server"

    [model.lora]
    name = "my_lora"
    alpha = 32.0

The trainer's and the orchestrator's files have both sections; the inference server's needs the
first one alone. Other sections are not looked at, and an unknown key in ``weight_broadcast`` is
refused.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rl_bridge.transports.files.steps import Handshake
from rl_bridge.transports.wire.channel import checked_address

__all__ = [
    "FileSystemWeightBroadcastConfig",
    "LoRAConfig",
    "NCCLWeightBroadcastConfig",
    "NIXLWeightBroadcastConfig",
    "PrimeRLConfig",
    "WeightBroadcastConfig",
    "check_server_names",
]

_Address = Annotated[str, AfterValidator(checked_address)]
_Port = Annotated[int, Field(ge=1, lt=2**16)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileSystemWeightBroadcastConfig(_Section):
    """Versions are directories that trainer and inference see under the same path.

    Attributes:
        handshake: ``stable``: a version has a marker, and nobody waits; ``stages``: the trainer
            offers it, and writes it once the orchestrator is ready.
        timeout: in stages, seconds that each side waits for the other.

    """

    type: Literal["filesystem"] = "filesystem"
    handshake: Handshake = "stable"
    timeout: _Seconds = 1200.0


class NCCLWeightBroadcastConfig(_Section):
    """A model's whole weights, adapters merged in, over the transport ``broadcast``.

    Attributes:
        host: the trainer's address, in numbers.
        port: where rank 0 listens, which sends; 0 takes a free port.
        timeout: seconds that each step may wait for another side.
        backend: ``nccl`` for weights on GPUs, ``gloo`` for weights on the CPU.

    """

    type: Literal["nccl"] = "nccl"
    host: _Address = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 0
    timeout: _Seconds = 1200.0
    backend: Literal["nccl", "gloo"] = "nccl"


class NIXLWeightBroadcastConfig(_Section):
    """An adapter's shards, which each engine rank reads out of the memory of all trainer ranks.

    Attributes:
        port: of rank 0's parameter server; other ranks add their rank to it.
        server_name: of the parameter servers, to which ``_rank`` is added. Both sides check it.
        host: this rank's address, in numbers. Others than 127.0.0.1 need a token on both sides.
        timeout: seconds that each step may wait for another side.

    """

    type: Literal["nixl"] = "nixl"
    port: _Port = 6000
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,120}$")] = "lora_param_server"
    host: _Address = "127.0.0.1"
    timeout: _Seconds = 30.0


WeightBroadcastConfig = Annotated[
    FileSystemWeightBroadcastConfig | NCCLWeightBroadcastConfig | NIXLWeightBroadcastConfig,
    Field(discriminator="type"),
]
"""One of the three, by its ``type``."""


class LoRAConfig(BaseModel):
    """``[model.lora]``; the training's own keys in it are not looked at.

    Attributes:
        name: by which requests ask for the adapter.
        alpha: numerator of its scaling.

    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")] = "policy"
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    lora: LoRAConfig | None = None


class PrimeRLConfig(BaseModel):
    """The two sections of a trainer's or an orchestrator's file.

    Attributes:
        weight_broadcast: how versions travel.
        model: in it ``lora``, if an adapter is trained.

    Raises:
        pydantic.ValidationError: a wrong value, an unknown key; ``nixl`` without ``model.lora``.

    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    weight_broadcast: WeightBroadcastConfig = FileSystemWeightBroadcastConfig()
    model: _Model = _Model()

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = self.weight_broadcast.type
        if kind == "nixl" and self.model.lora is None:
            raise ValueError(
                'weight_broadcast.type = "nixl" carries adapters, and model.lora is not set: '
                'expected a section [model.lora]. Add it, or take type = "nccl".'
            )
        return self

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no TOML, or what is said above.

        """
        return cls.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))


def check_server_names(trainer: NIXLWeightBroadcastConfig, inference: str) -> None:
    """Refuse a pair of configurations whose parameter servers would not find each other.

    Raises:
        ValueError: the names differ.

    """
    if trainer.server_name != inference:
        raise ValueError(
            f"the trainer's server_name is {trainer.server_name!r}, the inference's {inference!r}: "
            "expected the same. Change one of them."
        )

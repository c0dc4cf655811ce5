"""Faults in an engine's scheduler process, planted from outside.

`plant` is called there by SGLang, as a custom weight loader. Each fault hits the n-th tensor (from
0) that the engine's own loader is given, or that is made beside the serving ones, the n-th
parameter that is exchanged, or the n-th layer that is written; nothing else is replaced.
"""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_bridge.engines import model_installer, staging
from rl_bridge.engines.evidence import Places
from rl_bridge.engines.lora_slots import SlotInstaller
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.rank import ranks_of
from rl_bridge.engines.sglang.host import tensor_group
from rl_bridge.engines.staging import Exchange, Staged, TensorChange
from rl_bridge.installers.snapshot import Snapshot
from rl_bridge.testing import in_rank
from tests.engines.adapter_suite import DAMAGES, Slot, damage_slots
from tests.engines.faults import PlantedError, flip_byte, patch, uproot

Named = tuple[str, torch.Tensor]


def plant(model: torch.nn.Module, named: list[Named]) -> None:
    """Take the last fault out, and plant the one that the first tensor's name tells of."""
    uproot()
    what = json.loads(named[0][0])
    if what["point"] and what["rank"] in {None, tensor_group().rank}:
        _POINTS[what["point"]](model, what["nth"])


def ask(model: torch.nn.Module, named: list[Named]) -> None:
    """What `EngineSuite` asks of this rank; the answer is a file, by rank."""
    what = json.loads(named[0][0])
    Path(what["answer"], str(tensor_group().rank)).write_text(in_rank(model, what["text"]), "utf-8")


def _damage_slot(what: str) -> Callable[[torch.nn.Module, int], None]:
    """Let the slot of each adapter that is staged hold something else: see `AdapterSuite`."""

    def slot_of(manager: Any, slot: int) -> Slot:
        layers = manager.lora_modules[0]
        layer = next(one for name, one in layers.items() if name.endswith("gate_up_proj"))
        gate, up = layer.lora_b[slot].chunk(2)

        def empty() -> None:
            for one in layers.values():
                one.lora_b[slot].zero_()

        return Slot(gate, up, layer.lora_a[slot], empty)

    return lambda _model, _nth: damage_slots(what, slot_of)


def drop_adapters(model: torch.nn.Module, _: int) -> None:
    """Drop all adapters, behind the back of those who have installed them."""
    for rank in ranks_of(model).values():
        installer = rank.installer
        if isinstance(installer, SlotInstaller):
            for version in installer.residents.values():
                installer.free_slot(version)


def sleep_as_on_a_gpu(model: torch.nn.Module, _: int) -> None:
    """Let a release of memory take the weights away, which no CPU does: they become NaN."""
    saver = importlib.import_module("sglang.srt.utils.torch_memory_saver_adapter")

    def pause(_: Any, tag: str) -> None:
        if tag == "weights":
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)

    patch(saver._TorchMemorySaverAdapterNoop, "pause", pause)
    patch(saver._TorchMemorySaverAdapterNoop, "enabled", True)
    for rank in ranks_of(model).values():
        vars(rank.host)["may_sleep"] = True


def _around_load(
    model: torch.nn.Module, change: Callable[[int, Named], Iterable[Named]], end: Any = None
) -> None:
    """Put something between the tensors and the loader of the serving model."""
    original = vars(type(model))["load_weights"]

    def load_weights(self: Any, weights: Iterable[Named], *args: Any, **kwargs: Any) -> Any:
        if self is not model:
            # The skeleton on which routes are learned.
            return original(self, weights, *args, **kwargs)

        def changed() -> Iterator[Named]:
            for index, item in enumerate(weights):
                yield from change(index, item)

        done = original(self, changed(), *args, **kwargs)
        if end is not None:
            end()
        return done

    patch(type(model), "load_weights", load_weights)


def _around_staging(change: Callable[[int, Named], Named]) -> None:
    """Put something between the tensors and the version that is made beside the serving one."""
    original, met = vars(model_installer)["assemble"], list[Any]()

    def assemble(plan: Any, tensors: Any, *args: Any, **options: Any) -> None:
        met.append(tensors)
        if tensors is met[0]:  # an undo may write the version before once more
            tensors = dict(change(i, item) for i, item in enumerate(tensors.items()))
        original(plan, tensors, *args, **options)

    patch(model_installer, "assemble", assemble)


class _Upto(list[TensorChange]):
    """A list that fails when it is gone over, before its n-th item; it begins anew at its end."""

    nth = 0

    def __iter__(self) -> Iterator[TensorChange]:
        for index, item in enumerate(super().__iter__()):
            if index == self.nth % len(self):
                raise PlantedError(f"planted at tensor {self.nth}")
            yield item


def _fail(model: torch.nn.Module, nth: int) -> None:
    """Raise before the n-th tensor, or the exchange of the n-th parameter."""

    def change(index: int, item: Named) -> Iterable[Named]:
        if index == nth:
            raise PlantedError(f"planted at tensor {index}")
        return [item]

    _around_load(model, change)
    original = vars(Exchange)["apply"]

    def apply(self: Exchange, staged: Staged) -> None:
        tensors = _Upto(staged.tensors)
        tensors.nth = nth
        original(self, replace(staged, tensors=tensors))

    patch(Exchange, "apply", apply)
    write, written = vars(ModelInstaller)["_write"], [0]

    def fail(
        self: ModelInstaller, version: model_installer.Written, layer: model_installer.Layer
    ) -> Staged:
        done: Staged = write(self, version, layer)
        if written[0] == nth % len(model_installer.layers_of(version.plan)):
            msg = f"planted at tensor {nth}"
            written[0] = -1  # the undo writes, too
            raise PlantedError(msg)
        written[0] += written[0] >= 0
        return done

    patch(ModelInstaller, "_write", fail)


def _staging(model: torch.nn.Module, nth: int) -> None:
    """Raise when half of the next version is made beside the serving one."""
    del model, nth

    def run(*_args: Any, **_kwargs: Any) -> None:
        raise PlantedError("planted in the staging")

    patch(staging, "BytePlan", run)


def _wrong(model: torch.nn.Module, nth: int) -> None:
    """Load another number in the n-th tensor; nothing raises."""

    def change(index: int, item: Named) -> Iterable[Named]:
        name, tensor = item
        if index == nth:
            tensor = tensor.clone()
            flip_byte(tensor)
        return [(name, tensor)]

    _around_load(model, change)
    _around_staging(lambda index, item: next(iter(change(index, item))))


def _lost(model: torch.nn.Module, nth: int) -> None:
    """Leave the n-th tensor out; nothing raises."""
    _around_load(model, lambda index, item: [] if index == nth else [item])
    _around_staging(
        lambda index, item: (item[0], torch.zeros_like(item[1])) if index == nth else item
    )


def _buffer(model: torch.nn.Module, nth: int) -> None:
    """Change the n-th buffer behind the load, or the exchange."""
    buffers = [buffer for _, buffer in model.named_buffers() if buffer.numel()]
    _behind_the_install(model, lambda _: flip_byte(buffers[nth]))


def _corrupt(model: torch.nn.Module, nth: int) -> None:
    """Change a byte of the n-th parameter behind the load, or the exchange."""
    _behind_the_install(model, lambda parameters: flip_byte(parameters[nth % len(parameters)]))


def _behind_the_install(model: torch.nn.Module, does: Callable[[list[torch.Tensor]], None]) -> None:
    parameters: list[torch.Tensor] = list(model.parameters())
    _around_load(model, lambda _, item: [item], end=lambda: does(parameters))
    original = vars(Exchange)["apply"]

    def apply(self: Exchange, staged: Staged) -> None:
        original(self, staged)
        does(parameters)

    patch(Exchange, "apply", apply)
    install = vars(ModelInstaller)["install"]

    def installed(self: ModelInstaller, *given: Any) -> None:
        install(self, *given)
        if self.staging == "through":
            does(parameters)

    patch(ModelInstaller, "install", installed)


def _compiled(model: torch.nn.Module, nth: int) -> None:
    """Let SGLang's own settings say that the model is compiled; nothing else of that is done."""
    del model, nth
    flags = importlib.import_module("sglang.srt.runtime_context").get_flags().capture
    patch(flags, "enable_torch_compile", True)


def _undo(model: torch.nn.Module, nth: int) -> None:
    """Fail at the n-th tensor, and in the undo as well."""
    _fail(model, nth)

    def fails(*_: Any) -> None:
        raise PlantedError("planted in the undo")

    patch(Snapshot, "restore", fails)
    patch(Places, "check", fails)


_POINTS: dict[str, Callable[[torch.nn.Module, int], None]] = {
    "sleep": sleep_as_on_a_gpu,
    "fail": _fail,
    "wrong": _wrong,
    "lost": _lost,
    "buffer": _buffer,
    "compiled": _compiled,
    "corrupt": _corrupt,
    "staging": _staging,
    "undo": _undo,
    "drop adapters": drop_adapters,
    **{what: _damage_slot(what) for what in DAMAGES.values()},
}

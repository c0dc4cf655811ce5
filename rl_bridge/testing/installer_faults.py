"""Engines that fail on purpose, at a chosen place of an install.

`Sabotage` stands between an executor and the adapter under test. It changes the engine's memory
directly, not through the adapter, so that what an undo finds is what a real failure leaves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, ClassVar

import torch

from rl_bridge.installers.base import (
    Engine,
    InstallProof,
    TransactionalAdapter,
    WeightInstallAdapter,
)
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.packing import raw_elements
from rl_bridge.testing.faults import flip_byte

ENGINE_FAULT = "the engine fails, as planned"


class EngineFault(RuntimeError):
    """Raised by a sabotaged engine; the bridge does not know the type."""


class Stage(StrEnum):
    """Where an install fails."""

    BEFORE_INSTALL = "before install"
    HALF_WAY = "half-way"
    AFTER_INSTALL = "after install"
    AFTER_PROOF = "after proof"


def poke(tensor: torch.Tensor, place: int) -> None:
    """Flip one byte of a tensor's memory: `place` 0 is its first one, -1 its last one."""
    last = sum((dim - 1) * step for dim, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    flip_byte(tensor.data_ptr() + (0 if place == 0 else (last + 1) * size - 1))


def _fail() -> None:
    raise EngineFault(ENGINE_FAULT)


# torch describes the attribute as a tensor; it is a descriptor.
_DATA: Any = torch.Tensor.data


class BrittleTensor(torch.Tensor):
    """A tensor of an engine whose ``data`` cannot always be assigned."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - torch's own way to make a plain subclass
    num_left: ClassVar[int | None] = None
    """How many assignments succeed before one fails; None lets all succeed."""

    @property
    def data(self) -> torch.Tensor:
        """As torch has it."""
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if BrittleTensor.num_left is not None:
            BrittleTensor.num_left -= 1
            if BrittleTensor.num_left < 0:
                BrittleTensor.num_left = None
                _fail()
        _DATA.__set__(self, value)


class BrittleParameter(BrittleTensor, torch.nn.Parameter):
    """The same for parameters."""


def make_brittle(engine: Engine) -> None:
    """Turn an engine's tensors, in place, into brittle ones."""
    for tensor in named_engine_tensors(engine).values():
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        tensor.__class__ = BrittleParameter if is_parameter else BrittleTensor


class Sabotage:
    """One planned failure at a time; without a plan, everything passes through."""

    def __init__(
        self,
        adapter: WeightInstallAdapter | TransactionalAdapter,
        engine: Engine,
        *,
        rebinds: bool = False,
    ) -> None:
        """Stand before `adapter`, whose weights are `engine`'s.

        Args:
            adapter: under test.
            engine: its engine.
            rebinds: half-way means that some tensors were pointed elsewhere, not written.

        """
        self.adapter = adapter
        self.engine = engine
        self._rebinds = rebinds
        if rebinds:
            make_brittle(engine)
        self._stage: Stage | None = None
        self._count = 0
        self._action: Callable[[], Any] = _fail
        self.fails_undo = False
        """Whether undos fail, before they have done anything."""

    def plan(
        self, stage: Stage | None, count: int | None = None, *, action: Callable[[], Any] = _fail
    ) -> None:
        """Fail the next install.

        Args:
            stage: where; None takes a plan back.
            count: half-way: how many tensors were written; None takes half of them.
            action: what happens there; raises, or changes the engine behind the adapter's back.

        """
        half = (len(named_engine_tensors(self.engine)) + 1) // 2
        self._stage, self._action = stage, action
        self._count = half if count is None else count

    def at(self, stage: Stage) -> None:
        """Do what is planned here, once."""
        if self._stage is stage:
            self._stage = None
            self._action()

    @contextmanager
    def half_way(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Fail half-way through the install that is the body, if that is planned."""
        if self._stage is not Stage.HALF_WAY:
            yield
        elif not self._rebinds:
            self._write_half(tensors)
            self.at(Stage.HALF_WAY)
            yield
        else:
            BrittleTensor.num_left = self._count
            self._stage = None
            try:
                yield
            finally:
                BrittleTensor.num_left = None
            self._action()  # fewer tensors than planned were pointed elsewhere: fail at the end

    def _write_half(self, tensors: Mapping[str, torch.Tensor]) -> None:
        engine = named_engine_tensors(self.engine)
        if all(
            name in engine and (engine[name].shape, engine[name].dtype) == (it.shape, it.dtype)
            for name, it in tensors.items()
        ):
            for name in list(tensors)[: self._count]:
                raw_elements(engine[name]).copy_(raw_elements(tensors[name]))
            return
        # Updates have other parts than the engine: some of its own are written, with anything.
        for tensor in list(engine.values())[: self._count]:
            raw_elements(tensor).fill_(90)

    def wrapped(self) -> WeightInstallAdapter | TransactionalAdapter:
        """The adapter for the executor: of the same style as the one under test."""
        if isinstance(self.adapter, TransactionalAdapter):
            return _Transactional(self, self.adapter)
        return _two_verbs(self, self.adapter)


class _Transactional(TransactionalAdapter):
    def __init__(self, sabotage: Sabotage, inner: TransactionalAdapter) -> None:
        self._sabotage = sabotage
        self._inner = inner

    def prepare(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._inner.prepare(manifest, tensors)

    def install(self, manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._sabotage.at(Stage.BEFORE_INSTALL)
        with self._sabotage.half_way(tensors):
            self._inner.install(manifest, tensors)
        self._sabotage.at(Stage.AFTER_INSTALL)

    def prove(self) -> InstallProof:
        proof = self._inner.prove()
        self._sabotage.at(Stage.AFTER_PROOF)
        return proof

    def undo(self) -> None:
        if self._sabotage.fails_undo:
            _fail()
        self._inner.undo()

    def commit(self) -> None:
        self._inner.commit()

    def release(self, update_id: str) -> None:
        self._inner.release(update_id)


def _two_verbs(sabotage: Sabotage, adapter: WeightInstallAdapter) -> WeightInstallAdapter:
    """Sabotage the adapter in place: what its attributes show decides how it is wrapped."""
    install = adapter.install

    def sabotaged(manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> object:
        sabotage.at(Stage.BEFORE_INSTALL)
        with sabotage.half_way(tensors):
            answer = install(manifest, tensors)
        sabotage.at(Stage.AFTER_INSTALL)
        sabotage.at(Stage.AFTER_PROOF)  # it proves nothing by itself: this is the last place
        return answer

    vars(adapter)["install"] = sabotaged
    return adapter


def transpose(engine: Engine) -> bool:
    """Turn a square matrix around in place; False if the engine has none."""
    for tensor in named_engine_tensors(engine).values():
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] > 1:
            tensor.data = tensor.data.t()
            return True
    return False


def reinterpret(engine: Engine) -> bool:
    """Read a bfloat16 tensor as float16, or the other way round; False if there is none."""
    swap = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
    for tensor in named_engine_tensors(engine).values():
        if tensor.dtype in swap and tensor.numel() > 1:
            tensor.data = tensor.data.view(swap[tensor.dtype])
            return True
    return False

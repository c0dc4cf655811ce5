"""Faults in the workers of an engine, planted from outside.

vLLM mixes `FaultyWorker` into its worker class, wherever that runs; a test calls its methods by
``collective_rpc``. Each fault hits the n-th call (from 0) of what it names.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from rl_bridge.assembly import end as assembling
from rl_bridge.assembly.end import GroupEnd
from rl_bridge.engines import evidence, staging
from rl_bridge.engines.vllm import canary, model_installer
from rl_bridge.memory.segment import process_start_time
from rl_bridge.testing import in_rank
from rl_bridge.testing.processes import until

T = TypeVar("T")
_originals: list[tuple[Any, str, Any]] = []
_calls = [0]
# What the n-th call does, beside raising.
_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class PlantedError(Exception):
    """What a test planted."""


class _Upto(list[T]):
    """A list that fails when it is gone over, before its n-th item."""

    limit = 0
    action: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[T]:
        for index, item in enumerate(super().__iter__()):
            if index == self.limit:
                _fail(self.action)
            yield item


def _fail(action: Callable[[], None] | None, call: int | None = None) -> None:
    if action is not None:
        action()
    raise PlantedError(f"planted at call {_calls[0] if call is None else call}")


def patch(owner: Any, name: str, made: Any) -> None:
    """Put something in an attribute's place until `uproot`."""
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, made)


def _counted(owner: Any, name: str, nth: int, action: Callable[[], None] | None) -> None:
    original = owner.__dict__[name]

    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[0] += 1  # an undo may make the same calls
        if _calls[0] == nth + 1:
            _fail(action, nth)
        return original(*args, **kwargs)

    patch(owner, name, counted)


def _exchange(nth: int, action: Callable[[], None] | None) -> None:
    """Fail before the n-th exchange, parameters first, then packed products."""
    original = staging.Exchange.__dict__["apply"]

    def apply(self: Any, staged: staging.Staged) -> None:
        tensors: _Upto[Any] = _Upto(staged.tensors)
        attributes: _Upto[Any] = _Upto(staged.attributes)
        tensors.limit, attributes.limit = nth, nth - len(staged.tensors)
        tensors.action = attributes.action = action
        _calls[0] += len(staged.tensors) + len(staged.attributes)
        original(self, replace(staged, tensors=tensors, attributes=attributes))

    patch(staging.Exchange, "apply", apply)


def _half_written(nth: int) -> None:
    """Fail behind the first parameters of the n-th layer, when its pack may be gone already."""
    original = model_installer.VLLMModelInstaller.__dict__["_write"]

    def write(self: Any, written: Any, layer: Any) -> Any:
        if _calls[0] == nth:
            _calls[0] += 1
            original(self, written, layer[: len(layer) // 2 + 1])
            for user in written.plan.targets[layer[-1][0]].users:
                if "cpu_linear" in vars(user.module) and self._snapshot is None:
                    vars(user.module)["cpu_linear"] = None
            raise PlantedError(f"planted at call {nth}")
        _calls[0] += 1
        return original(self, written, layer)

    patch(model_installer.VLLMModelInstaller, "_write", write)


def _wrong_pack(nth: int) -> None:
    """Pack other weights than those that are given; nothing raises."""
    for owner, name in _packers():
        original = owner.__dict__[name]

        def create(weight: torch.Tensor, *args: Any, _pack: Any = original, **kwargs: Any) -> Any:
            if _calls[0] == nth:
                weight = weight.clone(memory_format=torch.preserve_format)
                weight[0, 0] += 1
            _calls[0] += 1
            return _pack(weight, *args, **kwargs)

        patch(owner, name, create)


def _packers() -> list[tuple[Any, str]]:
    """What packs the weights of linear layers: oneDNN, and for CPUs with AMX a kernel of vLLM's."""
    from vllm import _custom_ops as ops

    found: list[tuple[Any, str]] = [(ops, "create_onednn_mm")]
    # (Asked for once, it is an attribute that can be replaced.)
    if hasattr(torch.ops._C, "convert_weight_packed"):
        found.append((torch.ops._C, "convert_weight_packed"))
    return found


def _wrong_experts(nth: int, *, alike: bool) -> None:
    """Pack experts of the n-th layer in another order, both times alike or the second time only.

    A layer's weights are packed twice: ``w13`` and ``w2``, and the same once more.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    original, calls = cpu_moe.__dict__["cpu_prepack_moe_weight"], [0]

    def create(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, call = divmod(calls[0], 4)
        calls[0] += 1
        _calls[0] = layer + 1
        if layer == nth and call in ({0, 2} if alike else {2}):
            weight = weight.roll(1, 1)
        return original(weight, *args, **kwargs)

    patch(cpu_moe, "cpu_prepack_moe_weight", create)


def _pack_fails(nth: int, action: Callable[[], None] | None) -> None:
    for owner, name in _packers():
        _counted(owner, name, nth, action)


def _behind_the_exchange(does: Callable[[staging.Staged], int]) -> None:
    """Do something to the engine right behind the exchange; it says how much there is of it."""
    original = staging.Exchange.__dict__["apply"]

    def apply(self: Any, staged: staging.Staged) -> None:
        original(self, staged)
        _calls[0] += does(staged)

    patch(staging.Exchange, "apply", apply)


def _corrupt(nth: int) -> None:
    """Change one byte of the n-th parameter right behind the exchange."""

    def does(staged: staging.Staged) -> int:
        if nth < len(staged.tensors):
            flip_byte(staged.tensors[nth].live)
        return len(staged.tensors)

    _behind_the_exchange(does)


def _swap(nth: int, what: str) -> None:
    """Give the n-th packed layer another product, or its product another packed weight."""

    def does(staged: staging.Staged) -> int:
        if nth < len(staged.canaries):
            asked: Any = staged.canaries[nth]
            serving, other = asked.module, packed(asked)
            if what == "product":
                serving.cpu_linear = other
            else:
                cell(serving.cpu_linear).cell_contents = cell(other).cell_contents
        return len(staged.canaries)

    _behind_the_exchange(does)


def packed(like: canary.PackCanary) -> Any:
    """A product that vLLM packed, of weights that nobody published."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    made = torch.nn.Module()
    weight = torch.randn(like.answer.shape[1], like.inputs, dtype=like.answer.dtype)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(made, remove_weight=False)
    return made.cpu_linear


def cell(product: Any) -> Any:
    """Where a packed product keeps the weight that it computes with."""
    (found,) = [
        held
        for held in product.__closure__
        if isinstance(held.cell_contents, torch.Tensor)
        or type(held.cell_contents).__name__.endswith("Handler")
    ]
    return found


def _buffer(nth: int) -> None:
    """Change the n-th buffer or parameter that no update writes, behind the exchange."""
    original = evidence.Untouched.__dict__["check"]

    def check(self: Any) -> None:
        tensors = list(self._tensors.values())
        _calls[0] += len(tensors)
        if nth < len(tensors):
            flip_byte(tensors[nth])
        try:
            original(self)
        finally:
            if nth < len(tensors):
                flip_byte(tensors[nth])  # nobody else can bring it back

    patch(evidence.Untouched, "check", check)


def flip_byte(tensor: torch.Tensor) -> None:
    """Change the lowest bit of a tensor's last byte."""
    flat = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() else None
    assert flat is not None
    flat[-1] ^= 1


def plant(point: str, nth: int = 0, action: str = "") -> None:
    """Plant one fault in this process; see `uproot`."""
    uproot()
    does = _ACTIONS.get(action)
    points: dict[str, Callable[[], None]] = {
        "exchange": lambda: _exchange(nth, does),
        "assemble": lambda: _counted(staging, "_plain_copies", nth, does),
        "layer": lambda: _counted(model_installer.VLLMModelInstaller, "_write", nth, does),
        "half a layer": lambda: _half_written(nth),
        "process": lambda: _counted(model_installer, "_process", nth, does),
        "pack": lambda: _pack_fails(nth, does),
        "canary": lambda: _counted(canary, "question", nth, does),
        "digest": lambda: _counted(evidence, "digests_of", nth, does),
        "wrong pack": lambda: _wrong_pack(nth),
        "wrong experts": lambda: _wrong_experts(nth, alike=True),
        "unlike experts": lambda: _wrong_experts(nth, alike=False),
        "corrupt": lambda: _corrupt(nth),
        "product": lambda: _swap(nth, "product"),
        "packed weight": lambda: _swap(nth, "packed weight"),
        "buffer": lambda: _buffer(nth),
    }
    points[point]()


def uproot() -> int:
    """Take the fault out; how many calls there were."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)
    calls, _calls[0] = _calls[0], 0
    return calls


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end, by which the kernel has closed all that it had open."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: process_start_time(pid) is None, what=f"process {pid} is dead")


class FaultyWorker:
    """Mixed into vLLM's workers."""

    rank: int

    def plant_fault(self, point: str, nth: int, action: str = "", rank: int = -1) -> None:
        """Plant a fault in the worker of `rank`, -1 for all."""
        if rank in {-1, self.rank}:
            plant(point, nth, action)

    def in_rank(self, text: str) -> str:
        """What `EngineSuite` asks of this worker."""
        state: Any = self
        return in_rank(state.model_runner.get_model(), text)

    def sleep_as_on_a_gpu(self) -> None:
        """Let sleep take the weights away, which vLLM's CPU build does not: they become NaN."""
        worker: Any = self
        worker.vllm_config.model_config.enable_sleep_mode = True
        kept: list[torch.Tensor] = []

        def memory() -> list[torch.Tensor]:
            return [one.data for one in worker.model_runner.get_model().parameters()]

        def sleep(level: int = 1) -> None:
            kept[:] = [one.clone() for one in memory()] if level == 1 else []
            for one in memory():
                one.fill_(torch.nan)

        def wake_up(tags: list[str] | None = None) -> None:
            if kept and (tags is None or "weights" in tags):
                for one, before in zip(memory(), kept, strict=True):
                    one.copy_(before)

        worker.sleep, worker.wake_up = sleep, wake_up
        worker.discard = lambda tags: sleep(2) if "weights" in tags else None

    def drop_adapters(self) -> None:
        """Drop all adapters, as vLLM does when it reloads its weights."""
        state: Any = self
        state.model_runner.get_model().lora_manager.remove_all_adapters()

    def damage_slots(self, what: str) -> None:
        """Let the slot of each adapter that is staged hold something else: see `AdapterSuite`."""
        from tests.engines.adapter_suite import Slot, damage_slots

        def slot_of(manager: Any, slot: int) -> Slot:
            name = next(one for one in manager.modules if one.endswith("gate_up_proj"))
            layer = manager.modules[name]
            gate, up = (one[slot, 0] for one in layer.lora_b_stacked)
            return Slot(gate, up, layer.lora_a_stacked[0][slot, 0], lambda: layer.reset_lora(slot))

        damage_slots(what, slot_of)

    def uproot_fault(self) -> int:
        """Take it out."""
        return uproot()

    def kill_in_import(self, pid: int, when: str, rank: int) -> None:
        """Have a process killed when `rank` is about to import a group, or has its memory."""
        if rank == self.rank:
            uproot()
            owner, name = (
                (GroupEnd, "assemble") if when == "before" else (assembling, "require_sealed")
            )
            original = vars(owner)[name]

            def killing(*args: Any, **options: Any) -> Any:
                kill(pid)
                return original(*args, **options)

            patch(owner, name, killing)

    def tell_pid(self) -> int:
        """The process of this worker."""
        return os.getpid()

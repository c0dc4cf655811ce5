"""Tensors of which an engine would keep less than was published: as one, cut, or not at all."""

from collections.abc import Iterator, Mapping

import torch

from rl_bridge.engines.load_plan import Kinds, LoadPlan, Route, View, other_than
from rl_bridge.engines.vllm.compat import num_same, recorded_buffers
from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = [
    "check_casts",
    "check_landed",
    "check_same",
    "check_whole",
    "doubles",
    "refuse_unreached",
]

_SHOWN = 5


def check_same(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that go to one place and differ: the engine would have the last one only.

    As where an engine ties its head to its embeddings, and the trainer does not.

    Raises:
        IncompatibleUpdate: there are such.

    """
    for index, steps in plan.steps.items():
        first: dict[View, str] = {}
        for step in steps:
            if not isinstance(step, Route):
                continue
            name = first.setdefault(step.target_view, step.source)
            if _digest(manifest, name) != _digest(manifest, step.source):
                msg = (
                    f"tensors {name!r} and {step.source!r} both go to the engine's parameter "
                    f"{plan.targets[index].name!r}, expected the same bytes in both, got different "
                    "ones. Publish the model that the engine serves: tied as it ties them."
                )
                raise IncompatibleUpdate(msg)


def check_landed(plan: LoadPlan, manifest: WeightUpdateManifest) -> None:
    """Refuse tensors that the loader puts nowhere, except those whose bytes are there already.

    Raises:
        IncompatibleUpdate: there are such.

    """
    rows = manifest.table.rows
    known = {rows[name] for name in plan.landed} | doubles(plan, manifest).keys()
    lost = [name for name, row in rows.items() if row not in known]
    if not lost:
        return
    kinds = {_kind(manifest, rows[name]) for name in lost}
    tied = [name for name in _tied(plan) if _kind(manifest, rows[name]) in kinds]
    hint = f" (What the engine ties to {tied} must have the same bytes.)" if tied else ""
    msg = (
        f"the engine's loader puts {len(lost)} tensors of the update nowhere: {lost[:_SHOWN]}. "
        f"Publish the model that the engine serves, and no others.{hint}"
    )
    raise IncompatibleUpdate(msg)


def doubles(plan: LoadPlan, manifest: WeightUpdateManifest) -> dict[int, int]:
    """Rows that go nowhere and are, byte by byte, a row that goes to a tied parameter -> that row.

    Loaders pass over the second name of what they tie.
    """
    rows = manifest.table.rows
    landed = {rows[name] for name in plan.landed}
    lost = {name: row for name, row in rows.items() if row not in landed}
    if not lost:  # as in nearly every update
        return {}
    tied = {
        (_kind(manifest, rows[name]), _digest(manifest, name)): rows[name] for name in _tied(plan)
    }
    found = {
        row: tied.get((_kind(manifest, row), _digest(manifest, name))) for name, row in lost.items()
    }
    return {row: other for row, other in found.items() if other is not None}


def _tied(plan: LoadPlan) -> list[str]:
    """Tensors that go to parameters which several layers hold, and nowhere else."""
    routes = list(plan.routes())  # (of ranks, each has only its part)
    alone = {route.source for route in routes if len(plan.targets[route.target].users) == 1}
    return sorted({route.source for route in routes} - alone)


def _kind(manifest: WeightUpdateManifest, row: int) -> tuple[str, tuple[int, ...]]:
    return manifest.table.dtypes[row], tuple(manifest.table.shapes[row])


def _digest(manifest: WeightUpdateManifest, name: str) -> bytes:
    start = manifest.table.rows[name] * DIGEST_NBYTES
    return manifest.digests[start : start + DIGEST_NBYTES]


def check_whole(plan: LoadPlan, kinds: Kinds, ranks: int) -> None:
    """Refuse tensors of which all ranks together do not take all.

    Loaders cut each rank's part out of a tensor, and do not see that it is too long.

    Args:
        plan: of one rank.
        kinds: of the update's tensors.
        ranks: how many take parts.

    Raises:
        IncompatibleUpdate: there are such.

    """
    routes: dict[str, list[Route]] = {}
    for route in plan.routes():
        routes.setdefault(route.source, []).append(route)
    for name, parts in routes.items():
        if name in plan.mixed or any(part.is_whole for part in parts):
            continue
        shape = kinds[name][1]
        # How many ranks take the same part -> which elements. (A byte an element, as the learning
        # took for it, and for its targets besides.)
        seen: dict[int, torch.Tensor] = {}
        for part in parts:
            same = _num_same(plan, part)
            if same not in seen:  # (experts in one tensor have hundreds of parts)
                seen[same] = torch.zeros(shape, dtype=torch.bool, device="cpu")
            part.source_view.once().of(seen[same]).fill_(True)  # noqa: FBT003 - torch's own
        taken = sum(other_than(0, mask) * (ranks // same) for same, mask in seen.items())
        padded = sum(plan.padding(index) for index in {part.target for part in parts})
        numel = torch.Size(shape).numel()
        if taken + padded * ranks < numel:
            targets = sorted({plan.targets[part.target].name for part in parts})
            msg = (
                f"tensor {name!r} has shape {list(shape)}: all {ranks} ranks together take "
                f"{taken} of its {numel} elements, for {targets}, and the rest goes nowhere; "
                "expected all of it. Publish the model that the engine serves."
            )
            raise IncompatibleUpdate(msg)


def _num_same(plan: LoadPlan, part: Route) -> int:
    """How many ranks take the same part of a tensor."""
    target = plan.targets[part.target]
    a_row = next(iter(target.meta.stride()), 1)
    return num_same(target.users[0].module, part.target_view.offset // a_row)


# ---- What a model computes with and no update reaches: refused by its name.
#
# vLLM makes copies of weights while a model loads or runs, and calls hooks behind its first load.
# Neither its reload nor a version that is made beside the serving one does that again.

# vLLM's attention for the CPU computes with sinks of these; of all others it makes a copy.
_SINK_DTYPES = (torch.bfloat16, torch.float32)
# What layers make of weights in their first step and keep: fused gates (Qwen3-Next on ROCm), and
# what GLM-5-Next's indexer and its linear attention compute with.
_MADE_BY_STEPS = ("_combined_gate_weight", "_wp_fp32", "_merged_conv_weight")


def refuse_unreached(model: torch.nn.Module) -> None:
    """Refuse a model that would go on computing with something of the version before.

    Raises:
        IncompatibleUpdate: a hook that is called once, a buffer, attention sinks, or what a step
            made of weights.

    """
    _refuse_hooks(model)
    parameters = {_storage(parameter) for parameter in model.parameters()}
    held = parameters | {_storage(buffer) for buffer in model.buffers()}
    for name, layer in model.named_modules():
        _refuse_buffers(name, layer, parameters)
        _refuse_made_by_steps(name, layer)
        for sinks in _sinks(layer):
            is_cast = sinks.device.type == "cpu" and sinks.dtype not in _SINK_DTYPES
            if is_cast or _storage(sinks) not in held:
                dtype = str(sinks.dtype).removeprefix("torch.")
                msg = (
                    f"layer {name!r}: its attention computes with a copy of its sinks ({dtype}), "
                    "which no update reaches; expected the parameter itself. Start the engine "
                    "with dtype='bfloat16' or 'float32' on the CPU, or with another attention "
                    "backend on a GPU."
                )
                raise IncompatibleUpdate(msg)


def _refuse_hooks(model: torch.nn.Module) -> None:
    hooks = [("", model, "process_weights_after_loading")]
    hooks += [(name, layer, "post_weight_load") for name, layer in model.named_modules()]
    for name, layer, hook in hooks:
        if callable(getattr(layer, hook, None)):
            where = f"layer {name!r}, {type(layer).__name__}" if name else type(layer).__name__
            msg = (
                f"{where}: its {hook} was called when the model was loaded, and no update reaches "
                "what that made of the weights. Such models cannot be updated: start a fresh "
                "engine from the checkpoint."
            )
            raise IncompatibleUpdate(msg)


def _refuse_buffers(name: str, layer: torch.nn.Module, parameters: set[int]) -> None:
    """Refuse views of weights that vLLM has packed since: they show the weights before."""
    for leaf in sorted(layer._non_persistent_buffers_set):  # noqa: SLF001 - torch has no other way in
        buffer = layer._buffers.get(leaf)  # noqa: SLF001 - as above
        if buffer is None or not buffer.numel() or _storage(buffer) in parameters:
            continue
        if leaf not in recorded_buffers(layer):
            full = f"{name}.{leaf}" if name else leaf
            msg = (
                f"buffer {full!r}: expected a view of a parameter; vLLM has packed that since, or "
                "made the buffer when the weights had been loaded, and no update reaches it. Start "
                "the engine with a dtype in which vLLM does not pack that weight ('float32')."
            )
            raise IncompatibleUpdate(msg)


def _refuse_made_by_steps(name: str, layer: torch.nn.Module) -> None:
    """Refuse what a step has made of weights; a layer that made none yet makes it of new ones."""
    for leaf in _MADE_BY_STEPS:
        if getattr(layer, leaf, None) is not None:
            msg = (
                f"layer {name!r}, {type(layer).__name__}: its {leaf} was made of weights in its "
                "first step, and no update reaches it; expected none. Such models cannot be "
                "updated: start a fresh engine from the checkpoint."
            )
            raise IncompatibleUpdate(msg)


def _sinks(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Attention sinks that a layer computes with: some attention chooses between two others."""
    attention = getattr(layer, "impl", None)
    for owner in (attention, *getattr(attention, "__dict__", {}).values()):
        sinks = getattr(owner, "sinks", None)
        if isinstance(sinks, torch.Tensor):
            yield sinks


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - its identity
    return identity


# ---- Casts that a loader makes: what they may turn into Inf is refused before it is loaded.


def check_casts(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse numbers that are finite in an update and not in the engine's dtype.

    Args:
        plan: where the tensors go.
        tensors: the update's, finite.

    Raises:
        IncompatibleUpdate: a tensor has such a number.

    """
    for name, dtype in dict.fromkeys(
        (route.source, plan.targets[route.target].meta.dtype) for route in plan.routes()
    ):
        given = tensors[name]
        if given.dtype == dtype or not given.numel():
            continue
        if not (given.is_floating_point() and dtype.is_floating_point):
            continue
        # (torch cannot compare float8. Rounding keeps the order: the ends tell for all.)
        comparable = given.float() if given.element_size() == 1 else given
        ends = torch.stack(torch.aminmax(comparable))
        if not ends.to(dtype).double().isfinite().all():
            wanted = str(dtype).removeprefix("torch.")
            msg = (
                f"tensor {name!r} has numbers from {ends[0]:g} to {ends[1]:g}, and {wanted} cannot "
                "hold all of them: the engine would load NaN or Inf. Publish in the engine's "
                "dtype, and see which training step made them."
            )
            raise IncompatibleUpdate(msg)

"""Tensors of an update that an engine keeps as one: they must be the same."""

from rl_bridge.errors import IncompatibleUpdate
from rl_bridge.installers.vllm.load_plan import LoadPlan, Route, View
from rl_bridge.manifest.digest import DIGEST_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest

__all__ = ["check_same"]


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


def _digest(manifest: WeightUpdateManifest, name: str) -> bytes:
    start = manifest.table.rows[name] * DIGEST_NBYTES
    return manifest.digests[start : start + DIGEST_NBYTES]

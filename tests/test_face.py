"""The face of the package: few names at the top, the others by subject, each in one place."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

import rl_bridge
from rl_bridge import (
    LocalTensorCopyBridge,
    RolloutExecutor,
    SharedMemoryTensorBridge,
    VLLMIPCWeightUpdateRequestBuilder,
    make_weight_bridge,
)

ROOT = Path(__file__).resolve().parents[1]

# Users have had these names since before this package, and type them daily.
SINCE_EVER = {
    "TensorDescriptor",
    "WeightUpdateManifest",
    "WeightLayout",
    "WeightPublisher",
    "WeightConsumer",
    "WeightInstallAdapter",
    "make_weight_bridge",
    "LocalTensorCopyBridge",
    "SharedMemoryTensorBridge",
    "CUDAVMMTensorBridge",
    "CUDAIPCTensorBridge",
    "RolloutExecutor",
    "VLLMIPCWeightUpdateRequestBuilder",
    "VLLMCUDAVMMExternalStorageAdapter",
    "WeightExtractor",
    "FSDPWeightExtractor",
    "DeepSpeedWeightExtractor",
    "MegatronWeightExtractor",
    "WeightChunk",
    "WeightTransferSender",
    "WeightTransferReceiver",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "WeightSyncInitInfo",
    "WeightLoader",
    "VLLMWeightLoader",
    "SGLangWeightLoader",
}


def test_the_top_has_few_names_and_all_that_users_have_had_since_ever() -> None:
    assert len(rl_bridge.__all__) <= 55
    assert set(rl_bridge.__all__) >= SINCE_EVER


def test_faces_have_what_they_say() -> None:
    for face in rl_bridge.FACES:
        module = importlib.import_module(f"rl_bridge.{face}")
        assert (module.__doc__ or "").strip()
        assert all(hasattr(module, name) for name in module.__all__)


def public_classes() -> Iterator[tuple[str, type]]:
    for face in rl_bridge.FACES:
        module = importlib.import_module(f"rl_bridge.{face}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield f"{face}.{name}", value


def test_no_constructor_of_a_public_class_takes_more_than_eight_parameters() -> None:
    """Values are excepted: a frozen record or options object has a field for each thing it says."""
    counts = {
        name: len(inspect.signature(kind.__init__).parameters) - 1
        for name, kind in public_classes()
        if not is_dataclass(kind) and not issubclass(kind, BaseModel)
    }
    assert {name: count for name, count in counts.items() if count > 8} == {}


def test_a_name_at_the_top_is_the_one_of_its_face() -> None:
    for name in set(rl_bridge.__all__) - {"FACES", "__version__"}:
        homes = [importlib.import_module(f"rl_bridge.{face}") for face in rl_bridge.FACES]
        found = [getattr(home, name) for home in homes if name in home.__all__]
        assert found, name
        assert all(getattr(rl_bridge, name) is value for value in found)


def test_a_name_that_is_not_at_the_top_says_where_it_is() -> None:
    where = "GroupPublisher is in rl_bridge.groups: from rl_bridge.groups import GroupPublisher"
    with pytest.raises(AttributeError, match=where):
        rl_bridge.GroupPublisher  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match=where):
        from rl_bridge import GroupPublisher  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from rl_bridge import Nothing  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(rl_bridge, "Nothing")


def test_every_face_is_imported_without_engines_and_servers() -> None:
    away = "vllm sglang ray httpx fastapi anyio h11 nixl deepspeed megatron"
    code = f"""
import sys
for name in {away!r}.split():
    sys.modules[name] = None  # its import fails
import rl_bridge
from importlib import import_module
for face in rl_bridge.FACES:
    import_module("rl_bridge." + face)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr.decode()


# ---- usage that is older than this package, by name and parameter -------------------------------


@pytest.mark.parametrize("kind", [SharedMemoryTensorBridge, LocalTensorCopyBridge])
def test_a_manual_hand_over_imports_acknowledges_and_releases_on_both_sides(
    kind: type[SharedMemoryTensorBridge] | type[LocalTensorCopyBridge],
) -> None:
    policy = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    metadata = {"step": 1, "layout": {"kind": "full-state"}}
    trainer = kind(source_worker="trainer", source_rank=0)
    engine = kind(source_worker="rollout", source_rank=0)
    with trainer, engine:
        manifest = trainer.publish(policy, weight_version=1, metadata=metadata)
        assert manifest.metadata["step"] == 1
        received = engine.import_update(manifest)
        for name, tensor in policy.state_dict().items():
            assert torch.equal(received[name], tensor)
        engine.acknowledge(manifest.update_id)
        assert engine.active_weight_version == 1
        assert engine.update_status(manifest.update_id) == "acknowledged"
        for side in (engine, trainer):
            side.release(manifest.update_id)


def test_a_rollout_without_an_adapter_gets_the_imported_tensors_and_the_version() -> None:
    policy = torch.nn.Linear(4, 4)
    with (
        SharedMemoryTensorBridge(source_worker="trainer", source_rank=0) as trainer,
        SharedMemoryTensorBridge(source_worker="rollout", source_rank=0) as bridge,
    ):
        manifest = trainer.publish(policy, weight_version=7)
        rollout = RolloutExecutor(weight_bridge=bridge)
        imported = rollout.update_weights(manifest)
        assert rollout.active_weight_version == 7
        assert rollout.active_weight_update_id == manifest.update_id
        assert set(imported) == set(policy.state_dict())
        rollout.release_weights()
        trainer.release(manifest.update_id)


@pytest.mark.parametrize("transport", ["local-clone", "local", "shared-memory", "shm"])
def test_bridges_are_made_by_the_name_of_their_transport(transport: str) -> None:
    sides = ("trainer", "rollout")
    made = [make_weight_bridge(transport, source_worker=side, source_rank=0) for side in sides]
    for bridge in made:
        bridge.close()


def test_a_request_builder_takes_a_manifest_with_its_tensors_and_releases_by_update() -> None:
    assert list(inspect.signature(VLLMIPCWeightUpdateRequestBuilder.__call__).parameters)[1:3] == [
        "manifest",
        "tensors",
    ]
    builder = VLLMIPCWeightUpdateRequestBuilder(is_checkpoint_format=False)
    builder.release("0" * 32)

"""The face of the package: few names at the top, the others by subject, each in one place."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import rl_bridge

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
    away = "vllm sglang ray httpx fastapi uvicorn nixl deepspeed megatron"
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

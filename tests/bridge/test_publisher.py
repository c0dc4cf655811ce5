"""Publishing: a sealed snapshot, and a number that is used up only by success."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    SharedMemoryTensorBridge,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.bridge.publisher import _REMEMBERED as REMEMBERED
from rl_bridge.errors import (
    DuplicateTensorName,
    IncompatibleUpdate,
    MalformedManifest,
    RangeOverflow,
    SegmentError,
    TransportUnavailable,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.lifecycle import Event, Role, Transition
from rl_bridge.testing.tensors import bytes_of
from tests.bridge.engines import fours
from tests.helpers import weights

# ---- what a publication is ----------------------------------------------------------------------


def test_the_manifest_says_who_published_what(bridge: TensorBridge) -> None:
    state = weights()
    manifest = bridge.publish(state, weight_version=4, metadata={"step": 9})
    assert (manifest.source_worker, manifest.source_rank) == ("trainer", 2)
    assert (manifest.weight_version, manifest.transport) == (4, bridge.transport)
    assert manifest.publisher_id == bridge.publisher_id
    assert manifest.metadata["step"] == 9
    assert set(manifest.tensors) == set(state)
    assert manifest.total_nbytes == sum(len(bytes_of(tensor)) for tensor in state.values())
    assert bridge.update_status(manifest.update_id) == "published"
    assert bridge.get_manifest(manifest.update_id) is manifest


def test_modules_mappings_pairs_and_chunks_can_be_published(bridge: TensorBridge) -> None:
    class Chunk:
        names = ["weight", "bias"]  # noqa: RUF012 - an example of a user's own chunk
        tensors = [torch.ones(2, 2), torch.zeros(2)]  # noqa: RUF012

    model = torch.nn.Linear(2, 2)
    sources: list[Any] = [
        model,
        model.state_dict(),
        list(model.state_dict().items()),
        iter([Chunk()]),
    ]
    for version, source in enumerate(sources):
        for tensor in (*model.parameters(), *Chunk.tensors):
            tensor.data += 1
        manifest = bridge.publish(source, weight_version=version)
        assert set(manifest.tensors) == {"weight", "bias"}
        bridge.release(manifest.update_id)


def test_the_observer_sees_both_lives(bridge: TensorBridge) -> None:
    steps: list[Transition] = []
    with make_weight_bridge(bridge.transport, observer=steps.append) as watched:
        manifest = watched.publish(weights(), weight_version=1)
        watched.import_update(manifest)
        watched.acknowledge(manifest.update_id)
        watched.release(manifest.update_id)
    assert [(step.role, step.event) for step in steps] == [
        (Role.PUBLISHER, Event.PUBLISH),
        (Role.CONSUMER, Event.IMPORT),
        (Role.CONSUMER, Event.VERIFY),
        (Role.CONSUMER, Event.ACKNOWLEDGE),
        (Role.CONSUMER, Event.RELEASE),
        (Role.PUBLISHER, Event.RELEASE),
    ]


# ---- bad input leaves the number free -----------------------------------------------------------

HUGE = torch.empty(1).expand(2**30, 2**30)


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nothing": ({}, {}, MalformedManifest, "holds no tensors"),
    "no-model": (5, {}, IncompatibleUpdate, "cannot publish a int, expected a module"),
    "a-tensor": (torch.ones(3), {}, IncompatibleUpdate, "cannot publish a Tensor"),
    "name": ({3: torch.ones(2)}, {}, IncompatibleUpdate, "tensor name 3 is a int"),
    "value": ({"w": [1.0]}, {}, IncompatibleUpdate, "'w' is a list, expected a tensor"),
    "a-path": ("w.safetensors", {}, IncompatibleUpdate, "path 'w.safetensors'.*Load it first"),
    "parameters": ([torch.nn.Parameter(torch.ones(1))], {}, IncompatibleUpdate, "Pass the model"),
    "no-pair": ([("w",)], {}, IncompatibleUpdate, "cannot publish a tuple, expected"),
    "twice": (
        [("w", torch.ones(1)), ("w", torch.ones(1))],
        {},
        DuplicateTensorName,
        "'w' appears twice",
    ),
    "sparse": (
        {"w": torch.eye(2).to_sparse()},
        {},
        WeightBridgeUnavailableError,
        "'w'.*use dense",
    ),
    "overflow": ({"w": HUGE}, {}, RangeOverflow, "'w'.*63 bits"),
    "metadata-key": (None, {"metadata": {1: 2}}, MalformedManifest, "key 1 is int"),
    "metadata-value": (None, {"metadata": {"a": {1}}}, MalformedManifest, "set cannot travel"),
    "metadata-nan": (None, {"metadata": {"a": float("nan")}}, MalformedManifest, "nan"),
    "metadata-huge": (None, {"metadata": {"a": 10**9999}}, MalformedManifest, "digits"),
    "metadata-text": (None, {"metadata": "step 3"}, MalformedManifest, "metadata is a str"),
    "metadata-list": (None, {"metadata": [1]}, MalformedManifest, "metadata is a list"),
    "layout": (None, {"metadata": {"layout": {"rank": "0"}}}, MalformedManifest, "rank"),
    "sharded": (
        None,
        {"metadata": {"layout": {"tensor_parallel_size": 2}}},
        WeightBridgeUnavailableError,
        "tensor-parallel",
    ),
    "multi-node": (
        None,
        {"metadata": {"layout": {"node_count": 2}}},
        WeightBridgeUnavailableError,
        "multi-node/RDMA weight transport is not implemented",
    ),
    "trainable": (None, {"trainable": ["x"]}, IncompatibleUpdate, r"does not hold: \['x'\]"),
    "misspelt": (None, {"trainable": ["wieght"]}, IncompatibleUpdate, "some of its"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_publishes_nothing_and_leaves_the_version_free(
    bad: str, bridge: TensorBridge
) -> None:
    source, options, error, said = BAD[bad]
    state = weights()
    first = bridge.publish(state, weight_version=1)
    held = bridge.published_nbytes
    with pytest.raises(error, match=said):
        bridge.publish(state if source is None else source, weight_version=2, **options)
    assert bridge.published_nbytes == held
    bridge.release(first.update_id)
    assert bridge.publish(state, weight_version=2).weight_version == 2


def test_a_publisher_whose_transport_is_blocked_does_not_keep_the_directory(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        with (
            make_weight_bridge("cuda-vmm", state_dir=tmp_path) as blocked,
            pytest.raises(TransportUnavailable, match=r"'cuda-vmm' is blocked: .*shared-memory"),
        ):
            blocked.publish(weights(), weight_version=1)


# ---- suspicion ----------------------------------------------------------------------------------


def test_an_observer_may_publish_from_inside_a_publication() -> None:
    """What ends a publication that was cut off leaves one that runs alone."""

    def publish_another(step: Transition) -> None:
        if step.event is Event.PUBLISH and step.weight_version == 1:
            inner.append(trainer.publish(fours(2), weight_version=2))

    inner: list[WeightUpdateManifest] = []
    with SharedMemoryTensorBridge(observer=publish_another, suspicious="off") as trainer:
        outer = trainer.publish(fours(1), weight_version=1)
        for manifest, value in ((outer, 1.0), (inner[0], 2.0)):
            assert trainer.import_update(manifest)["weight"].tolist() == [value] * 4


def test_an_unknown_update_is_said_to_be_unknown(bridge: TensorBridge) -> None:
    with pytest.raises(UnknownUpdate, match=r"f{32}: neither published nor imported here"):
        bridge.update_status("f" * 32)
    with pytest.raises(UnknownUpdate, match="did not publish it"):
        bridge.get_manifest("f" * 32)
    assert bridge.rejection_reason("f" * 32) is None


def test_records_of_publications_stay_bounded_and_unreleased_ones_are_kept() -> None:
    with make_weight_bridge("local-clone", suspicious="off") as bridge:
        kept = bridge.publish(weights(), weight_version=0)
        for version in range(1, 2 * REMEMBERED):
            manifest = bridge.publish(weights(), weight_version=version)
            bridge.release(manifest.update_id)
        publisher = bridge.publisher
        assert len(publisher._updates) == REMEMBERED
        assert bridge.update_status(kept.update_id) == "published"
        assert bridge.update_status(manifest.update_id) == "released"


def test_a_publication_that_fails_half_way_holds_nothing(
    bridge: TensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights()
    bridge.release(bridge.publish(state, weight_version=1).update_id)
    held = bridge.published_nbytes

    def broken(*_: object, **__: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.memory.packing.PackPlan.pack", broken)
        with pytest.raises(MemoryError):
            bridge.publish(state, weight_version=2)
    state["layer.bias"].add_(1)
    manifest = bridge.publish(state, weight_version=2)
    assert bridge.published_nbytes <= max(held, 2 * manifest.table.arena_nbytes)
    imported = bridge.import_update(manifest)
    assert bytes_of(imported["layer.bias"]) == bytes_of(state["layer.bias"])


def test_memory_that_runs_out_is_a_segment_error_and_leaves_the_version_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with make_weight_bridge("shared-memory") as bridge:
        assert bridge.publisher_id
        with monkeypatch.context() as patch:
            patch.setattr("rl_bridge.memory.segment.os.ftruncate", full)
            with pytest.raises(SegmentError, match=r"No space left.*Free memory"):
                bridge.publish(weights(), weight_version=1)
        bridge.publish(weights(), weight_version=1)

"""Publishing: a sealed snapshot, and a number that is used up only by success."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    DuplicateTensorName,
    IncompatibleUpdate,
    MalformedManifest,
    RangeOverflow,
    SuspiciousUpdate,
    TransportUnavailable,
    VersionNotMonotonic,
    WeightBridgeUnavailableError,
)
from rl_bridge.lifecycle import Event, Role, Transition
from rl_bridge.manifest import Policy
from rl_bridge.testing.strategies import bytes_of
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


def test_the_snapshot_does_not_change_with_the_trainers_next_step(bridge: TensorBridge) -> None:
    state = weights()
    before = {name: bytes_of(tensor) for name, tensor in state.items()}
    manifest = bridge.publish(state, weight_version=1)
    for tensor in state.values():
        tensor.add_(1)
    imported = bridge.import_update(manifest)
    assert {name: bytes_of(tensor) for name, tensor in imported.items()} == before


def test_the_metadata_of_the_caller_is_copied(bridge: TensorBridge) -> None:
    metadata: dict[str, Any] = {"a": [1]}
    manifest = bridge.publish(weights(), weight_version=1, metadata=metadata)
    metadata["a"].append(2)
    assert manifest.metadata["a"] == (1,)


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
        manifest = bridge.publish(source, weight_version=version)
        assert set(manifest.tensors) == {"weight", "bias"}
        bridge.release(manifest.update_id)


def test_a_modules_trainable_parameters_are_declared(bridge: TensorBridge) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert bridge.publish(model, weight_version=1).table.trainable == "01"
    assert bridge.publish(model.state_dict(), weight_version=2).table.trainable is None
    declared = bridge.publish(model.state_dict(), weight_version=3, trainable=["bias"])
    assert declared.table.trainable == "10"


def test_a_late_joiner_is_given_the_latest_manifest(bridge: TensorBridge) -> None:
    assert bridge.latest_manifest is None
    for version in (1, 2):
        manifest = bridge.publish(weights(version), weight_version=version)
        assert bridge.latest_manifest is manifest


def test_phase_times_are_told(bridge: TensorBridge) -> None:
    manifest = bridge.publish(weights(), weight_version=1)
    timings = bridge.timings(manifest.update_id)
    assert {"gather", "stage_digest", "seal", "publish"} <= set(timings)
    assert all(ms >= 0 for ms in timings.values())
    assert bridge.timings("f" * 32) == {}


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


@pytest.mark.parametrize("version", [-1, 1.0, "1", None, True, 2**63], ids=repr)
def test_a_version_is_a_natural_number(version: Any, bridge: TensorBridge) -> None:
    with pytest.raises(MalformedManifest, match="weight_version"):
        bridge.publish(weights(), weight_version=version)
    bridge.publish(weights(), weight_version=0)


def test_versions_only_grow(bridge: TensorBridge) -> None:
    bridge.publish(weights(1), weight_version=5)
    for version in (5, 4, 0):
        with pytest.raises(
            VersionNotMonotonic, match="weight_version must increase monotonically: got"
        ):
            bridge.publish(weights(2), weight_version=version)
    assert bridge.publish(weights(3), weight_version=7).weight_version == 7


def test_four_threads_that_publish_at_once_stay_monotonic(tmp_path: Path) -> None:
    done: list[WeightUpdateManifest] = []
    lock = threading.Lock()
    start = threading.Barrier(4)
    with make_weight_bridge("shared-memory", state_dir=tmp_path, max_slots=20) as bridge:

        def work() -> None:
            state = weights(threading.get_ident() % 1000)
            start.wait(30)
            for version in range(1, 9):
                try:
                    manifest = bridge.publish(state, weight_version=version)
                except VersionNotMonotonic:
                    continue
                with lock:
                    done.append(manifest)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        versions = sorted(manifest.weight_version for manifest in done)
        assert versions == sorted(set(versions))
        assert versions[-1] == 8
        for manifest in done:
            bridge.import_update(manifest)


def test_a_restarted_publisher_cannot_reuse_a_number(tmp_path: Path) -> None:
    for version in (3, 4):
        with make_weight_bridge("shared-memory", state_dir=tmp_path) as bridge:
            identity = bridge.publish(weights(), weight_version=version).publisher_id
    with make_weight_bridge("shared-memory", state_dir=tmp_path) as bridge:
        assert bridge.publisher_id == identity
        with pytest.raises(VersionNotMonotonic, match="was 4"):
            bridge.publish(weights(), weight_version=4)


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


def test_a_no_op_is_refused_under_reject_and_leaves_the_version_free() -> None:
    with make_weight_bridge("shared-memory", suspicious="reject", max_slots=2) as bridge:
        state = weights()
        first = bridge.publish(state, weight_version=1)
        for _ in range(3):
            with pytest.raises(SuspiciousUpdate, match=r"version 2 \(after 1\) changes nothing"):
                bridge.publish(state, weight_version=2)
        state["layer.bias"].add_(1)
        second = bridge.publish(state, weight_version=2)
        # The slot of the refused one was not lost.
        assert bridge.import_update(second)
        bridge.release(first.update_id)


@pytest.mark.parametrize(("policy", "num_warnings"), [(Policy.WARN, 1), (Policy.OFF, 0)])
def test_a_no_op_is_logged_or_not(
    policy: Policy, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with make_weight_bridge("local-clone", suspicious=policy) as bridge:
        for version in (1, 2):
            bridge.publish(weights(), weight_version=version)
    assert sum("changes nothing" in message for message in caplog.messages) == num_warnings


def test_an_unknown_policy_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        make_weight_bridge("local-clone", suspicious="sometimes")

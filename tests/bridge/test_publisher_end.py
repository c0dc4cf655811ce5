"""Publishing, when it ends: release, failure, close, fork; and bridges by name."""

import pytest

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.bridge import WeightBridge
from rl_bridge.bridge.publisher import _REMEMBERED as REMEMBERED
from rl_bridge.errors import (
    BridgeClosed,
    SegmentError,
    SlotsExhausted,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.lifecycle import State
from rl_bridge.testing.strategies import bytes_of
from tests.helpers import forked, forking, open_fds, weights

# ---- release, close, failures -------------------------------------------------------------------


def test_releasing_is_idempotent_and_ignores_unknown_ids(bridge: TensorBridge) -> None:
    manifest = bridge.publish(weights(), weight_version=1)
    for _ in range(2):
        bridge.release(manifest.update_id)
        bridge.release("f" * 32)
    assert bridge.update_status(manifest.update_id) == "released"
    assert bridge.update_state(manifest.update_id) is State.RELEASED


def test_an_unknown_update_is_said_to_be_unknown(bridge: TensorBridge) -> None:
    with pytest.raises(UnknownUpdate, match=r"f{32}: neither published nor imported here"):
        bridge.update_status("f" * 32)
    with pytest.raises(UnknownUpdate, match="did not publish it"):
        bridge.get_manifest("f" * 32)
    assert bridge.rejection_reason("f" * 32) is None


def test_the_books_stay_bounded_and_unreleased_updates_stay_in_them() -> None:
    with make_weight_bridge("local-clone", suspicious="off") as bridge:
        kept = bridge.publish(weights(), weight_version=0)
        for version in range(1, 400):
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


def test_updates_that_are_never_released_end_in_an_error_that_says_so() -> None:
    with make_weight_bridge("shared-memory", max_slots=2, suspicious="off") as bridge:
        first = bridge.publish(weights(), weight_version=1)
        bridge.publish(weights(), weight_version=2)
        with pytest.raises(SlotsExhausted, match=f"{first.update_id}: the publisher has not rel"):
            bridge.publish(weights(), weight_version=3)
        bridge.release(first.update_id)
        assert bridge.publish(weights(), weight_version=3)


def test_a_closed_bridge_publishes_and_tells_nothing(bridge: TensorBridge) -> None:
    bridge.publish(weights(), weight_version=1)
    bridge.close()
    bridge.close()
    with pytest.raises(BridgeClosed, match="Make a new"):
        bridge.publish(weights(), weight_version=2)
    with pytest.raises(BridgeClosed):
        bridge.consumers()
    unused = make_weight_bridge(bridge.transport)
    unused.close()
    with pytest.raises(BridgeClosed, match=r"is closed. Make a new one"):
        unused.publish(weights(), weight_version=1)


def test_closing_gives_every_descriptor_back(bridge: TensorBridge) -> None:
    before = open_fds()
    with make_weight_bridge(bridge.transport) as other:
        manifest = other.publish(weights(), weight_version=1)
        other.import_update(manifest)
    assert open_fds() == before


@forking
def test_a_forked_child_cannot_publish_and_disturbs_nobody(bridge: TensorBridge) -> None:
    manifest = bridge.publish(weights(), weight_version=1)

    def child() -> bool:
        with pytest.raises(BridgeClosed, match="belongs to the parent process"):
            bridge.publish(weights(), weight_version=2)
        bridge.close()
        return True

    assert forked(child)
    assert bridge.import_update(manifest)
    bridge.publish(weights(1), weight_version=2)


# ---- the bridge as a whole ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rdma", "multi-node", "nccl-rdma"])
def test_transports_of_many_nodes_answer_with_the_sentence_that_users_know(name: str) -> None:
    with pytest.raises(
        WeightBridgeUnavailableError,
        match=f"multi-node/RDMA weight transport is not implemented .*'{name}'.*shared-memory, or "
        "go between machines with 'broadcast' or 'nixl'",
    ):
        make_weight_bridge(name)


def test_an_unknown_transport_names_the_known_ones() -> None:
    with pytest.raises(WeightBridgeUnavailableError, match="'pigeon', expected one of: local-cl"):
        make_weight_bridge("pigeon")


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_slotz"):
        make_weight_bridge("shared-memory", max_slotz=3)
    with pytest.raises(ValueError, match="max_slots=0"):
        make_weight_bridge("shared-memory", max_slots=0)


@pytest.mark.parametrize(
    ("short", "full"), [("local", "local-clone"), ("shm", "shared-memory"), ("ipc", "cuda-ipc")]
)
def test_short_forms_mean_the_same_transport(short: str, full: str) -> None:
    bridge = make_weight_bridge(short)
    assert bridge.transport == full
    assert isinstance(bridge, WeightBridge)

"""The executor's transaction: its order, what it leaves behind, and what a failed one undoes."""

from collections.abc import Mapping

import pytest
import torch

from rl_bridge import (
    InstallProof,
    RolloutExecutor,
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    StaleUpdate,
    SuspiciousUpdate,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from tests.bridge.engines import Recording, bridge_of, content, publish
from tests.helpers import weights

# ---- success ------------------------------------------------------------------------------------


def test_an_update_is_installed_proven_acknowledged_and_the_old_one_released_in_this_order(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    executor.update_weights(first)
    assert adapter.calls == ["prepare", "install", "prove", "commit"]
    adapter.calls.clear()
    tensors = executor.update_weights(second.to_json())
    assert adapter.calls == [
        "prepare",
        "install",
        "prove",
        "commit",
        f"release {first.update_id[:4]}",
    ]
    assert content(adapter.engine) == content(weights(2)) == content(tensors)
    assert executor.active_weight_version == 2
    assert executor.active_weight_update_id == second.update_id
    assert executor.shared_weights is tensors
    bridge = bridge_of(executor)
    assert bridge.update_status(first.update_id) == "released"
    assert bridge.update_status(second.update_id) == "acknowledged"
    assert bridge.active_weight_version == 2
    executor.check_servable()


def test_the_acknowledgement_tells_version_proof_phases_and_memory(
    publisher: TensorBridge, executor: RolloutExecutor
) -> None:
    manifest = publish(publisher, 3)
    before = executor.last_ack
    executor.update_weights(manifest)
    ack = executor.last_ack
    assert before is None
    assert ack is not None
    assert (ack.update_id, ack.weight_version) == (manifest.update_id, 3)
    assert (ack.root, ack.total_nbytes) == (manifest.root, manifest.total_nbytes)
    assert ack.proof == InstallProof(method="digest", root=manifest.root, tensors=3)
    assert ack.peak_rss_nbytes > 1 << 20
    assert {"attach", "verify", "prepare", "install", "prove", "total"} <= set(ack.timings_ms)
    parts = sum(ms for phase, ms in ack.timings_ms.items() if phase != "total")
    assert parts <= ack.timings_ms["total"] + 1
    (report,) = publisher.holders(manifest.update_id)
    assert report.proof is not None
    assert report.proof["root"] == manifest.root
    assert report.proof["total_nbytes"] == manifest.total_nbytes
    assert {"verify", "install", "prove", "total"} <= set(report.timings_ms)


def test_without_an_adapter_the_imported_mapping_is_what_serves(publisher: TensorBridge) -> None:
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(weight_bridge=bridge)
        tensors = executor.update_weights(manifest)
        assert content(tensors) == content(weights(1))
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "import"
        assert executor.shared_weights is tensors
        executor.release_weights()
        assert executor.shared_weights == {}
        assert executor.active_weight_update_id is None
        assert executor.active_weight_version == 1
        executor.release_weights()
        assert bridge.update_status(manifest.update_id) == "released"


def test_without_a_bridge_the_executor_makes_one() -> None:
    executor = RolloutExecutor(weight_transport="local")
    assert bridge_of(executor).transport == "local-clone"
    assert bridge_of(executor).source_worker == "rollout"
    executor.recover()
    with pytest.raises(WeightBridgeUnavailableError, match="no verified version yet"):
        executor.check_servable()


class _OwnConsumer:
    """A consumer of the user's own, with nothing but the protocol's four methods."""

    def __init__(self, bridge: TensorBridge) -> None:
        self._bridge = bridge
        self.calls: list[str] = []

    def import_update(self, manifest: WeightUpdateManifest) -> Mapping[str, torch.Tensor]:
        self.calls.append("import")
        return self._bridge.import_update(manifest)

    def acknowledge(self, update_id: str) -> None:
        self.calls.append("acknowledge")

    def reject(self, update_id: str, reason: str) -> None:
        self.calls.append(f"reject: {reason}")

    def release(self, update_id: str) -> None:
        self.calls.append("release")


def test_a_consumer_of_the_users_own_needs_only_the_protocol(
    publisher: TensorBridge, adapter: Recording
) -> None:
    with make_weight_bridge(publisher.transport) as bridge:
        consumer = _OwnConsumer(bridge)
        executor = RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter)
        executor.update_weights(publish(publisher, 1))
        adapter.fails["install"] = LookupError("no")
        with pytest.raises(LookupError):
            executor.update_weights(publish(publisher, 2))
        del adapter.fails["install"]
        executor.update_weights(publish(publisher, 3))
        assert consumer.calls == [
            "import",
            "acknowledge",
            "import",
            "reject: rollout weight install failed: LookupError: no",
            "import",
            "acknowledge",
            "release",
        ]
        assert executor.last_ack is not None
        assert "verify" not in executor.last_ack.timings_ms


# ---- refused before the engine is touched -------------------------------------------------------


def test_the_active_update_is_not_installed_again(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    manifest = publish(publisher, 1)
    executor.update_weights(manifest)
    adapter.calls.clear()
    with pytest.raises(StaleUpdate, match=r"version 1 .* is active already"):
        executor.update_weights(manifest)
    assert adapter.calls == []
    assert bridge_of(executor).update_status(manifest.update_id) == "acknowledged"


def test_an_older_version_never_reaches_the_engine(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    first, second = publish(publisher, 1), publish(publisher, 2)
    executor.update_weights(second)
    adapter.calls.clear()
    with pytest.raises(StaleUpdate):
        executor.update_weights(first)
    assert adapter.calls == []
    assert content(adapter.engine) == content(weights(2))


def test_a_corrupt_update_never_reaches_the_engine(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    adapter.calls.clear()
    manifest = publish(publisher, 2)
    altered = manifest.model_copy(update={"digests": bytes(len(manifest.digests))})
    with pytest.raises(ChecksumMismatch, match="tensor checksum mismatch"):
        executor.update_weights(altered)
    assert adapter.calls == []
    assert executor.active_weight_version == 1
    (report,) = publisher.holders(manifest.update_id)
    assert (report.state, "checksum" in str(report.reason)) == ("rejected", True)


def test_what_prepare_refuses_leaves_the_engine_as_it_was(
    publisher: TensorBridge, executor: RolloutExecutor, adapter: Recording
) -> None:
    executor.update_weights(publish(publisher, 1))
    refusal = IncompatibleUpdate("tensor 'x': the engine has none")
    adapter.fails["prepare"] = refusal
    adapter.calls.clear()
    manifest = publish(publisher, 2)
    with pytest.raises(IncompatibleUpdate) as caught:
        executor.update_weights(manifest)
    assert caught.value is refusal
    assert refusal.__notes__ == [
        (
            "rl_bridge: version 2 was refused before the engine was touched; "
            "the engine holds version 1."
        )
    ]
    assert adapter.calls == ["prepare"]
    assert content(adapter.engine) == content(weights(1))
    assert (
        bridge_of(executor).rejection_reason(manifest.update_id) == f"IncompatibleUpdate: {refusal}"
    )
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        executor.update_weights(manifest)


@pytest.mark.parametrize("policy", ["warn", "reject", "off"])
def test_a_suspicious_update_is_told_refused_or_let_through(
    policy: str, publisher: TensorBridge, adapter: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    state = weights(1)
    first = publisher.publish(state, weight_version=1)
    second = publisher.publish(state, weight_version=2)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious=policy
        )
        executor.update_weights(first)
        adapter.calls.clear()
        if policy == "reject":
            with pytest.raises(SuspiciousUpdate, match=r"version 2 \(after 1\) changes nothing"):
                executor.update_weights(second)
            assert adapter.calls == []
            assert executor.active_weight_version == 1
        else:
            executor.update_weights(second)
            assert executor.active_weight_version == 2
        told = any("changes nothing" in message for message in caplog.messages)
        assert told is (policy != "off")


@pytest.mark.parametrize("policy", ["warn", "reject"])
def test_installing_the_released_update_once_more_is_not_suspicious(
    policy: str, publisher: TensorBridge, adapter: Recording, caplog: pytest.LogCaptureFixture
) -> None:
    # After a loss: the engine was reloaded and needs its version again.
    manifest = publish(publisher, 1)
    with make_weight_bridge(publisher.transport) as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=adapter, suspicious=policy
        )
        executor.update_weights(manifest)
        executor.release_weights()
        adapter.engine["steps"].zero_()
        executor.update_weights(manifest)
        assert content(adapter.engine) == content(weights(1))
        assert executor.active_weight_update_id == manifest.update_id
        assert caplog.messages == []


@pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=["the same", "another dtype"])
def test_another_publisher_may_begin_with_the_same_weights_or_with_another_dtype(
    kind: torch.dtype, publisher: TensorBridge, caplog: pytest.LogCaptureFixture
) -> None:
    # A trainer that was started anew: what it publishes first is what the engine holds.
    source = {"w": torch.ones(4)}
    with (
        make_weight_bridge(publisher.transport) as bridge,
        make_weight_bridge(publisher.transport) as later,
    ):
        executor = RolloutExecutor(weight_bridge=bridge, suspicious="reject")
        executor.update_weights(publisher.publish(source, weight_version=7))
        begun = {"w": source["w"].to(kind)}
        executor.update_weights(later.publish(begun, weight_version=1))
        assert executor.active_weight_version == 1
        assert caplog.messages == []
        with pytest.raises(SuspiciousUpdate, match="changes nothing"):
            executor.update_weights(later.publish(begun, weight_version=2))

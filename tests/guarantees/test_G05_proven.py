"""G5 Proven: no acknowledgement without a proof of what the engine really holds.

The proof reads the engine, in its own layout, and fails when one byte is changed behind the
installer's back. Its method is one of `digest`, `digest+canary`, `identity`, `import` and, where an
adapter shows nothing of its engine, `unproven`.

It ends at the moment of the proof: what an engine does to its weights later is not watched. It
speaks of the tensors that the adapter was given or shows.
"""

import pytest
import torch

from rl_bridge import (
    InstallProof,
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.errors import ProofFailed, WeightBridgeError
from rl_bridge.testing import BridgeOver, Stage, engine_state, poke, sample_engine
from tests.guarantees.kit import ModuleReplica, Replica, Tensors, TwoVerbAdapter, engine_tensors


def test_an_acknowledgement_carries_the_root_of_what_the_engine_holds(replica: Replica) -> None:
    acknowledgement = replica.update(1)
    manifest = replica.trainer.latest_manifest
    assert manifest is not None
    assert acknowledgement.root == acknowledgement.proof.root == manifest.root
    assert acknowledgement.proof.method in {"digest", "digest+canary", "identity"}
    read = acknowledgement.proof.digested_nbytes + acknowledgement.proof.identical_nbytes
    assert read >= manifest.total_nbytes
    assert acknowledgement.proof.tensors == manifest.tensor_count


def test_the_proof_reaches_the_publisher(replica: Replica) -> None:
    acknowledgement = replica.update(1)
    (report,) = replica.reports(acknowledgement.update_id)
    assert report.state == "acknowledged"
    assert report.proof is not None
    assert report.proof["root"] == acknowledgement.root
    assert report.proof["method"] == acknowledgement.proof.method


def test_one_byte_changed_behind_the_adapters_back_is_found_and_undone(replica: Replica) -> None:
    before = replica.update(1)
    replica.damage_next()
    with pytest.raises(ProofFailed):
        replica.update(2)
    assert replica.executor.last_ack == before
    assert replica.version == before.weight_version
    assert replica.holds(1)
    refused = replica.trainer.latest_manifest
    assert refused is not None
    assert [report.state for report in replica.reports(refused.update_id)] == ["rejected"]
    replica.mend()
    replica.update(2)
    assert replica.holds(2)


def test_every_tensor_is_read_to_its_last_byte(replica: Replica) -> None:
    if not isinstance(replica, ModuleReplica):
        pytest.skip("its own tests damage each of its parameters")
    replica.update(1)
    for name, tensor in engine_tensors(replica.engine).items():
        for place in (0, -1) if tensor.numel() else ():
            before = engine_state(replica.engine)

            def change(name: str = name, place: int = place) -> None:
                poke(engine_tensors(replica.engine)[name], place)

            replica.rig.sabotage.plan(Stage.AFTER_INSTALL, action=change)
            with pytest.raises(ProofFailed):
                replica.update(2)
            assert engine_state(replica.engine) == before, name


def test_the_same_bytes_read_another_way_are_no_proof(replica: Replica) -> None:
    if not isinstance(replica, ModuleReplica):
        pytest.skip("an engine in a process of its own")
    replica.update(1)
    square = replica.engine.get_parameter("square.weight")

    def transpose() -> None:
        square.data = square.data.t()

    def reinterpret() -> None:
        square.data = square.data.view(torch.float16)

    for change in (transpose, reinterpret):
        replica.rig.sabotage.plan(Stage.AFTER_INSTALL, action=change)
        with pytest.raises(ProofFailed):
            replica.update(2)
        assert replica.holds(1)


def test_tied_weights_of_the_engine_stay_one_tensor(replica: Replica) -> None:
    if not isinstance(replica, ModuleReplica):
        pytest.skip("an engine in a process of its own")
    for number in (1, 2):
        replica.update(number)
        tied = [replica.engine.get_parameter(name) for name in ("head.weight", "embed.weight")]
        assert len({tensor.data_ptr() for tensor in tied}) == 1


def test_over_every_transport_the_proof_is_of_what_was_published(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    engine = sample_engine()
    with RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine)
    ) as executor:
        for version in (1, 2):
            source = sample_engine(seed=version)
            manifest = trainer.publish(source, weight_version=version)
            executor.update_weights(manifest.to_json())
            assert executor.last_ack is not None
            assert executor.last_ack.proof.root == manifest.root
            again = make_weight_bridge("local-clone").publish(engine, weight_version=1)
            assert again.root == manifest.root


# ---- who shows nothing --------------------------------------------------------------------------


class OfItsOwn(TwoVerbAdapter):
    """An adapter with two verbs that proves by itself, or hides what it holds."""

    def __init__(self, engine: torch.nn.Module, root: str | None) -> None:
        super().__init__(engine)
        if root is None:
            self._hidden = vars(self).pop("engine")
        else:
            self.prove = lambda: InstallProof(method="digest", root=root)

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        """Install nothing at all."""


def test_an_adapter_that_shows_nothing_is_acknowledged_as_unproven() -> None:
    adapter = OfItsOwn(sample_engine(), None)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.update_weights(bridge.publish(sample_engine(seed=1), weight_version=1))
        assert executor.last_ack is not None
        assert executor.last_ack.proof == InstallProof(method="unproven")


def test_an_adapter_whose_own_proof_is_of_something_else_is_not_acknowledged() -> None:
    adapter = OfItsOwn(sample_engine(), "0" * 32)
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        with pytest.raises(WeightBridgeError):
            executor.update_weights(bridge.publish(sample_engine(seed=1), weight_version=1))
        assert executor.last_ack is None
        assert executor.active_weight_version is None


def test_an_adapter_of_two_verbs_that_installs_nothing_is_found_out() -> None:
    class Lazy(TwoVerbAdapter):
        def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
            """Forget to."""

    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=Lazy(sample_engine())
        ) as executor,
        pytest.raises(ProofFailed),
    ):
        executor.update_weights(bridge.publish(sample_engine(seed=1), weight_version=1))


def test_without_an_adapter_the_verified_mapping_itself_is_the_proof() -> None:
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge) as executor,
    ):
        manifest = bridge.publish({"w": torch.ones(3)}, weight_version=1)
        tensors = executor.update_weights(manifest)
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "import"
        assert executor.last_ack.proof.root == manifest.root
        assert torch.equal(tensors["w"], executor.shared_weights["w"])

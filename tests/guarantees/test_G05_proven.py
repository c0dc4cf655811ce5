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
from rl_bridge.testing import BridgeOver, sample_engine
from tests.guarantees.kit import (
    OverEachAdapter,
    OverEachTransport,
    Tensors,
    TwoVerbAdapter,
    on_engines,
    scenarios,
)


@scenarios(
    "test_an_acknowledgement_says_what_was_installed_proven_and_how_long_it_took",
    "test_the_proof_reaches_the_publisher",
    "test_the_proof_fails_when_one_byte_differs",
    "test_the_proof_fails_when_a_tensor_is_read_another_way",
    "test_tied_tensors_of_the_engine_stay_tied",
)
class TestEachAdapter(OverEachAdapter):
    """The proof reads the engine, and fails when one byte of it is another one."""


ENGINES = on_engines(
    "test_version_after_version_the_engine_answers_as_a_fresh_one",
    "test_one_byte_changed_behind_an_install_is_found_and_undone",
)


@scenarios()
class TestEachTransport(OverEachTransport):
    def test_the_proof_is_of_what_was_published(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        engine = sample_engine()
        with RolloutExecutor(
            weight_bridge=consumer, weight_install_adapter=ModuleInstallAdapter(engine)
        ) as executor:
            for version in (1, 2):
                source = sample_engine(seed=version)
                manifest = publisher.publish(source, weight_version=version)
                executor.update_weights(manifest.to_json())
                assert executor.last_ack is not None
                assert executor.last_ack.proof.root == manifest.root
                again = make_weight_bridge("local-clone").publish(engine, weight_version=1)
                assert again.root == manifest.root


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

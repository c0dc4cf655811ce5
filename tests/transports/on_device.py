"""What a transport keeps whose slots lie in memory of torch's allocator: here it is the host's."""

import pytest
import torch

from rl_bridge import RolloutExecutor
from rl_bridge.errors import ChecksumMismatch, WeightBridgeError
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.leaks import assert_nothing_leaks
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.testing.tensors import contents_of, random_tensor


class InTorchMemory:
    """Inherit with fixtures `trainer`, whose transport injects faults, and `rollout`."""

    def test_versions_arrive_one_after_the_other(
        self, trainer: BridgeOver, rollout: BridgeOver
    ) -> None:
        taken = []
        for version in range(1, 9):
            source = sample_weights(version)
            manifest = trainer.publish(source, weight_version=version)
            assert contents_of(rollout.import_update(manifest)) == contents_of(source)
            taken.append(trainer.published_nbytes)
            rollout.acknowledge(manifest.update_id)
            rollout.release(manifest.update_id)
            trainer.release(manifest.update_id)
        assert max(taken) == max(taken[:2])

    def test_tensors_keep_their_bytes_for_as_long_as_they_live(
        self, trainer: BridgeOver, rollout: BridgeOver
    ) -> None:
        first = trainer.publish(sample_weights(1), weight_version=1)
        held = rollout.import_update(first)
        rollout.release(first.update_id)
        trainer.release(first.update_id)
        for version in range(2, 7):
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            rollout.import_update(manifest)
            rollout.release(manifest.update_id)
            trainer.release(manifest.update_id)
        rollout.close()
        trainer.close()
        assert contents_of(held) == contents_of(sample_weights(1))

    def test_damaged_bytes_are_found(self, trainer: BridgeOver, rollout: BridgeOver) -> None:
        given = trainer.given
        assert isinstance(given, FaultInjecting)
        given.locate = lambda end, update_id, _: end.snapshot(update_id).address  # type: ignore[attr-defined]
        given.corrupt_next = True
        bad = trainer.publish(sample_weights(1), weight_version=1)
        with pytest.raises(ChecksumMismatch):
            rollout.import_update(bad)
        good = trainer.publish(sample_weights(2), weight_version=2)
        assert contents_of(rollout.import_update(good)) == contents_of(sample_weights(2))

    @pytest.mark.parametrize("mode", ["copy", "alias"])
    def test_versions_are_installed_by_copy_and_alias(
        self, trainer: BridgeOver, rollout: BridgeOver, mode: str
    ) -> None:
        engine, source = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
        adapter = ModuleInstallAdapter(engine, mode=mode)  # type: ignore[arg-type]  # one of its words
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        for version in (1, 2, 3):
            with torch.no_grad():
                source.weight.add_(version)
            executor.update_weights(trainer.publish(source, weight_version=version))
            assert torch.equal(engine.weight, source.weight)
        executor.close()

    def test_a_flip_of_memory_that_cannot_be_mapped_is_refused(
        self, trainer: BridgeOver, rollout: BridgeOver
    ) -> None:
        engine, source = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
        before = engine.weight.detach().clone()
        adapter = ModuleInstallAdapter(engine, mode="flip")
        executor = RolloutExecutor(weight_bridge=rollout, weight_install_adapter=adapter)
        with pytest.raises(WeightBridgeError, match="flip"):
            executor.update_weights(trainer.publish(source, weight_version=1))
        assert torch.equal(engine.weight, before)

    def test_nothing_is_left_behind(self, trainer: BridgeOver, rollout: BridgeOver) -> None:
        version = 0

        def cycle() -> None:
            nonlocal version
            version += 1
            source = {"w": random_tensor("uint8", (1 << 20,), seed=version)}
            manifest = trainer.publish(source, weight_version=version)
            rollout.import_update(manifest)
            rollout.release(manifest.update_id)
            trainer.release(manifest.update_id)

        assert_nothing_leaks(cycle, num_cycles=20)

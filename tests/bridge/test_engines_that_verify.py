"""Adapters whose engine imports and verifies updates itself: the executor leases, and asks."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from rl_bridge import (
    SharedMemoryTensorBridge,
    WeightUpdateManifest,
)
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, WeightUpdateRejectedError
from rl_bridge.lifecycle import Transition
from rl_bridge.remote import TwoPhaseExecutor
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from tests.bridge.engines import Verifying, content, publish
from tests.helpers import weights


class Rig:
    """A trainer whose bytes can be damaged, the executor's process, and the engine's."""

    def __init__(self) -> None:
        self.damaged = FaultInjecting(SharedMemory())
        self.steps: list[str] = []
        self.trainer = BridgeOver(self.damaged)
        self.ranks = SharedMemoryTensorBridge(source_worker="engine")
        self.bridge = SharedMemoryTensorBridge(source_worker="rollout", observer=self._note)
        self.engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        self.adapter = Verifying(self.engine, self.ranks)
        self.executor = TwoPhaseExecutor(
            weight_bridge=self.bridge, weight_install_adapter=self.adapter
        )

    def _note(self, step: Transition) -> None:
        self.steps += [*self.adapter.calls, str(step.event)]
        self.adapter.calls.clear()

    def damage(self, version: int, name: str = "layer.bias") -> WeightUpdateManifest:
        """A version that went bad when it was published."""
        manifest = publish(self.trainer, version)
        self.damaged.corrupt(manifest, manifest.tensors[name].offset)
        return manifest

    def told(self, manifest: WeightUpdateManifest) -> dict[str, tuple[str, str | None]]:
        return {r.worker: (r.state, r.reason) for r in self.trainer.holders(manifest)}

    def close(self) -> None:
        for end in (self.executor, self.bridge, self.ranks, self.trainer):
            end.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_it_is_verified_when_the_engine_said_so_and_not_staged_before(rig: Rig) -> None:
    rig.executor.update_weights(publish(rig.trainer, 1))
    assert rig.steps[:4] == ["import", "prepare", "verify", "stage"]
    assert rig.steps[-1] == "acknowledge"
    assert content(rig.engine) == content(weights(1))


def test_the_trainer_is_told_when_the_engine_has_verified_it(rig: Rig) -> None:
    seen: list[str] = []
    manifest = publish(rig.trainer, 1)
    plain = rig.adapter.install

    def install(manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        seen.append(rig.told(manifest)["rollout"][0])
        plain(manifest, tensors)

    rig.adapter.install = install  # type: ignore[method-assign]
    rig.executor.update_weights(manifest)
    assert seen == ["verified"]


def test_what_update_weights_returns_is_verified_when_it_is_read_first(rig: Rig) -> None:
    good = publish(rig.trainer, 1)
    tensors = rig.executor.update_weights(good)
    assert content(tensors) == content(weights(1))
    rig.executor.release_weights()
    assert content(tensors) == content(weights(1))
    bad = rig.damage(2)
    rig.adapter.claims = bad.root  # an engine that lies: nobody has read the bytes
    with pytest.raises(ChecksumMismatch, match=r"'layer\.bias' in version 2"):
        rig.executor.update_weights(bad)  # by its install, which reads them here
    assert content(rig.engine) == content(weights(1))
    assert rig.told(bad)["rollout"][0] == "rejected"


def test_the_names_of_what_it_returns_are_known_without_reading_a_byte(rig: Rig) -> None:
    rig.adapter.install = lambda *_: None  # type: ignore[method-assign]
    bad = rig.damage(1)
    rig.adapter.claims = bad.root
    tensors = rig.executor.update_weights(bad)
    assert set(tensors) == set(weights())
    assert "layer.bias" in tensors
    assert "layer.none" not in tensors
    assert len(tensors) == len(weights())
    with pytest.raises(KeyError):
        tensors["layer.none"]
    with pytest.raises(ChecksumMismatch, match=r"'layer\.bias'"):
        tensors["layer.weight"]


def test_bytes_that_the_engine_finds_bad_are_refused_as_if_found_here(rig: Rig) -> None:
    rig.executor.update_weights(publish(rig.trainer, 1))
    rig.steps.clear()
    rig.adapter.calls.clear()
    bad = rig.damage(2)
    with pytest.raises(
        ChecksumMismatch, match=r"^tensor checksum mismatch for 'layer.bias' in version 2: expected"
    ) as caught:
        rig.executor.update_weights(bad)
    assert "refused before the engine was touched" in caught.value.__notes__[-1]
    assert rig.steps == ["import", "reject"]
    assert content(rig.engine) == content(weights(1))
    assert rig.executor.active_weight_version == 1
    reason = f"ChecksumMismatch: {caught.value}"
    assert rig.told(bad) == {"rollout": ("rejected", reason), "engine": ("rejected", reason)}
    with pytest.raises(WeightUpdateRejectedError, match="was rejected"):
        rig.executor.update_weights(bad)
    rig.executor.update_weights(publish(rig.trainer, 3))
    assert content(rig.engine) == content(weights(3))


def test_a_manifest_that_was_changed_on_its_way_is_refused_before_the_engine_hears_of_it(
    rig: Rig,
) -> None:
    good = publish(rig.trainer, 1)
    digests = bytes([good.digests[0] ^ 1]) + good.digests[1:]
    with pytest.raises(ChecksumMismatch, match=r"'layer\.bias'"):
        rig.executor.update_weights(good.model_copy(update={"digests": digests}))
    with pytest.raises(DigestMismatch, match="header"):
        rig.executor.update_weights(good.model_copy(update={"metadata": {"step": 9}}))
    assert rig.adapter.calls == []
    rig.executor.update_weights(good)  # the one that was published may come
    assert content(rig.engine) == content(weights(1))


def test_an_interrupt_while_the_engine_verifies_leaves_the_update_as_it_was(rig: Rig) -> None:
    manifest = publish(rig.trainer, 1)
    rig.adapter.fails["prepare"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.executor.update_weights(manifest)
    assert rig.steps == ["import", "prepare", "release"]
    del rig.adapter.fails["prepare"]
    rig.executor.update_weights(manifest)
    assert content(rig.engine) == content(weights(1))


def test_in_two_phases_the_import_reads_every_byte_by_itself(rig: Rig) -> None:
    with pytest.raises(ChecksumMismatch, match=r"'layer\.weight'"):
        rig.executor.import_weights(rig.damage(1, "layer.weight"))
    assert rig.adapter.calls == []
    good = publish(rig.trainer, 2)
    rig.steps.clear()
    rig.executor.import_weights(good)
    rig.executor.prepare_weights(good)
    rig.executor.commit_weights(good)
    assert rig.steps[:4] == ["import", "verify", "prepare", "stage"]
    ack = rig.executor.last_ack
    assert ack is not None
    mine = rig.bridge.timings(good.update_id)["verify"]
    assert ack.timings_ms["verify"] == mine  # the engine's own is a part of prepare


def test_in_two_phases_the_import_may_leave_the_bytes_to_the_engine(rig: Rig) -> None:
    bad = rig.damage(1, "layer.weight")
    rig.executor.import_weights(bad, reads=False)
    with pytest.raises(ChecksumMismatch, match=r"'layer\.weight'"):
        rig.executor.prepare_weights(bad)
    good = publish(rig.trainer, 2)
    rig.steps.clear()
    rig.executor.import_weights(good, reads=False)
    rig.executor.prepare_weights(good)
    rig.executor.commit_weights(good)
    assert rig.steps[:4] == ["import", "prepare", "verify", "stage"]
    assert content(rig.engine) == content(weights(2))


def test_the_engines_verification_is_told_as_a_phase_of_its_own(rig: Rig) -> None:
    manifest = publish(rig.trainer, 1)
    rig.executor.update_weights(manifest)
    ack = rig.executor.last_ack
    assert ack is not None
    timings = dict(ack.timings_ms)
    assert timings["verify"] == rig.adapter.told_ms["verify"]
    assert all(ms >= 0 for ms in timings.values())
    assert sum(timings.values()) - timings["total"] <= timings["total"]
    (report,) = [r for r in rig.trainer.holders(manifest) if r.worker == "rollout"]
    assert report.timings_ms["verify"] == timings["verify"]


def test_the_mapping_of_an_update_that_was_refused_holds_no_memory(rig: Rig) -> None:
    held: list[Mapping[str, torch.Tensor]] = []
    plain = rig.adapter.prepare

    def prepare(manifest: WeightUpdateManifest, tensors: Mapping[str, torch.Tensor]) -> None:
        held.append(tensors)
        plain(manifest, tensors)

    rig.adapter.prepare = prepare  # type: ignore[method-assign]
    bad = rig.damage(1)
    with pytest.raises(ChecksumMismatch):
        rig.executor.update_weights(bad)
    with pytest.raises(WeightUpdateRejectedError, match="refused or undone"):
        held[0]["layer.bias"]
    assert not any(report.tensors_held for report in rig.trainer.holders(bad))

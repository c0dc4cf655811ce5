"""``broadcast``: what arrives is verified, once, and while the rest is on its way."""

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.bridge import BroadcastTensorBridge
from rl_bridge.errors import ChecksumMismatch, DigestMismatch, SegmentError, StaleUpdate
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.digest import digest_bytes
from rl_bridge.manifest.table import TensorTable
from rl_bridge.memory import vm
from rl_bridge.memory.arrival_digest import ArrivalPlan
from rl_bridge.memory.views import Attachment
from rl_bridge.testing.peer import engine_weights, hashes, sample_weights
from rl_bridge.testing.processes import until
from rl_bridge.testing.tensors import contents_of, random_tensor
from rl_bridge.transports.broadcast import group, receiver, sender
from rl_bridge.transports.wire.arenas import Arrivals, CPUArenas
from tests.bridge.engines import Verifying
from tests.transports.broadcast_rig import at_transfer, big_weights


def bridge(worker: str, **options: Any) -> BroadcastTensorBridge:
    made = make_weight_bridge(
        "broadcast",
        source_worker=worker,
        suspicious="off",
        nonfinite="off",
        timeout_s=20.0,
        **options,
    )
    assert isinstance(made, BroadcastTensorBridge)
    return made


@pytest.fixture
def trainer() -> Iterator[BroadcastTensorBridge]:
    with bridge("trainer") as made:
        yield made


@pytest.fixture
def rollout(trainer: BroadcastTensorBridge) -> Iterator[BroadcastTensorBridge]:
    with bridge("rollout") as made:
        yield made


def flip_last(arena: torch.Tensor) -> None:
    """A byte that the wire delivered as another one."""
    arena[0] ^= 255


@pytest.mark.parametrize("number", [1, 3], ids=["unknown layout", "digested on arrival"])
def test_bytes_that_change_on_the_wire_never_reach_the_engine(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge, number: int
) -> None:
    engine = engine_weights(0)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine)
    )
    with at_transfer(receiver, number, flip_last):
        for version in range(1, number):
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            executor.update_weights(manifest)
        before = hashes(engine)
        bad = trainer.publish(sample_weights(number), weight_version=number)
        with pytest.raises(ChecksumMismatch, match="tensor checksum mismatch"):
            executor.update_weights(bad)
        assert hashes(engine) == before
        good = trainer.publish(sample_weights(number + 1), weight_version=number + 1)
        executor.update_weights(good)
    assert executor.active_weight_version == number + 1
    executor.close()


def test_a_manifest_of_another_version_number_than_the_bytes_is_refused(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    with pytest.raises(DigestMismatch, match="weight_version"):
        rollout.import_update(manifest.model_copy(update={"weight_version": 2}))
    assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))


def test_a_steady_update_is_digested_on_arrival_and_not_once_more(
    trainer: BroadcastTensorBridge,
    rollout: BroadcastTensorBridge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    whole = Attachment._digest_all

    def counting(self: Attachment) -> bytes:
        passes.append(1)
        return whole(self)

    monkeypatch.setattr(Attachment, "_digest_all", counting)
    for version in (1, 2, 3):
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        tensors = rollout.import_update(manifest)
        assert contents_of(tensors) == contents_of(sample_weights(version))
        rollout.acknowledge(manifest.update_id)
        del tensors
        rollout.release(manifest.update_id)
        trainer.release(manifest.update_id)
    assert len(passes) == 1 or vm.private_ranges(0, 0) is None


def test_pages_that_an_engine_wrote_are_not_taken_for_the_arrived_bytes(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    """A page of an earlier version that was written to must not hide behind a digest."""
    for version in range(1, 6):
        source = sample_weights(version)
        manifest = trainer.publish(source, weight_version=version)
        tensors = rollout.import_update(manifest)
        assert contents_of(tensors) == contents_of(source)
        for tensor in tensors.values():
            tensor.zero_()
        del tensor, tensors
        rollout.release(manifest.update_id)
        trainer.release(manifest.update_id)


@pytest.mark.parametrize("slice_nbytes", [4096, 1 << 17, 1 << 18, 1 << 22])
def test_digests_of_an_arrival_equal_those_of_the_whole(slice_nbytes: int) -> None:
    sizes = [0, 1, 5000, 131_072, 131_073, 700_001, 0, 300_000, 262_144, 17]
    table = TensorTable.pack({f"{i:02}": ("uint8", (n,)) for i, n in enumerate(sizes)})
    arena = random_tensor("uint8", (table.arena_nbytes,), seed=1)
    digest = ArrivalPlan(table, slice_nbytes).start(arena.data_ptr())
    for watermark in range(slice_nbytes, table.arena_nbytes, slice_nbytes):
        digest.advance(watermark)
        assert digest.digests() is None
    digest.advance(table.arena_nbytes)
    expected = b"".join(
        digest_bytes(arena[offset : offset + nbytes].numpy().tobytes())
        for offset, nbytes in zip(table.offsets, table.nbytes, strict=True)
    )
    assert digest.digests() == expected


def test_an_update_of_nothing_but_empty_tensors_is_digested() -> None:
    table = TensorTable.pack({"a": ("int8", (0,)), "b": ("int8", (3, 0))})
    digest = ArrivalPlan(table, 4096).start(4096)
    digest.advance(0)
    assert digest.digests() == digest_bytes(b"") * 2


def test_a_layout_of_another_size_than_was_offered_is_not_digested_on_arrival() -> None:
    """A publisher that says so must not make a receiver read beyond its slot."""
    table = TensorTable.pack({"w": ("uint8", (1 << 20,))})
    arrivals = Arrivals(CPUArenas(), "rlb-test")
    arrivals.learn(table)
    slot = arrivals.reserve(4096)
    assert arrivals.digest_of(table.digest, 4096, slot, 4096) is None
    assert arrivals.digest_of(table.digest, 4096, slot, 1 << 20) is not None
    arrivals.abandon(slot)
    arrivals.close()


def test_only_contiguous_memory_is_sent_whatever_the_sources_strides_are(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    base = random_tensor("float32", (600, 500), seed=1)
    source = {
        "transposed": base.t(),
        "columns": base[:, ::3],
        "expanded": base[0].expand(400, 500),
        "reversed view": base.flip(0)[::2],
    }
    manifest = trainer.publish(source, weight_version=1)
    assert contents_of(rollout.import_update(manifest)) == contents_of(source)


def test_a_version_that_is_released_on_the_wire_arrives_whole(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    """Its slot is not written again before its last byte is out."""
    rollout.import_update(trainer.publish(big_weights(1), weight_version=1))
    is_under_way, may_go_on = threading.Event(), threading.Event()

    def wait(_: torch.Tensor) -> None:
        is_under_way.set()
        assert may_go_on.wait(60)

    with at_transfer(sender, 1, wait):
        second = trainer.publish(big_weights(2), weight_version=2)
        assert is_under_way.wait(60)
        trainer.release(second.update_id)
        for version in (3, 4):
            trainer.publish(big_weights(version), weight_version=version)
        may_go_on.set()
        assert contents_of(rollout.import_update(second)) == contents_of(big_weights(2))


def test_a_transfer_that_broke_off_keeps_nothing_of_the_group_alive() -> None:
    """Nothing more is begun, nobody waits for the others, and the error holds no sockets."""

    class Work:
        pass

    class Broken:
        def __init__(self) -> None:
            self.works: list[weakref.ref[Work]] = []
            self.num_finished = 0

        def broadcast(self, _: torch.Tensor) -> Work:
            work = Work()
            self.works.append(weakref.ref(work))
            return work

        def finish(self, work: Work) -> None:
            self.num_finished += 1
            if self.num_finished == 2:
                raise RuntimeError("Connection reset by peer\nand much more")

    broken: Any = Broken()
    arena = torch.zeros(100, dtype=torch.uint8)
    marks: list[int] = []
    with pytest.raises(SegmentError, match=r"by peer\. Send") as caught:
        group.send_slices(broken, arena, 10, meanwhile=marks.append)
    assert caught.value.__traceback__ is not None
    assert (broken.num_finished, len(broken.works)) == (2, 4)
    assert marks == [10]
    assert [work() for work in broken.works] == [None] * 4


def test_two_receivers_cost_one_transfer(
    trainer: BroadcastTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = group.send_slices

    def counting(members: Any, *rest: Any, **named: Any) -> None:
        sizes.append(members._group.size())
        send(members, *rest, **named)

    monkeypatch.setattr(sender, "send_slices", counting)
    with (
        bridge("one", init_info=trainer.init_info()) as one,
        bridge("two", init_info=trainer.init_info()) as two,
    ):
        one.join()
        two.join()
        for version in (1, 2, 3):
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            for engine in (one, two):
                tensors = engine.import_update(manifest)
                assert contents_of(tensors) == contents_of(sample_weights(version))
    assert sizes == [3, 3, 3]


def test_a_late_engine_gets_the_current_version_by_a_transfer_of_its_own(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    first = trainer.publish(sample_weights(1), weight_version=1)
    rollout.import_update(first)
    second = trainer.publish(sample_weights(2), weight_version=2)
    with bridge("late") as late:
        assert contents_of(late.import_update(second)) == contents_of(sample_weights(2))
        assert contents_of(late.import_update(first)) == contents_of(sample_weights(1))
    assert contents_of(rollout.import_update(second)) == contents_of(sample_weights(2))


def test_versions_that_nobody_imports_are_not_kept(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    rollout.import_update(trainer.publish(sample_weights(1), weight_version=1))
    arrivals = rollout.consumer.end._clients[trainer.publisher_id][1]  # type: ignore[attr-defined]
    manifest = None
    for version in range(2, 12):
        if manifest is not None:
            trainer.release(manifest.update_id)
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        until(partial(arrivals.find, manifest.update_id), what="it arrives")
    assert len(arrivals._arrived) <= 3
    assert len(arrivals._ring) <= 5


def test_a_version_that_was_released_before_it_was_asked_for_is_stale(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge
) -> None:
    rollout.import_update(trainer.publish(sample_weights(1), weight_version=1))
    with bridge("late") as late:
        gone = trainer.publish(sample_weights(2), weight_version=2)
        trainer.release(gone.update_id)
        with pytest.raises(StaleUpdate, match="latest"):
            late.import_update(gone)


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_every_install_mode_works_on_an_arrived_version(
    trainer: BroadcastTensorBridge, rollout: BroadcastTensorBridge, mode: Any
) -> None:
    engine = torch.nn.Linear(300, 200)
    source = torch.nn.Linear(300, 200)
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine, mode=mode)
    )
    for version in range(1, 6):
        with torch.no_grad():
            source.weight.add_(version)
        manifest = trainer.publish(source, weight_version=version)
        executor.update_weights(manifest)
        assert torch.equal(engine.weight, source.weight)
        trainer.release(manifest.update_id)
    executor.close()


def test_a_driver_whose_engine_imports_by_itself_is_in_no_transfer(
    trainer: BroadcastTensorBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = group.send_slices

    def counting(members: Any, *rest: Any, **named: Any) -> None:
        sizes.append(members._group.size())
        send(members, *rest, **named)

    monkeypatch.setattr(sender, "send_slices", counting)
    with bridge("engine") as rank, bridge("driver") as driver:
        adapter = Verifying(engine_weights(0), rank)
        executor = RolloutExecutor(weight_bridge=driver, weight_install_adapter=adapter)
        for version in (1, 2, 3):
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            tensors = executor.update_weights(manifest)
            assert {one.worker for one in trainer.holders(manifest)} == {"engine", "driver"}
        assert sizes == [2, 2, 2], "trainer and engine"
        assert contents_of(tensors) == contents_of(sample_weights(3))
        assert sizes == [2, 2, 2, 2]
        executor.close()

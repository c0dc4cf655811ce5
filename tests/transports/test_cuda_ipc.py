"""``cuda-ipc`` keeps every promise of a transport, on host memory; and what only it can refuse."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from rl_bridge.cuda import views as ipc_view
from rl_bridge.cuda.devices import driver_at
from rl_bridge.cuda.driver import CAPTURING, INVALID_VALUE, driver_error
from rl_bridge.cuda.host import HostIPCDriver
from rl_bridge.cuda.owners import settle_late
from rl_bridge.errors import (
    DriverError,
    MalformedManifest,
    RangeBeyondSegment,
    SegmentError,
    TransportUnavailable,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.testing import TransportSuite
from rl_bridge.testing.faults import HostIPC, Locate, published_address
from rl_bridge.testing.peer import BridgeOver, Peer, hashes, sample_weights
from rl_bridge.testing.processes import Child
from rl_bridge.testing.tensors import contents_of
from tests.helpers import open_fds
from tests.transports.cuda_rig import changed, publish, refuse_once, shown

INVALID_HANDLE, OPENING = "CUDA_ERROR_INVALID_HANDLE", "cuIpcOpenMemHandle"


class TestOnHostMemory(TransportSuite):
    transport_class = HostIPC
    locate: ClassVar[Locate] = staticmethod(published_address)


@pytest.fixture
def trainer() -> Iterator[BridgeOver]:
    with BridgeOver(HostIPC()) as made:
        yield made


@pytest.fixture
def rollout() -> Iterator[BridgeOver]:
    with BridgeOver(HostIPC()) as made:
        yield made


@pytest.fixture
def elsewhere() -> Iterator[Child]:
    """A trainer in another process."""
    with Child(Peer, transport_class=HostIPC, transport_kwargs={}, worker="trainer") as child:
        yield child


def published(elsewhere: Child, version: int = 1) -> WeightUpdateManifest:
    text = elsewhere.call("publish", seed=version, weight_version=version)
    return WeightUpdateManifest.from_json(text)


def host() -> HostIPCDriver:
    driver = driver_at("host", None)
    assert isinstance(driver, HostIPCDriver)
    return driver


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of legacy IPC that this process makes."""
    made: list[str] = []
    for name in ("alloc", "dealloc", "open_ipc", "close_ipc"):
        inner = getattr(HostIPCDriver, name)

        def call(driver: Any, *args: Any, _name: str = name, _inner: Any = inner) -> Any:
            made.append(_name)
            return _inner(driver, *args)

        monkeypatch.setattr(HostIPCDriver, name, call)
    return made


# ---- what travels, and how often it is opened ---------------------------------------------------


def test_a_handle_is_64_bytes_as_text_and_nothing_is_called_to_open_it(
    trainer: BridgeOver,
) -> None:
    handle = json.loads(publish(trainer).to_json())["header"]["handle"]
    assert set(handle["arena"]) == {"driver", "device", "nbytes", "handle", "namespace"}
    assert len(bytes.fromhex(handle["arena"]["handle"])) == 64


def test_a_slot_is_opened_once_for_all_its_versions(
    elsewhere: Child, rollout: BridgeOver, calls: list[str]
) -> None:
    for version in range(1, 8):
        manifest = published(elsewhere, version)
        found = hashes(rollout.import_update(manifest))
        assert found == hashes(sample_weights(version))
        rollout.release(manifest.update_id)
        elsewhere.call("release", update_id=manifest.update_id)
    assert calls == ["open_ipc"]
    rollout.close()
    assert calls == ["open_ipc", "close_ipc"]


def test_in_the_publishers_own_process_the_pointer_is_used(
    trainer: BridgeOver, rollout: BridgeOver, calls: list[str]
) -> None:
    assert shown(rollout, publish(trainer)) == {1.0}
    assert calls == ["alloc"]


def test_an_engine_that_keeps_its_tensors_costs_the_publisher_no_slot(rollout: BridgeOver) -> None:
    kept = []
    with BridgeOver(HostIPC(max_slots=1)) as trainer:
        for version in range(1, 8):
            manifest = publish(trainer, version)
            kept.append(rollout.import_update(manifest)["w"])
            trainer.release(manifest.update_id)
    assert [set(tensor.tolist()) for tensor in kept] == [{float(n)} for n in range(1, 8)]


def test_what_is_written_to_the_shared_memory_later_reaches_no_engine(
    elsewhere: Child, rollout: BridgeOver
) -> None:
    # A handle opens memory to be written: somebody else's engine may do so, and its trainer.
    manifest = published(elsewhere)
    expected = contents_of(sample_weights(1))
    tensors = rollout.import_update(manifest)
    raw = bytes.fromhex(manifest.handle["arena"]["handle"])
    at = host().open_ipc(raw)
    vm.tensor_at(at, manifest.table.arena_nbytes).fill_(7)
    host().close_ipc(at)
    assert contents_of(tensors) == expected
    assert contents_of(rollout.import_update(manifest)) == expected
    with BridgeOver(HostIPC()) as late, pytest.raises(WeightBridgeError, match="checksum"):
        late.import_update(manifest)


# ---- who frees what, and when -------------------------------------------------------------------


def test_memory_that_a_consumer_has_open_is_freed_when_it_closed(
    trainer: BridgeOver, calls: list[str]
) -> None:
    with Child(Peer, transport_class=HostIPC, transport_kwargs={}) as rollout:
        rollout.call("import_update", manifest=publish(trainer).to_json())
        trainer.close()
        settle_late()
        assert calls == ["alloc"]
        rollout.call("close")
        settle_late()
        assert calls == ["alloc", "dealloc"]


def test_a_publisher_that_died_is_told_before_its_memory_is_touched(
    elsewhere: Child, rollout: BridgeOver
) -> None:
    first, second = published(elsewhere, 1), published(elsewhere, 2)
    held = rollout.import_update(first)
    rollout.import_update(second)
    rollout.reject(second, "its slot is known")
    elsewhere.kill()
    with BridgeOver(HostIPC()) as late, pytest.raises(SegmentError, match="is gone"):
        late.import_update(second)
    third = first.model_copy(update={"update_id": "c" * 32, "weight_version": 3})
    with pytest.raises(SegmentError, match="its memory went with it"):
        rollout.import_update(third)
    assert contents_of(held) == contents_of(sample_weights(1))


def test_a_slot_that_is_refused_leaves_nothing(
    trainer: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trainer)
    before = (host().num_plain(), set(open_fds()))
    for name in ("alloc", "ipc_handle"):
        with monkeypatch.context() as patch:
            refuse_once(patch, HostIPCDriver, name, "CUDA_ERROR_OUT_OF_MEMORY")
            with pytest.raises(DriverError, match="refused, as planned"):
                publish(trainer, 2)
        assert (host().num_plain(), set(open_fds())) == before
    publish(trainer, 3)


# ---- blocked, with the cause: the update is as good as before -----------------------------------


def test_a_runtime_that_rebuilds_no_handle_says_so_in_the_words_of_the_table(
    elsewhere: Child, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, before = published(elsewhere), set(open_fds())
    refuse_once(monkeypatch, HostIPCDriver, "open_ipc", INVALID_HANDLE, call=OPENING)
    told = r"CUDA IPC handle reconstruction failed: .*INVALID_HANDLE.*Use cuda-vmm"
    with pytest.raises(TransportUnavailable, match=told) as kept:
        rollout.import_update(manifest)
    assert kept.value.transport == HostIPC.name
    # The way back stays open; what was opened for the slot does not, though the error is kept.
    assert len(set(open_fds()) - before) == 1
    assert hashes(rollout.import_update(manifest)) == hashes(sample_weights(1))


def test_another_ipc_namespace_is_named_as_the_cause(
    elsewhere: Child, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = published(elsewhere)
    mine = ipc_view.ipc_namespace()
    assert manifest.handle["arena"]["namespace"] == mine != 0
    refuse_once(monkeypatch, HostIPCDriver, "open_ipc", INVALID_HANDLE, call=OPENING)
    with monkeypatch.context() as patch:
        patch.setattr(ipc_view, "ipc_namespace", lambda: mine + 1)
        with pytest.raises(TransportUnavailable, match=r"IPC namespace .*--ipc=host"):
            rollout.import_update(manifest)
    assert hashes(rollout.import_update(manifest)) == hashes(sample_weights(1))


def test_a_publisher_in_another_container_is_out_of_reach_and_not_dead(
    elsewhere: Child, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = published(elsewhere)
    mine = ipc_view.ipc_namespace()
    with monkeypatch.context() as patch:
        patch.setattr(ipc_view, "ipc_namespace", lambda: mine + 1)
        patch.setattr("rl_bridge.transports.cuda.process_start_time", lambda _: None)
        with pytest.raises(TransportUnavailable, match=r"is not to be seen.*one process namespace"):
            rollout.import_update(manifest)
    assert hashes(rollout.import_update(manifest)) == hashes(sample_weights(1))


def test_a_gpu_that_this_process_does_not_see_is_named(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(name: str, uuid: str) -> object:
        raise driver_error("cuDeviceGetUuid", "CUDA_ERROR_INVALID_DEVICE", f"{name} {uuid} is not")

    manifest = publish(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(ipc_view, "driver_of", nobody)
        with pytest.raises(TransportUnavailable, match=r"host host is not.*Name a GPU"):
            rollout.import_update(manifest)
    assert shown(rollout, manifest) == {1.0}


def test_a_side_that_is_short_of_memory_for_its_copy_may_try_again(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    manifest = publish(trainer)
    with monkeypatch.context() as patch:
        patch.setattr("rl_bridge.memory.views.vm.map_anonymous", none)
        with pytest.raises(WeightBridgeUnavailableError, match="memory for a copy") as kept:
            rollout.import_update(manifest)
    end: Any = trainer.publisher
    held = leases.is_held(end.end._ring._slots[0].segment.fd)
    assert not held, f"although {kept.value!r} is kept"
    assert shown(rollout, manifest) == {1.0}


def test_an_import_while_a_graph_is_captured_may_come_again(
    trainer: BridgeOver, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publish(trainer)
    refuse_once(monkeypatch, HostIPCDriver, "size_at", CAPTURING)
    with pytest.raises(TransportUnavailable, match="Let the capture of the CUDA graph end"):
        rollout.import_update(manifest)
    assert shown(rollout, manifest) == {1.0}


def test_a_probe_passes_where_memory_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostIPC.probe().status == "pass"
    refuse_once(monkeypatch, HostIPCDriver, "ipc_handle", "CUDA_ERROR_NOT_SUPPORTED")
    assert "ipc_handle failed with CUDA_ERROR_NOT_SUPPORTED" in HostIPC.probe().cause


# ---- manifests that cannot be right -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"driver": "cuda"}, TransportUnavailable, "memory of 'cuda' and this side of 'host'"),
        ({"nbytes": 1024}, RangeBeyondSegment, "does not fit its allocation of 1024"),
        ({"nbytes": 1 << 40}, RangeBeyondSegment, f"opens {2 << 20} bytes and the manifest says"),
        ({"handle": "00" * 63}, MalformedManifest, "handle field arena.handle"),
        ({"handle": "AB" * 64}, MalformedManifest, "handle field arena.handle"),
        ({"namespace": -1}, MalformedManifest, "handle field arena.namespace"),
        ({"callable": "os.system"}, MalformedManifest, "handle field arena.callable"),
    ],
)
def test_an_arena_that_cannot_be_right_is_refused(
    elsewhere: Child,
    rollout: BridgeOver,
    fields: dict[str, Any],
    error: type[WeightBridgeError],
    told: str,
) -> None:
    with pytest.raises(error, match=told):
        rollout.import_update(changed(published(elsewhere), "arena", **fields))
    assert host().num_plain() == (0, 0)


def test_a_handle_that_a_driver_calls_none_ends_the_update(
    elsewhere: Child, rollout: BridgeOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = published(elsewhere)
    refuse_once(monkeypatch, HostIPCDriver, "open_ipc", INVALID_VALUE, call=OPENING)
    with pytest.raises(DriverError, match="refused, as planned"):
        rollout.import_update(manifest)
    assert rollout.update_status(manifest.update_id) == "rejected"

"""G7 Bounded: every wait has a deadline, and every failure a type.

A dead peer is noticed by the kernel (its lock or its socket is gone), a living one that hangs by a
deadline. A reader that hangs pins one slot, and never blocks a publisher.

It ends at your adapter: how long `install` takes is its own business.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_bridge.errors
from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import (
    BridgeClosed,
    DeadlineExceeded,
    SegmentError,
    SlotsExhausted,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing import BridgeOver, Child, contents_of, sample_weights, until, watchdog
from tests.guarantees.kit import Carrier

SHARING = ["shared-memory", "shared-memory-in-files", "cuda-vmm-on-host", "cuda-ipc-on-host"]


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    with watchdog(60):
        yield


def stop(child: Child) -> None:
    """Let a process stand still, as one that hangs does: every thread of it."""
    os.kill(child.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{child.pid}/task")
    until(
        lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()),
        what="it stands still",
    )


def publish_all(trainer: BridgeOver, versions: range) -> None:
    for version in versions:
        manifest = trainer.publish(sample_weights(version), weight_version=version)
        trainer.release(manifest.update_id)


# ---- readers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", SHARING, indirect=True)
def test_a_reader_that_hangs_pins_one_slot_and_the_publisher_goes_on(
    trainer: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    first = trainer.publish(sample_weights(1), weight_version=1)
    reader = make_peer("reader")
    reader.call("import_update", manifest=first.to_json())
    stop(reader)
    trainer.release(first.update_id)
    publish_all(trainer, range(2, 4))
    size = trainer.published_nbytes
    publish_all(trainer, range(4, 20))
    assert trainer.published_nbytes == size
    (report,) = trainer.holders(first)
    assert (report.worker, report.presence) == ("reader", "alive")


def test_where_every_slot_is_held_the_error_names_the_holder() -> None:
    held: list[Mapping[str, torch.Tensor]] = []
    with (
        make_weight_bridge("shared-memory", source_worker="trainer", max_slots=3) as trainer,
        make_weight_bridge("shared-memory", source_worker="hoarder") as hoarder,
    ):
        for version in (1, 2, 3):
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            held.append(hoarder.import_update(manifest))
            trainer.release(manifest.update_id)
            hoarder.release(manifest.update_id)
        with pytest.raises(SlotsExhausted, match="hoarder"):
            trainer.publish(sample_weights(4), weight_version=4)
        held.pop()
        assert trainer.publish(sample_weights(4), weight_version=4)


def test_a_reader_that_died_is_gone_and_its_memory_is_used_again(
    trainer: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    first = trainer.publish(sample_weights(1), weight_version=1)
    reader = make_peer("reader")
    reader.call("import_update", manifest=first.to_json())
    reader.kill()
    until(
        lambda: {report.presence for report in trainer.holders(first)} <= {"gone"},
        what="the kernel drops the reader's locks",
    )
    trainer.release(first.update_id)
    publish_all(trainer, range(2, 4))
    size = trainer.published_nbytes
    publish_all(trainer, range(4, 12))
    assert trainer.published_nbytes == size


# ---- publishers ---------------------------------------------------------------------------------


def test_the_manifest_of_a_dead_publisher_is_refused_or_true_and_that_at_once(
    rollout: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    trainer = make_peer("trainer")
    manifest = trainer.call("publish", seed=1, weight_version=1)
    trainer.kill()
    with watchdog(10), suppress(WeightBridgeError):
        # (Files stay until the next sweep.)
        assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))


@pytest.mark.parametrize("transport", ["shared-memory", "shared-memory-in-files"], indirect=True)
def test_over_shared_memory_a_publisher_that_hangs_is_not_waited_for(
    rollout: BridgeOver, make_peer: Callable[..., Child]
) -> None:
    trainer = make_peer("trainer")
    manifest = trainer.call("publish", seed=1, weight_version=1)
    stop(trainer)
    with watchdog(10):
        assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))
        rollout.acknowledge(manifest)


@pytest.mark.parametrize("transport", ["cuda-vmm-on-host", "broadcast"], indirect=True)
def test_a_publisher_that_hangs_costs_a_reader_its_deadline_and_no_more(
    transport: Carrier, make_peer: Callable[..., Child]
) -> None:
    trainer = make_peer("trainer")
    manifest = trainer.call("publish", seed=1, weight_version=1)
    stop(trainer)
    impatient = Carrier(transport.transport, {**transport.options, "timeout_s": 0.3})
    with impatient.bridge() as rollout, watchdog(15):
        with pytest.raises(WeightBridgeUnavailableError, match=r"in time|timeout_s"):
            rollout.import_update(manifest)
        os.kill(trainer.pid, signal.SIGCONT)
    with transport.bridge() as rollout:  # nothing was rejected: the update may come again
        assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))


@pytest.mark.parametrize("transport", ["cuda-vmm", "broadcast", "nixl"])
@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), None, "1"])
def test_a_deadline_is_a_positive_number_of_seconds(transport: str, timeout_s: object) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        make_weight_bridge(transport, timeout_s=timeout_s)


# ---- calls --------------------------------------------------------------------------------------


def test_an_update_from_inside_an_update_is_refused_and_does_not_wait_for_itself() -> None:
    told: list[BaseException] = []

    class Impatient(ModuleInstallAdapter):
        def install(self, manifest: object, tensors: Mapping[str, torch.Tensor]) -> None:
            with pytest.raises(WeightUpdateRejectedError, match="from inside an update") as caught:
                executor.update_weights(manifest)  # type: ignore[arg-type]
            told.append(caught.value)
            super().install(manifest, tensors)  # type: ignore[arg-type]

    engine = {"w": torch.zeros(3)}
    with (
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=Impatient(engine)) as executor,
    ):
        executor.update_weights(bridge.publish({"w": torch.ones(3)}, weight_version=1))
    assert len(told) == 1
    assert torch.equal(engine["w"], torch.ones(3))


def test_whatever_is_closed_says_so(trainer: BridgeOver, rollout: BridgeOver) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    for bridge in (trainer, rollout):
        bridge.close()
        bridge.close()
    with pytest.raises(BridgeClosed):
        trainer.publish(sample_weights(2), weight_version=2)
    with pytest.raises((BridgeClosed, SegmentError)):
        rollout.import_update(manifest)


def test_every_error_is_a_weight_bridge_error_and_each_name_is_public() -> None:
    kinds = [vars(rl_bridge.errors)[name] for name in rl_bridge.errors.__all__]
    assert len(kinds) > 30
    for kind in kinds:
        assert issubclass(kind, WeightBridgeError)
        assert kind.__doc__
    assert issubclass(DeadlineExceeded, TimeoutError)


@pytest.mark.parametrize(
    "options",
    [{"max_slots": 0}, {"num_threads": 0}, {"source_rank": -1}, {"suspicious": "loud"}, {"no": 1}],
    ids=str,
)
def test_a_call_that_is_wrong_in_itself_is_pythons_type_or_value_error(
    options: dict[str, Any],
) -> None:
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=name):
        make_weight_bridge("shared-memory", **options)

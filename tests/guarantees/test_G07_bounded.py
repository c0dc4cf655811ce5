"""G7 Bounded: every wait has a deadline, and every failure a type.

A dead peer is noticed by the kernel (its lock or its socket is gone), a living one that hangs by a
deadline. A reader that hangs pins one slot, and never blocks a publisher.

It ends at your adapter: how long `install` takes is its own business.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import rl_bridge.errors
from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import (
    DeadlineExceeded,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
)
from rl_bridge.testing import (
    BridgeOver,
    contents_of,
    sample_weights,
    stop_process,
    watchdog,
)
from tests.guarantees.kit import OverEachTransport, on_engines, scenarios

SHARING = ["shared-memory", "shared-memory-in-files", "cuda-vmm-on-host", "cuda-ipc-on-host"]


def publish_all(publisher: BridgeOver, versions: range) -> None:
    for version in versions:
        manifest = publisher.publish(sample_weights(version), weight_version=version)
        publisher.release(manifest.update_id)


@pytest.fixture(autouse=True)
def no_test_hangs() -> Iterator[None]:
    with watchdog(60):
        yield


@scenarios(
    "test_a_holder_that_never_lets_go_cannot_make_the_publisher_wait",
    "test_a_consumer_killed_at_any_transition_disturbs_nobody",
    "test_a_dead_publishers_update_is_refused_or_true",
    "test_an_unknown_publisher_is_refused",
    "test_close_is_idempotent_and_final",
)
class TestEachTransport(OverEachTransport):
    """Readers and publishers that hang, die or are closed keep nobody waiting."""

    @pytest.mark.parametrize("transport", SHARING, indirect=True)
    def test_a_reader_that_hangs_pins_one_slot_and_the_publisher_goes_on(
        self, publisher: BridgeOver, make_peer: Any
    ) -> None:
        first = publisher.publish(sample_weights(1), weight_version=1)
        reader = make_peer(worker="reader")
        reader.call("import_update", manifest=first.to_json())
        stop_process(reader.pid)
        publisher.release(first.update_id)
        publish_all(publisher, range(2, 4))
        size = publisher.published_nbytes
        publish_all(publisher, range(4, 20))
        assert publisher.published_nbytes == size
        (report,) = publisher.holders(first)
        assert (report.worker, report.presence) == ("reader", "alive")

    @pytest.mark.parametrize(
        "transport", ["shared-memory", "shared-memory-in-files"], indirect=True
    )
    def test_over_shared_memory_a_publisher_that_hangs_is_not_waited_for(
        self, consumer: BridgeOver, make_peer: Any
    ) -> None:
        trainer = make_peer(worker="trainer")
        manifest = trainer.call("publish", seed=1, weight_version=1)
        stop_process(trainer.pid)
        with watchdog(10):
            assert contents_of(consumer.import_update(manifest)) == contents_of(sample_weights(1))
            consumer.acknowledge(manifest)

    @pytest.mark.parametrize("transport", ["cuda-vmm-on-host", "broadcast"], indirect=True)
    def test_a_publisher_that_hangs_costs_a_reader_its_deadline_and_no_more(
        self, make_bridge: Any, make_peer: Any
    ) -> None:
        trainer = make_peer(worker="trainer")
        manifest = trainer.call("publish", seed=1, weight_version=1)
        stop_process(trainer.pid)
        impatient = self.transport_class.create(**{**self.options, "timeout_s": 0.3})
        with BridgeOver(impatient) as consumer, watchdog(15):
            with pytest.raises(WeightBridgeUnavailableError, match=r"in time|timeout_s"):
                consumer.import_update(manifest)
            os.kill(trainer.pid, signal.SIGCONT)
        found = make_bridge().import_update(manifest)  # nothing was rejected: it may come again
        assert contents_of(found) == contents_of(sample_weights(1))


ENGINES = on_engines(
    "test_a_rank_that_is_killed_is_a_typed_error_and_a_fresh_engine_takes_the_version",
    "test_an_update_whose_engine_does_not_answer_before_it_is_installed_may_come_again",
    "test_a_driver_that_hears_only_some_of_the_ranks_is_refused",
    "test_an_answer_to_another_call_is_not_taken",
    "test_what_a_rank_is_short_of_costs_no_update",
    "test_an_update_over_the_memory_budget_is_refused_before_it_is_staged",
)


@pytest.mark.parametrize("transport", ["cuda-vmm", "broadcast", "nixl"])
@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan"), None, "1"])
def test_a_deadline_is_a_positive_number_of_seconds(transport: str, timeout_s: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout_s"):
        make_weight_bridge(transport, timeout_s=timeout_s)


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

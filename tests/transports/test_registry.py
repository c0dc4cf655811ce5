"""Transports of one's own: what the registry takes, what it refuses, and what it is good for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.transports import registry
from rl_bridge.transports.base import Transport
from rl_bridge.transports.local import LocalClone
from rl_bridge.transports.registry import TRANSPORTS, probe, register_transport, transport_class


class Pigeon(LocalClone):
    """Another name for what works."""

    name = "pigeon"


@pytest.fixture
def pigeon() -> Iterator[type[Transport]]:
    yield register_transport(Pigeon)
    del registry._KINDS["pigeon"]


def test_a_registered_transport_is_found_by_its_name(pigeon: type[Transport]) -> None:
    assert transport_class("pigeon") is TRANSPORTS["pigeon"] is pigeon
    assert probe("pigeon").status == "pass"


def test_a_bridge_is_made_for_every_transport_that_is_registered(
    pigeon: type[Transport], tmp_path: Path
) -> None:
    for name in TRANSPORTS:
        options: dict[str, object] = {"url": tmp_path} if name == "files" else {}
        with make_weight_bridge(name, **options) as bridge:  # type: ignore[arg-type]  # its own
            assert isinstance(bridge, TensorBridge)
            assert bridge.transport == name


def test_an_update_travels_over_a_registered_transport(pigeon: type[Transport]) -> None:
    weights = {"w": torch.arange(5.0)}
    with (
        make_weight_bridge("pigeon", source_worker="trainer", num_threads=1) as trainer,
        make_weight_bridge("pigeon", source_worker="rollout") as rollout,
    ):
        manifest = trainer.publish(weights, weight_version=1)
        assert manifest.transport == "pigeon"
        assert torch.equal(rollout.import_update(manifest)["w"], weights["w"])
        rollout.acknowledge(manifest.update_id)
        (report,) = trainer.holders(manifest.update_id)
        assert (report.worker, report.state) == ("rollout", "acknowledged")


def test_registering_the_same_class_again_changes_nothing(pigeon: type[Transport]) -> None:
    before = dict(TRANSPORTS)
    assert register_transport(Pigeon) is Pigeon
    assert before == TRANSPORTS


def test_a_class_that_was_defined_anew_replaces_its_earlier_self(pigeon: type[Transport]) -> None:
    again = type("Pigeon", (LocalClone,), {"name": "pigeon", "__module__": pigeon.__module__})
    assert register_transport(again) is TRANSPORTS["pigeon"] is again


def named(given: object) -> type[Transport]:
    return type("Odd", (LocalClone,), {"name": given})


@pytest.mark.parametrize("name", ["shared-memory", "local", "ipc"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is taken by .*Choose another"):
        register_transport(named(name))


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_transport_without_a_name_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"Odd\.name is .*expected what users type"):
        register_transport(named(name))


@pytest.mark.parametrize(
    "given", [LocalClone(), TensorBridge, "pigeon"], ids=["object", "class", "text"]
)
def test_what_is_no_transport_class_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="is no transport"):
        register_transport(given)  # type: ignore[type-var]  # that is the point


def test_a_transport_that_lacks_an_end_is_refused() -> None:
    class Half(Transport):
        """No consumer, no publisher, no probe."""

    with pytest.raises(TypeError, match="Half lacks consumer_end, probe, publisher_end"):
        register_transport(Half)


def test_the_table_of_transports_is_only_to_be_read() -> None:
    with pytest.raises(TypeError):
        TRANSPORTS["pigeon"] = Pigeon  # type: ignore[index]  # that is the point

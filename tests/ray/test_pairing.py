"""A pair's transport follows from what both endpoints found, and the choice says why."""

import os
from pathlib import Path

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import MalformedManifest
from rl_bridge.ray.pairing import (
    EndpointFacts,
    PairChoice,
    ProbeSegment,
    SharedDirectory,
    choose_transport,
    look_around,
)
from rl_bridge.testing.processes import Child

ALL = {"shared-memory": "", "nixl": "", "broadcast": ""}


def endpoint(**changed: object) -> EndpointFacts:
    facts: dict[str, object] = {
        "boot_id": "one",
        "pid_namespace": 1,
        "user_id": 1000,
        "pid": 7,
        "address": "10.0.0.1",
        "transports": ALL,
    }
    return EndpointFacts.model_validate(facts | changed)


class Finder:
    """A consumer's endpoint in a process of its own."""

    def find(self, publisher: str) -> str:
        return look_around(publisher=EndpointFacts.from_json(publisher)).to_json().decode()


def test_one_machine_shares_memory() -> None:
    choice = choose_transport(endpoint(), endpoint(pid=8))
    assert (choice.transport, dict(choice.not_taken)) == ("shared-memory", {})
    assert "reachable through /proc" in str(choice)


def test_another_machine_reads_by_nixl_at_the_publishers_address() -> None:
    choice = choose_transport(endpoint(), endpoint(boot_id="two"))
    assert choice.transport == "nixl"
    assert choice.publisher_options == {"address": "10.0.0.1"}
    assert choice.not_taken == {"shared-memory": "they run on different machines"}


def test_without_nixl_on_either_endpoint_it_is_broadcast() -> None:
    lacking = ALL | {"nixl": "nixl is not installed"}
    for publisher, consumer in ((lacking, ALL), (ALL, lacking)):
        choice = choose_transport(
            endpoint(transports=publisher), endpoint(boot_id="2", transports=consumer)
        )
        assert choice.transport == "broadcast"
        assert "nixl is not installed" in choice.not_taken["nixl"]


@pytest.mark.parametrize(
    ("consumer", "why"),
    [({"pid_namespace": 2}, "PID namespaces"), ({"user_id": 1001}, "user 1001 may not open")],
)
def test_a_container_or_a_user_apart_shares_no_memory(
    consumer: dict[str, object], why: str
) -> None:
    choice = choose_transport(endpoint(), endpoint(**consumer))
    assert choice.transport == "nixl"
    assert why in choice.not_taken["shared-memory"]


def test_a_directory_of_both_shares_memory_under_the_path_that_each_endpoint_has() -> None:
    mine = SharedDirectory(path="/dev/shm/w", device=5, inode=6)
    theirs = SharedDirectory(path="/mnt/w", device=5, inode=6)
    choice = choose_transport(
        endpoint(directories=(mine,)), endpoint(pid_namespace=2, directories=(theirs,))
    )
    assert choice.transport == "shared-memory"
    assert choice.publisher_options == {"directory": "/dev/shm/w"}
    assert choice.consumer_options == {"directory": "/mnt/w"}
    assert choice.channel == "shared-memory@/dev/shm/w"


def test_directories_of_one_name_on_two_machines_share_nothing() -> None:
    one = SharedDirectory(path="/dev/shm/w", device=5, inode=6)
    choice = choose_transport(
        endpoint(directories=(one,)), endpoint(boot_id="two", directories=(one,))
    )
    assert choice.transport == "nixl"


def test_the_opened_probe_decides_over_namespaces_and_users() -> None:
    probe = ProbeSegment()
    try:
        choice = choose_transport(endpoint(probe=probe.ref), endpoint(user_id=1000))
        assert "cannot open the memory of process 7" in choice.not_taken["shared-memory"]
    finally:
        probe.close()


def test_another_process_of_this_machine_opens_the_probe() -> None:
    probe = ProbeSegment()
    try:
        mine = look_around(probe=probe, address="10.0.0.1")
        with Child(Finder) as child:
            theirs = child.ready().call("find", publisher=mine.to_json().decode())
        choice = choose_transport(mine, EndpointFacts.from_json(theirs))
        assert choice.transport == "shared-memory"
        assert "(tried)" in choice.reason
    finally:
        probe.close()


def test_a_probe_that_is_gone_is_not_opened() -> None:
    probe = ProbeSegment()
    mine = look_around(probe=probe)
    probe.close()
    assert look_around(publisher=mine).opened is None


def test_no_transport_at_all_says_why_of_each() -> None:
    with pytest.raises(WeightBridgeUnavailableError) as caught:
        choose_transport(endpoint(address="", node="a"), endpoint(boot_id="two"))
    text = str(caught.value)
    assert "on node a" in text
    assert "shared-memory: they run on different machines" in text
    assert "did not say at which address" in text


def test_a_transport_that_one_endpoint_does_not_know_is_not_chosen() -> None:
    choice = choose_transport(endpoint(), endpoint(boot_id="two", transports={"broadcast": ""}))
    assert choice.not_taken["nixl"] == "blocked at the consumer: not known there"


def test_facts_travel_as_json_and_nothing_else_is_read() -> None:
    mine = look_around(node="n", address="10.0.0.1", directories=[os.curdir])
    assert EndpointFacts.from_json(mine.to_json()) == mine
    for text in (b"", b"[]", b'{"boot_id": 1}', mine.to_json()[:-1] + b',"more":1}', b" " * 2**21):
        with pytest.raises(MalformedManifest):
            EndpointFacts.from_json(text)
    with pytest.raises(MalformedManifest, match="PairChoice"):
        PairChoice.from_json(mine.to_json())


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match="cannot be looked at"):
        look_around(directories=[tmp_path / "none"])
    (tmp_path / "file").touch()
    with pytest.raises(WeightBridgeUnavailableError, match="no directory that this user"):
        look_around(directories=[tmp_path / "file"])

"""A pair's transport follows from what both endpoints found, and the choice says why."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import MalformedManifest
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.ray.pairing import (
    EndpointFacts,
    PairChoice,
    SharedDirectory,
    choose_transport,
    look_around,
    make_probe,
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


LACKING = ALL | {"nixl": "nixl is not installed"}
HERE = SharedDirectory(path="/dev/shm/w", device=5, inode=6)
CHOSEN: dict[str, tuple[dict[str, object], dict[str, object], str, str]] = {
    "one machine": ({}, {"pid": 8}, "shared-memory", "reachable through /proc"),
    "two machines": ({}, {"boot_id": "two"}, "nixl", "memory: they run on different machines"),
    "no nixl here": ({"transports": LACKING}, {"boot_id": "2"}, "broadcast", "is not installed"),
    "no nixl there": ({}, {"boot_id": "2", "transports": LACKING}, "broadcast", "not installed"),
    "unknown there": ({}, {"boot_id": "2", "transports": {"broadcast": ""}}, "broadcast", "not kn"),
    "a container": ({}, {"pid_namespace": 2}, "nixl", "PID namespaces"),
    "another user": ({}, {"user_id": 1001}, "nixl", "user 1001 may not open"),
    "directories of one name": (
        {"directories": (HERE,)},
        {"boot_id": "two", "directories": (HERE,)},
        "nixl",
        "different machines",
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_transport_follows_from_what_the_two_share_and_the_choice_says_why(case: str) -> None:
    publisher, consumer, transport, why = CHOSEN[case]
    choice = choose_transport(endpoint(**publisher), endpoint(**consumer))
    assert choice.transport == transport
    assert why in str(choice)
    address = {} if transport == "shared-memory" else {"address": "10.0.0.1"}
    assert choice.publisher_options == address


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


@pytest.fixture
def probe() -> Iterator[OwnedSegment]:
    made = make_probe()
    yield made
    made.close()


def test_the_opened_probe_decides_over_namespaces_and_users(probe: OwnedSegment) -> None:
    choice = choose_transport(endpoint(probe=probe.ref), endpoint())
    assert "cannot open the memory of process 7" in choice.not_taken["shared-memory"]


def test_another_process_of_this_machine_opens_the_probe_while_it_is_there(
    probe: OwnedSegment,
) -> None:
    mine = look_around(probe=probe.ref, address="10.0.0.1")
    with Child(Finder) as child:
        theirs = child.ready().call("find", publisher=mine.to_json().decode())
    choice = choose_transport(mine, EndpointFacts.from_json(theirs))
    assert choice.transport == "shared-memory"
    assert "(tried)" in choice.reason
    probe.close()
    assert look_around(publisher=mine).opened is None


def test_no_transport_at_all_says_why_of_each() -> None:
    with pytest.raises(WeightBridgeUnavailableError) as caught:
        choose_transport(endpoint(address="", node="a"), endpoint(boot_id="two"))
    text = str(caught.value)
    assert "on node a" in text
    assert "shared-memory: they run on different machines" in text
    assert "did not say at which address" in text


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

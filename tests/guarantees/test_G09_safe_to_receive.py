"""G9 Safe to receive: what a peer sends is parsed and checked before memory is touched.

No pickle on any wire. What a manifest says about memory is compared with the kernel, and sockets
check their peer.

It ends at the channel of the manifests, which is yours: limit their length and check the peer
there. Processes of one user are not protected from each other.
"""

import ast
import copy
import json
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_bridge
from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    ForeignTransport,
    RangeOverflow,
    WeightBridgeError,
    WeightManifestValidationError,
)
from rl_bridge.testing import BridgeOver, Holdings, contents_of, sample_weights, watchdog

PACKAGE = Path(rl_bridge.__file__).parent
HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    2**31,
    2**63,
    2**70,
    1.5,
    True,
    None,
    "",
    "/etc/passwd",
    "a\0b",
    [],
    {"a": {}},
)


@pytest.fixture(scope="module")
def text() -> str:
    with make_weight_bridge("local-clone") as bridge:
        weights = {"a": torch.ones(2, 3), "b": torch.ones(5)}
        return bridge.publish(weights, weight_version=3, metadata={"step": 1}).to_json()


# ---- text ---------------------------------------------------------------------------------------


def test_no_module_can_unpickle_anything() -> None:
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {("torch", "load"), ("np", "load"), ("numpy", "load")}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in calls, f"{path}:{node.lineno}"
            assert not names & banned, f"{path}: {names & banned}"


@settings(max_examples=300)
@given(data=st.data())
def test_a_manifest_that_was_cut_or_changed_is_refused_with_a_type(
    text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(start + 40, len(text))))
    changed = text[:start] + data.draw(st.text(max_size=12)) + text[end:]
    try:
        found = WeightUpdateManifest.from_json(changed)
    except WeightManifestValidationError:
        return
    # Whatever is taken says of itself what it said, canonically: here that is another header.
    assert found.to_json() == changed
    assert found.root == WeightUpdateManifest.from_json(text).root


@pytest.mark.parametrize(
    "sent", ["", "null", "[]", "{}", "[" * 100_000, b"\xff", None, 7, {"a": 1}]
)
def test_what_is_no_manifest_is_refused_with_a_type(sent: Any) -> None:
    with (
        watchdog(10),
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_bridge=bridge) as executor,
    ):
        for call in (bridge.import_update, executor.update_weights):
            with pytest.raises(WeightManifestValidationError):
                call(sent)


def test_a_manifest_that_claims_more_than_there_is_costs_nothing(text: str) -> None:
    before = Holdings.now()
    huge = text.replace('"shapes":[[2,3],[5]]', f'"shapes":[[{2**40},3],[5]]')
    assert huge != text
    with pytest.raises(WeightManifestValidationError):
        WeightUpdateManifest.from_json(huge)
    with pytest.raises(WeightManifestValidationError):
        WeightUpdateManifest.from_json(text.replace("[[2,3],[5]]", f"[[{2**63},{2**63}],[5]]"))
    assert Holdings.now().resident_nbytes < before.resident_nbytes + (8 << 20)
    assert issubclass(RangeOverflow, WeightManifestValidationError)


# ---- handles ------------------------------------------------------------------------------------


def lies(handle: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every handle that differs from an honest one in one place."""

    def places(part: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        for key, item in part.items():
            yield (*path, key)
            if isinstance(item, dict):
                yield from places(item, (*path, key))

    for *path, last in places(handle):
        for value in (*HOSTILE, KeyError):
            changed = copy.deepcopy(handle)
            part = changed
            for key in path:
                part = part[key]
            if value is KeyError:
                del part[last]
            else:
                part[last] = value
            yield changed


def test_a_handle_that_lies_in_one_place_opens_nothing_that_it_should_not(
    trainer: BridgeOver, rollout: BridgeOver, make_bridge: Callable[..., BridgeOver]
) -> None:
    source = sample_weights(1)
    manifest = trainer.publish(source, weight_version=1)
    honest = json.loads(manifest.to_json())["header"]["handle"]
    rollout.import_update(manifest)
    before = Holdings.now()
    for handle in lies(honest):
        with make_bridge() as other, watchdog(30), suppress(WeightBridgeError):
            tensors = other.import_update(manifest.model_copy(update={"handle": handle}))
            assert contents_of(tensors) == contents_of(source), handle
            del tensors
    after = Holdings.now()
    assert len(after.descriptors) <= len(before.descriptors)
    assert not after.files - before.files
    assert contents_of(rollout.import_update(manifest)) == contents_of(source)


def test_a_manifest_of_another_transport_is_foreign(
    trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    with pytest.raises(ForeignTransport):
        rollout.import_update(manifest.model_copy(update={"transport": "carrier-pigeon"}))


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["broadcast"], indirect=True)
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000], ids=repr)
def test_a_stranger_at_the_port_disturbs_nobody(
    said: bytes, trainer: BridgeOver, rollout: BridgeOver
) -> None:
    manifest = trainer.publish(sample_weights(1), weight_version=1)
    handle = json.loads(manifest.to_json())["header"]["handle"]
    port = next(int(value) for name, value in _flat(handle) if name == "port")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(said)
        assert contents_of(rollout.import_update(manifest)) == contents_of(sample_weights(1))


def _flat(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        yield from _flat(value) if isinstance(value, dict) else [(name, value)]


def test_what_holds_memory_or_locks_cannot_be_pickled_by_mistake(trainer: BridgeOver) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(trainer)

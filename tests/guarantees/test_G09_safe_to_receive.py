"""G9 Safe to receive: what a peer sends is parsed and checked before memory is touched.

No pickle on any wire. What a manifest says about memory is compared with the kernel, and sockets
check their peer.

It ends at the channel of the manifests, which is yours: limit their length and check the peer
there. Processes of one user are not protected from each other.
"""

import ast
import json
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_bridge
from rl_bridge import RolloutExecutor, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import RangeOverflow, WeightManifestValidationError
from rl_bridge.testing import Holdings, contents_of, sample_weights, watchdog
from tests.guarantees.kit import OverEachTransport, scenarios

PACKAGE = Path(rl_bridge.__file__).parent


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


@scenarios(
    "test_hostile_handles_are_refused_by_type",
    "test_a_layout_that_does_not_fit_the_memory_is_refused",
    "test_a_manifest_of_another_transport_is_foreign",
)
class TestEachTransport(OverEachTransport):
    """A handle that lies opens nothing that it should not."""


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000], ids=repr)
def test_a_stranger_at_the_port_disturbs_nobody(said: bytes) -> None:
    with make_weight_bridge("broadcast") as trainer, make_weight_bridge("broadcast") as rollout:
        manifest = trainer.publish(sample_weights(1), weight_version=1)
        handle = json.loads(manifest.to_json())["header"]["handle"]
        port = next(int(value) for name, value in _flat(handle) if name == "port")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            with suppress(ConnectionError):
                stranger.sendall(said)
            found = contents_of(rollout.import_update(manifest))
            assert found == contents_of(sample_weights(1))


def _flat(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        yield from _flat(value) if isinstance(value, dict) else [(name, value)]


def test_what_holds_memory_or_locks_cannot_be_pickled_by_mistake() -> None:
    with make_weight_bridge() as bridge, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(bridge)

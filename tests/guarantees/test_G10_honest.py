"""G10 Honest: what cannot work here says `blocked`, with the cause and the remedy.

Nothing falls back to another transport or mode. The one exception changes no result: without the
compiled pass, Python digests, and `rl-bridge doctor` says so.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    make_weight_bridge,
)
from rl_bridge.errors import (
    IncompatibleUpdate,
    TransportUnavailable,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing import BridgeOver, engine_state
from tests.guarantees.kit import OverEachTransport, scenarios

WEIGHTS = {"w": torch.ones(3)}
NEEDS_A_GPU = [] if torch.cuda.is_available() else ["cuda-vmm", "cuda-ipc"]
NEEDS_A_PACKAGE = [] if importlib.util.find_spec("nixl_cu12") else ["nixl"]


def doctor() -> dict[str, Any]:
    """What `rl-bridge doctor --json` says of this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "rl_bridge", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- transports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEEDS_A_GPU + NEEDS_A_PACKAGE)
def test_a_transport_that_is_blocked_says_why_and_what_to_do_on_both_sides(name: str) -> None:
    manifest = make_weight_bridge("local-clone").publish(WEIGHTS, weight_version=1)
    with make_weight_bridge(name) as bridge:
        with pytest.raises(TransportUnavailable, match=f"'{name}' is blocked: ") as caught:
            bridge.publish(WEIGHTS, weight_version=1)
        assert caught.value.transport == name
        assert len(caught.value.cause) > 10
        assert len(caught.value.remedy) > 10
        with pytest.raises(TransportUnavailable):
            bridge.import_update(manifest.model_copy(update={"transport": name}))
        assert bridge.latest_manifest is None
        assert bridge.published_nbytes == 0


@pytest.mark.parametrize("name", ["rdma", "multi-node"])
def test_a_transport_that_nobody_serves_yet_answers_with_the_known_sentence(name: str) -> None:
    with pytest.raises(
        WeightBridgeUnavailableError, match="multi-node/RDMA weight transport is not implemented"
    ):
        make_weight_bridge(name)


def test_a_name_that_is_wrong_is_no_other_transport() -> None:
    with pytest.raises(WeightBridgeUnavailableError, match="Did you mean 'shared-memory'"):
        make_weight_bridge("shared_memory")


@pytest.mark.parametrize("option", ["directory", "max_slots", "timeout_s"])
def test_an_option_that_a_transport_does_not_have_is_not_ignored(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        make_weight_bridge("local-clone", **{option: 3})  # type: ignore[arg-type]


@scenarios(
    "test_it_works_on_this_machine",
    "test_the_manifest_crosses_a_process_exactly_if_declared",
    "test_an_import_without_a_copy_takes_no_memory",
    "test_a_manifest_of_another_transport_is_foreign",
)
class TestEachTransport(OverEachTransport):
    """What a transport says of itself is tried, and no other one takes its place."""

    @pytest.mark.parametrize("transport", ["local-clone", "shared-memory-in-files"], indirect=True)
    def test_flip_does_not_become_a_copy_where_there_is_nothing_to_flip(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        engine = torch.nn.Linear(3, 3)
        before = engine_state(engine)
        adapter = ModuleInstallAdapter(engine, mode="flip")
        with (
            RolloutExecutor(weight_bridge=consumer, weight_install_adapter=adapter) as executor,
            pytest.raises(IncompatibleUpdate, match="flip"),
        ):
            executor.update_weights(publisher.publish(torch.nn.Linear(3, 3), weight_version=1))
        assert engine_state(engine) == before


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.ones(2, device="meta"), "is on meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        ("no tensor", "w"),
    ],
    ids=["meta", "sparse", "text"],
)
def test_what_cannot_be_published_is_named(tensor: Any, told: str) -> None:
    with make_weight_bridge("shared-memory") as trainer:
        with pytest.raises(WeightBridgeError, match=told):
            trainer.publish({"w": tensor}, weight_version=1)
        assert trainer.publish(WEIGHTS, weight_version=1)


@pytest.mark.parametrize("layout", [{"kind": "fsdp", "world_size": 2}, {"node_count": 2}], ids=str)
def test_a_layout_that_this_bridge_does_not_serve_is_refused(layout: dict[str, Any]) -> None:
    with (
        make_weight_bridge("shared-memory") as bridge,
        pytest.raises(WeightBridgeUnavailableError),
    ):
        bridge.publish(WEIGHTS, weight_version=1, metadata={"layout": layout})


# ---- engines ------------------------------------------------------------------------------------


def test_a_bridge_serves_one_executor_and_tells_the_second() -> None:
    with (
        make_weight_bridge("shared-memory", source_worker="rollout") as bridge,
        RolloutExecutor(weight_bridge=bridge),
        pytest.raises(WeightBridgeUnavailableError, match="rollout"),
    ):
        RolloutExecutor(weight_bridge=bridge)


@pytest.mark.parametrize("mode", ["flop", None, 3])
def test_a_mode_that_does_not_exist_is_refused_with_those_that_do(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"expected one of \['alias', 'copy', 'flip'\]"):
        ModuleInstallAdapter(torch.nn.Linear(3, 3), mode=mode)


# ---- the doctor ---------------------------------------------------------------------------------


def test_the_doctor_says_of_every_transport_what_a_bridge_of_it_says(tmp_path: Path) -> None:
    told = {row["name"]: row for row in doctor()["checks"] if row["group"] == "transports"}
    assert set(told) >= {
        "local-clone",
        "shared-memory",
        "cuda-vmm",
        "cuda-ipc",
        "broadcast",
        "nixl",
        "files",
    }
    needed: dict[str, dict[str, object]] = {"files": {"url": tmp_path / "run"}}
    for name, row in told.items():
        with make_weight_bridge(name, **needed.get(name, {})) as bridge:  # type: ignore[arg-type]  # options of its own
            if row["status"] == "pass":
                assert bridge.publish(WEIGHTS, weight_version=1)
                continue
            with pytest.raises(TransportUnavailable) as caught:
                bridge.publish(WEIGHTS, weight_version=1)
            told_here = (caught.value.cause, caught.value.remedy)
            assert (row["status"], row["cause"], row["remedy"]) == ("blocked", *told_here)

"""What users hand to a bridge: taken in every sensible form, refused with the words that help."""

import gc
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_bridge
from rl_bridge import (
    TensorBridge,
    WeightUpdateManifest,
    make_weight_bridge,
)
from rl_bridge.bridge.bridges import BridgeOptions
from rl_bridge.errors import (
    MalformedManifest,
    SegmentError,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.groups import GroupBridge
from rl_bridge.transports import TRANSPORTS
from tests.helpers import weights

# ---- what names an update -----------------------------------------------------------------------


def by_id(manifest: WeightUpdateManifest) -> object:
    return manifest.update_id


def by_manifest(manifest: WeightUpdateManifest) -> object:
    return manifest


def by_text(manifest: WeightUpdateManifest) -> object:
    return manifest.to_json()


@pytest.mark.parametrize("named", [by_id, by_manifest, by_text])
def test_an_update_is_named_by_its_id_its_manifest_or_its_text(named: Any) -> None:
    with make_weight_bridge() as trainer, make_weight_bridge() as rollout:
        manifest = trainer.publish(weights(), weight_version=1)
        update = named(manifest)
        assert trainer.get_manifest(update) == manifest
        rollout.import_update(manifest)
        rollout.acknowledge(update)
        assert [told.state for told in trainer.holders(update)] == ["acknowledged"]
        assert rollout.update_status(update) == "acknowledged"
        assert rollout.update_state(update) == "acknowledged"
        assert rollout.rejection_reason(update) is None
        assert "verify" in rollout.timings(update)
        for bridge in (rollout, trainer):
            bridge.release(update)
            assert bridge.update_status(update) == "released"
        other = trainer.publish(weights(1), weight_version=2)
        rollout.reject(named(other), "no")
        assert rollout.rejection_reason(named(other)) == "no"


CALLS = (
    "acknowledge",
    "get_manifest",
    "holders",
    "reject",
    "rejection_reason",
    "release",
    "release_imported",
    "timings",
    "update_state",
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", [None, 7, {"update_id": "x"}], ids=["none", "int", "dict"])
def test_what_names_no_update_is_refused(call: str, given: object) -> None:
    with make_weight_bridge() as bridge, pytest.raises(MalformedManifest, match=f"{call} got a"):
        getattr(bridge, call)(given, *(["no"] if call == "reject" else []))


# ---- one executor to a bridge -------------------------------------------------------------------


class Owner:
    """Stands for an executor."""


def test_a_claimed_bridge_is_refused_to_another_owner_until_the_first_gives_it_up() -> None:
    first, second = Owner(), Owner()
    with make_weight_bridge(source_worker="rollout-3") as bridge:
        for _ in range(2):
            bridge.claim(first)
        bridge.give_up(second)
        with pytest.raises(
            WeightBridgeUnavailableError, match=r"'rollout-3' serves another Owner.*Make a bridge"
        ):
            bridge.claim(second)
        bridge.give_up(first)
        bridge.claim(second)


def test_a_claim_ends_with_its_owner() -> None:
    with make_weight_bridge() as bridge:
        bridge.claim(Owner())
        gc.collect()
        bridge.claim(Owner())


def test_releasing_what_was_imported_leaves_it_published() -> None:
    with make_weight_bridge("shared-memory") as both, make_weight_bridge("shared-memory") as late:
        manifest = both.publish(weights(), weight_version=1)
        both.import_update(manifest)
        both.release_imported(manifest)
        both.release_imported(manifest)
        assert both.update_status(manifest) == "released"
        assert both.latest_manifest == manifest
        for version in range(2, 5):  # every other slot is written
            both.publish(weights(version), weight_version=version)
        assert set(late.import_update(manifest)) == set(weights())


# ---- options ------------------------------------------------------------------------------------


def test_type_checkers_know_every_option_of_every_transport() -> None:
    options = {name for kind in TRANSPORTS.values() for name in inspect.signature(kind).parameters}
    own = set(inspect.signature(TensorBridge).parameters) - {"options"}
    told = set(inspect.signature(make_weight_bridge).parameters) - {"transport", "options"}
    assert BridgeOptions.__annotations__.keys() == (options | own) - told


def test_a_type_checker_finds_a_misspelt_option() -> None:
    # (An ignore that ignores nothing is an error of mypy, which checks the tests.)
    with pytest.raises(TypeError, match="Did you mean 'max_slots'"):
        make_weight_bridge("shared-memory", max_slot=3)  # type: ignore[call-arg]


def test_integers_of_numpy_count() -> None:
    rank: Any = np.int64(3)
    slots: Any = np.int32(2)
    with make_weight_bridge("shm", source_rank=rank, max_slots=slots) as bridge:
        assert bridge.publish(weights(), weight_version=1).source_rank == 3


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"source_rank": "0"}, "source_rank='0': expected an int of 0 or more"),
        ({"source_rank": None}, "source_rank=None: expected an int of 0 or more"),
        ({"source_rank": 1.0}, "source_rank=1.0: expected an int of 0 or more"),
        ({"observer": 3}, "observer: got a int, expected a function"),
        ({"source_worker": 3}, "source_worker is a int, expected a name"),
        ({"state_dir": 3}, "state_dir=3: expected the path of a directory"),
        ({"max_slots": "3"}, "max_slots='3': expected an int of 1 or more"),
        ({"max_consumers": 2.0}, "max_consumers=2.0: expected an int of 1 or more"),
        ({"num_threads": "2"}, "num_threads='2': expected an int of 1 or more"),
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type_says_what_is_expected(
    option: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        make_weight_bridge("shared-memory", **option)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"source_rank": -1}, "source_rank=-1: expected an int of 0 or more"),
        ({"source_rank": True}, "source_rank=True: expected an int of 0 or more"),
        ({"source_rank": 2**63}, r"source_rank=.*below 2\*\*63"),
        ({"max_slots": 0}, "max_slots=0: expected an int of 1 or more"),
        ({"max_consumers": 0}, "max_consumers=0: expected an int of 1 or more"),
        ({"num_threads": 0}, "num_threads=0: expected an int of 1 or more"),
        ({"suspicious": "rejct"}, "'off', 'warn', 'reject'"),
    ],
    ids=str,
)
def test_an_option_out_of_its_range_says_what_is_expected(
    option: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_weight_bridge("shared-memory", **option)


def _options(name: str, value: object) -> dict[str, Any]:
    return {name: value}


@pytest.mark.parametrize(
    ("option", "meant"), [("max_slot", "max_slots"), ("suspicous", "suspicious")]
)
def test_an_unknown_option_names_those_there_are(option: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=rf"'{option}' is no option.*Did you mean '{meant}'\?"
    ) as told:
        make_weight_bridge("shared-memory", **_options(option, 3))
    for known in ("directory", "max_consumers", "max_slots", "num_threads", "state_dir"):
        assert known in str(told.value)


def test_an_option_that_a_transport_cannot_do_without_is_named() -> None:
    with pytest.raises(TypeError, match="'files' needs its option url="):
        make_weight_bridge("files")


# ---- transports ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [("SHM", "shm"), ("shared_memory", "shared-memory"), ("Local", "local")]
)
def test_a_misspelt_transport_is_recognised(given: str, meant: str) -> None:
    with pytest.raises(WeightBridgeUnavailableError, match=f"{given!r}.*Did you mean {meant!r}"):
        make_weight_bridge(given)


def test_an_unknown_transport_names_only_documented_ones() -> None:
    with pytest.raises(WeightBridgeUnavailableError) as told:
        make_weight_bridge("pigeon")
    assert "cuda-vmm-fd" not in str(told.value)
    assert isinstance(make_weight_bridge("cuda-vmm-fd"), TensorBridge)


def test_what_serves_vllm_is_imported_without_it() -> None:
    names = [name for name in rl_bridge.__all__ if name.startswith("VLLM")]
    assert "VLLMIPCWeightUpdateRequestBuilder" in names
    assert "VLLMCUDAVMMExternalStorageAdapter" in names
    code = f"""
import subprocess
import sys
sys.modules["vllm"] = sys.modules["httpx"] = None  # an import of either fails
from rl_bridge import {", ".join(names)}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_name_that_nobody_knows_is_no_attribute() -> None:
    assert not hasattr(rl_bridge, "SharedMemoryBridge")


# ---- directories --------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["directory", "state_dir"])
def test_a_directory_whose_parent_is_missing_is_not_made(option: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {option: tmp_path / "typo" / "rl"}
    with (
        make_weight_bridge("shared-memory", **given) as bridge,
        pytest.raises(WeightBridgeError, match=str(tmp_path)),
    ):
        bridge.publish(weights(), weight_version=1)
    assert not (tmp_path / "typo").exists()


def test_a_consumer_with_another_directory_is_told_to_compare_them(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "a", tmp_path / "b"
    theirs.mkdir()
    with (
        make_weight_bridge("shared-memory", directory=mine) as trainer,
        make_weight_bridge("shared-memory", directory=theirs) as rollout,
    ):
        manifest = trainer.publish(weights(), weight_version=1)
        with pytest.raises(SegmentError, match="directory= is not the publisher's"):
            rollout.import_update(manifest)


def test_an_update_of_a_closed_bridge_says_that_its_bridge_may_be_closed() -> None:
    trainer = make_weight_bridge("shared-memory")
    manifest = trainer.publish(weights(), weight_version=1)
    trainer.close()
    with (
        make_weight_bridge("shared-memory") as rollout,
        pytest.raises(SegmentError, match="bridge was closed or dropped"),
    ):
        rollout.import_update(manifest)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("backend_options", [1]),
        ("backend_options", {1: "a"}),
        ("backend_options", {"a": None}),
        ("server_name", 7),
    ],
    ids=["list", "no_name", "no_value", "server_name"],
)
def test_an_option_of_nixl_of_a_wrong_type_is_named(option: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{option}="):
        make_weight_bridge("nixl", **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transports": 5}, "expected name of a transport"),
        ({"transports": {"nixl": 5}}, "expected name of a transport"),
        ({"transports": {"nixl": {"prot": 1}}}, "Did you mean 'port'"),
        ({"wanted": 5}, "wanted=5"),
    ],
    ids=["transports", "options", "option", "wanted"],
)
def test_an_argument_of_a_groups_bridge_of_a_wrong_type_is_named(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        GroupBridge(**given)

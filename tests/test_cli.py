"""The command line: what each command says, to people and to programs, and its exit codes.

What the machine decides (doctor, bench, gc, the demo) is in `test_cli_machine`.
"""

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_bridge
from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.cli import program
from rl_bridge.cli.program import main
from rl_bridge.cli.screen import plain
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory import vm
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from tests.cli_program import PLAIN, Said, call, run, run_as_process
from tests.groups.meshes import shards
from tests.groups.rig import damage, trainers

HELP = {name: line for name, (_, line) in program.COMMANDS.items()} | {
    f"files {name}": line for name, (_, line) in program.OF_FILES.items()
}
WEIGHTS = {
    "layers.0.weight": torch.arange(60_000, dtype=torch.float32).reshape(200, 300),
    "layers.1.weight": torch.ones(70_000, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
}


@pytest.fixture
def bridge() -> Iterator[BridgeOver]:
    with BridgeOver(FaultInjecting(SharedMemory()), source_worker="trainer") as bridge:
        yield bridge


@pytest.fixture
def manifest(bridge: BridgeOver) -> WeightUpdateManifest:
    return bridge.publish(WEIGHTS, weight_version=7, metadata={"step": 41})


@pytest.fixture
def file(manifest: WeightUpdateManifest, tmp_path: Path) -> Path:
    return write(manifest, tmp_path)


def write(manifest: WeightUpdateManifest, folder: Path) -> Path:
    path = folder / "manifest.json"
    path.write_text(manifest.to_json() + "\n", encoding="ascii")
    return path


def flip_a_byte(bridge: BridgeOver, manifest: WeightUpdateManifest, name: str) -> None:
    """Damage a published tensor, in the memory behind the manifest."""
    assert isinstance(bridge.given, FaultInjecting)
    bridge.given.corrupt(manifest, manifest.tensors[name].offset + 1)


# ------------------------------------------------------------------------------ the program


def test_the_version_is_the_librarys() -> None:
    assert call("--version") == Said(0, f"rl-bridge {rl_bridge.__version__}\n", "")


def test_the_entry_point_is_the_same_program() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="rl-bridge")
    assert entry.load() is main


@pytest.mark.parametrize("command", sorted(HELP))
def test_every_command_has_help(command: str) -> None:
    said = call(*command.split(), "--help")
    assert (said.code, said) == (0, call(*command.split(), "-h"))
    assert f"Usage: rl-bridge {command}" in said.out
    assert f"\n\n  {HELP[command]}\n" in said.out, "the list of commands says something else"
    assert said.out.count("--") > 1, "an option without a word of help"


def test_arguments_are_named_alike_by_all_commands() -> None:
    named = {
        argument
        for command in HELP
        for argument in call(*command.split(), "--help").out.splitlines()[0].split()[3:]
        if argument != "[OPTIONS]" and argument not in command.split()
    }
    known = {"DIRECTORY", "ENGINE", "FILE", "MANIFEST", "TARGET", "URL", "VERSION"}
    assert {argument.strip("{}[]") for argument in named} == known


def test_the_list_of_commands_cuts_no_line_off() -> None:
    assert "..." not in call("--help", columns=80).out.replace("[ARGS]...", "")


LIGHT = """
import sys
from rl_bridge.cli import main
try:
    main()
finally:
    ours = {"rl_bridge", "rl_bridge.cli", "rl_bridge.errors"}
    ours |= {"rl_bridge.cli.program", "rl_bridge.cli.screen"}
    found = {name for name in sys.modules if name.startswith(("rl_bridge", "torch", "numpy"))}
    assert found == ours, found - ours
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--version"], {}, f"rl-bridge {rl_bridge.__version__}\n"),
        (["--help"], {}, HELP["doctor"]),
        (["files", "--help"], {}, HELP["files ls"]),
        ([], {"COMP_WORDS": "rl-bridge files ver", "COMP_CWORD": "2"}, "verify\n"),
    ],
    ids=["version", "help", "help-of-files", "completion"],
)
def test_what_needs_no_weights_imports_no_torch(
    arguments: list[str], environment: dict[str, str], words: str
) -> None:
    asked = {**environment, "_RL_BRIDGE_COMPLETE": "complete_bash"} if environment else PLAIN
    done = run_as_process("-c", LIGHT, *arguments, environment=asked)
    assert (done.code, done.err) == (0, "")
    assert words in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("inspect",),
        ("inspect", "/nowhere/manifest.json"),
        ("verify", "/"),
        ("verify", __file__, "--directory", "/nowhere"),
        ("gc", __file__),
        ("gc", "/nowhere"),
        ("files",),
        ("files", "show", "/nowhere"),
        ("publish", "/nowhere", "--url", "/tmp/run"),
        ("bench", "--mib", "0"),
        ("bench", "--mib", "1000000000"),
    ],
    ids=" ".join,
)
def test_misuse_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    said = call(*arguments)
    assert said.code == 2
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "--mib", "0"), "'--mib': expected at least 1, got '0'."),
        (("bench", "--mib", "x"), "'--mib': expected a valid integer, got 'x'."),
        (("demo", "--engine", "x"), "'x' is not one of 'module', 'vllm', 'sglang', 'vllm-http'"),
    ],
    ids=["small", "no-number", "no-engine"],
)
def test_a_value_that_does_not_fit_is_told_with_what_was_expected(
    arguments: tuple[str, ...], words: str
) -> None:
    said = call(*arguments)
    assert said.code == 2
    assert words in said.err


def test_strangers_text_cannot_drive_the_terminal() -> None:
    assert plain("a\x1b[2J\n\u202eb \u00e9") == "a\\x1b[2J\\n\\u202eb \u00e9"


# ------------------------------------------------------------------------------ inspect


def test_inspect_reads_a_manifest_from_standard_input(manifest: WeightUpdateManifest) -> None:
    said = call("inspect", "-", text=manifest.to_json() + "\n")
    assert (said.code, said.err) == (0, "")
    for word in (manifest.root, manifest.update_id, '{"step":41}', "200x300", "bfloat16", "scalar"):
        assert word in said.out


def test_inspect_as_json_says_what_the_manifest_says(
    manifest: WeightUpdateManifest, file: Path
) -> None:
    said = call("inspect", file, "--tensors", "--json").json
    assert said["header"]["weight_version"] == 7
    assert said["header"]["root"] == manifest.root
    assert said["layout"]["total_nbytes"] == manifest.total_nbytes
    assert said["layout"]["dtypes"]["float32"] == {"nbytes": 240_004, "tensors": 2}
    assert said["largest"][0]["name"] == "layers.0.weight"
    assert {t["name"]: t["checksum"] for t in said["tensors"]} == {
        name: tensor.checksum for name, tensor in manifest.tensors.items()
    }


def test_inspect_as_json_says_what_is_wrong_with_a_manifest(tmp_path: Path) -> None:
    broken = tmp_path / "manifest.json"
    broken.write_text("{}")
    said = call("inspect", broken, "--json")
    assert said.code == 1
    assert said.json["error"]["type"] == "MalformedManifest"


def test_inspect_shows_the_largest_tensors_and_all_on_request(
    bridge: BridgeOver, tmp_path: Path
) -> None:
    shared = torch.ones(500)
    weights = {f"w{index:02}": torch.ones(index + 1) for index in range(20)}
    weights |= {"tied": shared, "head": shared}
    manifest = bridge.publish(weights, weight_version=1)
    file = write(manifest, tmp_path)
    short, full = call("inspect", file).out, call("inspect", file, "--tensors").out
    assert "w19" in short
    assert "w00" not in short
    assert all(name in full for name in weights)
    assert "tied = head" in full
    assert "tensors" not in call("inspect", file, "--json").json


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_in_a_pipe_a_row_is_one_line_without_blanks_at_its_end(
    bridge: BridgeOver, tmp_path: Path, command: str
) -> None:
    name = "model." + "deep.layers.of.many.experts." * 10 + "weight_scale_inv"
    manifest = bridge.publish({name: torch.ones(3), "w": torch.ones(2)}, weight_version=1)
    said = call(command, write(manifest, tmp_path))
    (row,) = (line for line in said.out.splitlines() if name in line)
    assert manifest.tensors[name].checksum[:12] in row
    assert not any(line.endswith(" ") for line in said.out.splitlines())


def test_inspect_says_how_many_tensors_are_trainable(bridge: BridgeOver, tmp_path: Path) -> None:
    manifest = bridge.publish(torch.nn.BatchNorm1d(4), weight_version=1)
    later = manifest.model_copy(update={"created_at": 9e9})
    said = call("inspect", write(later, tmp_path))
    assert "2 of 5 stored tensors" in said.out
    assert "in the future" in said.out
    assert call("inspect", write(later, tmp_path), "--json").json["layout"]["trainable_count"] == 2


def test_inspect_survives_a_hostile_manifest(bridge: BridgeOver, tmp_path: Path) -> None:
    bad = bridge.publish({"[red]\x1b[2J": torch.ones(2)}, weight_version=1).model_copy(
        update={
            "source_worker": "\x1b]0;owned\x07",
            "created_at": 1e300,
            "handle": {"[blink]": "\x1b[5m", "deep": [{"\x1b": "x"}]},
            "metadata": {"\x1b": "\x1b[2J", "layout": {"kind": "\x1b", "data_parallel_size": 8}},
        }
    )
    for flags in ((), ("--json",)):
        said = call("inspect", write(bad, tmp_path), *flags)
        assert said.code == 0
        assert "\x1b" not in said.out
        assert "\x07" not in said.out


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    "text", ["", "{}", "\xff\x00", '{"format":"rl_bridge.manifest/3","header":3}']
)
def test_text_that_is_no_manifest_is_refused_in_one_line(
    command: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="latin-1")
    assert call(command, path).complains("MalformedManifest")


# ------------------------------------------------------------------------------ verify


def test_another_process_verifies_what_this_one_published(
    manifest: WeightUpdateManifest, file: Path
) -> None:
    said = run("verify", file)
    assert (said.code, said.err) == (0, "")
    assert "pass: every byte fits" in said.out
    assert manifest.root in said.out
    assert all(name in said.out for name in WEIGHTS)


def test_a_flipped_byte_is_exit_code_1_and_a_checksum_mismatch(
    bridge: BridgeOver, manifest: WeightUpdateManifest, file: Path
) -> None:
    flip_a_byte(bridge, manifest, "layers.1.weight")
    said = call("verify", file)
    assert said.complains("ChecksumMismatch")
    assert "tensor checksum mismatch for 'layers.1.weight' in version 7" in said.err
    assert "1 of 3 tensors differ" in said.out


def test_verify_as_json_says_which_tensor_differs(
    bridge: BridgeOver, manifest: WeightUpdateManifest, file: Path
) -> None:
    before = call("verify", file, "--json").json
    flip_a_byte(bridge, manifest, "scale")
    failed = call("verify", file, "--json")
    assert (before["status"], before["error"], before["found_root"]) == (
        "pass",
        None,
        manifest.root,
    )
    assert failed.complains("ChecksumMismatch")
    assert failed.json["status"] == "failed"
    assert failed.json["error"]["type"] == "ChecksumMismatch"
    assert failed.json["found_root"] != manifest.root
    results = {tensor["name"]: tensor["status"] for tensor in failed.json["tensors"]}
    assert results == {"layers.0.weight": "pass", "layers.1.weight": "pass", "scale": "failed"}


def test_an_altered_header_does_not_verify_although_every_byte_fits(
    manifest: WeightUpdateManifest, tmp_path: Path
) -> None:
    altered = manifest.model_copy(update={"weight_version": 9, "metadata": {"step": 99}})
    said = call("verify", write(altered, tmp_path))
    assert said.complains("DigestMismatch")
    assert f"expected {manifest.header_digest.hex()}" in " ".join(said.err.split())
    assert "failed: every byte fits, the manifest's header does not" in said.out
    document = call("verify", write(altered, tmp_path), "--json").json
    assert (document["status"], document["error"]["type"]) == ("failed", "DigestMismatch")
    assert {tensor["status"] for tensor in document["tensors"]} == {"pass"}


def test_inspect_and_verify_take_a_version_of_several_parts(tmp_path: Path) -> None:
    with trainers(2) as group:
        manifest = group.publish(shards(1), 1)
        file = write(manifest, tmp_path)
        said = call("inspect", file).out
        assert "rank 1: shared-memory" in said
        assert manifest.root in said
        document = call("inspect", file, "--json").json
        assert [part["transport"] for part in document["header"]["parts"]] == ["shared-memory"] * 2
        verified = call("verify", file).out
        assert "pass: every byte fits" in verified
        assert "rank 1: embed" in verified
        altered = manifest.model_copy(update={"metadata": {"step": 99}})
        assert call("verify", write(altered, tmp_path)).complains("DigestMismatch")
        damage(group, manifest, 1, manifest.parts[1].tensors["embed"].offset)
        said_of_damage = call("verify", write(manifest, tmp_path))
        assert said_of_damage.complains("ChecksumMismatch")
        assert "1 of 8 tensors differ" in said_of_damage.out
        found = call("verify", write(manifest, tmp_path), "--json").json
        wrong = [(one["rank"], one["name"]) for one in found["tensors"] if one["status"] != "pass"]
        assert wrong == [(1, "embed")]
        assert group.publishers[0].consumers(manifest) == []


def test_verify_leaves_no_trace_at_the_publisher(
    bridge: BridgeOver, manifest: WeightUpdateManifest, file: Path
) -> None:
    with make_weight_bridge("shared-memory", source_worker="rollout") as consumer:
        consumer.import_update(manifest)
        consumer.acknowledge(manifest.update_id)
    # A consumer that is gone: its record is free to be taken, and the last that is known of it.
    before = bridge.consumers()
    assert [report.presence for report in before] == ["gone"]
    assert call("verify", file).code == 0
    assert bridge.consumers() == before
    assert bridge.update_status(manifest.update_id) == "published"


def test_verify_lists_every_tensor_on_request(bridge: BridgeOver, tmp_path: Path) -> None:
    weights = {f"w{index:02}": torch.ones(index + 1) for index in range(30)}
    file = write(bridge.publish(weights, weight_version=1), tmp_path)
    assert "and 10 more, all pass" in call("verify", file).out
    full = call("verify", file, "--tensors").out
    assert all(name in full for name in weights)


def test_an_update_whose_slot_was_reused_is_stale(
    bridge: BridgeOver, manifest: WeightUpdateManifest, file: Path
) -> None:
    bridge.release(manifest.update_id)
    bridge.publish(WEIGHTS, weight_version=8)
    assert call("verify", file).complains("StaleUpdate")


def test_an_update_of_a_publisher_that_closed_is_gone(bridge: BridgeOver, file: Path) -> None:
    bridge.close()
    said = call("verify", file, "--json")
    assert said.complains("SegmentError")
    assert said.json["error"]["type"] == "SegmentError"


def test_a_local_clone_cannot_be_verified_from_elsewhere(tmp_path: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        said = run("verify", write(bridge.publish(WEIGHTS, weight_version=1), tmp_path))
    assert said.complains("SegmentError")
    assert "shared-memory between processes" in said.err


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        ({}, "MalformedManifest"),
        ({"slot": {"nbytes": 4096}}, "RangeBeyondSegment"),
        ({"slot": {"inode": 1}}, "SegmentError"),
    ],
    ids=["empty", "too-small", "replaced"],
)
def test_a_forged_handle_is_refused(
    manifest: WeightUpdateManifest, tmp_path: Path, handle: Any, error: str
) -> None:
    real = manifest.header()["handle"]
    forged = real | {part: real[part] | change for part, change in handle.items()} if handle else {}
    bad = manifest.model_copy(update={"handle": forged})
    assert call("verify", write(bad, tmp_path)).complains(error)


def test_verify_refuses_every_update_that_an_import_would_refuse(
    manifest: WeightUpdateManifest, tmp_path: Path
) -> None:
    said = call("verify", write(manifest, tmp_path), "--directory", tmp_path)
    assert said.complains("TransportUnavailable")
    assert "set up for the other kind" in " ".join(said.err.split())


def test_named_segments_are_verified_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "segments"
    with make_weight_bridge("shared-memory", directory=shared) as bridge:
        file = write(bridge.publish(WEIGHTS, weight_version=1), tmp_path)
        assert call("verify", file).complains("TransportUnavailable")
        assert call("verify", file, "--directory", shared).code == 0
        with monkeypatch.context() as patch:
            patch.setattr(vm, "read_into", lambda _fd, _address, nbytes: nbytes - 1)
            said = call("verify", file, "--directory", shared)
        assert said.complains("SegmentError")
        assert "it was truncated" in said.err
        (segment,) = shared.glob("*.seg")
        os.truncate(segment, 4096)
        assert call("verify", file, "--directory", shared).complains("SegmentError")

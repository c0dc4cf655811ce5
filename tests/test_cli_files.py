"""The commands about versions in files: what they say and write, and what they leave alone."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.processes import Child
from rl_bridge.trainers import read_peft
from rl_bridge.transports.files.directory import DirectoryStore
from rl_bridge.transports.files.transport import FilesPublisher
from tests.cli_program import Said, call, run
from tests.groups.meshes import SHAPES, model, shards
from tests.groups.rig import trainers

WEIGHTS = {
    "layers.0.weight": torch.arange(6_000, dtype=torch.float32).reshape(20, 300),
    "layers.1.weight": torch.ones(70, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
}
PATH = "base_model.model.layers.0.q_proj"
PAIR = {f"{PATH}.lora_A.weight": torch.ones(2, 4), f"{PATH}.lora_B.weight": torch.ones(6, 2)}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "run"


def files(store: Path, **options: Any) -> FilesTensorBridge:
    bridge = make_weight_bridge("files", url=store, suspicious="off", **options)
    assert isinstance(bridge, FilesTensorBridge)
    return bridge


def publish(store: Path, *versions: int, keep_last: int = 99) -> list[WeightUpdateManifest]:
    """Publish versions from a trainer that ends then."""
    with files(store, keep_last=keep_last, source_worker="trainer") as trainer:
        return [
            trainer.publish(
                {name: one + version for name, one in WEIGHTS.items()}, weight_version=version
            )
            for version in versions
        ]


def publish_adapter(store: Path, version: int) -> WeightUpdateManifest:
    shapes = {name: tuple(one.shape) for name, one in PAIR.items()}
    spec = AdapterSpec.inferred("policy", shapes, lora_alpha=4)
    with files(store) as trainer:
        return trainer.publish(PAIR, weight_version=version, adapter=spec)


def publish_from_ranks(store: Path, version: int) -> WeightUpdateManifest:
    with trainers(2, "files", url=store, keep_last=99) as group:
        return group.publish(shards(version), version)


def listed(store: Path) -> list[int]:
    return [one["weight_version"] for one in call("files", "ls", store, "--json").json["versions"]]


def damage(file: Path, offset: int) -> None:
    """Turn one byte of a file around."""
    content = bytearray(file.read_bytes())
    content[offset] ^= 255
    file.write_bytes(content)


def refuses(said: Said, words: str) -> bool:
    """Whether a command says so of how it was called, in its box."""
    return said.code == 2 and words in " ".join(said.err.replace("│", " ").split())


def folder_of(store: Path, version: int) -> Path:
    return next(store.glob(f"{version:010d}-{12 * '[0-9a-f]'}"))  # of the first rank


# ------------------------------------------------------------------------------ ls and show


def test_ls_lists_whole_versions_and_those_of_several_ranks_alike(store: Path) -> None:
    first, second = publish(store, 1, 2)
    group = publish_from_ranks(store, 3)
    with files(store) as bridge:
        bridge.keep(second)
    said = run("files", "ls", store)
    assert (said.code, said.err) == (0, "")
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [
        [str(one.weight_version), one.update_id[:12]] for one in (first, second, group)
    ]
    assert [row[-1] == "kept" for row in rows] == [False, True, False]
    found = call("files", "ls", store, "--json").json["versions"]
    assert [one["ranks"] for one in found] == [1, 1, 2]
    assert [one["root"] for one in found] == [first.root, second.root, group.root]
    assert [one["is_kept"] for one in found] == [False, True, False]


def test_ls_says_what_is_damaged(store: Path) -> None:
    publish(store, 1)
    (folder_of(store, 1) / "manifest.json").write_text("{}")
    assert "damaged: " in call("files", "ls", store).out
    assert "error" in call("files", "ls", store, "--json").json["versions"][0]
    folder = folder_of(store, 1)
    (folder / "STABLE").write_text("{}")
    assert f"{folder.name}: its marker is damaged" in call("files", "ls", store).out
    assert call("files", "ls", store, "--json").json["damaged_markers"] == [folder.name]


@pytest.mark.parametrize("by", ["number", "update"])
def test_show_tells_of_a_version_and_its_files(store: Path, by: str) -> None:
    (_, second) = publish(store, 1, 2)
    named = "2" if by == "number" else second.update_id[:9]
    said = call("files", "show", store, named)
    assert said.code == 0
    assert all(word in said.out for word in (second.root, "model.safetensors", "STABLE"))
    found = call("files", "show", store, named, "--json").json
    assert (found["weight_version"], found["update_id"]) == (2, second.update_id)
    sizes = {one["name"]: one["nbytes"] for one in found["files"]}
    file = folder_of(store, 2) / "model.safetensors"
    assert sizes["model.safetensors"] == file.stat().st_size


def test_a_number_that_two_versions_have_is_an_error_that_lists_both(store: Path) -> None:
    (first,) = publish(store, 7)
    (second,) = publish(store, 7)
    said = call("files", "show", store, "7")
    assert said.complains("VersionNotFound")
    assert "7 names 2 versions" in said.err
    assert all(one.update_id[:12] in said.err for one in (first, second))
    assert call("files", "show", store, second.update_id).code == 0
    assert call("files", "show", store, "8", "--json").json["error"]["type"] == "VersionNotFound"


def rename(store: Path, version: int, update_id: str) -> None:
    """Have a version's marker and name say another update id."""
    folder = folder_of(store, version)
    marker = json.loads((folder / "STABLE").read_text())
    (folder / "STABLE").write_text(json.dumps(marker | {"update_id": update_id}))
    folder.rename(store / f"{version:010d}-{update_id[:12]}")


def test_a_version_is_named_by_its_number_or_by_a_long_beginning_of_its_update_id(
    store: Path,
) -> None:
    publish(store, 4)
    rename(store, 4, "0123456789" + "a" * 22)
    for named in ("01234567", "0123456789A"):
        assert call("files", "show", store, named, "--json").json["weight_version"] == 4
    for named in ("0", "0123", "0123456", "12345678"):
        said = call("files", "show", store, named)
        assert said.complains("VersionNotFound")
        words = f"has no version {named}. Name one of those that are there: 4 (0123456789aa)"
        assert words in said.err
    for named in ("", "a", "0f2"):
        said = call("files", "show", store, named)
        assert refuses(said, f"{named!r} names no version. Expected its number, or at least 4")


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_a_store_that_is_not_there_is_an_error_with_a_remedy(store: Path, command: str) -> None:
    said = call("files", command, store)
    assert said.complains("WeightBridgeUnavailableError")
    assert "Name a directory" in said.err


# ------------------------------------------------------------------------------ verify


def test_verify_reads_the_newest_version_and_says_that_every_byte_fits(store: Path) -> None:
    *_, newest = publish(store, 1, 2)
    said = run("files", "verify", store)
    assert (said.code, said.err) == (0, "")
    assert "pass: every byte fits" in said.out
    assert newest.root in said.out


@pytest.mark.parametrize(
    ("file", "offset", "words"),
    [
        ("model.safetensors", -5, "model.safetensors: tensor 'layers.1.weight': expected checksum"),
        ("model.safetensors", 20, "model.safetensors: its header is not the one"),
        ("lists.bin", 20, "lists.bin: its digests of leaves are not those of the tensors"),
    ],
    ids=["tensor", "header", "lists"],
)
def test_verify_names_the_file_and_the_tensor_that_is_wrong(
    store: Path, file: str, offset: int, words: str
) -> None:
    publish(store, 1)
    damage(folder_of(store, 1) / file, offset)
    said = call("files", "verify", store, "1")
    assert said.complains("ChecksumMismatch")
    assert words in said.err
    assert "failed: 1 of 3 files differ" in said.out
    found = call("files", "verify", store, "1", "--json").json
    assert [one["name"] for one in found["files"] if one["status"] == "failed"] == [file]


def test_verify_names_a_file_that_was_cut_and_one_that_is_gone(store: Path) -> None:
    publish(store, 1)
    os.truncate(folder_of(store, 1) / "model.safetensors", 100)
    assert "has 100 bytes, expected" in call("files", "verify", store).err
    (folder_of(store, 1) / "model.safetensors").unlink()
    assert "model.safetensors: is not there" in call("files", "verify", store).err


@pytest.mark.parametrize("file", ["manifest.json", "group.json"])
@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_a_manifest_that_is_no_text_is_an_error_that_names_it(
    store: Path, tmp_path: Path, command: str, file: str
) -> None:
    if file == "manifest.json":
        publish(store, 1)
    else:
        publish_from_ranks(store, 1)
    damage(folder_of(store, 1) / file, 5)
    words: dict[str, tuple[str | Path, ...]] = {
        "show": ("files", "show", store, "1"),
        "verify": ("files", "verify", store),
        "export": ("export", store, tmp_path / "out"),
    }
    said = call(*words[command], "--json")
    assert said.complains("SegmentError")
    assert said.json["error"]["type"] == "SegmentError"
    assert f"{file} of {folder_of(store, 1).name}" in said.json["error"]["message"]


def test_verify_names_a_configuration_of_an_adapter_that_is_gone(store: Path) -> None:
    publish_adapter(store, 1)
    assert call("files", "verify", store).code == 0
    (folder_of(store, 1) / "adapter_config.json").unlink()
    said = call("files", "verify", store)
    assert said.complains("ChecksumMismatch")
    assert "adapter_config.json: is not there" in said.err


def test_verify_reads_all_parts_of_a_version_of_several_ranks(store: Path) -> None:
    publish_from_ranks(store, 1)
    assert call("files", "verify", store).code == 0
    (folder,) = store.glob("0*-1")
    damage(folder / "model.safetensors.part", -5)
    said = call("files", "verify", store)
    assert said.complains("ChecksumMismatch")
    assert f"{folder.name}/model.safetensors.part: tensor " in said.err


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-00002.safetensors.part"])
def test_verify_names_a_model_s_file_in_a_part_s_folder(store: Path, name: str) -> None:
    publish_from_ranks(store, 1)
    (folder,) = store.glob("0*-1")
    (folder / name).write_bytes(b"xx")
    said = call("files", "verify", store)
    assert said.complains("ChecksumMismatch")
    assert f"{name}: is no file of this version" in " ".join(said.err.split())


# ------------------------------------------------------------------------------ gc


def test_gc_removes_what_a_publisher_would_and_a_dry_run_only_says_so(store: Path) -> None:
    publish(store, 1, 2)
    publish_from_ranks(store, 3)
    publish_from_ranks(store, 4)
    (store / f".0-{'a' * 32}").mkdir()  # as a publisher that was killed leaves it
    before = sorted(path.name for path in store.iterdir())
    dry = call("files", "gc", store, "--keep-last", "1", "--dry-run", "--json").json
    assert sorted(path.name for path in store.iterdir()) == before
    assert listed(store) == [1, 2, 3, 4]
    said = run("files", "gc", store, "--keep-last", "1")
    assert (said.code, said.err) == (0, "")
    assert "Removed 5 of 5" in said.out
    assert {one["name"] for one in dry["found"]} == {*before} - {
        path.name for path in store.iterdir()
    }
    assert listed(store) == [4]
    assert "Nothing to remove" in call("files", "gc", store).out


def test_gc_leaves_what_is_kept_and_what_is_being_read(store: Path) -> None:
    publish(store, 1, 2, 3, 4)
    with files(store) as bridge:
        bridge.keep(bridge.versions()[0])
    with DirectoryStore(store).leased(folder_of(store, 2).name):
        found = call("files", "gc", store, "--keep-last", "1", "--json").json["found"]
    assert [one["outcome"] for one in found] == ["kept", "being read", "removed"]
    assert listed(store) == [1, 2, 4]


class Clock:
    """The time that `gc` and its store see: it passes only where `gc` waits."""

    def __init__(self, patched: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
        self.now, self._meanwhile = 0.0, meanwhile
        patched.setattr("rl_bridge.cli.files.time", SimpleNamespace(sleep=self.sleep))
        monotonic = SimpleNamespace(monotonic=lambda: self.now)
        patched.setattr("rl_bridge.transports.files.objects.time", monotonic)

    def sleep(self, seconds: float) -> None:
        self._meanwhile()
        self.now += seconds


@pytest.mark.parametrize(
    ("before", "after", "outcome", "waited_s"),
    [
        (b"7", b"7", "removed", 2.0),  # of an earlier build
        (b"7", b"8", "being read", 2.0),
        (b"7 90.0", b"7 90.0", "removed", 90.0),
        (b"7 90.0", b"8 90.0", "being read", 90.0),
        (b"7 0.5", b"7 0.5", "removed", 2.0),
        (b"7 inf", b"7 inf", "removed", 2.0),
    ],
)
def test_gc_tells_the_lease_of_a_killed_reader_by_that_it_does_not_change(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: bytes,
    after: bytes,
    outcome: str,
    waited_s: float,
) -> None:
    url = f"memory://{tmp_path}/run"
    with make_weight_bridge("files", url=url) as trainer:
        first, _ = [trainer.publish(WEIGHTS, weight_version=version) for version in (1, 2)]
    lease = f"{url}/leases/0000000001-{first.update_id[:12]}/of-a-reader"
    memory = fsspec.filesystem("memory")
    memory.pipe_file(lease, before)
    dry = call("files", "gc", url, "--keep-last", "1", "--dry-run", "--json").json
    assert [one["outcome"] for one in dry["found"]] == ["being read"]
    clock = Clock(monkeypatch, lambda: memory.pipe_file(lease, after))
    said = call("files", "gc", url, "--keep-last", "1", "--lease-s", "2", "--json").json
    assert [one["outcome"] for one in said["found"]] == [outcome]
    assert clock.now == waited_s
    assert memory.exists(lease) == (outcome == "being read")


def test_a_lease_says_how_long_it_lives(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/run"
    with make_weight_bridge("files", url=url, lease_s=90.0) as trainer:
        trainer.publish(WEIGHTS, weight_version=1)
        memory = fsspec.filesystem("memory")
        (lease,) = memory.glob(f"{url}/leases/*/*")
        assert memory.cat_file(lease) == b"1 90.0"


def test_gc_refuses_a_lease_that_a_slow_request_outlasts(store: Path) -> None:
    publish(store, 1)
    assert refuses(call("files", "gc", store, "--lease-s", "0.5"), "expected at least 1, got '0.5'")


def test_gc_does_not_remove_a_version_that_ranks_published_while_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store nobody keeps publishers out: parts become a version meanwhile."""
    url = f"memory://{tmp_path}/run"
    said: list[Said] = []
    showing = FilesPublisher.show_group
    everybody = threading.Barrier(2, action=lambda: said.append(collect()))

    def collect() -> Said:
        # Both parts are there, and no marker says yet that they are published.
        return call("files", "gc", url, "--keep-last", "5", "--json")

    def show_group(end: FilesPublisher, update_id: str) -> None:
        if end._rank:
            parts[end] = update_id
        everybody.wait(60)
        showing(end, update_id)

    def meanwhile() -> None:
        for end, update_id in parts.items():
            showing(end, update_id)

    parts: dict[FilesPublisher, str] = {}
    Clock(monkeypatch, meanwhile)
    with trainers(2, "files", url=url, keep_last=5) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilesPublisher, "show_group", show_group)
        group.publish(shards(1), 1)
        found = said[0].json["found"]
        assert {one["outcome"] for one in found} == {
            "left: it was published, or removed, meanwhile"
        }
        with make_weight_bridge("files", url=url, source_worker="reader") as reader:
            assert isinstance(reader, FilesTensorBridge)
            assert [one.weight_version for one in reader.versions()] == [1]


def test_gc_says_what_it_leaves_where_a_publisher_may_live(store: Path) -> None:
    publish(store, 1)
    (store / ".writer-0").unlink()  # as where only publishers that are not fenced were
    name = f".0-{'a' * 32}"
    (store / name).mkdir()
    said = call("files", "gc", store)
    assert said.code == 0
    assert "left: a publisher may be writing it" in said.out
    assert "Removed 0 of 1" in said.out
    assert (store / name).exists()


def test_gc_counts_only_what_is_gone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 1, 2)
    (store / f".0-{'a' * 32}").mkdir()
    monkeypatch.setattr(DirectoryStore, "discard", lambda _self, _name: None)
    found = call("files", "gc", store, "--keep-last", "1", "--json").json["found"]
    assert [one["outcome"] for one in found] == ["removed", "left: it cannot be removed"]


def test_gc_removes_nothing_while_a_publisher_lives(store: Path) -> None:
    publish(store, 1, 2, 3)
    with Child(Trainer, store=str(store)) as trainer:
        trainer.ready()
        said = call("files", "gc", store, "--keep-last", "0")
    assert said.complains("WeightBridgeUnavailableError")
    assert "has a publisher of rank 0" in said.err
    assert listed(store) == [1, 2, 3]


class Trainer:
    """A trainer in a process of its own."""

    def __init__(self, *, store: str) -> None:
        self.bridge = files(Path(store), keep_last=99)
        assert self.bridge.publisher


# ------------------------------------------------------------------------------ export and publish


@pytest.mark.parametrize("transport", ["shared-memory", "files"])
def test_a_live_version_is_exported_by_its_manifest(
    store: Path, tmp_path: Path, transport: str
) -> None:
    file, out = tmp_path / "m.json", tmp_path / "out"
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "config.json").write_text('{"model_type": "tiny"}')
    options: dict[str, Any] = {"url": store, "config_dir": configs} if transport == "files" else {}
    with make_weight_bridge(transport, source_worker="trainer", **options) as trainer:
        manifest = trainer.publish(WEIGHTS, weight_version=5)
        file.write_text(manifest.to_json())
        where = ("--url", store) if transport == "files" else ()
        said = run("export", file, out, *where)
    assert (said.code, said.err) == (0, "")
    found = load_file(out / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(found[name].equal(one) for name, one in WEIGHTS.items())
    assert (out / "manifest.json").read_text() == manifest.to_json()
    expected = {"model.safetensors", "manifest.json"}
    if transport == "files":
        expected.add("config.json")
        assert (out / "config.json").read_text() == '{"model_type": "tiny"}'
    assert {path.name for path in out.iterdir()} == expected
    assert {path.name for path in tmp_path.iterdir()} - {"run"} == {"m.json", "out", "configs"}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("manifest", "--version 1"),
        ("manifest", "--directory ."),
        ("store", "--url elsewhere"),
        ("store", "--directory ."),
    ],
)
def test_export_refuses_options_that_belong_to_another_source(
    store: Path, tmp_path: Path, kind: str, given: str
) -> None:
    file = tmp_path / "m.json"
    file.write_text(publish(store, 1)[0].to_json())
    source = store if kind == "store" else file
    said = call("export", source, tmp_path / "out", *given.split())
    assert refuses(said, f"{given} does not belong to")
    assert not (tmp_path / "out").exists()


def test_export_takes_the_url_of_the_store_that_it_is_from(store: Path, tmp_path: Path) -> None:
    publish(store, 1)
    assert call("export", store, tmp_path / "out", "--url", store).code == 0


def test_export_of_what_is_not_there_says_what_it_takes(tmp_path: Path) -> None:
    said = call("export", tmp_path / "nope.json", tmp_path / "out")
    assert said.complains("WeightBridgeUnavailableError")
    assert "nope.json' is neither a manifest's file nor a store" in said.err


@pytest.mark.parametrize("fault", ["not empty", "a file", "no directory"])
def test_export_looks_at_its_target_before_it_reads_the_version_and_leaves_it_alone(
    store: Path, tmp_path: Path, fault: str
) -> None:
    publish(store, 1)
    damage(folder_of(store, 1) / "model.safetensors", -5)
    out = mine = tmp_path / "out"
    if fault == "not empty":
        out.mkdir()
        mine = out / "mine"
    elif fault == "no directory":
        out = tmp_path / "absent" / "out"
    mine.write_text("mine")
    said = call("export", store, out)
    assert said.complains("WeightBridgeUnavailableError")
    assert f"{out} cannot be written: " in said.err
    assert fault in said.err
    assert mine.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}


def test_a_manifest_of_files_needs_the_url(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(publish(store, 1)[0].to_json())
    said = call("export", file, tmp_path / "out")
    assert said.complains("WeightBridgeUnavailableError")
    assert "--url" in said.err


def test_a_version_of_several_ranks_is_exported_whole(store: Path, tmp_path: Path) -> None:
    publish_from_ranks(store, 1)
    publish_from_ranks(store, 2)
    assert call("export", store, tmp_path / "out", "--version", "1").code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = model(SHAPES, 1)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(one) for name, one in expected.items())


def test_export_of_damaged_bytes_writes_nothing(store: Path, tmp_path: Path) -> None:
    publish(store, 1)
    damage(folder_of(store, 1) / "model.safetensors", -5)
    assert call("export", store, tmp_path / "out").complains("ChecksumMismatch")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def checkpoint(folder: Path) -> Path:
    """A checkpoint of two files, as Hugging Face's tools write it."""
    folder.mkdir()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    first, *others = WEIGHTS
    save_file({first: WEIGHTS[first]}, folder / names[0])
    save_file({name: WEIGHTS[name] for name in others}, folder / names[1])
    where = {first: names[0], **dict.fromkeys(others, names[1])}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    return folder


def test_a_checkpoint_is_published_and_exported_again_with_its_configuration(
    store: Path, tmp_path: Path
) -> None:
    publish(store, 3)
    said = run("publish", checkpoint(tmp_path / "given"), "--url", store)
    assert (said.code, said.err) == (0, "")
    assert listed(store) == [3, 4]  # nothing is removed
    with files(store) as reader:
        manifest = reader.newest()
        assert manifest is not None
        found = reader.import_update(manifest)
        assert all(found[name].equal(one) for name, one in WEIGHTS.items())
    assert call("export", store, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "tiny"}'
    again = call("publish", tmp_path / "out", "--url", store, "--version", "9", "--json").json
    assert (again["weight_version"], again["root"]) == (9, manifest.root)


def test_an_adapter_goes_through_files_as_peft_has_it(store: Path, tmp_path: Path) -> None:
    publish_adapter(store, 1)
    assert call("export", store, tmp_path / "policy").code == 0
    found, tensors = read_peft(tmp_path / "policy", "policy")
    assert found.scaling_of("layers.0.q_proj") == 2.0
    assert all(tensors[name].equal(one) for name, one in PAIR.items())
    said = call("publish", tmp_path / "policy", "--url", store, "--json").json
    assert (said["adapter"], said["weight_version"]) == ("policy", 2)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("cut", "MalformedManifest", "is damaged"),
        ("gone", "WeightBridgeUnavailableError", "cannot be read"),
        ("outside", "MalformedManifest", "no weight_map of files beside it"),
        ("swapped", "MalformedManifest", "as model.safetensors.index.json says"),
        ("empty", "WeightBridgeUnavailableError", "has no file of safetensors"),
    ],
)
def test_a_checkpoint_that_is_none_is_not_published(
    store: Path, tmp_path: Path, fault: str, error: str, words: str
) -> None:
    folder = checkpoint(tmp_path / "given")
    first = folder / "model-00001-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    if fault == "cut":
        os.truncate(first, 100)
    elif fault == "gone":
        first.unlink()
    elif fault == "outside":
        index.write_text('{"weight_map": {"w": "../run/model.safetensors"}}')
    elif fault == "swapped":
        first.rename(folder / "x")
        (folder / "model-00002-of-00002.safetensors").rename(first)
        (folder / "x").rename(folder / "model-00002-of-00002.safetensors")
    else:
        for path in folder.iterdir():
            path.unlink()
    said = call("publish", folder, "--url", store)
    assert said.complains(error)
    assert words in said.err
    assert not store.exists()


def test_publish_is_refused_where_a_trainer_lives(store: Path, tmp_path: Path) -> None:
    with Child(Trainer, store=str(store)) as trainer:
        trainer.ready()
        said = call("publish", checkpoint(tmp_path / "given"), "--url", store)
    assert said.complains("WeightBridgeUnavailableError")
    assert "has a publisher of rank 0 already" in said.err


def test_publish_refuses_a_number_that_the_store_has(store: Path, tmp_path: Path) -> None:
    publish(store, 3, 5)
    said = call("publish", checkpoint(tmp_path / "given"), "--url", store, "--version", "3")
    assert said.complains("VersionNotMonotonic")
    assert "has a version 3 already" in said.err
    assert "such as --version 6" in said.err
    assert listed(store) == [3, 5]


def test_publish_refuses_the_name_of_an_adapter_for_a_model(store: Path, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "given")
    said = call("publish", folder, "--url", store, "--adapter", "policy")
    assert refuses(said, "--adapter policy is of an adapter")
    assert not store.exists()


@pytest.mark.parametrize("content", [b"", b"nonsense"], ids=["empty", "nonsense"])
def test_publish_leaves_the_number_of_a_version_with_a_damaged_marker(
    store: Path, tmp_path: Path, content: bytes
) -> None:
    publish(store, 3, 5)
    (folder_of(store, 5) / "STABLE").write_bytes(content)
    said = call("publish", checkpoint(tmp_path / "given"), "--url", store, "--json").json
    assert said["weight_version"] == 6


def test_publish_into_a_bucket_with_a_damaged_marker_asks_for_a_number(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}/run"
    given = checkpoint(tmp_path / "given")
    assert call("publish", given, "--url", url).code == 0
    memory = fsspec.filesystem("memory")
    for marker in memory.glob(f"{url}/STABLE/*"):
        memory.pipe_file(marker, b"nonsense")
    said = call("publish", given, "--url", url)
    assert said.complains("WeightBridgeUnavailableError")
    assert "a number that was never published" in said.err
    assert call("publish", given, "--url", url, "--version", "7").code == 0

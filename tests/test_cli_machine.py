"""The commands whose answer depends on the machine: doctor, gc, bench, and the demo."""

import os
import re
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge.bridge.bridges import make_weight_bridge
from rl_bridge.cli import bench, demo
from rl_bridge.cli import bench as measure
from rl_bridge.cli import doctor as probes
from rl_bridge.cli import screen as environment
from rl_bridge.cuda.devices import has_driver
from rl_bridge.engines import probe as engine_probe
from rl_bridge.engines.sglang import probe as sglang
from rl_bridge.engines.vllm import probe as vllm
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.segment import OwnedSegment
from rl_bridge.testing.processes import Child
from rl_bridge.transports import registry
from rl_bridge.transports.base import Availability
from tests.cli_program import Said, call, run

WEIGHTS = {"w": torch.ones(5_000)}


# ------------------------------------------------------------------------------ doctor


def checks(said: Any) -> dict[str, Any]:
    return {check["name"]: check for check in said.json["checks"]}


def test_doctor_checks_every_transport_every_engine_and_the_machine() -> None:
    said = call("doctor", "--json")
    assert (said.code, said.err, said.json["status"]) == (0, "", "pass")
    found = checks(said)
    assert found.keys() == {
        *registry.TRANSPORTS,
        *probes.ENGINES,
        *probes.FEATURES,
        *(item.name for name in probes.ENGINES for item in probes.engine_features(name)),
        "torch module",
        "ray",
        "compiled pass",
    }
    assert {name: registry.probe(name).status for name in registry.TRANSPORTS} == {
        name: found[name]["status"] for name in registry.TRANSPORTS
    }
    for check in found.values():
        assert check["purpose"] or check["group"] == "engines"
        assert (check["status"] == "blocked") == bool(check["cause"]) == bool(check["remedy"])


def test_doctor_tells_people_cause_and_remedy_and_calls_nothing_blocked_that_is_sound() -> None:
    said = call("doctor")
    assert said.code == 0
    for words in ("shared-memory", "sglang is not installed", "→ Install it: pip", "Ready:"):
        assert words in said.out
    if has_driver():
        return  # a GPU is here: its transports are not missing
    assert "locked" not in said.out, said.out
    (summary,) = (line for line in said.out.splitlines() if line.startswith("Not installed"))
    assert {"sglang", "cuda-vmm", "cuda-ipc", "NCCL"} < set(re.findall(r"[\w-]+", summary))


def test_doctor_calls_blocked_what_is_installed_and_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12/_api.py").write_text("raise ImportError('no libcudart')")
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = (line for line in call("doctor").out.splitlines() if line.startswith("  nixl "))
    assert row.split()[1] == "blocked"
    assert "no libcudart" in row


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["screen", "json"])
def test_doctor_fails_where_a_needed_transport_is_blocked(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    def blocked(name: str) -> Availability:
        return Availability(name, "blocked", f"no {name} \x1b[2J today", "Wait.")

    monkeypatch.setattr(registry, "probe", blocked)
    said = call("doctor", *flags)
    assert said.code == 1
    assert "no shared-memory" in said.out
    assert "\x1b" not in said.out
    if flags:
        assert said.json["status"] == "blocked"
    else:
        assert "Not ready: local-clone and shared-memory blocked." in said.out


def installed(patch: pytest.MonkeyPatch, engine: str, version: str) -> None:
    """Let one engine be installed, and no other one."""
    versions = {engine: version}
    patch.setattr(engine_probe.EnginePackage, "version", lambda self: versions.get(self.module))


def test_doctor_names_an_installed_engine_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "9.9")
    assert probes.engine("sglang").status == "pass"
    assert "sglang" not in sys.modules


def test_doctor_tells_how_to_install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "find_spec", lambda _: None)
    found = checks(call("doctor", "--json"))
    assert found["vllm"]["cause"] == "vllm is not installed"
    assert found["vllm"]["remedy"] == "Install it: pip install 'rl-bridge[vllm]'."
    assert not found.keys() & vllm.FEATURES.keys()


@pytest.mark.parametrize(
    ("kind", "name", "has", "lacks", "needs", "works"),
    [
        (vllm, "vLLM", "0.30.0", "vllm version spans", "0.32.0", "vllm backend"),
        (sglang, "SGLang", "0.5.2", "sglang plugin", "0.5.23", "sglang tensor"),
    ],
    ids=["vllm", "sglang"],
)
def test_doctor_has_a_row_for_each_feature_of_an_installed_engine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: Any,
    name: str,
    has: str,
    lacks: str,
    needs: str,
    works: str,
) -> None:
    installed(monkeypatch, name.lower(), has)
    monkeypatch.setattr(engine_probe, "_ask", lambda *_: {lacks: "it is not there"})
    said = call("doctor", "--json")
    found = checks(said)
    assert {found[feature]["group"] for feature in kind.FEATURES} == {f"what {name} offers"}
    assert (said.code, found[name.lower()]["status"]) == (0, "pass")
    assert found[works]["status"] == "pass"
    assert all(found[feature]["purpose"] for feature in kind.FEATURES)
    assert found[lacks]["cause"] == f"{name} {has} is installed, expected {needs} or later"
    assert "pip install" in found[lacks]["remedy"]


def test_doctor_says_why_the_compiled_pass_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "native_cause", lambda: "no compiler")
    found = probes.compiled_pass()
    assert (found.status, found.cause) == ("blocked", "no compiler")


def refuse(*_: object, **__: object) -> Any:
    raise OSError(22, "Invalid argument")


BROKEN: dict[str, tuple[str, object, str, Callable[..., Any], str]] = {
    "no-memfd": ("memfd sealing", os, "memfd_create", refuse, "Invalid argument"),
    "no-locks": ("OFD locks", leases, "try_shared", lambda _: False, "free lease"),
    "loose-locks": ("OFD locks", leases, "try_exclusive", lambda _: True, "keep the writer out"),
    "lasting-locks": ("OFD locks", leases, "try_exclusive", lambda _: False, "was not freed"),
    "no-moves": ("MREMAP_DONTUNMAP", vm, "move", refuse, "Invalid argument"),
    "no-scan": ("PAGEMAP_SCAN", vm, "private_ranges", lambda *_: None, "no PAGEMAP_SCAN"),
    "blind-scan": ("PAGEMAP_SCAN", vm, "private_ranges", lambda *_: [], "did not report"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_kernel_that_lacks_a_feature_is_found_out(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, module, attribute, replacement, cause = BROKEN[case]
    monkeypatch.setattr(module, attribute, replacement)
    found = probes.feature(name)
    assert found.status == "blocked"
    assert cause in found.cause
    assert found.remedy


def test_a_move_that_loses_the_content_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(source: int, nbytes: int, target: int) -> None:
        del source
        segment = OwnedSegment.make("empty", nbytes)
        vm.map_fixed(target, nbytes, segment.fd)
        segment.close()

    monkeypatch.setattr(vm, "move", move)
    assert "does not show what it showed" in probes.feature("MREMAP_DONTUNMAP").cause


@pytest.mark.parametrize(
    ("code", "cause"),
    {
        "refused": ("import sys; sys.exit('no such place')", r"cannot open .*: no such place"),
        "silent": ("import sys; sys.exit(3)", r"cannot open .*: exit code 3"),
        "other-file": ("print(1)", r"another file"),
        "hangs": ("import signal; signal.pause()", r"did not open .* within"),
    }.values(),
    ids=["refused", "silent", "other-file", "hangs"],
)
def test_a_proc_that_hides_processes_is_found_out(
    monkeypatch: pytest.MonkeyPatch, code: str, cause: str
) -> None:
    monkeypatch.setattr(probes, "_OPEN", code)
    if "pause" in code:
        monkeypatch.setattr(probes, "_CHILD_TIMEOUT_S", 0.5)
    found = probes.feature("/proc visibility")
    assert found.status == "blocked"
    assert re.search(cause, found.cause)


def test_doctor_says_unknown_for_facts_that_the_machine_hides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_found(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(environment, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(metadata, "version", not_found)
    said = call("doctor", "--json").json["environment"]
    assert (said["memory"], said["rl_bridge"]) == ("unknown", "unknown (not installed)")


# ------------------------------------------------------------------------------ gc


class Publisher:
    """One that is killed: it publishes into named segments, and waits."""

    def __init__(self, directory: str) -> None:
        self.bridge = make_weight_bridge("shared-memory", directory=directory)
        self.bridge.publish(WEIGHTS, weight_version=1)


def kill_a_publisher(directory: Path) -> None:
    """Leave named segments in a directory the hard way."""
    with Child(Publisher, directory=str(directory)) as child:
        child.ready()
        assert call("gc", directory, "--json").json["segments"] == [], "it lives"
        child.kill()
        assert child.exitcode() == -signal.SIGKILL


def test_gc_removes_what_a_killed_publisher_left(tmp_path: Path) -> None:
    kill_a_publisher(tmp_path)
    (tmp_path / "rlb-notes.txt").write_text("mine", "ascii")
    said = call("gc", tmp_path)
    assert (said.code, said.err) == (0, "")
    assert "Removed 2 segments" in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["rlb-notes.txt"]
    assert "Nothing to remove" in call("gc", tmp_path).out


def test_gc_only_says_what_it_would_do_in_a_dry_run(tmp_path: Path) -> None:
    left = {"rlb-0123456789ab-1.seg": 8192, "rlb-0123456789ab-control": 4096}
    for name, nbytes in left.items():
        (tmp_path / name).write_bytes(bytes(nbytes))
    said = call("gc", tmp_path, "--dry-run", "--json").json
    assert {segment["name"]: segment["nbytes"] for segment in said["segments"]} == left
    assert (said["total_nbytes"], said["dry_run"]) == (12_288, True)
    assert "Would remove 2 segments, 12.00 KiB" in call("gc", tmp_path, "--dry-run").out
    assert {path.name for path in tmp_path.iterdir()} == left.keys()


def test_gc_says_whether_there_was_any_segment_at_all(tmp_path: Path) -> None:
    assert "no segment in" in call("gc", tmp_path).out
    with make_weight_bridge("shared-memory", directory=tmp_path) as bridge:
        bridge.publish(WEIGHTS, weight_version=1)
        assert "no dead publisher's segment in" in call("gc", tmp_path).out


# ------------------------------------------------------------------------------ bench


@pytest.fixture(scope="module")
def measured() -> Said:
    """What the bench says, run once and as a process of its own: it starts another one."""
    return run("bench", "--mib", "1", "--mib", "2", "--tensors", "3", "--repeats", "2", "--json")


def test_bench_measures_every_phase_in_two_processes(measured: Said) -> None:
    said = measured
    assert (said.code, said.err) == (0, "")
    first, second = said.json["sizes"]
    assert first["nbytes"] == pytest.approx(1 << 20, rel=1e-3)
    assert second["nbytes"] == pytest.approx(2 << 20, rel=1e-3)
    for name, phase in first["phases"].items():
        samples = phase["samples_ms"]
        assert len(samples) == (2 if name.endswith(("_copy", "_flip")) else 4), name
        assert min(samples) <= phase["median_ms"] <= max(samples)
        has_no_rate = name in {"install_flip", "prove_flip"} or name[:4] in {"prep", "rest"}
        assert (phase["gb_per_s"] is None) == has_no_rate
    rates = [first["phases"][name]["of_memcpy"] for name in ("memcpy_1", "memcpy_all")]
    assert max(rates) == 1


def test_the_phases_of_the_bench_account_for_all_of_its_time(measured: Said) -> None:
    first = measured.json["sizes"][0]
    found = {name: phase["samples_ms"] for name, phase in first["phases"].items()}
    for way, updates in (("copy", slice(0, 2)), ("flip", slice(2, 4))):
        parts = [found[name][updates] for name in ("publish", "import_verify")]
        parts += [found[f"{name}_{way}"] for name in ("prepare", "install", "prove", "rest")]
        spent = [sum(update) for update in zip(*parts, strict=True)]
        assert spent == pytest.approx(found[f"loaded_{way}"])
        assert min(map(min, parts)) > 0


def test_bench_shows_rates_next_to_memcpy(monkeypatch: pytest.MonkeyPatch, measured: Said) -> None:
    """Of what was measured already: only the screen is another one."""
    first = measured.json["sizes"][0]
    samples = {name: phase["samples_ms"] for name, phase in first["phases"].items()}

    def measure_again(_: int, *, on_update: Callable[[str], None], **__: int) -> measure.Timings:
        on_update("again")
        return measure.Timings(1 << 20, samples)

    monkeypatch.setattr(bench, "measure", measure_again)
    said = call("bench", "--mib", "1", "--tensors", "3", "--repeats", "2")
    assert said.code == 0
    for words in ("1.00 MiB in 3 tensors", "of memcpy", "install by flip", "publish to loaded"):
        assert words in said.out


# ------------------------------------------------------------------------------ demo


def test_the_demo_runs_as_the_command_line_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(demo, "run_demo", lambda **options: asked.append(options))
    said = call("demo", "--steps", "6", "--transport", "local-clone", "--out", tmp_path, "--seed=3")
    assert (said.code, said.err) == (0, "")
    (options,) = asked
    assert options.pop("console") is not None
    assert options == {
        "transport": "local-clone",
        "engine": "module",
        "lora": False,
        "steps": 6,
        "seed": 3,
        "out": tmp_path,
        "plain": False,
        "url": None,
    }


def test_a_transport_that_the_demo_cannot_use_is_refused_in_one_line(tmp_path: Path) -> None:
    said = call("demo", "--transport", "cuda-ipc", "--out", tmp_path)
    assert said.complains("WeightBridgeUnavailableError")
    assert "shared-memory or local-clone or files, not over 'cuda-ipc'" in said.err

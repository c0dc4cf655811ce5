"""What is found out about an installed vLLM. What asks vLLM itself runs where it is installed."""

import json
import sys

import pytest

from rl_bridge.engines import probe as engine_probe
from rl_bridge.engines.vllm import probe as vllm


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A vLLM of version 0.32.0, as far as its metadata go."""
    monkeypatch.setattr(engine_probe.EnginePackage, "version", lambda _: "0.32.0")
    return monkeypatch


def answering(patch: pytest.MonkeyPatch, code: str) -> None:
    patch.setattr(vllm, "_CHILD", code)


def test_without_vllm_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "find_spec", lambda _: None)
    answering(monkeypatch, "raise SystemExit('asked')")
    assert vllm.PACKAGE.version() is None
    assert vllm.probe() == []


def test_causes_that_the_child_finds_come_with_a_remedy(installed: pytest.MonkeyPatch) -> None:
    causes = {"vllm plugin": "no entry point", "vllm ipc": "no driver"}
    answering(installed, f"print('noise of others'); print({json.dumps(json.dumps(causes))})")
    found = {item.name: item for item in vllm.probe(timeout_s=60)}
    assert found.keys() == vllm.FEATURES.keys()
    assert {name for name, item in found.items() if item.status != "pass"} == causes.keys()
    for name, cause in causes.items():
        assert found[name].cause == cause
        assert found[name].remedy == vllm.FEATURES[name].remedy


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit('no such library')", "cannot be imported: no such library"),
        ("import os; os._exit(7)", "cannot be imported: exit code 7"),
        ("input()", "cannot be imported: EOFError"),
    ],
    ids=["raises", "crashes", "asks"],
)
def test_a_vllm_that_cannot_be_imported_blocks_everything_with_what_it_said(
    installed: pytest.MonkeyPatch, code: str, words: str
) -> None:
    answering(installed, code)
    found = vllm.probe(timeout_s=60)
    assert {item.status for item in found} == {"blocked"}
    assert all(words in item.cause and item.remedy for item in found)


def test_a_vllm_that_hangs_blocks_everything_after_the_deadline(
    installed: pytest.MonkeyPatch,
) -> None:
    answering(installed, "import threading; threading.Event().wait()")
    found = vllm.probe(timeout_s=0.2)
    assert {item.cause for item in found} == {"vLLM was not imported within 0 s"}


OURS = {"vllm plugin", "vllm backend", "vllm executor", "vllm server"}


@pytest.mark.parametrize(
    ("has", "older"),
    [
        ("0.26.0", {*OURS, "vllm version labels", "vllm version spans"}),
        ("0.27.0", {*OURS, "vllm version spans"}),
        ("0.31.2+cpu", {"vllm version spans"}),
        ("0.32.0", set()),
    ],
)
def test_a_version_that_lacks_something_is_told_which_one_has_it(
    monkeypatch: pytest.MonkeyPatch, has: str, older: set[str]
) -> None:
    monkeypatch.setattr(engine_probe.EnginePackage, "version", lambda _: has)
    causes = dict.fromkeys(vllm.FEATURES, "it is not there")
    causes.pop("vllm external storage")
    answering(monkeypatch, f"print({json.dumps(json.dumps(causes))})")
    for item in vllm.probe(timeout_s=60):
        if item.name in older:
            since = vllm.FEATURES[item.name].since
            assert item.cause == f"vLLM {has} is installed, expected {since} or later"
        else:
            assert item.cause == causes.get(item.name, "")


def test_every_attempt_is_answered_where_vllm_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm.look()
    causes = json.loads(capsys.readouterr().out)
    assert causes.keys() == vllm.FEATURES.keys()
    assert "vLLM is not installed" in causes["vllm backend"]
    assert "vLLM is not installed" in causes["vllm version spans"]

"""What the doctor says of the SGLang of this environment."""

import pytest

from rl_bridge.engines.sglang import probe


def test_all_of_it_works_here() -> None:
    found = probe.probe(timeout_s=280)
    assert {item.name for item in found} == set(probe.FEATURES)
    assert {item.status for item in found} == {"pass"}, found


def test_a_list_of_plugins_without_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    cause = probe.FEATURES["sglang plugin"].attempt()
    assert cause == "SGLANG_PLUGINS allows another, and not rl_bridge"

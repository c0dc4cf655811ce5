"""The doctor tells of each backend of NIXL's whether it can be opened here, and what it lacks."""

import pytest

from rl_bridge.cli.doctor import nixl_backends
from rl_bridge.transports.nixl import library
from rl_bridge.transports.nixl import library as backends


def test_each_backend_that_nixl_brings_is_listed_with_the_cause_if_it_does_not_open() -> None:
    found = {item.name.removeprefix("NIXL "): item for item in nixl_backends()}
    assert list(found) == library.plugins()
    assert found["UCX"].status == "pass"
    for name, item in found.items():
        assert item.status == "pass" or (item.cause and item.remedy), name
        assert name in backends.BACKENDS, "say what it is for"


def test_a_plugin_that_cannot_be_loaded_says_which_library_is_missing() -> None:
    lacking = [cause for cause in backends.causes().values() if cause and "plugin" in cause]
    if not lacking:
        pytest.skip("this machine has what all of them need")
    assert all(".so" in cause and "cannot open" in cause for cause in lacking), lacking


def test_a_probe_that_prints_nothing_is_reported_as_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "command_without_torch", lambda _: ["/bin/false"])
    (item,) = nixl_backends()
    assert item.status == "blocked"
    assert "ended with 1" in item.cause

"""The suites see what they are for: each planted lie is caught.

For honest ones the same suites pass, in `tests/transports` and `tests/installers`.
"""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing import LifecycleMachine
from tests.planted_liars import INSTALLER_LIES, TRANSPORT_LIES, Forgets, HalfUndoes

LIARS = Path(__file__).with_name("planted_liars.py")
ALL_LIES: dict[type, str] = {**TRANSPORT_LIES, **INSTALLER_LIES}
LIES = [(f"Test{kind.__name__}", name) for kind, name in ALL_LIES.items()]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Class and test -> failed, passed or skipped; of a parametrized test, the worst."""
    report = tmp_path_factory.mktemp("liars") / "report.xml"
    chosen = [f"{LIARS}::{kind}::{name}" for kind, name in LIES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=LIARS.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[tuple[str, str], str] = {}
    for case in ET.parse(report).iter("testcase"):
        kind = case.attrib["classname"].rpartition(".")[2]
        key = (kind, case.attrib["name"].partition("[")[0])
        worst = "passed"
        for tag, word in (("skipped", "skipped"), ("error", "error"), ("failure", "failed")):
            if case.find(tag) is not None:
                worst = word
        order = ["passed", "skipped", "error", "failed"]
        found[key] = max(found.get(key, "passed"), worst, key=order.index)
    return found


@pytest.mark.parametrize("lie", LIES, ids="-".join)
def test_a_lie_is_caught(lie: tuple[str, str], outcomes: dict[tuple[str, str], str]) -> None:
    assert outcomes[lie] == "failed"


@pytest.mark.parametrize("adapter", [Forgets, HalfUndoes])
def test_the_lifecycle_machine_catches(adapter: type[ModuleInstallAdapter]) -> None:
    class Machine(LifecycleMachine):
        def make_adapter(self, engine: object) -> ModuleInstallAdapter:
            return adapter(engine)  # type: ignore[arg-type]  # a dict of tensors

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=200,
                phases=[Phase.generate],
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
            ),
        )

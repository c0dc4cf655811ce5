"""The guard: whoever is registered keeps the suite's promises, or says why it cannot."""

from importlib import import_module
from pathlib import Path

import pytest

from rl_bridge.testing import TransportSuite
from rl_bridge.transports.base import Transport
from rl_bridge.transports.registry import ALIASES, TRANSPORTS, canonical_name, probe

HERE = Path(__file__).parent
AVAILABLE = sorted(name for name in TRANSPORTS if probe(name).status == "pass")


def with_a_suite() -> set[type[Transport]]:
    """Transports with a class in this folder that inherits the suite as it is."""
    found = set()
    for path in HERE.glob("test_*.py"):
        module = import_module(f"tests.{HERE.name}.{path.stem}")
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, TransportSuite):
                kind = getattr(item, "transport_class", None)
                if kind is not None and item.__name__.startswith("Test"):
                    assert not {name for name in vars(item) if name.startswith("test_")} & {
                        name for name in dir(TransportSuite) if name.startswith("test_")
                    }, f"{item.__name__} replaces a test of the suite"
                    found.add(kind)
    return found


def test_every_available_transport_runs_the_conformance_suite() -> None:
    assert {TRANSPORTS[name] for name in AVAILABLE} <= with_a_suite()


def test_shared_memory_and_local_clone_are_available_wherever_tests_run() -> None:
    assert {"local-clone", "shared-memory"} <= set(AVAILABLE)


@pytest.mark.parametrize("name", [*TRANSPORTS, *ALIASES])
def test_every_name_answers_a_probe(name: str) -> None:
    found = probe(name)
    assert found.name == canonical_name(name)
    assert (found.status == "pass") == (found.cause == "")
    assert (found.status == "blocked") == bool(found.cause and found.remedy)

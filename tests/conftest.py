"""What all tests share: hypothesis profiles, one thread for torch, readable assertions."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

pytest.register_assert_rewrite("rl_bridge.testing")

# Spawned children inherit the environment; this process has loaded its libraries already.
torch.set_num_threads(1)

# A run in the background of a script begins with interrupts ignored; the tests of interrupts, and
# the processes that they start, need them.
signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", _COMMON, max_examples=60, stateful_step_count=25)
# The same examples in every run: what fails in CI fails on the desk.
settings.register_profile(
    "ci",
    _COMMON,
    max_examples=100,
    stateful_step_count=25,
    derandomize=True,
    print_blob=True,
)
settings.register_profile("nightly", _COMMON, max_examples=3000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

assert Phase.shrink in settings().phases


def pytest_configure() -> None:
    """Have children begin with what the files import that their classes are found in."""
    from rl_bridge.testing import processes

    processes.PRELOADED += ["hypothesis", "numpy", "pydantic", "pytest"]
    # Where the compiled module is hidden (tests.pure_python), each child imports us by itself.
    if not any(type(finder).__name__ == "Hidden" for finder in sys.meta_path):
        homes = ("testing.peer", "strategies", "trainers", "sglang", "vllm")
        processes.PRELOADED += [f"rl_bridge.{home}" for home in homes]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `full` what a class of tests does not name in its `in_ci`, if it has one."""
    for item in items:
        chosen = getattr(getattr(item, "cls", None), "in_ci", None)
        if chosen is not None and getattr(item, "originalname", None) not in chosen:
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Have what stays for all tests, so that no test takes it for its own."""
    from rl_bridge.testing import processes

    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # to import this tree
        processes.start_server()


@pytest.fixture(scope="module", autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """A test that left interrupts ignored would have a later one wait for its own in vain."""
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture(scope="module", autouse=True)
def collections_are_short() -> None:
    """Leave what there is by now out of every collection: it would take most of its time.

    Much is imported by single tests, such as torch's compiler, and some tests collect all the time.
    """
    gc.collect()
    gc.freeze()

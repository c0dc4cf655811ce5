"""What all tests share: hypothesis profiles, one thread for torch, readable assertions."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

pytest.register_assert_rewrite("rl_bridge.testing")

# Spawned children inherit the environment; this process has loaded its libraries already.
torch.set_num_threads(1)

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", max_examples=60, stateful_step_count=25, **_COMMON)  # type: ignore[arg-type]  # typed per key
# The same examples in every run: what fails in CI fails on the desk.
settings.register_profile(
    "ci", max_examples=100, stateful_step_count=25, derandomize=True, print_blob=True, **_COMMON
)  # type: ignore[arg-type]  # typed per key
settings.register_profile("nightly", max_examples=3000, stateful_step_count=80, **_COMMON)  # type: ignore[arg-type]  # typed per key
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

assert Phase.shrink in settings().phases

"""What the tests with real trainers share: the environment."""

import importlib.util

import pytest

for _name in ("deepspeed", "megatron.core", "mbridge", "peft"):
    if importlib.util.find_spec(_name.partition(".")[0]) is None:
        pytest.exit(f"tests/trainers needs {_name}: run `make test-trainers`.", 4)

"""The programs that the documentation shows for vLLM run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.models import Checkpoints, Kind

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "vllm_engines"
# The trainer's side is run by `test_trainer_side.py`, which has a server for it.
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "trainer_side.py"})
SAYS = {
    "in_process.py": "\n3 [",
    "native.py": "vllm 1 released",
    "train_a_lora.py": "\nversion 12: reward ",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_of_the_documentation_runs(example: Path, checkpoints: Checkpoints) -> None:
    path = checkpoints.path(Kind("qwen3", tied=True), 0)
    done = subprocess.run(
        [sys.executable, str(example), str(path)],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[example.name] in done.stdout, done.stdout[-2000:]
    if rewards := [
        float(one) for one in re.findall(r"^version \d+: reward (.*)$", done.stdout, re.MULTILINE)
    ]:
        assert rewards[-1] > rewards[0] + 0.1, (
            rewards
        )  # (which draws come differs, not that they learn)

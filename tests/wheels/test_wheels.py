"""What `make wheels` built: each wheel, alone in a fresh environment, makes a first update."""

import os
import shlex
import subprocess
import zipfile
from functools import cache
from pathlib import Path

import pytest

import rl_bridge

ROOT = Path(__file__).resolve().parents[2]
FIRST_UPDATE = ROOT / "docs" / "examples" / "two_processes.py"
INSTALL_S, RUN_S = 400.0, 120.0
pytestmark = pytest.mark.timeout(2 * INSTALL_S)


def built() -> list[Path]:
    return sorted(Path(os.environ["WHEELS"]).glob("*.whl"))


def said(*command: str | Path, timeout_s: float = RUN_S, cwd: Path | None = None) -> str:
    """What a command writes; it must go well. No path of this tree reaches it."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
        env=kept,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@cache
def tag_of(python: str) -> str:
    code = "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}')"
    return said(python, "-c", code).strip()


def test_there_is_a_wheel_for_each_python() -> None:
    tags = {path.name.split("-")[2] for path in built()}
    assert tags == {tag_of(python) for python in os.environ["PYTHONS"].split()}
    assert tags


@pytest.fixture(params=built(), ids=lambda path: path.name.split("-")[2])
def wheel(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_a_wheel_is_for_any_linux_and_has_what_was_compiled_and_no_source_of_it(
    wheel: Path,
) -> None:
    assert "-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    (compiled,) = (name for name in names if name.endswith(".so"))
    assert compiled.startswith("rl_bridge/memory/_native.")
    assert "rl_bridge/py.typed" in names
    assert not [name for name in names if name.endswith(".c") or name.startswith("tests")]


def test_a_wheel_alone_makes_a_first_update(wheel: Path, tmp_path: Path) -> None:
    tag = wheel.name.split("-")[2]
    python = next(one for one in os.environ["PYTHONS"].split() if tag_of(one) == tag)
    said(python, "-m", "venv", tmp_path / "fresh", timeout_s=INSTALL_S)
    there = tmp_path / "fresh" / "bin"
    install = (there / "python", "-m", "pip", "install", "--quiet")
    said(*install, *shlex.split(os.environ["TORCH"]), timeout_s=INSTALL_S)
    said(*install, wheel, timeout_s=INSTALL_S)
    assert said(there / "rl-bridge", "--version") == f"rl-bridge {rl_bridge.__version__}\n"
    code = "import rl_bridge.memory.passes as p; print(p.__file__, p.native_cause())"
    found = said(there / "python", "-c", code, cwd=tmp_path)
    assert found.startswith(str(tmp_path))
    assert found.endswith(" None\n"), "the compiled module is not in use"
    told = said(there / "python", FIRST_UPDATE, cwd=tmp_path)
    assert "proof by digest" in told

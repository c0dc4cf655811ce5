"""What is handed out: the source distribution is whole, and the version stands in one place."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import rl_bridge
from rl_bridge.engines import sglang, vllm
from rl_bridge.engines.probe import EnginePackage

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> list[str]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files there are")
    listed = subprocess.run(
        [git, "-C", str(ROOT), "ls-files"], capture_output=True, text=True, timeout=60, check=True
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of a source distribution that was made from what is tracked, by its path."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    tree = tmp_path_factory.mktemp("tree")
    for name in {*tracked(), "MANIFEST.in"}:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    code = "from setuptools import build_meta; build_meta.build_sdist('made')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "made").iterdir()
    with tarfile.open(made) as archive:
        files = {item.name: archive.extractfile(item) for item in archive if item.isfile()}
        return {name.partition("/")[2]: file.read() for name, file in files.items() if file}


def test_the_source_distribution_has_every_file_of_the_repository(
    distribution: dict[str, bytes],
) -> None:
    assert set(tracked()) - distribution.keys() == set()
    assert not [name for name in distribution if name.endswith((".so", ".pyc"))]


def test_the_version_is_said_once_and_the_distribution_has_it(
    distribution: dict[str, bytes],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "version" not in project
    assert f"\nVersion: {rl_bridge.__version__}\n".encode() in distribution["PKG-INFO"]


@pytest.mark.parametrize(("engine", "parts"), [("vllm", vllm), ("sglang", sglang)])
def test_the_remedy_for_an_old_engine_installs_one_that_is_new_enough(
    engine: str, parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnginePackage, "version", lambda _: "0.1")
    with pytest.raises(rl_bridge.WeightBridgeUnavailableError) as told:
        parts.require(f"{engine}_that_is_old.part")
    assert f"pip install 'rl-bridge[{engine}]'" in str(told.value)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"{engine}>={parts.MINIMUM}" in extras["optional-dependencies"][engine]


# What extras and our own tools bring, as modules; a plain `pip install rl-bridge` has none of them.
NOT_BROUGHT = (
    *("anyio", "cryptography", "fastapi", "fsspec", "h11", "httpx", "hypothesis", "matplotlib"),
    *("prometheus_client", "pytest", "safetensors", "watchfiles"),
)
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {0!r}:
            raise ModuleNotFoundError(name)
if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    from rl_bridge.cli import main
    main({1!r})
"""


@pytest.mark.parametrize("command", [("--version",), ("doctor",), ("bench", "--mib=1")])
def test_the_program_runs_with_nothing_but_what_it_depends_on(command: tuple[str, ...]) -> None:
    code = WITHOUT.format(NOT_BROUGHT, command)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr

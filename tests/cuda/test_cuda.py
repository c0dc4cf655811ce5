"""The CUDA driver: what it says without CUDA, and its calls over a stand-in for libcuda."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge.cuda.libcuda import CUDADriver, _is_capturing, ordinal_of
from rl_bridge.errors import DriverError

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# ---- without CUDA -------------------------------------------------------------------------------


@pytest.mark.skipif(has_libcuda(), reason="libcuda.so.1 is installed here")
def test_a_missing_libcuda_has_its_type() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for act in (CUDADriver, lambda: ordinal_of("x")):
        with pytest.raises(DriverError, match="Install the NVIDIA driver") as caught:
            act()
        assert (caught.value.call, caught.value.code) == ("cuInit", "LIBCUDA_NOT_FOUND")


def test_a_missing_package_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(DriverError, match="pip install cuda-bindings") as caught:
        CUDADriver()
    assert caught.value.code == "BINDINGS_NOT_FOUND"


class Code(IntEnum):
    """Answers of a driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


class FunctionNotFoundError(RuntimeError):
    """What the bindings raise for a function that an old libcuda lacks."""


def bindings_with(**functions: Any) -> Any:
    return SimpleNamespace(**{"cuInit": lambda _: (Code.CUDA_SUCCESS,), **functions})


def old_function(*_: object) -> object:
    raise FunctionNotFoundError("function cuDeviceGet is not found")


def no_libcuda(_: int) -> object:
    raise RuntimeError("Failed to dlopen libcuda.so.1\nand so on")


@pytest.mark.parametrize(
    ("name", "function", "code", "said"),
    [
        ("cuInit", lambda _: (Code.CUDA_ERROR_NO_DEVICE,), "CUDA_ERROR_NO_DEVICE", "GPU visible"),
        ("cuInit", lambda _: (12345,), "CUDA_ERROR_12345", "cuInit failed with"),
        ("cuDeviceGet", old_function, "CUDA_ERROR_NOT_FOUND", "Update the NVIDIA driver"),
        ("cuInit", no_libcuda, "LIBCUDA_NOT_FOUND", "Install the NVIDIA driver"),
    ],
    ids=["no device", "unknown code", "old driver", "no libcuda"],
)
def test_a_refusal_of_the_driver_has_its_code_and_a_remedy(
    name: str, function: Any, code: str, said: str
) -> None:
    with pytest.raises(DriverError, match=said) as caught:
        CUDADriver(bindings=bindings_with(**{name: function}))
    assert (caught.value.call, caught.value.code) == (name, code)


def test_an_error_of_another_kind_is_not_taken_for_a_missing_driver() -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else") as caught:
        CUDADriver(bindings=bindings_with(cuDeviceGet=broken))
    assert type(caught.value) is RuntimeError


def test_nothing_is_captured_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _is_capturing(0) is False


def test_the_stream_of_the_drivers_own_gpu_is_asked_for_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = 0

    @contextmanager
    def device(ordinal: int) -> Iterator[None]:
        nonlocal current
        before, current = current, ordinal
        yield
        current = before

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current == 1)
    assert (_is_capturing(0), _is_capturing(1), current) == (False, True, 0)


def test_a_device_that_is_lost_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch raises must not come out of a close, which takes a driver's error only.
    def lost() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lost)
    assert _is_capturing(0) is False


# ---- over the stand-in --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libcuda with")
    folder = tmp_path_factory.mktemp("stand-in")
    subprocess.run(
        [
            *(compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
            *("-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")),
            str(HERE / "libcuda_stand_in.c"),
        ],
        check=True,
        timeout=120,
    )
    return folder


@pytest.mark.parametrize(
    ("files", "least"),
    [
        (["on_stand_in.py", "on_stand_in_drain.py"], 36),
        # The same suite holds for the driver on host memory.
        pytest.param(["on_stand_in_ipc.py"], 20, marks=pytest.mark.full),
    ],
)
def test_the_real_bindings_make_the_right_calls_over_a_stand_in(
    stand_in: Path, files: list[str], least: int
) -> None:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{stand_in}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed in", done.stdout)
    assert passed is not None
    assert int(passed[1]) > least
    assert "skipped" not in done.stdout

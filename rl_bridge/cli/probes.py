"""What this machine can do: each probe tries the thing itself and trusts no version number."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_bridge.errors import WeightBridgeError
from rl_bridge.integrations.ray.library import INSTALL as INSTALL_RAY
from rl_bridge.integrations.sglang import probe as sglang
from rl_bridge.integrations.vllm import probe as vllm
from rl_bridge.memory import leases, vm
from rl_bridge.memory.holding import close_fd
from rl_bridge.memory.passes import native_cause
from rl_bridge.memory.segment import OwnedSegment, open_segment
from rl_bridge.transports.base import Availability
from rl_bridge.transports.broadcast.transport import backend_cause
from rl_bridge.transports.nixl import backends

__all__ = [
    "ENGINES",
    "FEATURES",
    "NIXL_BACKEND",
    "compiled_pass",
    "engine",
    "engine_features",
    "feature",
    "nixl_backends",
    "ray",
]

NIXL_BACKEND = "NIXL "
"""How the names of its backends begin."""

# Engines of others that users ask for.
ENGINES = {"vllm": vllm, "sglang": sglang}

_CHILD_TIMEOUT_S = 20.0
# What a consumer does first, with nothing but the standard library: open another process's segment.
_OPEN = "import os, sys; print(os.fstat(os.open(sys.argv[1], os.O_RDONLY)).st_ino)"


@contextmanager
def _segment() -> Iterator[OwnedSegment]:
    segment = OwnedSegment.make("rl_bridge-doctor", vm.PAGE)
    try:
        yield segment
    finally:
        segment.close()


def _sealing() -> str | None:
    """Seal a segment and open it as a reader does, who insists on the seals."""
    with _segment() as segment:
        close_fd(open_segment(segment.ref))
    return None


def _ofd_locks() -> str | None:
    """Let two descriptions of one file compete for a lease."""
    with _segment() as segment:
        reader = open_segment(segment.ref)
        try:
            if not leases.try_shared(reader):
                return "a free lease cannot be taken"
            if leases.try_exclusive(segment.fd):
                return "a lease that a reader holds did not keep the writer out"
        finally:
            close_fd(reader)
        if not leases.try_exclusive(segment.fd):
            return "the lease of a reader that is gone was not freed"
    return None


def _moves() -> str | None:
    """Move a private mapping of a segment, as a flip does, and read it at its new address."""
    mark = b"moved"
    with _segment() as segment:
        vm.store(segment.address, mark)
        source, target = vm.reserve(vm.PAGE), vm.reserve(vm.PAGE)
        try:
            vm.map_fixed(source, vm.PAGE, segment.fd)
            vm.move(source, vm.PAGE, target)
            if ctypes.string_at(target, len(mark)) != mark:
                return "a moved mapping does not show what it showed before"
        finally:
            vm.unmap(source, vm.PAGE)
            vm.unmap(target, vm.PAGE)
    return None


def _page_scan() -> str | None:
    """Write to one of two pages and ask the kernel which one it was."""
    address = vm.reserve(2 * vm.PAGE)
    with _segment() as segment:
        try:
            vm.map_fixed(address, vm.PAGE, segment.fd)
            if vm.private_ranges(address, vm.PAGE) is None:
                return "the kernel has no PAGEMAP_SCAN, or /proc/self/pagemap is not readable"
            vm.store(address, b"x")
            if vm.private_ranges(address, vm.PAGE) != [(address, vm.PAGE)]:
                return "the kernel did not report a page that was written to"
        finally:
            vm.unmap(address, 2 * vm.PAGE)
    return None


def _proc_visibility() -> str | None:
    """Have another process open a segment of this one through /proc, as every consumer does."""
    with _segment() as segment:
        where = f"/proc/{os.getpid()}/fd/{segment.fd}"
        try:
            child = subprocess.run(  # noqa: S603 - our own interpreter, our own words
                [sys.executable, "-I", "-S", "-c", _OPEN, where],
                capture_output=True,
                text=True,
                timeout=_CHILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"another process did not open {where} within {_CHILD_TIMEOUT_S:.0f} s"
        if child.returncode:
            said = child.stderr.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
            return f"another process cannot open {where}: {said}"
        if child.stdout.strip() != str(segment.ref.inode):
            return f"another process sees another file at {where}"
    return None


# Name -> (what it is good for, the probe: a cause or None, what to do where it is blocked).
FEATURES: dict[str, tuple[str, Callable[[], str | None], str]] = {
    "memfd sealing": (
        "nobody can shrink or rewrite a published version",
        _sealing,
        "Linux 5.1 or later; in a container, allow memfd_create.",
    ),
    "OFD locks": (
        "a reader that is killed frees its lease at once",
        _ofd_locks,
        "Linux 3.15 or later, not through an emulation layer.",
    ),
    "/proc visibility": (
        "processes find each other's segments without names",
        _proc_visibility,
        "Give both sides directory=, for instance one in /dev/shm.",
    ),
    "MREMAP_DONTUNMAP": (
        "install by flip",
        _moves,
        "Linux 5.13 or later. Until then install with mode='copy'.",
    ),
    "PAGEMAP_SCAN": (
        "proves an install by flip or alias without reading the bytes again",
        _page_scan,
        "Linux 6.7 or later. Until then such a proof digests the bytes: slower, as strong.",
    ),
    "NCCL": (
        "broadcast between GPUs, with backend='nccl'",
        lambda: backend_cause("nccl"),
        "Install torch for CUDA where GPUs are. Until then broadcast goes over Gloo, on the CPU.",
    ),
}


def feature(name: str) -> Availability:
    """Try one of `FEATURES`."""
    _, probe, remedy = FEATURES[name]
    try:
        cause = probe()
    except (WeightBridgeError, OSError) as error:
        cause = str(error)
    return Availability(name, "blocked", cause, remedy) if cause else Availability(name, "pass")


def compiled_pass() -> Availability:
    """Tell whether copies and digests run in the compiled module."""
    cause = native_cause()
    if cause is None:
        return Availability("compiled pass", "pass")
    remedy = "Install a C compiler and reinstall. Until then Python does it: slower, same digests."
    return Availability("compiled pass", "blocked", cause, remedy)


def engine(name: str) -> Availability:
    """Tell whether one of `ENGINES` is installed, without importing it.

    Importing one takes many seconds and may take the GPU. What of it works is asked for by
    `engine_features`.
    """
    found = ENGINES[name]
    if found.version() is not None:
        return Availability(name, "pass")
    cause, remedy = f"{name} is not installed", f"Install it: {found.INSTALL}."
    return Availability(name, "blocked", cause, remedy)


def engine_features(name: str) -> list[Availability]:
    """What works with the engine that is installed, tried in a child; empty where none is."""
    found: list[Availability] = ENGINES[name].probe()
    return found


def ray() -> Availability:
    """Tell whether Ray is installed, without importing it."""
    if importlib.util.find_spec("ray") is not None:
        return Availability("ray", "pass")
    return Availability("ray", "blocked", "ray is not installed", f"Install it: {INSTALL_RAY}.")


def nixl_backends() -> list[Availability]:
    """What NIXL's backends need here, tried in a child; empty where NIXL is not installed."""
    try:
        causes = backends.causes()
    except ImportError:
        return []  # that is said of the transport
    except RuntimeError as error:
        remedy = "See whether NIXL works: rl-bridge doctor says so of the transport nixl."
        return [Availability(f"{NIXL_BACKEND}backends", "blocked", str(error), remedy)]
    remedy = "Nothing, unless you want backend= to be that: nixl uses UCX."
    return [
        Availability(f"{NIXL_BACKEND}{name}", "pass")
        if cause is None
        else Availability(f"{NIXL_BACKEND}{name}", "blocked", cause, remedy)
        for name, cause in causes.items()
    ]

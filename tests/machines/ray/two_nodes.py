"""A Ray cluster of two nodes that share a machine and neither its network nor its processes."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.machines.network.namespaces import Machine, machines

ROOT = Path(__file__).resolve().parents[3]
PORT = 6379
NODE = "--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats"
STOP_S = 20.0


@dataclass(frozen=True)
class TwoNodes:
    """What runs where.

    Attributes:
        trainer: the machine of the head node, with the resource `trainer`.
        rollouts: the other one, with two of the resource `rollout`.
        driver: runs on the head node, behind its start; its exit code is the script's.
        rollout_pid: a process on the other machine.

    """

    trainer: Machine
    rollouts: Machine
    driver: "subprocess.Popen[str]"
    rollout_pid: int


@contextmanager
def two_nodes(script: Path, *arguments: str) -> Iterator[TwoNodes]:
    """Start both, and `script` as the driver on the first; all of it is gone in the end."""
    with ExitStack() as stack:
        left, right = stack.enter_context(machines())
        address = f"{left.address}:{PORT}"
        head = shlex.join([sys.executable, str(script), "--address", address, *arguments])
        driver = _node(
            stack,
            left,
            f"ray start --head --node-ip-address={left.address} --port={PORT} {NODE} "
            f"--include-dashboard=false --resources='{{\"trainer\":1}}' && exec {head}",
        )
        # It may come before the head listens.
        other = _node(
            stack,
            right,
            f"until ray start --address={address} --node-ip-address={right.address} {NODE} "
            f"--resources='{{\"rollout\":2}}' --block; do sleep 1; done",
        )
        yield TwoNodes(left, right, driver, other.pid)


def _node(stack: ExitStack, machine: Machine, script: str) -> "subprocess.Popen[str]":
    """A shell that is process 1 of its own PID namespace: when it goes, so does all it started."""
    # Short: the paths of Ray's sockets must stay below 107 characters.
    folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": stack.enter_context(folder),
        # It sees by itself that the two share a machine, and not that they share no processes.
        "UCX_TLS": "tcp",
    }
    words = ["ip", "netns", "exec", machine.namespace]
    words += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate(timeout=STOP_S)

"""What `test_replicas.py` runs in the ranks of small engines: each tells which replica it is of."""

from engine import Worker
from host import SmallHost

from rl_bridge.engines import rank_of


def be_replica(worker: Worker, number: str) -> str:
    """Be of that replica from here on."""
    rank_of(worker.model, lambda: SmallHost(worker)).host.replica = int(number)
    return ""

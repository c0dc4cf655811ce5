"""Steady state: fifty updates touch no new page, open nothing and map nothing, on either side."""

import resource
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.testing.processes import Child
from tests.helpers import open_fds

NUM_UPDATES = 50
NBYTES = 8 << 20
# One new slot alone would fault in 2048 pages of 4 KiB; the interpreter itself has a few.
FEW_FAULTS = 1000


def mappings_of_ours() -> list[str]:
    return [
        line.split()[0] + line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "rlb-" in line
    ]


def footprint() -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "faults": usage.ru_minflt,
        "fds": len(open_fds()),
        "mappings": len(mappings_of_ours()),
        "rss": usage.ru_maxrss,
    }


class Rollout:
    """The consumer's side, in a process of its own."""

    def __init__(self, mode: str) -> None:
        self.engine = {"w": torch.zeros(NBYTES // 4), "b": torch.zeros(100)}
        bridge = make_weight_bridge("shared-memory", source_worker="rollout")
        adapter = ModuleInstallAdapter(self.engine, mode=mode, num_threads=1)  # type: ignore[arg-type]
        self.executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)

    def install(self, text: str) -> None:
        self.executor.update_weights(text)

    def footprint(self) -> dict[str, Any]:
        return footprint()

    def first_value(self) -> float:
        return float(self.engine["w"][0])


@pytest.mark.parametrize("mode", ["copy", "alias", "flip"])
def test_fifty_updates_touch_no_new_page_and_open_nothing(mode: str) -> None:
    weights = {"w": torch.zeros(NBYTES // 4), "b": torch.zeros(100)}
    published: deque[str] = deque()
    with (
        Child(Rollout, mode=mode) as child,
        make_weight_bridge("shared-memory", num_threads=1) as bridge,
    ):

        def step(version: int) -> None:
            weights["w"].fill_(version)
            manifest = bridge.publish(weights, weight_version=version)
            published.append(manifest.update_id)
            child.call("install", text=manifest.to_json(layout=version == 1))
            while len(published) > 1:
                bridge.release(published.popleft())

        for version in range(1, 7):
            step(version)
        # Looking collects garbage, which writes to every object: pages that an earlier fork shared
        # are copied then, once. That is the look's doing and not an update's.
        footprint(), child.call("footprint")
        mine, theirs = footprint(), child.call("footprint")
        for version in range(7, 7 + NUM_UPDATES):
            step(version)
        mine_after, theirs_after = footprint(), child.call("footprint")
        assert child.call("first_value") == 6 + NUM_UPDATES
        for before, after in ((mine, mine_after), (theirs, theirs_after)):
            assert after["fds"] == before["fds"]
            assert after["mappings"] == before["mappings"]
            assert after["faults"] - before["faults"] < FEW_FAULTS
        assert bridge.published_nbytes < 2.2 * NBYTES + (1 << 20)

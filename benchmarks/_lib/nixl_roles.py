"""The processes of `nixl_reads.py`: owners of the weights, an engine, and raw agents in both."""

import importlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch

from _lib.cuts import placement
from _lib.memory import MIB
from _lib.payload import Payload, PayloadSpec, find_wrong_tensor
from rl_bridge import TensorBridge, make_weight_bridge
from rl_bridge.bridge.bridges import NIXLTensorBridge
from rl_bridge.groups import GroupBridge, GroupPublisher
from rl_bridge.groups.exchange import StoreExchange
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.parallel import Placement

__all__ = ["Engine", "Owner"]

TCPStore = torch._C._distributed_c10d.TCPStore  # noqa: SLF001 - has no other name
TIMEOUT_S = 120.0
_BACKEND = "UCX"
# Each version is written into one of these in turn.
_SLOTS = 2
_ROUNDS = 64


def _library() -> Any:
    for package in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError:
            continue
    msg = "this benchmark needs NIXL: pip install 'rl-bridge[nixl]'"
    raise ImportError(msg)


def _specs(given: dict[str, dict[str, int]]) -> dict[str, PayloadSpec]:
    return {lane: PayloadSpec(**sizes) for lane, sizes in given.items()}


class RawAgent:
    """NIXL as anybody would use it: memory registered once, lists prepared once."""

    def __init__(self, name: str) -> None:
        """Make an agent that makes progress when asked: faster than with a thread of its own."""
        nixl = _library()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
        self.agent = nixl.nixl_agent(name, config)

    def register(self, address: int, nbytes: int) -> None:
        """Register one range."""
        self.agent.register_memory([(address, nbytes, 0, "")], "DRAM", [_BACKEND])

    def rows(self, address: int, places: list[tuple[int, int]]) -> Any:
        """Descriptors of ranges in it."""
        return np.array([(address + at, nbytes, 0) for at, nbytes in places], np.uint64)


class Owner:
    """One rank of a trainer, with a part of the weights."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        port: int,
        *,
        specs: dict[str, dict[str, int]],
        ucx: str,
        cores: list[int],
    ) -> None:
        """Build the payloads, each of a lane; `cores` are those that it may use."""
        os.sched_setaffinity(0, cores)
        if ucx:
            os.environ["UCX_TLS"] = ucx
        self.rank, self.world_size = rank, world_size
        self.payloads = {lane: Payload.build(spec) for lane, spec in _specs(specs).items()}
        self.bridges: dict[str, TensorBridge] = {}
        self.publishers: dict[str, GroupPublisher] = {}
        self.manifests: dict[str, Any] = {}
        limit = timedelta(seconds=TIMEOUT_S)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        self.raw = RawAgent(f"raw-owner-{rank}")
        self.known: set[int] = set()
        # Over TCP bytes wait for help. Where UCX reads this process's memory directly, only
        # connecting does, and a helper that never rests would take a core from the reader.
        self.pause_s = 0.0 if ucx == "tcp" else 1e-3
        self.is_helping = threading.Event()
        threading.Thread(target=self._help, daemon=True).start()

    def _bridge(self, lane: str) -> TensorBridge:
        if lane not in self.bridges:
            self.bridges[lane] = make_weight_bridge(
                "nixl",
                source_worker=f"trainer-{lane}",
                source_rank=self.rank,
                timeout_s=TIMEOUT_S,
                max_slots=_SLOTS,
                suspicious="off",
                nonfinite="warn",
            )
        return self.bridges[lane]

    def publish(self, lane: str, version: int, *, layout: bool) -> str:
        """Publish by this rank alone."""
        payload = self.payloads[lane]
        payload.advance_to(version)
        made = self._bridge(lane).publish(payload.tensors, weight_version=version)
        self.manifests[lane] = made
        return made.to_json(layout=layout)

    def publish_part(self, lane: str, version: int, *, layout: bool) -> str:
        """Publish with all ranks; each has its rows of every tensor."""
        payload = self.payloads[lane]
        payload.advance_to(version)
        if lane not in self.publishers:
            exchange = StoreExchange(self.store, rank=self.rank, world_size=self.world_size)
            self.publishers[lane] = GroupPublisher(
                self._bridge(lane), exchange, timeout_s=TIMEOUT_S
            )
        made = self.publishers[lane].publish(
            payload.tensors, self._placements(payload.spec), weight_version=version
        )
        self.manifests[lane] = made
        return made.to_json(layout=layout)

    def _placements(self, spec: PayloadSpec) -> dict[str, Placement]:
        whole = (spec.rows * self.world_size, spec.cols)
        return {
            name: placement(name, whole, 0, self.rank, self.world_size) for name in spec.names()
        }

    def release(self, lane: str) -> None:
        """Let go of the lane's version."""
        made = self.manifests.pop(lane)
        if isinstance(made, GroupManifest):
            self.publishers[lane].release(made)
        else:
            self.bridges[lane].release(made)

    # ---- raw ------------------------------------------------------------------------------------

    def raw_place(self, lane: str, *, as_one: bool) -> dict[str, Any]:
        """Where the lane's version lies, for a raw read of the very same bytes."""
        made = self.manifests[lane]
        if isinstance(made, GroupManifest):
            made = made.parts[self.rank]
        end = cast("Any", self.bridges[lane].publisher.end)
        slot = end.snapshot(made.update_id)
        table = made.table
        if slot.address not in self.known:
            self.raw.register(slot.address, table.arena_nbytes)
            self.known.add(slot.address)
        places = list(zip(table.offsets, table.nbytes, strict=True))
        if as_one:
            places = [(0, table.arena_nbytes)]
        return {
            "metadata": self.raw.agent.get_agent_metadata().hex(),
            "address": slot.address,
            "nbytes": table.arena_nbytes,
            "places": places,
        }

    def help_raw(self, *, on: bool) -> None:
        """Make progress for raw reads, or stop that."""
        (self.is_helping.set if on else self.is_helping.clear)()

    def _help(self) -> None:
        while self.is_helping.wait():
            for _ in range(_ROUNDS):
                self.raw.agent.get_new_notifs()
            time.sleep(self.pause_s)

    def close(self) -> None:
        """End."""
        for bridge in self.bridges.values():
            bridge.close()


class Engine:
    """Imports what it is told to, and says how long that took."""

    def __init__(
        self, specs: dict[str, dict[str, int]], ucx: str, num_owners: int, cores: list[int]
    ) -> None:
        """Connect to nobody yet; `specs` are those of one owner."""
        os.sched_setaffinity(0, cores)
        self.num_owners = num_owners
        if ucx:
            os.environ["UCX_TLS"] = ucx
        self.specs = _specs(specs)
        self.plain: dict[str, TensorBridge] = {}
        self.groups: dict[str, GroupBridge] = {}
        self.raw = RawAgent("raw-engine")
        self.targets: dict[int, torch.Tensor] = {}
        self.reads: OrderedDict[tuple[str, int, str], Any] = OrderedDict()

    def update(self, lane: str, version: int, text: str) -> dict[str, float]:
        """One update of one owner's, from its manifest to the verified import."""
        if lane not in self.plain:
            self.plain[lane] = make_weight_bridge(
                "nixl", source_worker="engine", timeout_s=TIMEOUT_S
            )
        return self._timed(self.plain[lane], WeightUpdateManifest.from_json, lane, version, text)

    def update_group(self, lane: str, version: int, text: str) -> dict[str, float]:
        """One update out of all owners' parts."""
        if lane not in self.groups:
            options = {"nixl": {"timeout_s": TIMEOUT_S}}
            self.groups[lane] = GroupBridge(source_worker="engine", transports=options)
        return self._timed(self.groups[lane], GroupManifest.from_json, lane, version, text)

    def _timed(
        self,
        bridge: TensorBridge,
        parse: Callable[[str], Any],
        lane: str,
        version: int,
        text: str,
    ) -> dict[str, float]:
        began = time.perf_counter()
        manifest = parse(text)
        parsed = time.perf_counter()
        tensors = bridge.import_update(manifest)
        ended = time.perf_counter()
        # Each owner has its rows of every tensor.
        cut = {name: one.chunk(self.num_owners) for name, one in tensors.items()}
        for number in range(self.num_owners):
            part = {name: chunks[number] for name, chunks in cut.items()}
            if wrong := find_wrong_tensor(part, self.specs[lane], version):
                raise ValueError(wrong)
        bridge.acknowledge(manifest)
        del tensors, cut, part
        bridge.release(manifest)
        return {"parse_s": parsed - began, "import_s": ended - parsed, "seconds": ended - began}

    def counters(self) -> dict[str, dict[str, int]]:
        """What each lane's transport has made so far."""
        found = {lane: cast("NIXLTensorBridge", one).counters for lane, one in self.plain.items()}
        found |= {lane: group.nixl_counters for lane, group in self.groups.items()}
        return {lane: asdict(counted) for lane, counted in found.items()}

    def raw_read(self, owners: list[dict[str, Any]], *, as_one: bool) -> float:
        """Read the same bytes raw, of all owners at once: seconds."""
        reads = [self._raw_of(number, owner, as_one=as_one) for number, owner in enumerate(owners)]
        agent = self.raw.agent
        began = time.perf_counter()
        states = [agent.transfer(read) for read in reads]
        while "PROC" in states:
            states = [
                agent.check_xfer_state(read) if state == "PROC" else state
                for read, state in zip(reads, states, strict=True)
            ]
        seconds = time.perf_counter() - began
        if set(states) != {"DONE"}:
            msg = f"raw reads ended in {states}"
            raise RuntimeError(msg)
        return seconds

    def _raw_of(self, number: int, owner: dict[str, Any], *, as_one: bool) -> Any:
        metadata, nbytes = owner["metadata"], owner["nbytes"]
        key = (metadata, owner["address"], "one" if as_one else "each")
        if key in self.reads:
            return self.reads[key]
        agent = self.raw.agent
        peer = agent.add_remote_agent(bytes.fromhex(metadata))
        target = self.targets.get(number)
        if target is None or target.numel() < nbytes:
            target = self.targets[number] = torch.zeros(max(nbytes, MIB), dtype=torch.uint8)
            self.raw.register(target.data_ptr(), target.numel())
        places = [tuple(place) for place in owner["places"]]
        local = self.raw.rows(target.data_ptr(), places)
        remote = self.raw.rows(owner["address"], places)
        indices = np.arange(len(places), dtype=np.int32)
        made = agent.make_prepped_xfer(
            "READ",
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM", [_BACKEND]),
            indices,
            agent.prep_xfer_dlist(peer, remote, "DRAM", [_BACKEND]),
            indices,
            backends=[_BACKEND],
        )
        self.reads[key] = made
        return made

    def close(self) -> None:
        """End."""
        for bridge in (*self.plain.values(), *self.groups.values()):
            bridge.close()

"""Versions as snapshots, in a ring of registered slots."""

import itertools
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from rl_bridge.errors import SegmentError
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.slots import Slot, SlotRing
from rl_bridge.transports.nixl.agent import AgentError
from rl_bridge.transports.nixl.arenas import RegisteredArenas
from rl_bridge.transports.nixl.host import Host
from rl_bridge.transports.nixl.messages import Entry
from rl_bridge.transports.nixl.shelf import Placed, Published, Shelf, Taken

__all__ = ["SlotShelf"]


class SlotShelf(Shelf):
    """Snapshots in a ring of registered slots."""

    def __init__(self, arenas: RegisteredArenas, host: Host, label: str, max_slots: int) -> None:
        """Start empty; slots are made when they are needed."""
        super().__init__(host)
        self._arenas = arenas
        self._epoch = host.epoch
        self._label = label
        self._numbers = itertools.count(1)  # no generator, which an interrupt would end for good
        self._slots: dict[Slot, None] = {}
        self.ring = SlotRing(
            self._make_slot,
            limit=max_slots,
            name_holders=self.readers_of,
            is_released=self.is_released,
        )

    def attend(self, *, is_sure: bool = False) -> bool:
        """Have somebody there who serves what is held; see `Host.ensure`."""
        self._host.ensure(is_sure=is_sure)
        epoch = self._host.epoch
        if epoch == self._epoch:
            return False
        try:
            self._arenas.move_to(self._host)
        except BaseException:
            self._host.close()  # what it does not know it must not seem to serve
            raise
        self._epoch = epoch  # behind it: what an interrupt cuts off is done again
        return True

    def _make_slot(self, arena_nbytes: int) -> Slot:
        name = f"{self._label}-{next(self._numbers)}"
        try:
            self.attend()
            try:
                slot = self._arenas.make_slot(name, arena_nbytes)
            except SegmentError:
                if not self.attend():  # its end was not known yet
                    raise
                slot = self._arenas.make_slot(name, arena_nbytes)
        except AgentError as error:
            msg = (
                f"a slot of {arena_nbytes} bytes cannot be served: {error} Ask `rl-bridge doctor` "
                "what NIXL lacks here, or use the transport broadcast."
            )
            raise SegmentError(msg) from error
        self._slots[slot] = None
        return slot

    def take(
        self,
        plan: PackPlan,
        tensors: Mapping[str, torch.Tensor],
        update_id: str,
        *,
        lock: AbstractContextManager[object],
        num_threads: int | None,
    ) -> Taken:
        """Copy it into a slot."""
        table = plan.table
        with lock:
            slot = self.ring.acquire(table.arena_nbytes)
        try:
            if slot.layout_digest != table.digest:
                plan.clear_padding(slot.address)
                slot.layout_digest = table.digest
            staged = time.perf_counter()
            digests = plan.pack(tensors, slot.address, num_threads=num_threads)
            with lock:
                self.ring.publish(slot, update_id, table.arena_nbytes)
                self._published[update_id] = Published(slot, slot.generation, table.arena_nbytes)
            return Taken(digests, slot.generation, staged)
        except BaseException:
            with lock:
                self.ring.abandon(slot)
            raise

    def seal_header(self, update_id: str, digest: bytes) -> None:
        """Keep the digest of the manifest's header in the slot's stamp."""
        self.ring.seal_header(update_id, digest)

    def _place_of(self, update_id: str, known: Published) -> Placed:
        """The whole arena, as one range."""
        del update_id
        slot = self._arenas.known(known.slot)
        nbytes = known.arena_nbytes
        return Placed(
            number=slot.number,
            regions=slot.regions,
            stamp=slot.stamp,
            ranges=((slot.address,), (0,), (nbytes,)) if nbytes else ((), (), ()),
            memory=slot.memory,
            device=slot.device,
        )

    def _free(self, update_id: str) -> None:
        self.ring.release(update_id)

    def entries(self) -> tuple[Entry, ...]:
        """Every slot, those that nothing is published in too."""
        for slot in list(self._slots):
            if slot.before_close is None:
                del self._slots[slot]
        known = self._arenas.known
        return tuple(self._entry(known(slot).number, slot, slot.nbytes) for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.ring.nbytes

    def close(self) -> None:
        """Give the slots back."""
        self._published.clear()
        self.ring.close()
        self._slots.clear()
        self._arenas.close()

"""Transports and installers with one defect each, for `test_suites_see_faults`.

No test file by its name: `test_suites_see_faults` runs chosen tests of it, in a process of their
own, and wants them to fail.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rl_bridge.installers.base import Engine, InstallProof
from rl_bridge.installers.engine_memory import named_engine_tensors
from rl_bridge.installers.module import ModuleInstallAdapter
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.memory.control import UpdateReport
from rl_bridge.memory.packing import PackPlan
from rl_bridge.memory.passes import BytePlan
from rl_bridge.memory.views import Attachment, Pin, anonymous_pin
from rl_bridge.testing import InstallerSuite, TransportSuite
from rl_bridge.testing.faults import AroundConsumer, AroundPublisher, flip_byte
from rl_bridge.transports.base import Carried, ConsumerEnd, PublisherEnd, Transport
from rl_bridge.transports.local import LocalClone

__all__ = ["INSTALLER_LIES", "TRANSPORT_LIES"]

Tensors = Mapping[str, torch.Tensor]


# ---- transports ---------------------------------------------------------------------------------


class Liar(LocalClone):
    """``local-clone`` with a defect in one of its ends."""

    publisher_kind: ClassVar[type[AroundPublisher]] = AroundPublisher
    consumer_kind: ClassVar[type[AroundConsumer]] = AroundConsumer

    def publisher_end(self, publisher_id: str) -> PublisherEnd:
        return self.publisher_kind(super().publisher_end(publisher_id))

    def consumer_end(self, worker: str, rank: int) -> ConsumerEnd:
        return self.consumer_kind(super().consumer_end(worker, rank))


class ClaimsToCross(LocalClone):
    crosses_processes = True


class ClaimsZeroCopy(LocalClone):
    zero_copy_import = True


class ClaimsSomethingElse(LocalClone):
    supports_everything = True


class Unsealed(Liar):
    """Reads the source when it is imported, not when it is published."""

    class publisher_kind(AroundPublisher):  # noqa: N801 - stands for an attribute
        live: ClassVar[dict[str, tuple[PackPlan, Tensors]]] = {}

        def carry(self, plan: PackPlan, tensors: Tensors, update_id: str) -> Carried:
            self.live[update_id] = (plan, tensors)
            return self.inner.carry(plan, tensors, update_id)

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            attachment = self.inner.attach(manifest)
            plan, tensors = Unsealed.publisher_kind.live[manifest.update_id]
            plan.pack(tensors, attachment.tensors.pin.address)
            return attachment


class Shared(Liar):
    """Gives every consumer the publisher's own memory, writable."""

    class publisher_kind(AroundPublisher):  # noqa: N801 - stands for an attribute
        pins: ClassVar[dict[str, Pin]] = {}

        def carry(self, plan: PackPlan, tensors: Tensors, update_id: str) -> Carried:
            carried = self.inner.carry(plan, tensors, update_id)
            self.pins[update_id] = self.inner.snapshot(update_id)  # type: ignore[attr-defined]  # local-clone has it
            return carried

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            self.inner.attach(manifest)
            table = manifest.table
            pin = Shared.publisher_kind.pins[manifest.update_id]
            return Attachment(table, pin, BytePlan(table.nbytes_column))


class Reusing(Shared):
    """Writes every version into the same memory, whoever still looks at it."""

    class publisher_kind(AroundPublisher):  # noqa: N801 - stands for an attribute
        slot: ClassVar[Pin] = anonymous_pin(1 << 22)

        def carry(self, plan: PackPlan, tensors: Tensors, update_id: str) -> Carried:
            carried = self.inner.carry(plan, tensors, update_id)
            plan.pack(tensors, self.slot.address)
            Shared.publisher_kind.pins[update_id] = self.slot
            return carried


class _Trusting(Attachment):
    def __init__(self, honest: Attachment, digests: bytes) -> None:
        table = honest.tensors.table
        super().__init__(table, honest.tensors.pin, BytePlan(table.nbytes_column))
        self._claimed = digests

    def digests(self) -> bytes:
        return self._claimed


class Trusting(Liar):
    """Does not read the bytes: says that they are what the manifest says."""

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            return _Trusting(self.inner.attach(manifest), manifest.digests)


class CutsOff(Trusting):
    """Loses the last byte of what is large, and does not look."""

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            attachment = self.inner.attach(manifest)
            table = manifest.table
            for offset, nbytes in zip(table.offsets, table.nbytes, strict=True):
                if nbytes > 16:
                    flip_byte(attachment.tensors.pin.address + offset + nbytes - 1)
            return _Trusting(attachment, manifest.digests)


class Leaky(Liar):
    """Opens a file for every import."""

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        kept: ClassVar[list[int]] = []

        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            self.kept.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            return self.inner.attach(manifest)


class Hoarding(Liar):
    """Gives no memory back before it is closed."""

    class publisher_kind(AroundPublisher):  # noqa: N801 - stands for an attribute
        def release(self, update_id: str) -> None:
            """Keep it."""


class Silent(Liar):
    """Reports nothing to the publisher."""

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def report(self, manifest: WeightUpdateManifest, report: UpdateReport) -> None:
            """Keep it to itself."""


class Careless(Liar):
    """Takes a handle for what it should be."""

    class consumer_kind(AroundConsumer):  # noqa: N801 - stands for an attribute
        def attach(self, manifest: WeightUpdateManifest) -> Attachment:
            for value in manifest.handle.values():
                value["slot"]
            return self.inner.attach(manifest)


TRANSPORT_LIES: dict[type[Transport], str] = {
    ClaimsToCross: "test_the_manifest_crosses_a_process_exactly_if_declared",
    ClaimsZeroCopy: "test_an_import_without_a_copy_takes_no_memory",
    ClaimsSomethingElse: "test_every_declared_capability_is_exercised",
    Unsealed: "test_the_snapshot_survives_an_overwritten_source",
    Shared: "test_a_consumers_write_changes_nobody_elses_bytes",
    Reusing: "test_tensors_held_after_release_keep_their_bytes",
    Trusting: "test_a_flipped_byte_anywhere_is_a_checksum_mismatch",
    CutsOff: "test_any_state_dict_arrives_unchanged",
    Leaky: "test_fifty_cycles_leave_nothing_behind",
    Hoarding: "test_memory_is_used_again_once_nobody_holds_it",
    Silent: "test_the_publisher_learns_what_became_of_an_update",
    Careless: "test_hostile_handles_are_refused_by_type",
}


# ---- installers ---------------------------------------------------------------------------------


class Forgets(ModuleInstallAdapter):
    """Undoes nothing."""

    def undo(self) -> None:
        self.commit()


class Believes(ModuleInstallAdapter):
    """Proves without reading."""

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        super().install(manifest, tensors)
        self.manifest = manifest

    def prove(self) -> InstallProof:
        return InstallProof(method="digest", root=self.manifest.root)


class Unties(Believes):
    """Gives every name a memory of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        self.manifest = manifest
        assert isinstance(self.engine, torch.nn.Module)
        for name in named_engine_tensors(self.engine):
            path, _, leaf = name.rpartition(".")
            owner = self.engine.get_submodule(path)
            if leaf in dict(owner.named_parameters(recurse=False)):
                setattr(owner, leaf, torch.nn.Parameter(tensors[name].clone()))


class Skips(Believes):
    """Leaves the last tensor as it was."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.last = list(named_engine_tensors(engine).values())[-1]

    def install(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        before = self.last.detach().clone()
        super().install(manifest, tensors)
        self.last.data.copy_(before)


class WritesFirst(ModuleInstallAdapter):
    """Begins to write before it knows that all fits."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine

    def prepare(self, manifest: WeightUpdateManifest, tensors: Tensors) -> None:
        first = next(iter(named_engine_tensors(self.engine).values()))
        first.data.add_(1)
        super().prepare(manifest, tensors)


class HalfUndoes(ModuleInstallAdapter):
    """Brings all bytes back but the last one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine

    def undo(self) -> None:
        super().undo()
        last = list(named_engine_tensors(self.engine).values())[-1]
        last.data.view(-1).view(torch.uint8)[-1] ^= 1


INSTALLER_LIES: dict[type[Any], str] = {
    Forgets: "test_an_install_that_fails_at_any_tensor_is_undone",
    Believes: "test_the_proof_fails_when_one_byte_differs",
    Unties: "test_tied_tensors_of_the_engine_stay_tied",
    Skips: "test_version_after_version_the_engine_holds_what_was_published",
    WritesFirst: "test_what_does_not_fit_is_refused_before_byte_0",
    HalfUndoes: "test_a_later_install_that_fails_leaves_the_version_before",
}


# ---- what pytest collects here ------------------------------------------------------------------


def _suites() -> dict[str, type]:
    found: dict[str, type] = {}
    for kind in TRANSPORT_LIES:
        name = f"Test{kind.__name__}"
        found[name] = type(name, (TransportSuite,), {"transport_class": kind})
    for adapter in INSTALLER_LIES:
        name = f"Test{adapter.__name__}"
        made = {"make_adapter": lambda _self, engine, adapter=adapter: adapter(engine)}
        found[name] = type(name, (InstallerSuite,), made)
    return found


globals().update(_suites())

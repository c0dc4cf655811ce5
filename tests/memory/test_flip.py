"""Flip: versions exchanged under fixed addresses, back again, and whole when the kernel refuses."""

import errno
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.errors import SegmentError, TornEngine, WeightBridgeUnavailableError
from rl_bridge.memory import segment as leases
from rl_bridge.memory import vm
from rl_bridge.memory.flip import LiveRange
from rl_bridge.memory.slots import Slot
from rl_bridge.memory.views import Pin, ViewCache, anonymous_pin, tensor_in
from tests.memory.slots_rig import new_ring, uid, write

SIZE = 3 * vm.PAGE


class Versions:
    """A publisher's ring, and a consumer that pins its versions."""

    def __init__(self) -> None:
        self.ring = new_ring(limit=4)
        self.views = ViewCache()
        self.slots: dict[int, Slot] = {}

    def pin(self, number: int, nbytes: int = SIZE) -> Pin:
        slot = self.slots[number] = write(self.ring, number, nbytes)
        view = self.views.get(slot.segment.ref)
        return view.pin(uid(number), slot.generation, nbytes)

    def close(self) -> None:
        self.views.close()
        self.ring.close()


@pytest.fixture
def versions() -> Iterator[Versions]:
    made = Versions()
    yield made
    made.close()


@pytest.fixture
def live() -> LiveRange:
    return LiveRange(SIZE)


def engine_of(live: LiveRange) -> torch.Tensor:
    return tensor_in(live.pin, 0, SIZE, "uint8", (SIZE,))


def shown(live: LiveRange) -> set[int]:
    return set(engine_of(live).tolist())


def read(pin: Pin) -> set[int]:
    return set(tensor_in(pin, 0, SIZE, "uint8", (SIZE,)).tolist())


def test_addresses_stay_while_versions_change(versions: Versions, live: LiveRange) -> None:
    pins = [versions.pin(number) for number in (1, 2, 3)]
    assert live.flip(pins[0]) is None
    engine = engine_of(live)
    address = engine.data_ptr()
    assert live.flip(pins[1]) is pins[0]
    assert set(engine.tolist()) == {2}
    assert live.flip(pins[2]) is pins[1]
    assert set(engine.tolist()) == {3}
    assert engine.data_ptr() == address == live.address
    assert live.content is pins[2]
    assert live.nbytes == SIZE


def test_a_range_with_a_foreign_page_in_it_does_not_show_the_segment(
    versions: Versions, live: LiveRange
) -> None:
    pin, other = versions.pin(1), versions.pin(2)
    live.flip(pin)
    assert other.view is not None
    vm.map_fixed(live.address + vm.PAGE, vm.PAGE, other.view.fd)
    assert not live.shows(pin)
    assert pin.view is not None
    # The right file, but not the right part of it.
    vm.map_fixed(live.address + vm.PAGE, vm.PAGE, pin.view.fd)
    assert not live.shows(pin)
    assert not LiveRange(SIZE).shows(pin)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EMFILE, WeightBridgeUnavailableError), (errno.EACCES, SegmentError)],
)
def test_a_kernel_that_cannot_be_asked_what_is_shown_is_a_failure_of_ours(
    number: int,
    kind: type[Exception],
    versions: Versions,
    live: LiveRange,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = versions.pin(1)
    live.flip(pin)

    def refused(_: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(vm, "mapped_file", refused)
    with pytest.raises(kind, match="no"):
        live.shows(pin)


def test_the_lease_ends_when_range_and_engine_are_gone(versions: Versions) -> None:
    live = LiveRange(SIZE)
    live.flip(versions.pin(1))
    engine = engine_of(live)
    address = live.address
    del live
    gc.collect()
    assert leases.is_held(versions.slots[1].segment.fd)
    assert set(engine.tolist()) == {1}
    del engine
    assert not leases.is_held(versions.slots[1].segment.fd)
    assert vm.mapped_file(address) is None


# ---- refusals -----------------------------------------------------------------------------------


def test_what_is_no_mapped_segment_of_that_size_cannot_be_flipped(
    versions: Versions, live: LiveRange
) -> None:
    with pytest.raises(SegmentError, match=r"needs the mapped segment.*mode='copy' or 'alias'"):
        live.flip(anonymous_pin(SIZE))
    assert live.content is None
    with pytest.raises(SegmentError, match="needs the mapped segment"):
        LiveRange(20 * vm.PAGE).flip(versions.pin(1))


def test_a_version_flipped_over_itself_loses_what_was_written_over_it(
    versions: Versions, live: LiveRange
) -> None:
    pin = versions.pin(1)
    live.flip(pin)
    engine_of(live)[:100] = 9
    slot = versions.slots[1]
    again = versions.views.get(slot.segment.ref).pin(uid(1), slot.generation, SIZE)
    assert live.flip(again) is pin
    assert live.content is again
    assert live.shows(again)
    assert shown(live) == {1}


class Refusing:
    """`vm.move` that fails at chosen calls."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *failing: int, number: int = errno.EINVAL
    ) -> None:
        self._failing = failing
        self.errno = number
        self._move = vm.move
        self.num_calls = 0
        patch.setattr("rl_bridge.memory.flip.vm.move", self)

    def __call__(self, source: int, nbytes: int, target: int) -> None:
        self.num_calls += 1
        if self.num_calls in self._failing:
            raise OSError(self.errno, "refused by the test")
        self._move(source, nbytes, target)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_move_that_fails_leaves_the_old_version_live(
    failing: int, versions: Versions, live: LiveRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = versions.pin(1), versions.pin(2)
    live.flip(old)
    engine = engine_of(live)
    engine[7] = 77
    with monkeypatch.context() as patch:
        Refusing(patch, failing)
        with pytest.raises(SegmentError, match=r"does not move mappings.*Linux 5.13"):
            live.flip(new)
    assert live.content is old
    assert live.shows(old)
    assert engine[7] == 77
    assert read(new) == {2}
    live.flip(new)
    assert shown(live) == {2}


class ShortOnce:
    """A call of `vm` that the kernel refuses once, for want of address space."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, *, call: int) -> None:
        self._function = getattr(vm, name)
        self._call = call
        patch.setattr(vm, name, self)

    def __call__(self, *arguments: Any) -> Any:
        self._call -= 1
        if self._call == 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return self._function(*arguments)


@pytest.mark.parametrize(
    ("name", "call", "is_first"),
    [("reserve", 1, True), ("reserve", 2, True), ("move", 1, True), ("move", 1, False)],
    ids=["mapping", "live-range", "first-move", "later-move"],
)
def test_a_moment_without_address_space_rejects_no_update(
    name: str, call: int, *, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    with (
        make_weight_bridge("shared-memory") as trainer,
        RolloutExecutor(
            weight_transport="shared-memory",
            weight_install_adapter=ModuleInstallAdapter(engine, mode="flip"),
        ) as executor,
    ):
        if not is_first:
            executor.update_weights(trainer.publish(model, weight_version=1))
            with torch.no_grad():
                model.weight.add_(1)
        manifest = trainer.publish(model, weight_version=2)
        with monkeypatch.context() as patch:
            ShortOnce(patch, name, call=call)
            with pytest.raises(WeightBridgeUnavailableError, match="Cannot allocate memory"):
                executor.update_weights(manifest)
        executor.update_weights(manifest)
        assert executor.active_weight_version == 2
        assert torch.equal(engine.weight, model.weight)


def test_a_way_back_that_fails_too_is_torn_and_can_be_tried_again(
    versions: Versions, live: LiveRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = versions.pin(1), versions.pin(2)
    live.flip(old)
    engine = engine_of(live)
    engine[7] = 77
    with monkeypatch.context() as patch:
        Refusing(patch, 2, 3)
        with pytest.raises(TornEngine, match=r"the flip failed .* and so did the way back"):
            live.flip(new)
    assert live.content is None
    live.flip(old)
    assert engine[7] == 77
    assert set(engine[8:].tolist()) == {1}

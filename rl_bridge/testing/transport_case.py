"""The transport suite's first half: what its tests are given, and that bytes arrive and stay.

Bytes arrive unchanged, whatever they are and however they lie; several readers hold versions, and
none can disturb another. Equality is of bytes, never of values: a NaN is not equal to itself.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_bridge.bridge.executor import RolloutExecutor
from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.errors import (
    BridgeClosed,
    IllegalTransition,
    SegmentError,
    SlotsExhausted,
    StaleUpdate,
    WeightBridgeError,
)
from rl_bridge.lifecycle import Event, State
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import row_major_stride
from rl_bridge.memory.parts import Scope
from rl_bridge.testing.faults import (
    Fault,
    FaultInjecting,
    InjectedFault,
    Locate,
    Step,
    arena_address,
)
from rl_bridge.testing.peer import BridgeOver, Peer, PeerOptions, sample_weights
from rl_bridge.testing.processes import Child, watchdog
from rl_bridge.testing.tensors import bytes_of, contents_of, random_tensor
from rl_bridge.transports.base import Transport

MakeBridge = Callable[..., BridgeOver]
MakePeer = Callable[..., Child]
_Report = TypeVar("_Report")


def faults_of(bridge: TensorBridge) -> FaultInjecting:
    """The fault-injecting transport under a bridge of the suite: its raw access."""
    given = getattr(bridge, "given", None)
    if not isinstance(given, FaultInjecting):
        raise TypeError(f"{bridge!r} does not belong to the suite")
    return given


def only_report(reports: Iterable[_Report]) -> _Report:
    """The one report that a publisher's end has of an update, or a failure that says so."""
    found = list(reports)
    assert found, (
        "records() shows no consumer that reported the update: the publisher's end must read what "
        "the consumer's end reported"
    )
    assert len(found) == 1, f"records() shows {len(found)} reports of one consumer: {found}"
    return found[0]


_VERSIONS = itertools.count(1)

# ---- what travels, drawn by Hypothesis: dtypes, shapes, names, tensors in odd layouts ------------

ODD_NAMES = (
    "",
    " ",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "a\nb",
    "a\tb",
    "a\0b",
    '"',
    "\\",
    "é",
    "e\u0301",
    "重み",
    "🦊",
    "\u202eabc",
    "\u2028",
    "\uffff",
    "__class__",
    "%s",
    "{}",
    "x" * 300,
)

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "offset": lambda tensor: tensor[min(1, tensor.shape[0]) :],
    "stepped": lambda tensor: tensor[::2],
    "expanded": lambda tensor: tensor[:1].expand(min(3, 3 * tensor.shape[0]), *tensor.shape[1:]),
    "windows": lambda tensor: tensor.unfold(0, min(2, tensor.shape[0]), 1),
    "transposed": lambda tensor: tensor.transpose(0, -1),
    "narrowed": lambda tensor: tensor[..., : max(1, tensor.shape[-1] - 1)],
    "channels last": lambda tensor: tensor.permute(0, 3, 1, 2),
}
_DIMS_NEEDED = dict(zip(_VIEWS, (0, 1, 1, 1, 1, 2, 2, 4), strict=True))
LAYOUTS = tuple(_VIEWS)
"""Memory layouts of a source tensor, by name."""


def dtypes() -> st.SearchStrategy[str]:
    """Every wire dtype."""
    return st.sampled_from(sorted(DTYPE_NBYTES))


def shapes(*, max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, those with no dimensions and with a 0 among them too."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def names() -> st.SearchStrategy[str]:
    """Tensor names, most of them ugly."""
    return st.sampled_from(ODD_NAMES) | st.text(max_size=12) | st.from_regex(r"[a-z]\.[0-9]\.w")


def _lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Another view with odd strides; the tensor itself where it has too few dimensions."""
    if tensor.dim() < _DIMS_NEEDED[layout]:
        return tensor
    return _VIEWS[layout](tensor)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """One tensor: any dtype, shape, bytes and memory layout."""
    tensor = random_tensor(draw(dtypes()), draw(shapes()), draw(st.integers(0, 2**32 - 1)))
    return _lay_out(tensor, draw(st.sampled_from(LAYOUTS)))


@st.composite
def state_dicts(draw: st.DrawFn, *, max_tensors: int = 8) -> dict[str, torch.Tensor]:
    """Some tensors by name, among them tied ones and views that overlap."""
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(names(), unique=True, min_size=1, max_size=max_tensors)):
        earlier = list(found.values())
        kind = draw(st.sampled_from(("fresh", "fresh", "tied", "view", "overlapping")))
        if not earlier or kind == "fresh":
            found[name] = draw(tensors())
            continue
        base = draw(st.sampled_from(earlier))
        if kind == "tied":
            found[name] = base
        elif kind == "view":
            found[name] = base.view(base.shape)
        else:
            found[name] = base[: base.shape[0] // 2 + 1] if base.dim() else base
    return found


# ---- the tests -----------------------------------------------------------------------------------


class TransportCase:
    """Give `transport_class` and, by overriding the fixture, `transport_kwargs`.

    Never an instance: one that travels to a child by pickle can take its bytes along, and then a
    transport that crosses no process would pass for one that does.
    """

    transport_class: ClassVar[type[Transport]]
    locate: ClassVar[Locate] = staticmethod(arena_address)
    """Finds the bytes behind a manifest in the publisher's process, without the transport's help.
    Required for a transport of your own: a static method that children can import. The one that
    stands here knows the transports of rl_bridge only."""

    device: ClassVar[str] = "cpu"
    """Where the tensors lie that the transport carries."""

    @property
    def _finder(self) -> Locate:
        case: Any = self  # `locate` is the class's, or one test's alone
        found: Locate = case.locate
        return found

    @pytest.fixture(autouse=True)
    def on_device(self) -> Iterator[None]:
        """Make the suite's tensors where the transport takes them."""
        with nullcontext() if self.device == "cpu" else torch.device(self.device):
            yield

    @pytest.fixture
    def transport_kwargs(self) -> dict[str, Any]:
        """The transport's options; both ends, in whatever process, are made from them."""
        return {}

    @pytest.fixture
    def make_bridge(self, transport_kwargs: dict[str, Any]) -> Iterator[MakeBridge]:
        """Make bridges over the transport that are closed at the end."""
        made: list[BridgeOver] = []

        def make(**options: Any) -> BridgeOver:
            transport = self.transport_class.create(**transport_kwargs)
            bridge = BridgeOver(FaultInjecting(transport, locate=self._finder), **options)
            made.append(bridge)
            return bridge

        yield make
        for bridge in reversed(made):
            bridge.close()

    @pytest.fixture
    def publisher(self, make_bridge: MakeBridge) -> BridgeOver:
        """A bridge that publishes."""
        return make_bridge(source_worker="trainer")

    @pytest.fixture
    def consumer(self, make_bridge: MakeBridge) -> BridgeOver:
        """A bridge that imports."""
        return make_bridge(source_worker="rollout")

    @pytest.fixture
    def make_peer(self, transport_kwargs: dict[str, Any]) -> Iterator[MakePeer]:
        """Start children that are built from class and arguments; survivors are killed."""
        started: list[Child] = []

        def make(*, max_files: int | None = None, **arguments: Any) -> Child:
            options = PeerOptions(locate=self._finder, device=self.device, max_files=max_files)
            child = Child(
                Peer,
                transport_class=self.transport_class,
                transport_kwargs=transport_kwargs,
                options=options,
                **arguments,
            )
            started.append(child)
            return child

        yield make
        for child in started:
            with child:
                pass  # leaving the context kills

    @pytest.fixture
    def crossing(self, transport_kwargs: dict[str, Any]) -> None:
        """Skip where the transport says that it crosses no process; another test checks that."""
        if not self.transport_class.create(**transport_kwargs).crosses_processes:
            pytest.skip(f"{self.transport_class.name} declares that it crosses no process")

    @pytest.fixture
    def may_write(self, transport_kwargs: dict[str, Any]) -> bool:
        """Whether the transport says that a consumer may write to what it imported."""
        return self.transport_class.create(**transport_kwargs).writable_import

    # ---- bytes arrive unchanged ------------------------------------------------------------------

    # The fixtures serve all examples: versions go on counting, and memory is used again. Each
    # transport's class runs this inherited test as its own.
    @settings(
        deadline=None,  # a busy machine is no fault of the transport's
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(source=state_dicts())
    def test_any_state_dict_arrives_unchanged(
        self, publisher: BridgeOver, consumer: BridgeOver, source: dict[str, torch.Tensor]
    ) -> None:
        """All dtypes, shapes, names, strides, views, overlaps and ties."""
        manifest = publisher.publish(source, weight_version=next(_VERSIONS))
        tensors = consumer.import_update(manifest.to_json())
        assert contents_of(tensors) == contents_of(source)
        del tensors
        consumer.release(manifest.update_id)
        publisher.release(manifest.update_id)

    @pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
    def test_every_dtype_arrives_in_every_shape(
        self, publisher: BridgeOver, consumer: BridgeOver, dtype: str
    ) -> None:
        """No dimensions, no elements, one element, odd sizes, strides, all bits set."""
        full = random_tensor(dtype, (5, 7, 3), seed=7)
        source = {
            "full": full,
            "zero dim": full[2, 3, 1],
            "empty": full[:0],
            "empty inside": full[:, :0],
            "one": full[:1, :1, :1],
            "transposed": full.transpose(0, 2),
            "every other": full[::2, :, ::2],
            "leaf and a byte": random_tensor(dtype, (131_072 // DTYPE_NBYTES[dtype] + 1,), seed=8),
            "ones": torch.full((16 * 9,), 255, dtype=torch.uint8).view(full.dtype),
            "zeros": torch.zeros(16 * 9, dtype=torch.uint8).view(full.dtype),
        }
        tensors = consumer.import_update(publisher.publish(source, weight_version=1))
        assert contents_of(tensors) == contents_of(source)

    def test_what_is_cast_on_its_way_arrives_as_torch_casts_it(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Strided, of several dtypes, tied; what holds no floating-point numbers stays as it is."""
        matrix = torch.arange(35.0).view(5, 7) / 3
        source = {
            "matrix": matrix,
            "transposed": matrix.t(),
            "tied": matrix,
            "double": matrix.double()[::2],
            "zero dim": matrix[1, 1],
            "empty": matrix[:0],
            "integers": torch.arange(9),
            "flags": torch.tensor([True, False]),
        }
        wanted = {
            name: one.to(torch.bfloat16) if one.is_floating_point() else one
            for name, one in source.items()
        }
        manifest = publisher.publish(source, dtype=torch.bfloat16)
        assert contents_of(consumer.import_update(manifest)) == contents_of(wanted)
        assert dict(manifest.table.ties) == {"tied": "matrix"}

    def test_the_manifest_describes_what_arrives(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Name, dtype, shape, row-major stride and size of each tensor are those that arrive."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        tensors = consumer.import_update(manifest)
        assert set(manifest.tensors) == set(tensors)
        for name, told in manifest.tensors.items():
            found = tensors[name]
            assert told.name == name
            assert told.shape == tuple(found.shape)
            assert told.dtype == str(found.dtype).removeprefix("torch.")
            assert told.stride == row_major_stride(told.shape)
            assert found.is_contiguous()
            assert told.nbytes == len(bytes_of(found))

    def test_odd_names_arrive(self, publisher: BridgeOver, consumer: BridgeOver) -> None:
        """Names are data: no separator, control character or length is special."""
        source = {name: torch.tensor([float(i)]) for i, name in enumerate(ODD_NAMES)}
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest.to_json())
        assert contents_of(tensors) == contents_of(source)
        assert WeightUpdateManifest.from_json(manifest.to_json()).to_json() == manifest.to_json()

    def test_only_the_bytes_of_a_view_travel(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Neither the storage behind a view nor its neighbours are copied, hashed or shown."""
        storage = random_tensor("uint8", (1 << 20,), seed=1)
        source = {"view": storage[1000:1010]}
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest)
        assert manifest.total_nbytes == 10
        assert tensors["view"].untyped_storage().nbytes() == 10
        assert contents_of(tensors) == contents_of(source)

    def test_tied_tensors_travel_once_and_are_tied_again(
        self, publisher: BridgeOver, consumer: BridgeOver, *, may_write: bool
    ) -> None:
        """One copy of the bytes, one tensor on the other side."""
        embedding = random_tensor("bfloat16", (9, 4), seed=1)
        source = {"embed": embedding, "head": embedding, "third": embedding.view(9, 4)}
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest)
        assert manifest.total_nbytes == 72
        assert manifest.tensor_count == 3
        assert tensors["embed"].data_ptr() == tensors["head"].data_ptr()
        if may_write:
            tensors["head"][0, 0] = 3.0
        assert bytes_of(tensors["embed"]) == bytes_of(tensors["head"]) == bytes_of(tensors["third"])

    def test_overlapping_views_arrive_each_on_its_own(
        self, publisher: BridgeOver, consumer: BridgeOver, *, may_write: bool
    ) -> None:
        """Views that share some bytes are no ties: each has its own bytes on the other side."""
        base = random_tensor("float32", (10,), seed=1)
        source = {"low": base[:7], "high": base[3:], "square": base[:9].view(3, 3)}
        tensors = consumer.import_update(publisher.publish(source, weight_version=1))
        assert contents_of(tensors) == contents_of(source)
        if may_write:
            before = bytes_of(tensors["high"])
            tensors["low"].zero_()
            assert bytes_of(tensors["high"]) == before

    def test_the_snapshot_survives_an_overwritten_source(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The next training step starts at once: it changes nothing that was published."""
        source = sample_weights(1)
        expected = contents_of(source)
        manifest = publisher.publish(source, weight_version=1)
        for tensor in source.values():
            tensor.zero_()
        assert contents_of(consumer.import_update(manifest)) == expected

    def test_the_same_memory_under_new_values_arrives_anew(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Steady state: the same tensors, changed in place, version after version."""
        source = sample_weights(1)
        for version in range(1, 9):
            for name, tensor in sample_weights(version).items():
                source[name].copy_(tensor)
            manifest = publisher.publish(source, weight_version=version)
            assert contents_of(consumer.import_update(manifest)) == contents_of(source)
            consumer.acknowledge(manifest.update_id)
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

    def test_the_layout_may_change_from_version_to_version(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Larger, smaller, empty: what an earlier version left behind never shows."""
        sizes = [(100,), (3, 5), (0,), (300_000,), (1,), (70_000, 2), ()]
        for version, shape in enumerate(sizes, 1):
            source = {"w": random_tensor("float32", shape, seed=version)}
            manifest = publisher.publish(source, weight_version=version)
            assert contents_of(consumer.import_update(manifest)) == contents_of(source)
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

    def test_compact_manifests_arrive_once_the_layout_is_known(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """`to_json(layout=False)` leads to the same bytes."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest.to_json(layout=False))
        assert contents_of(tensors) == contents_of(source)

    def test_an_update_that_others_read_is_fetched_when_a_tensor_is_asked_for(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Before, its names are known, and its consumer is."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.consumer.import_update(manifest, scope=Scope.LEASE)
        assert set(tensors) == set(source)
        assert contents_of(tensors) == contents_of(source)
        if consumer.update_state(manifest) is State.IMPORTED:
            consumer.consumer.advance(manifest.update_id, Event.VERIFY)
        consumer.acknowledge(manifest)
        assert [report.state for report in publisher.holders(manifest)] == ["acknowledged"]

    def test_an_update_that_others_read_is_refused_or_true_once_it_is_released(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Its consumer asks for a tensor when the publisher's memory has been written again."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.consumer.import_update(manifest, scope=Scope.LEASE)
        publisher.release(manifest)
        for version in range(2, 6):
            newer = publisher.publish(sample_weights(version), weight_version=version)
            publisher.release(newer)
        with suppress(StaleUpdate):
            assert contents_of(tensors) == contents_of(source)

    # ---- nobody disturbs anybody -----------------------------------------------------------------

    def test_many_consumers_share_one_update_also_late_ones(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Each sees the same bytes, before and after others are done, and beside a newer one."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        early = [make_bridge(source_worker=f"early-{index}") for index in range(3)]
        for bridge in early:
            assert contents_of(bridge.import_update(manifest)) == contents_of(source)
        early[0].acknowledge(manifest.update_id)
        early[0].release(manifest.update_id)
        early[1].reject(manifest.update_id, "not today")
        publisher.publish(sample_weights(2), weight_version=2)
        late = make_bridge(source_worker="late")
        assert contents_of(late.import_update(manifest.to_json())) == contents_of(source)
        assert contents_of(early[2].import_update(manifest)) == contents_of(source)

    def test_a_consumers_write_changes_nobody_elses_bytes(
        self, publisher: BridgeOver, make_bridge: MakeBridge, *, may_write: bool
    ) -> None:
        """Neither the neighbour's, nor a late one's, nor what is verified anew."""
        if not may_write:
            pytest.skip(f"{self.transport_class.name} declares that a consumer may not write")
        source = sample_weights(1)
        expected = contents_of(source)
        manifest = publisher.publish(source, weight_version=1)
        writer, neighbour, late = (make_bridge(source_worker=name) for name in "abc")
        mine, theirs = writer.import_update(manifest), neighbour.import_update(manifest)
        for tensor in mine.values():
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).bitwise_not_()
        assert contents_of(theirs) == expected
        assert contents_of(late.import_update(manifest)) == expected
        assert contents_of(writer.import_update(manifest)) == expected
        assert contents_of(source) == expected

    def test_what_a_consumer_wrote_is_gone_with_the_next_version(
        self, publisher: BridgeOver, consumer: BridgeOver, *, may_write: bool
    ) -> None:
        """A page that was written to must not show through when its memory is used again."""
        for version in range(1, 8):
            source = sample_weights(version)
            manifest = publisher.publish(source, weight_version=version)
            tensors = consumer.import_update(manifest)
            assert contents_of(tensors) == contents_of(source)
            if may_write:
                for tensor in tensors.values():
                    tensor.zero_()
                del tensor
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

    def test_a_newer_version_does_not_disturb_an_import_in_flight(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Even if its update is released meanwhile: attached is attached."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        released = []

        def meanwhile() -> None:
            publisher.release(manifest.update_id)
            released.append(manifest.update_id)
            for version in (2, 3):
                newer = publisher.publish(sample_weights(version), weight_version=version)
                publisher.release(newer.update_id)
                released.append(newer.update_id)

        faults_of(consumer).faults.append(Fault(Step.AFTER_ATTACH, meanwhile))
        assert contents_of(consumer.import_update(manifest)) == contents_of(source)
        assert len(released) == 3, "the import was never in flight"

    def test_a_loop_that_keeps_one_version_takes_nothing_from_its_consumer(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """More versions than slots; the consumer holds each until it has the next one."""
        held: list[tuple[str, dict[str, torch.Tensor]]] = []
        for version in range(10):
            manifest = publisher.publish(sample_weights(version), keep=1)
            tensors = dict(consumer.import_update(manifest))
            consumer.acknowledge(manifest.update_id)
            for number, (before, its) in enumerate(held, start=version - len(held)):
                assert contents_of(its) == contents_of(sample_weights(number))
                its.clear()
                consumer.release(before)
            held = [(manifest.update_id, tensors)]
            del tensors

    def test_two_versions_are_live_at_once(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The old one serves until the new one is in."""
        sources = {version: sample_weights(version) for version in (1, 2)}
        live = {
            version: consumer.import_update(publisher.publish(source, weight_version=version))
            for version, source in sources.items()
        }
        for version, source in sources.items():
            assert contents_of(live[version]) == contents_of(source)

    def test_tensors_held_after_release_keep_their_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Memory is written again only once nobody reads it, whatever is published meanwhile."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        held = consumer.import_update(manifest)
        consumer.release(manifest.update_id)
        publisher.release(manifest.update_id)
        for version in range(2, 9):
            newer = publisher.publish(sample_weights(version), weight_version=version)
            consumer.import_update(newer)
            consumer.release(newer.update_id)
            publisher.release(newer.update_id)
        assert contents_of(held) == contents_of(source)

    def test_one_tensor_that_is_held_keeps_its_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A view of a slice of one tensor is enough; it pins its own version and no other."""
        taken, kept = [], []
        for version in range(1, 20):
            manifest = publisher.publish(sample_weights(version), weight_version=version)
            tensors = consumer.import_update(manifest)
            if version == 5:
                kept.append(tensors["layer.0.weight"][3:5].t())
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)
            taken.append(publisher.published_nbytes)
        assert len(set(taken[8:])) == 1
        assert bytes_of(kept[0]) == bytes_of(sample_weights(5)["layer.0.weight"][3:5].t())

    def test_tensors_held_after_both_ends_closed_keep_their_bytes(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Also those that are first looked at then."""
        source = sample_weights(1)
        held = consumer.import_update(publisher.publish(source, weight_version=1))
        publisher.close()
        consumer.close()
        assert contents_of(held) == contents_of(source)

    def test_a_holder_that_never_lets_go_cannot_make_the_publisher_wait(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Publishing goes on, or ends at once in an error that names the holder."""
        hoarder = make_bridge(source_worker="hoarder")
        held = {}
        sources = {version: sample_weights(version) for version in range(1, 13)}
        complaint = "hoarder"
        with watchdog(60):
            for version, source in sources.items():
                try:
                    manifest = publisher.publish(source, weight_version=version)
                except SlotsExhausted as error:
                    complaint = str(error)
                    break
                held[version] = hoarder.import_update(manifest)
                publisher.release(manifest.update_id)
        assert "hoarder" in complaint
        for version, tensors in held.items():
            assert contents_of(tensors) == contents_of(sources[version])
        held.clear()
        del tensors
        hoarder.close()
        publisher.publish(sample_weights(99), weight_version=99)

    def test_memory_is_used_again_once_nobody_holds_it(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """Twenty serial versions take no more than the first three."""
        taken = []
        for version in range(1, 21):
            source = {"w": random_tensor("uint8", (1 << 20,), seed=version)}
            manifest = publisher.publish(source, weight_version=version)
            consumer.import_update(manifest)
            taken.append(publisher.published_nbytes)
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)
        assert max(taken) <= max(taken[:3])

    # ---- ends -----------------------------------------------------------------------------------

    def test_release_is_idempotent_and_final(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """On both sides; the state stays, and nothing is imported or acknowledged any more."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        for bridge in (consumer, publisher):
            for _ in range(3):
                bridge.release(manifest.update_id)
            assert bridge.update_state(manifest.update_id) is State.RELEASED
        with pytest.raises(IllegalTransition):
            consumer.acknowledge(manifest.update_id)
        publisher.publish(sample_weights(2), weight_version=2)
        publisher.publish(sample_weights(3), weight_version=3)
        with pytest.raises((StaleUpdate, SegmentError)):
            consumer.import_update(manifest)

    def test_close_is_idempotent_and_final(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A closed end refuses with its own error, and still reports what it knew."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        for bridge in (consumer, publisher):
            for _ in range(3):
                bridge.close()
            bridge.release(manifest.update_id)
        with pytest.raises(BridgeClosed):
            publisher.publish(sample_weights(2), weight_version=2)
        with pytest.raises(BridgeClosed):
            consumer.import_update(manifest)
        with pytest.raises(BridgeClosed):
            consumer.acknowledge(manifest.update_id)
        assert consumer.update_status(manifest.update_id) == "released"
        assert publisher.published_nbytes == 0

    def test_closing_the_publisher_ends_its_updates_with_a_typed_error(
        self, publisher: BridgeOver, consumer: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """A consumer that has not imported yet gets the error; one that has keeps its tensors."""
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        tensors = consumer.import_update(manifest)
        publisher.close()
        with pytest.raises(SegmentError):
            make_bridge().import_update(manifest)
        assert contents_of(tensors) == contents_of(source)
        consumer.acknowledge(manifest.update_id)
        consumer.release(manifest.update_id)

    # ---- the way back ---------------------------------------------------------------------------

    def test_publishing_and_importing_are_timed_phase_by_phase(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """On each side by itself; a phase is a part of the whole."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        consumer.import_update(manifest)
        published, imported = publisher.timings(manifest), consumer.timings(manifest)
        assert set(published) >= {"gather", "stage_digest", "seal", "publish"}
        assert set(imported) >= {"attach", "verify"}
        assert 0 < sum(published.values()) - published["publish"] <= published["publish"]
        assert min(*published.values(), *imported.values()) >= 0

    def test_the_publisher_learns_what_became_of_an_update(
        self, publisher: BridgeOver, make_bridge: MakeBridge
    ) -> None:
        """Each consumer's state, its proof or reason, and whether its process is gone."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        good, bad, lazy, gone = (make_bridge(source_worker=name) for name in ("g", "b", "l", "x"))
        for bridge in (good, bad, lazy, gone):
            bridge.import_update(manifest)
        good.acknowledge(manifest.update_id, proof={"method": "digest", "root": manifest.root})
        bad.reject(manifest.update_id, "the engine said no: " + "é" * 2000)
        gone.close()
        told = {report.worker: report for report in publisher.holders(manifest.update_id)}
        assert {name: report.state for name, report in told.items()} == {
            "g": "acknowledged",
            "b": "rejected",
            "l": "verified",
            "x": "released",
        }
        assert dict(told["g"].proof or {}) == {"method": "digest", "root": manifest.root}
        assert (told["b"].reason or "").startswith("the engine said no: é")
        assert {told[name].presence for name in "gbl"} == {"alive"}
        assert told["x"].presence == "gone"
        assert set(told["g"].timings_ms) >= {"attach", "verify"}

    def test_the_publisher_learns_that_tensors_are_still_held(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The report distinguishes released and still held from released and gone."""
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        held = consumer.import_update(manifest)["scale"]
        consumer.release(manifest.update_id)
        assert only_report(publisher.holders(manifest.update_id)).tensors_held
        del held
        assert not only_report(publisher.holders(manifest.update_id)).tensors_held

    def test_lost_reports_cost_nothing_but_knowledge(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """The transaction does not depend on the way back."""
        faults_of(consumer).drops_reports = True
        source = sample_weights(1)
        manifest = publisher.publish(source, weight_version=1)
        assert contents_of(consumer.import_update(manifest)) == contents_of(source)
        consumer.acknowledge(manifest.update_id)
        assert consumer.active_weight_version == 1
        assert publisher.holders(manifest.update_id) == []

    def test_a_way_back_that_fails_does_not_fail_the_update(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A lost report changes nothing: the step that it reports was taken."""
        faults_of(consumer).faults += [Fault(Step.BEFORE_REPORT, count=n) for n in range(1, 20)]
        source = sample_weights(1)
        executor = RolloutExecutor(weight_bridge=consumer)
        manifest = publisher.publish(source, weight_version=1)
        assert contents_of(executor.update_weights(manifest)) == contents_of(source)
        assert executor.active_weight_version == consumer.active_weight_version == 1
        bad = publisher.publish(sample_weights(2), weight_version=2)
        consumer.reject(bad, "no")
        executor.release_weights()
        assert consumer.update_status(manifest.update_id) == "released"

    @pytest.mark.parametrize("step", list(Step))
    def test_a_failure_in_the_transport_leaves_both_ends_usable(
        self, publisher: BridgeOver, consumer: BridgeOver, make_bridge: MakeBridge, step: Step
    ) -> None:
        """It comes out as it is, where it matters, and the next version arrives all the same."""
        untroubled = make_bridge()
        untroubled.publish({"w": random_tensor("uint8", (1 << 16,), seed=0)}, weight_version=1)
        struck = []

        def strike() -> None:
            struck.append(step)
            raise InjectedFault("injected fault")

        for bridge in (publisher, consumer):
            faults_of(bridge).faults.append(Fault(step, strike))
        for version in range(1, 9):
            source = {"w": random_tensor("uint8", (1 << 16,), seed=version)}
            manifest = None
            try:
                manifest = publisher.publish(source, weight_version=version)
                assert contents_of(consumer.import_update(manifest)) == contents_of(source)
                consumer.acknowledge(manifest.update_id)
            except InjectedFault:
                assert version == 1
            else:
                assert consumer.active_weight_version == version
            for bridge in (consumer, publisher):
                if manifest is not None:
                    with suppress(InjectedFault):
                        bridge.release(manifest.update_id)
                    bridge.release(manifest.update_id)
        assert struck == [step], "the step was never reached, or more than once"
        assert consumer.active_weight_version == 8
        assert publisher.published_nbytes <= 2 * untroubled.published_nbytes

    def test_whatever_the_transport_raises_is_typed_or_its_own(
        self, publisher: BridgeOver, consumer: BridgeOver
    ) -> None:
        """A rejected import names its reason."""
        faults_of(consumer).faults.append(Fault(Step.AFTER_ATTACH))
        manifest = publisher.publish(sample_weights(1), weight_version=1)
        with pytest.raises(InjectedFault):
            consumer.import_update(manifest)
        assert consumer.update_status(manifest.update_id) == "rejected"
        assert "injected fault" in (consumer.rejection_reason(manifest.update_id) or "")
        with pytest.raises(WeightBridgeError):
            consumer.import_update(manifest)

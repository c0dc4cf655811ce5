"""The suite's first part: bytes arrive unchanged, whatever they are and however they lie."""

import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_bridge.errors import StaleUpdate
from rl_bridge.lifecycle import Event, State
from rl_bridge.manifest.dtypes import DTYPE_NBYTES
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.manifest.table import row_major_stride
from rl_bridge.memory.parts import Scope
from rl_bridge.testing.peer import BridgeOver, sample_weights
from rl_bridge.testing.tensors import bytes_of, contents_of, random_tensor
from rl_bridge.testing.transport_case import TransportCase

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


# ---- the suite -----------------------------------------------------------------------------------


class BytesArriveUnchanged(TransportCase):
    """Equality of bytes, never of values: a NaN is not equal to itself."""

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

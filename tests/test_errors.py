"""The tree of errors: as its docstring draws it, each documented, each raised by someone."""

import ast
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_bridge import RolloutExecutor, errors, make_weight_bridge
from rl_bridge.cuda.host import HostDriver
from rl_bridge.engines.session import Session
from rl_bridge.engines.vllm.engine_adapter import VLLMEngineAdapter
from rl_bridge.installers.base import InstallProof
from rl_bridge.journal import Journal
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.memory.segment import OwnedSegment, open_segment
from rl_bridge.remote.signing import Credentials
from rl_bridge.transports.broadcast.init_info import BroadcastInitInfo
from rl_bridge.transports.broadcast.transport import Broadcast
from rl_bridge.transports.registry import transport_class
from tests.bridge.engines import Recording
from tests.helpers import make_manifest, make_table, weights
from tests.raise_sites import errors_raised, messages, modules, said, says_a_remedy


def tree() -> Iterator[type[Exception]]:
    """Every class of ours, parents first."""
    waiting: list[type[Exception]] = [errors.WeightBridgeError]
    while waiting:
        kind = waiting.pop(0)
        yield kind
        waiting[:0] = [
            child for child in kind.__subclasses__() if child.__module__ == errors.__name__
        ]


def drawn() -> dict[str, str]:
    """Name -> parent, as the docstring draws it."""
    parents: list[str] = []
    found = {}
    block = (errors.__doc__ or "").split("::")[1].split("Each message")[0]
    for line in block.splitlines():
        match = re.match(r"    ((?:[│ ]   )*)(?:[├└]── )?([A-Z]\w+)(?:\((\w+)\))?", line)
        if match:
            depth = len(match[1]) // 4 + ("── " in line)
            parents[depth:] = [match[2]]
            found[match[2]] = parents[depth - 1] if depth else (match[3] or "")
    return found


# ---- the tree -----------------------------------------------------------------------------------


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    real = {
        kind.__name__: next(
            base.__name__ for base in kind.__mro__[1:] if issubclass(base, Exception)
        )
        for kind in tree()
    }
    assert drawn() == real


def test_every_class_is_public_documented_and_listed() -> None:
    names = {kind.__name__ for kind in tree()}
    assert set(errors.__all__) == names
    assert errors.__all__ == sorted(errors.__all__)
    for kind in tree():
        assert (kind.__doc__ or "").strip(), kind


def test_every_error_of_ours_is_a_runtime_error() -> None:
    assert all(issubclass(kind, RuntimeError) for kind in tree())
    assert issubclass(errors.DeadlineExceeded, TimeoutError)


def test_a_blocked_transport_keeps_cause_and_remedy_apart() -> None:
    error = errors.TransportUnavailable("pigeon", "no wings", "Use a horse.")
    assert (error.transport, error.cause, error.remedy) == ("pigeon", "no wings", "Use a horse.")
    assert str(error) == "transport 'pigeon' is blocked: no wings. Use a horse."


# ---- each of them is raised ---------------------------------------------------------------------


def _manifest(error_case: dict[str, object]) -> Callable[[Path], object]:
    return lambda _: make_table().__class__(**{**make_table().document(), **error_case})


def _publish_twice(_: Path) -> None:
    with make_weight_bridge("local-clone", suspicious="reject") as bridge:
        bridge.publish(weights(), weight_version=1)
        bridge.publish(weights(), weight_version=2)


def _corrupt(_: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish(weights(), weight_version=1)
        bridge.import_update(manifest.model_copy(update={"digests": bytes(48)}))


def _foreign(_: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        bridge.import_update(make_manifest(transport="shared-memory"))


def _stale(_: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifests = [bridge.publish(weights(n), weight_version=n) for n in (1, 2)]
        bridge.import_update(manifests[1])
        bridge.acknowledge(manifests[1].update_id)
        bridge.import_update(manifests[0])


def _rejected(_: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish(weights(), weight_version=1)
        bridge.reject(manifest, "no")
        bridge.import_update(manifest)


def _illegal(_: Path) -> None:
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish(weights(), weight_version=1)
        bridge.import_update(manifest)
        bridge.acknowledge(manifest.update_id)
        bridge.reject(manifest.update_id, "too late")


def _install(**faults: object) -> None:
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    adapter = Recording(engine)
    for step, fault in faults.items():
        if isinstance(fault, BaseException):
            adapter.fails[step] = fault
        elif isinstance(fault, InstallProof):
            adapter.proof = fault
    with make_weight_bridge("local-clone") as bridge:
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        executor.update_weights(bridge.publish(weights(), weight_version=1))


def _exhausted(_: Path) -> None:
    with make_weight_bridge("shared-memory", max_slots=1) as bridge:
        for version in (1, 2):
            bridge.publish(weights(version), weight_version=version)


def _closed(_: Path) -> None:
    bridge = make_weight_bridge("local-clone")
    bridge.close()
    bridge.publish(weights(), weight_version=1)


def _bad_name(directory: Path) -> None:
    segment = OwnedSegment.make("rlb-000000000000-1.seg", 1, directory=directory)
    ref = segment.ref.model_copy(update={"name": "../etc/passwd"})
    open_segment(ref, directory=directory)


def _unknown_layout(_: Path) -> None:
    table = make_table({"seen by nobody": ("int8", (1,))})
    text = make_manifest(table).to_json(layout=False)
    make_manifest().from_json(text)


def _damaged_journal(directory: Path) -> None:
    (directory / "publisher.json").write_text("{")
    Journal(directory)


def _multi_node(_: Path) -> None:
    transport_class("rdma")


def _cover(*ranges: tuple[int, int], dtypes: tuple[str, ...] = ("int8", "int8")) -> None:
    """Prove that ranks with these ranges (first, number) hold a tensor of 4 elements."""
    pieces = [
        Piece(name="w", global_shape=(4,), offset=(at,), shape=(n,), local_offset=(0,))
        for at, n in ranges
    ]
    ranks = [
        {"w": Placement(dtype=dtype, shape=piece.shape, pieces=(piece,))}
        for piece, dtype in zip(pieces, dtypes, strict=False)
    ]
    prove_coverage(held_pieces(ranks))


def _reused_version(_: Path) -> None:
    journal = Journal()
    journal.reserve(1)
    journal.reserve(1)


def _blocked(_: Path) -> None:
    make_weight_bridge("cuda-ipc").publish(weights(), weight_version=1)


def _silent(_: Path) -> None:
    """Somebody listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        info = BroadcastInitInfo(
            address="127.0.0.1",
            port=listener.getsockname()[1],
            token="0" * 64,
            publisher_id="0" * 32,
            group_name="silent",
            backend="gloo",
        )
        Broadcast(init_info=info, timeout_s=0.05).consumer_end("rollout", 0)


def _dead(_: Path) -> None:
    class EngineDeadError(Exception):
        """What vLLM raises, by its name, once its processes are gone."""

    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    class LLM:
        llm_engine = SimpleNamespace(vllm_config=config, engine_core=None)

        def collective_rpc(self, *_arguments: object, **_named: object) -> object:
            raise EngineDeadError("EngineCore encountered an issue")

    with make_weight_bridge("local-clone") as bridge:
        adapter = VLLMEngineAdapter(LLM())
        executor = RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter)
        executor.update_weights(bridge.publish(weights(), weight_version=1))


RAISED: dict[type[Exception], Callable[[Path], object]] = {
    errors.WeightBridgeError: _damaged_journal,
    errors.WeightBridgeUnavailableError: _multi_node,
    errors.TransportUnavailable: _blocked,
    errors.SignatureRefused: lambda _: Credentials.parse("Bearer abc"),
    errors.MalformedManifest: lambda _: make_manifest().from_json("{}"),
    errors.DuplicateTensorName: _manifest({"names": ["bias", "bias"]}),
    errors.UnknownDtype: _manifest({"dtypes": ["float32", "qint8"]}),
    errors.NegativeRange: _manifest({"offsets": [0, -1]}),
    errors.RangeOverflow: _manifest({"shapes": [[2**62, 2], [3, 5]]}),
    errors.ShapeMismatch: _manifest({"nbytes": [1, 30]}),
    errors.OverlappingRange: _manifest({"offsets": [0, 0]}),
    errors.RangeBeyondSegment: _manifest({"arena_nbytes": 1}),
    errors.BadSegmentName: _bad_name,
    errors.ForeignTransport: _foreign,
    errors.LayoutUnknown: _unknown_layout,
    errors.DigestMismatch: lambda _: make_manifest(root="0" * 32),
    errors.ChecksumMismatch: _corrupt,
    errors.VersionNotMonotonic: _reused_version,
    errors.IncompleteCoverage: lambda _: _cover((0, 2)),
    errors.RanksDisagree: lambda _: _cover((0, 2), (2, 2), dtypes=("float32", "int8")),
    errors.WeightUpdateRejectedError: _rejected,
    errors.UnknownUpdate: lambda _: make_weight_bridge("local").update_status("x"),
    errors.IllegalTransition: _illegal,
    errors.StaleUpdate: _stale,
    errors.SuspiciousUpdate: _publish_twice,
    errors.IncompatibleUpdate: lambda _: make_weight_bridge("local").publish(5, weight_version=1),  # type: ignore[arg-type]  # that is the point
    errors.ProofFailed: lambda _: _install(proof=InstallProof(method="digest", root="0")),
    errors.TornEngine: lambda _: _install(install=OSError("x"), undo=OSError("y")),
    errors.EngineLost: _dead,
    errors.SessionRefused: lambda _: Session().require({}),
    errors.SegmentError: lambda _: OwnedSegment.make("x", 1 << 60),
    errors.DriverError: lambda _: HostDriver().create(1),
    errors.SlotsExhausted: _exhausted,
    errors.TransferTimeout: _silent,
    errors.BridgeClosed: _closed,
}
# Raised by no path that a test could take here, each with its reason.
NOT_HERE = {
    errors.GroupAborted: "raised between the ranks of a group, which have tests of their own",
    errors.WeightManifestValidationError: "only its subclasses are raised: one per reason",
    errors.DeadlineExceeded: "raised where peers talk: the demo's frames have their own tests",
}


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.__name__)
def test_each_error_is_raised_with_something_to_read(kind: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(errors.WeightBridgeError) as caught:
        RAISED[kind](tmp_path)
    assert type(caught.value) is kind
    assert not lacks_a_remedy(str(caught.value)), str(caught.value)


def test_no_error_is_left_out() -> None:
    assert {*RAISED, *NOT_HERE} == set(tree())


def test_every_error_that_the_library_raises_is_in_the_tree() -> None:
    builtins = {"ValueError", "TypeError", "KeyError", "OSError", "RuntimeError", "StopIteration"}
    builtins |= {
        "AgentError",
        "MemoryRefused",
        "TornRead",
        "ImportError",
    }  # said within a transport
    builtins.add("AttributeError")  # what Python itself raises for an attribute of a frozen value
    known = {kind.__name__ for kind in tree()}
    strangers = {
        f"{path}:{line} raises {name}"
        for path, module in modules()
        for line, name, _ in errors_raised(module)
        if name[:1].isupper() and name not in known | builtins
    }
    assert not strangers


KNOWN = frozenset(errors.__all__)

# ---- each of them says what to do ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor 'w' is a list, expected a tensor. Leave it out of the state dict.", True),
        ("the engine must not serve: call recover().", True),
        ("update x: the publisher has not released it (call release)", True),
        ("unknown transport 'pigeon', expected one of: local-clone.", True),
        ("tensor 'w' is a list, expected a tensor.", False),
        ("publish got a list, which nobody can publish.", False),
        ("names must be unique, and useful.", False),
        ("the engine failed: callbacks were lost.", False),
    ],
)
def test_a_remedy_is_told_from_a_description(text: str, expected: bool) -> None:
    assert says_a_remedy(text) is expected


def test_every_form_of_a_message_is_read() -> None:
    module = ast.parse("""
AGAIN = "Publish again."
def check(ok):
    if ok:
        msg = f"version {ok} is gone. {AGAIN}"
    else:
        msg = "short" if ok is None else "long"
    raise SegmentError(msg)
def other():
    raise SegmentError(words()) from None
def words():
    return "made elsewhere"
def unknown():
    msg = "not ours"
    raise ValueError(msg)
""")
    assert [text for _, text in messages(module, {"SegmentError"})] == [
        "version {} is gone. Publish again.",
        "short",
        "long",
        "made elsewhere",
    ]


# What tells nobody what to do itself: module, part of the text, and why nobody needs it there.
NO_REMEDY = {
    ("memory/packing.py", "tensor {} {}."): "the reason that is filled in ends in what to do",
    ("installers/snapshot.py", "of the engine {};"): "so does this one",
    ("installers/wrapped.py", "and cannot now: {}"): "the error that is filled in says it",
}
# Parts of messages that lack it still. Whoever gives one its remedy takes its line away here.
YET_TO_SAY = [
    "Names must be unique",
    "they are gone",
    "tensors that the update does not hold",
    "expected a module, a state dict or chunks",
    "expected str",
    "names for",
    "was copied back",
    "the engine does not hold version",
    "not take back what was there",
    "installs what bridge.import_update returned",
    "expected an int of 0 or more",
    "this publisher did not publish it",
]


def lacks_a_remedy(text: str) -> bool:
    """Whether a message leaves its reader alone, and is not known to."""
    return not says_a_remedy(text) and not any(part in text for part in YET_TO_SAY)


def test_every_message_says_what_to_do() -> None:
    silent = [row for row in said(KNOWN) if lacks_a_remedy(row[2])]
    excused = {
        row for row in silent for path, part in NO_REMEDY if row[0] == path and part in row[2]
    }
    assert not set(silent) - excused, "\n".join(
        f"{path}:{line}: {text}" for path, line, text in silent if (path, line, text) not in excused
    )
    assert len(excused) >= len(NO_REMEDY), "an excuse that nobody needs any more"


def test_the_messages_are_found_where_they_are_raised() -> None:
    # Should the way of raising change, the test above must not go blind.
    texts = [text for _, _, text in said(KNOWN)]
    assert len(texts) > 100
    assert sum("{}" in text for text in texts) > 50

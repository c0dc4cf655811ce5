"""The base of the transport suite's parts: class and arguments, bridges, raw access."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from rl_bridge.bridge.tensor_bridge import TensorBridge
from rl_bridge.testing.faults import FaultInjecting, Locate, arena_address
from rl_bridge.testing.peer import BridgeOver, Peer, PeerOptions
from rl_bridge.testing.processes import Child
from rl_bridge.transports.base import Transport

MakeBridge = Callable[..., BridgeOver]
MakePeer = Callable[..., Child]
_Report = TypeVar("_Report")


def faults_of(bridge: TensorBridge) -> FaultInjecting:
    """The fault-injecting transport under a bridge of the suite: its raw access."""
    given = getattr(bridge, "given", None)
    if not isinstance(given, FaultInjecting):
        msg = f"{bridge!r} does not belong to the suite"
        raise TypeError(msg)
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

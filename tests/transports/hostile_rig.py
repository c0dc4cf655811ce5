"""Peers that mean harm to a publisher's control server: strangers, and insiders who have the token.

Each of them does one thing after another, drawn from a seed. Insiders send every kind of message
but the last one (`Leave`), with values drawn at random, the ids of real versions among them.
"""

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from rl_bridge import WeightUpdateManifest
from rl_bridge.bridge import TensorBridge
from rl_bridge.errors import WeightBridgeError
from rl_bridge.testing.peer import sample_weights
from rl_bridge.testing.tensors import contents_of
from rl_bridge.transports.wire import Connector, Message, PeerClient, PeerProtocol, Reported

__all__ = ["Target", "every_version_arrives"]

_NUM_HELD = 12
"""Connections that one attacker keeps open."""
_WAIT_S = 5.0
_LEAST = 20
_OFTEN, _SELDOM = 0.5, 0.05


@dataclass
class Target:
    """A publisher, as those see it who mean harm.

    Attributes:
        port: where it listens on this machine.
        token: what lets insiders in.
        identity: see `PeerServer`.
        protocol: see `PeerProtocol`.
        joins: fields that the first message has besides those of `PeerJoin`.
        update_ids: versions that were published so far.

    """

    port: int
    token: bytes
    identity: str
    protocol: PeerProtocol[Any, Any]
    joins: dict[str, object] = field(default_factory=dict)
    update_ids: list[str] = field(default_factory=list)


class _Attacker:
    """Does harm until it is told to stop; every connection is its own."""

    def __init__(self, target: Target, seed: int, is_over: threading.Event) -> None:
        self.target, self.is_over = target, is_over
        self.draw = random.Random(seed)
        self.is_stranger = seed % 2 == 0
        self.held: list[socket.socket | PeerClient[Any]] = []
        self.num_done = 0
        self.num_joined = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error
            raise

    def _run(self) -> None:
        deeds = (
            [self.come_and_go, self.say_nothing, self.babble, self.greet_wrongly]
            if self.is_stranger
            else [self.cut_a_frame, self.claim_a_size, self.send_nonsense, self.lie, self.lie]
        )
        while not self.is_over.is_set():
            with suppress(OSError, WeightBridgeError):
                self.draw.choice(deeds)()
            self.num_done += 1
            while len(self.held) > _NUM_HELD or (self.held and self.draw.random() < _SELDOM):
                _hang_up(self.held.pop(0))
        for one in self.held:
            _hang_up(one)

    # ---- strangers ------------------------------------------------------------------------------

    def _call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.target.port), _WAIT_S)

    def come_and_go(self) -> None:
        for _ in range(10):
            self._call().close()

    def say_nothing(self) -> None:
        self.held.append(self._call())

    def babble(self) -> None:
        link = self._call()
        self.held.append(link)
        link.sendall(self.draw.randbytes(self.draw.randrange(1, 5000)))

    def greet_wrongly(self) -> None:
        link = self._call()
        self.held.append(link)
        answer = self.draw.randbytes(self.draw.choice([1, 32, 63, 64]))
        link.sendall(answer + b"\0\0\0\2{}" * 3)

    # ---- insiders -------------------------------------------------------------------------------

    def _join(self) -> PeerClient[Any]:
        target = self.target
        connector = Connector(
            "the publisher", "127.0.0.1", target.port, target.protocol, timeout_s=_WAIT_S
        )
        # Few as full members: each version is sent to those, and may wait for them.
        is_observer = self.draw.random() > _SELDOM
        join = target.protocol.join(
            worker="hostile",
            rank=1,
            pid=1,
            reader=self.draw.randbytes(16).hex(),
            is_observer=is_observer,
            **target.joins,
        )
        client: PeerClient[Any] = PeerClient(connector, target.token, target.identity, join)
        self.num_joined += 1
        self.held.append(client)
        return client

    def cut_a_frame(self) -> None:
        self._join()._channel.send_raw(struct.pack("!I", 100) + b'{"kind":')

    def claim_a_size(self) -> None:
        most = self.target.protocol.max_message_nbytes
        size = self.draw.choice([most + 1, 2**31, 2**32 - 1])
        self._join()._channel.send_raw(struct.pack("!I", size) + b"x" * 1000)

    def send_nonsense(self) -> None:
        texts = [b"", b"null", b"[" * 5000, b"\xff\xfe", b'{"kind":"none"}', b'{"kind":1e999}']
        self._join()._channel.send_bytes(*self.draw.sample(texts, 2))

    def lie(self) -> None:
        client = self._join()
        kinds: tuple[type[Message], ...] = (*self.target.protocol.from_receiver, Reported)
        for _ in range(self.draw.choice([1, 20, 300])):  # and nothing is read of the answers
            with suppress(ValidationError):
                client.send(self._drawn(self.draw.choice(kinds)))
        if self.draw.random() < _OFTEN:
            client.send(client._join.model_copy(update={"is_observer": True}))

    def _drawn(self, kind: type[Message]) -> Message:
        schema = kind.model_json_schema()
        places = schema.get("$defs", {})
        return kind.model_validate(self._value(schema, places), strict=False)

    def _value(self, schema: dict[str, Any], places: dict[str, Any]) -> Any:
        """Draw a value that a JSON schema allows, as far as it can be told from its parts."""
        draw = self.draw
        if "$ref" in schema:
            schema = places[schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return self._value(draw.choice(schema["anyOf"]), places)
        if "default" in schema and draw.random() < _OFTEN:
            return schema["default"]
        kind = schema.get("type")
        if kind == "object":
            return {
                name: self._value(of, places) for name, of in schema.get("properties", {}).items()
            }
        if kind == "array":
            of = schema.get("items", {"type": "integer"})
            return [self._value(of, places) for _ in range(draw.randrange(3))]
        texts = [*self.target.update_ids[-4:], draw.randbytes(16).hex(), "x"]
        drawn: dict[str, list[Any]] = {
            "integer": [0, 1, 2, 7, 2**31, 2**62],
            "number": [0.001, 1.0, 1e5],
            "boolean": [True, False],
            "string": texts,
        }
        if "const" in schema:
            return schema["const"]
        return draw.choice(schema.get("enum") or drawn.get(kind or "") or [None])


def _hang_up(one: "socket.socket | PeerClient[Any]") -> None:
    with suppress(OSError):
        one.hang_up() if isinstance(one, PeerClient) else one.close()


@contextmanager
def besieged(target: Target, *, num_attackers: int = 4) -> Iterator[list[_Attacker]]:
    """Attackers that do harm until the end, each from a thread of its own."""
    is_over = threading.Event()
    attackers = [_Attacker(target, seed, is_over) for seed in range(num_attackers)]
    with ExitStack() as stack:
        threads = [threading.Thread(target=one.run) for one in attackers]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(is_over.set)
        yield attackers


def every_version_arrives(
    trainer: TensorBridge, rollout: TensorBridge, target: Target, *, num_deeds: int
) -> None:
    """Publish to an engine that means well, until each attacker did so much: it gets all of it."""
    last: WeightUpdateManifest | None = None
    with besieged(target) as attackers:
        version = 2
        while version <= _LEAST or min(one.num_done for one in attackers) < num_deeds:
            assert [one.failure for one in attackers] == [None] * len(attackers)
            manifest = trainer.publish(sample_weights(version), weight_version=version)
            target.update_ids.append(manifest.update_id)
            imported = rollout.import_update(manifest)
            assert contents_of(imported) == contents_of(sample_weights(version))
            rollout.acknowledge(manifest.update_id)
            del imported
            if last is not None:
                trainer.release(last.update_id)
            last = manifest
            version += 1
        assert last is not None
        good = [one for one in trainer.holders(last.update_id) if one.worker == "rollout"]
        assert [one.state for one in good] == ["acknowledged"]
    joined = [one.num_joined for one in attackers if not one.is_stranger]
    assert min(joined) >= num_deeds // 2, "insiders were let in"

"""TLS between two machines: what can be read on the cable, and whose certificate is refused."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_bridge import WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import DeadlineExceeded, EngineLost, WeightBridgeError
from rl_bridge.manifest.group import GroupManifest
from rl_bridge.remote import RemoteEngine, serve
from rl_bridge.testing.peer import hashes
from rl_bridge.testing.processes import Child, until
from rl_bridge.transports import TLSFiles
from tests.helpers import weights
from tests.machines.network.namespaces import Machine, machines, why_not
from tests.machines.roles import Engine, Owner, publish, settle_in
from tests.remote.engines import plain
from tests.remote.process import make_key
from tests.tls_files import Certificates, let_expired_pass

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

TCP = {"UCX_TLS": "tcp"}
STORE_PORT = 29_400  # the namespace is the test's own
SIDECAR_PORT = 8471
ADDRESSES = ["10.77.31.1", "10.77.31.2"]  # that `machines` gives
ALL_KINDS = 3  # ETH_P_ALL
ROOM = 64 << 20
Plain = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a process is, and what it shows: also a certificate that it would refuse itself."""

    namespace: str
    tls: Plain | None = None

    def settle(self) -> None:
        settle_in(self.namespace, TCP)
        let_expired_pass(pytest.MonkeyPatch())  # for good: the other side judges


class Tap:
    """Listens to the cable, at one end of it."""

    def __init__(self, place: Plain, interface: str) -> None:
        Place(**place).settle()
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_KINDS))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        self.socket.bind((interface, 0))
        self.socket.setblocking(False)
        self.heard = bytearray()

    def hears(self, texts: list[str]) -> list[str]:
        """Which of these texts have crossed so far, as they are or in hexadecimal digits."""
        with suppress(BlockingIOError):
            while True:
                self.heard += self.socket.recv(1 << 17)
        return [
            text
            for text in texts
            if text.encode() in self.heard or text.encode().hex().encode() in self.heard
        ]

    def nbytes(self) -> int:
        return len(self.heard)

    def close(self) -> None:
        self.socket.close()


class Trainer:
    """Publishes."""

    def __init__(self, place: Plain, transport: str, address: str) -> None:
        Place(**place).settle()
        self.bridge = make_weight_bridge(
            transport, source_worker="trainer", address=address, tls=place["tls"], suspicious="off"
        )

    def publish(self, version: int) -> str:
        return self.bridge.publish(weights(version), weight_version=version).to_json()

    def states(self, update_id: str) -> list[str]:
        return [one.state for one in self.bridge.consumers() if one.update_id == update_id]

    def close(self) -> None:
        self.bridge.close()


class Reader:
    """Imports."""

    def __init__(self, place: Plain, transport: str) -> None:
        Place(**place).settle()
        self.bridge = make_weight_bridge(transport, source_worker="engine", tls=place["tls"])

    def read(self, manifest: str) -> dict[str, str]:
        return hashes(self.bridge.import_update(manifest))

    def acknowledge(self, update_id: str) -> None:
        self.bridge.acknowledge(update_id)

    def refusal(self, manifest: str) -> list[str]:
        """The error that an import raises."""
        try:
            self.bridge.import_update(manifest)
        except WeightBridgeError as error:
            return [type(error).__name__, str(error)]
        return []

    def close(self) -> None:
        self.bridge.close()


class Sidecar:
    """Serves an engine."""

    def __init__(self, place: Plain, host: str, key_file: str, state_dir: str) -> None:
        Place(**place).settle()
        self.tls = place["tls"] and TLSFiles(**place["tls"])
        self.options: Plain = {"host": host, "key_file": key_file, "state_dir": state_dir}

    def serve(self) -> None:
        serve(plain(), port=SIDECAR_PORT, tls=self.tls, **self.options)


class Driver:
    """Updates the engine behind a side-car; the bytes stay in this machine's memory."""

    def __init__(self, place: Plain, url: str, key_file: str) -> None:
        Place(**place).settle()
        self.bridge = make_weight_bridge("shared-memory", source_worker="trainer", max_slots=4)
        self.engine = RemoteEngine(url, key_file, tls=place["tls"])

    def meet(self) -> None:
        """Wait until the side-car serves, whatever it answers."""

        def answers() -> bool:
            try:
                self.engine.status()
            except EngineLost:
                return False
            return True

        until(answers, what="the side-car answers", deadline_s=60.0)

    def update(self, version: int) -> list[str]:
        """Update; returns what a listener could know it by."""
        manifest = self.bridge.publish(weights(version), weight_version=version)
        assert self.engine.update_weights(manifest).weight_version == version
        return telling(manifest.to_json())

    def refusal(self) -> list[str]:
        try:
            self.engine.status()
        except WeightBridgeError as error:
            return [type(error).__name__, str(error)]
        return []

    def close(self) -> None:
        self.engine.close()
        self.bridge.close()


def telling(manifest: str) -> list[str]:
    """Texts of a manifest by which a listener could know it."""
    read = WeightUpdateManifest.of(manifest, caller="the test")
    parts = read.parts if isinstance(read, GroupManifest) else (read,)
    return [one.update_id for one in parts] + [name for one in parts for name in one.table.names]


@contextmanager
def two(tmp_path: Path) -> Iterator[tuple[Machine, Machine, Certificates]]:
    with machines() as (left, right):
        yield left, right, Certificates(tmp_path / "tls", ADDRESSES)


def at(machine: Machine, tls: TLSFiles | None) -> Plain:
    return asdict(Place(machine.namespace, None if tls is None else tls.model_dump(mode="json")))


def tap(machine: Machine) -> Child:
    return Child(Tap, place=at(machine, None), interface=machine.interface)


# ---- what can be read on the cable ---------------------------------------------------------------


@pytest.mark.parametrize("is_secured", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("transport", ["nixl", "broadcast"])
def test_an_update_between_machines_shows_its_manifest_only_without_tls(
    transport: str, tmp_path: Path, *, is_secured: bool
) -> None:
    with two(tmp_path) as (left, right, certificates), tap(right) as listener:
        tls = certificates.good if is_secured else None
        listener.ready()
        with (
            Child(
                Trainer, place=at(left, tls), transport=transport, address=left.address
            ) as trainer,
            Child(Reader, place=at(right, tls), transport=transport) as engine,
        ):
            manifest = trainer.call("publish", version=1)
            assert engine.call("read", manifest=manifest) == hashes(weights(1))
            update_id = WeightUpdateManifest.from_json(manifest).update_id
            engine.call("acknowledge", update_id=update_id)
            until(
                lambda: trainer.call("states", update_id=update_id) == ["acknowledged"],
                what="the report has crossed",
            )
        heard = listener.call("hears", texts=telling(manifest))
        assert listener.call("nbytes") > 10_000
        assert (update_id in heard) is not is_secured
        assert not is_secured or not heard


@pytest.mark.parametrize("is_secured", [True, False], ids=["tls", "plain"])
def test_a_group_between_machines_shows_its_manifests_only_without_tls(
    tmp_path: Path, *, is_secured: bool
) -> None:
    with two(tmp_path) as (left, right, certificates), tap(right) as listener, ExitStack() as held:
        tls = {"tls": certificates.good.model_dump(mode="json")} if is_secured else {}
        listener.ready()
        owners = [
            held.enter_context(
                Child(
                    Owner,
                    rank=rank,
                    world_size=2,
                    store=(left.address, STORE_PORT),
                    serves_store=rank == 0,
                    options={"address": left.address, **tls},
                    namespace=left.namespace,
                    ucx=TCP,
                )
            ).ready()
            for rank in range(2)
        ]
        engine = held.enter_context(
            Child(
                Engine,
                rank=1,
                degree=2,
                transports={"nixl": tls},
                namespace=right.namespace,
                ucx=TCP,
            )
        )
        manifest = publish(owners, 1)
        assert engine.call("update", manifest=manifest)
        heard = listener.call("hears", texts=telling(manifest))
        assert bool(heard) is not is_secured, heard


@contextmanager
def sidecar(machine: Machine, tls: TLSFiles | None, folder: Path) -> Iterator[str]:
    """One that serves: its URL. If the test fails, and it did before, that is said."""
    key_file = make_key(folder)
    with Child(
        Sidecar,
        place=at(machine, tls),
        host=machine.address,
        key_file=str(key_file),
        state_dir=str(folder / "state"),
    ) as served:
        served.tell("serve")

        try:
            yield f"http{'s' if tls else ''}://{machine.address}:{SIDECAR_PORT}"
        except BaseException:
            with suppress(DeadlineExceeded):  # it serves on, as it should
                served.answer(deadline_s=1.0)
            raise


@pytest.mark.parametrize("is_secured", [True, False], ids=["tls", "plain"])
def test_a_side_car_on_another_machine_shows_its_manifest_only_without_tls(
    tmp_path: Path, *, is_secured: bool
) -> None:
    with two(tmp_path) as (left, right, certificates), tap(right) as listener:
        tls = certificates.good if is_secured else None
        listener.ready()
        with (
            sidecar(right, tls, tmp_path) as url,
            Child(Driver, place=at(left, tls), url=url, key_file=str(tmp_path / "key")) as driver,
        ):
            driver.call("meet")
            texts = driver.call("update", version=1)
        heard = listener.call("hears", texts=texts)
        assert heard == ([] if is_secured else texts)


# ---- whose certificate is refused ----------------------------------------------------------------

SHOWN = {
    "wrong": "showed a certificate that this side refuses: it names another host",
    "expired": "showed a certificate that this side refuses: it has expired",
    "foreign": "showed a certificate that this side refuses: another authority signed it",
}
REFUSED = {
    "expired": "refuses this side's certificate (certificate expired)",
    "foreign": "refuses this side's certificate (unknown ca)",
}
SIDES = [("trainer", kind) for kind in SHOWN] + [("engine", kind) for kind in REFUSED]


@pytest.mark.parametrize(("side", "kind"), SIDES)
@pytest.mark.parametrize("transport", ["nixl", "broadcast"])
def test_certificates_of_other_machines_are_refused_by_name_and_no_manifest_crosses(
    transport: str, side: str, kind: str, tmp_path: Path
) -> None:
    with two(tmp_path) as (left, right, certificates), tap(right) as listener:
        good, bad = certificates.good, getattr(certificates, kind)
        listener.ready()
        with (
            Child(
                Trainer,
                place=at(left, bad if side == "trainer" else good),
                transport=transport,
                address=left.address,
            ) as trainer,
            Child(
                Reader, place=at(right, bad if side == "engine" else good), transport=transport
            ) as engine,
        ):
            manifest = trainer.call("publish", version=1)
            name, text = engine.call("refusal", manifest=manifest)
        assert name == "CertificateRefused"
        assert (SHOWN if side == "trainer" else REFUSED)[kind] in text
        assert listener.call("hears", texts=telling(manifest)) == []


@pytest.mark.parametrize(("side", "kind"), SIDES)
def test_a_side_cars_or_its_drivers_certificate_is_refused_by_name(
    side: str, kind: str, tmp_path: Path
) -> None:
    with two(tmp_path) as (left, right, certificates):
        good, bad = certificates.good, getattr(certificates, kind)
        key_file = str(tmp_path / "key")
        with (
            sidecar(right, bad if side == "trainer" else good, tmp_path) as url,
            # (The first one that it answers: to anybody else it says nothing else.)
            Child(
                Driver,
                place=at(left, bad if side == "engine" else good),
                url=url,
                key_file=key_file,
            ) as driver,
        ):
            until(lambda: driver.call("refusal")[0] != "EngineLost", what="the side-car listens")
            name, text = driver.call("refusal")
        assert name == "CertificateRefused"
        assert (SHOWN if side == "trainer" else REFUSED)[kind] in text

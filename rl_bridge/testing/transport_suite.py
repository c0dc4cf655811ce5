"""`TransportSuite`: what every transport must keep, as tests that a transport's class inherits."""

from pathlib import Path
from typing import Any

import pytest

from rl_bridge.testing.leaks import assert_nothing_leaks
from rl_bridge.testing.peer import BridgeOver, hashes
from rl_bridge.testing.tensors import random_tensor
from rl_bridge.testing.transport_bytes import BytesArriveUnchanged
from rl_bridge.testing.transport_case import MakeBridge
from rl_bridge.testing.transport_processes import ProcessesComeAndGo
from rl_bridge.testing.transport_refusals import TheWrongIsRefused
from rl_bridge.testing.transport_sharing import NobodyDisturbsAnybody
from rl_bridge.transports.base import Transport

EXERCISED = {
    "crosses_processes": "test_the_manifest_crosses_a_process_exactly_if_declared",
    "zero_copy_import": "test_an_import_without_a_copy_takes_no_memory",
    "writable_import": "test_a_write_ends_its_writer_exactly_if_it_is_not_allowed",
    "binds_header": "test_a_changed_header_is_refused_and_the_update_still_arrives",
}
"""Each capability, and the test that does not believe it."""


def capabilities(transport: type[Transport] | Transport) -> frozenset[str]:
    """The capabilities that a transport declares: its boolean attributes."""
    return frozenset(
        name
        for name in dir(transport)
        if not name.startswith("_") and isinstance(getattr(transport, name, None), bool)
    )


class TransportSuite(
    BytesArriveUnchanged, NobodyDisturbsAnybody, TheWrongIsRefused, ProcessesComeAndGo
):
    """Inherit, name the transport, and all promises are tested.

    ::

        class TestFilesystem(TransportSuite):
            transport_class = Filesystem

            @pytest.fixture
            def transport_kwargs(self, tmp_path):
                return {"directory": tmp_path}
    """

    num_cycles = 50
    """How often an update comes and goes in the leak test."""

    def test_it_works_on_this_machine(self, transport_kwargs: dict[str, Any]) -> None:
        """A suite that ran on a blocked transport would prove nothing."""
        found = self.transport_class.probe()
        assert found.status == "pass", found.cause
        assert found.name == self.transport_class.name
        with pytest.raises(TypeError, match="no_such_option"):
            self.transport_class.create(**transport_kwargs, no_such_option=1)

    def test_every_declared_capability_is_exercised(self, transport_kwargs: dict[str, Any]) -> None:
        """A capability that no test knows is a claim that nobody checks."""
        declared = capabilities(self.transport_class.create(**transport_kwargs))
        assert declared == EXERCISED.keys()
        for name in EXERCISED.values():
            assert callable(getattr(self, name))

    def test_an_import_without_a_copy_takes_no_memory(
        self, publisher: BridgeOver, consumer: BridgeOver, transport_kwargs: dict[str, Any]
    ) -> None:
        """Memory of this process's own stays where it was, also while the tensors are read."""
        if not self.transport_class.create(**transport_kwargs).zero_copy_import:
            pytest.skip(f"{self.transport_class.name} declares that an import copies")
        nbytes = 64 << 20
        source = {"w": random_tensor("uint8", (nbytes,), seed=1)}
        for version, nbytes_then in ((1, 1 << 16), (2, nbytes)):
            # Code that is loaded the first time, above all a device's, is no copy.
            manifest = publisher.publish({"w": source["w"][:nbytes_then]}, weight_version=version)
            before = _private_nbytes()
            tensors = consumer.import_update(manifest)
            assert int(tensors["w"][::4096].max()) > 0
        assert _private_nbytes() - before < nbytes // 4

    def test_fifty_cycles_leave_nothing_behind(
        self, make_bridge: MakeBridge, transport_kwargs: dict[str, Any]
    ) -> None:
        """Descriptors, mappings, names and memory are where they were: serial updates."""
        publisher, consumer = make_bridge(), make_bridge()
        version = 0
        source = {"w": random_tensor("uint8", (1 << 20,), seed=1)}

        def cycle() -> None:
            nonlocal version
            version += 1
            source["w"] += 1
            manifest = publisher.publish(source, weight_version=version)
            tensors = consumer.import_update(manifest.to_json())
            hashes(tensors)
            if version % 3:
                consumer.acknowledge(manifest.update_id)
            else:
                consumer.reject(manifest.update_id, "every third")
            del tensors
            consumer.release(manifest.update_id)
            publisher.release(manifest.update_id)

        assert_nothing_leaks(cycle, *self._watched(transport_kwargs), num_cycles=self.num_cycles)

    def test_fifty_bridges_leave_nothing_behind(self, transport_kwargs: dict[str, Any]) -> None:
        """Ends that open and close, with updates that nobody released and one that was refused."""

        def cycle() -> None:
            transport = self.transport_class.create(**transport_kwargs)
            with BridgeOver(transport) as publisher, BridgeOver(transport) as consumer:
                source = {"w": random_tensor("uint8", (1 << 16,), seed=1)}
                held = consumer.import_update(publisher.publish(source, weight_version=1))
                consumer.import_update(publisher.publish(source, weight_version=2))
            del held

        assert_nothing_leaks(cycle, *self._watched(transport_kwargs), num_cycles=self.num_cycles)

    @staticmethod
    def _watched(transport_kwargs: dict[str, Any]) -> list[Path]:
        """Directories among the transport's options: what it leaves there counts as well."""
        return [value for value in transport_kwargs.values() if isinstance(value, Path)]


def _private_nbytes() -> int:
    """Resident memory of this process's own, shared pages not counted."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    msg = "this kernel does not tell RssAnon"
    raise OSError(msg)

"""Only the manifest comes over HTTP: the bytes by whatever both sides share, such as a group."""

from rl_bridge import make_weight_bridge
from tests.helpers import weights
from tests.remote.process import SidecarProcess


def test_the_bytes_come_by_broadcast(sidecar: SidecarProcess) -> None:
    sidecar.start("over_broadcast")
    with (
        make_weight_bridge("broadcast", source_worker="trainer", address="127.0.0.1") as trainer,
        sidecar.client() as engine,
    ):
        for version in (1, 2):
            manifest = trainer.publish(weights(version), weight_version=version)
            ack = engine.update_weights(manifest)
            assert (ack.weight_version, ack.proof.root) == (version, manifest.root)
            (told,) = trainer.holders(manifest.update_id)
            assert (told.worker, told.state) == ("rollout", "acknowledged")
        status = engine.status()
        assert (status.state, status.transport) == ("serving", "broadcast")

"""``success: true`` proves nothing: what the engine holds is read."""

from pathlib import Path

import pytest

from rl_bridge.engines.sglang.loaders import ROUTES, RouteName
from rl_bridge.engines.staging import Staging
from rl_bridge.errors import ChecksumMismatch, ProofFailed
from rl_bridge.sglang import SGLangInstallAdapter
from rl_bridge.testing.faults import FaultInjecting
from rl_bridge.testing.peer import BridgeOver
from rl_bridge.transports.shared_memory import SharedMemory
from tests.engines.matrix import few_of
from tests.sglang.bench import Bench, executor_for, sums_of

STAGINGS: tuple[Staging, ...] = ("beside", "through")


@pytest.mark.parametrize(
    ("fault", "staging"),
    few_of(
        [(fault, staging) for fault in ("wrong", "lost") for staging in STAGINGS],
        ("wrong", "beside"),
        ("lost", "through"),
    ),
)
def test_a_wrong_tensor_is_found_whichever_it_is(
    fault: str, staging: Staging, bench: Bench
) -> None:
    with executor_for(bench.engine, staging=staging) as executor:
        for nth, name in enumerate(bench.weights[0]):
            bench.plant(fault, nth)
            manifest = bench.trainer.publish(bench.next())
            named = name.replace(".", r"\.")
            with pytest.raises(ProofFailed, match=named):
                executor.update_weights(manifest)
            assert sums_of(bench.engine) == bench.sums[bench.holds], name
        bench.check()


@pytest.mark.parametrize("route", ROUTES[1:])
def test_sglang_says_success_and_the_weight_is_wrong(
    route: RouteName, bench: Bench, tmp_path: Path
) -> None:
    with executor_for(bench.engine, route=route, tmp_path=tmp_path) as executor:
        bench.plant("wrong", 5)
        with pytest.raises(ProofFailed, match="does not hold tensor"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.check()


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_byte_that_changes_behind_the_install_is_found_in_every_parameter(
    staging: Staging, bench: Bench
) -> None:
    with executor_for(bench.engine, staging=staging) as executor:
        for nth in range(len(bench.sums[0])):
            bench.plant("corrupt", nth)
            with pytest.raises(ProofFailed, match="does not hold tensor"):
                executor.update_weights(bench.trainer.publish(bench.next()))
            assert sums_of(bench.engine) == bench.sums[bench.holds], nth
        bench.check()


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_buffer_that_no_update_writes_must_stay_as_it_is(staging: Staging, bench: Bench) -> None:
    with executor_for(bench.engine, staging=staging) as executor:
        bench.plant("buffer")
        with pytest.raises(ProofFailed, match="what it was before the install"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.check()


def test_a_byte_that_went_bad_is_found_by_the_engine_and_told_to_the_trainer(bench: Bench) -> None:
    """The executor does not read what the engine's process verifies by itself."""
    name = "model.layers.1.mlp.up_proj.weight"
    damaged = FaultInjecting(SharedMemory())
    with executor_for(bench.engine) as executor, BridgeOver(damaged) as trainer:
        manifest = trainer.publish(bench.next(), weight_version=1)
        damaged.corrupt(manifest, manifest.tensors[name].offset)
        with pytest.raises(ChecksumMismatch, match=f"tensor checksum .* {name!r}"):
            executor.update_weights(manifest)
        told = {report.worker: report.reason for report in trainer.holders(manifest)}
        assert told.keys() == {"rollout", "sglang"}
        assert all(name in str(reason) for reason in told.values()), told
        bench.check()


@pytest.mark.parametrize("route", ["import", "tensor"])
def test_who_reads_an_update_tells_how_long_that_took(route: RouteName, bench: Bench) -> None:
    with executor_for(bench.engine, route=route) as executor:
        bench.update(executor)
        adapter, ack = executor.weight_install_adapter, executor.last_ack
        assert isinstance(adapter, SGLangInstallAdapter)
        assert ack is not None
        assert ack.timings_ms["verify"] > 0
        assert adapter.imports_itself == (route == "import")
        assert adapter.verified_root == (ack.proof.root if route == "import" else "")

"""Versions in files: an SGLang engine's rank reads them, of one trainer and of several ranks."""

from contextlib import closing
from pathlib import Path

import pytest

from rl_bridge import RolloutExecutor
from rl_bridge.bridge import FilesTensorBridge
from rl_bridge.sglang import SGLangInstallAdapter
from tests.groups.meshes import flat_cut
from tests.groups.rig import trainers
from tests.sglang.bench import Bench


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_installs_what_a_trainer_left_in_files(
    bench: Bench, tmp_path: Path, num_ranks: int
) -> None:
    run = tmp_path / "run"
    if num_ranks == 1:
        with FilesTensorBridge(url=run, source_worker="trainer") as trainer:
            trainer.publish(bench.next(), weight_version=7)
    else:
        with trainers(num_ranks, "files", url=run) as group:
            group.publish(flat_cut(bench.next(), num_ranks), version=7)
    options = {"files": {"url": str(run)}}
    with (
        FilesTensorBridge(url=run, source_worker="sglang") as bridge,
        closing(SGLangInstallAdapter(bench.engine, transports=options)) as adapter,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.update_weights(bridge.newest_verified() or "")
        bench.holds = 1 - bench.holds
        bench.check()
        ack = executor.last_ack
        assert ack is not None
        assert ack.proof.method == "digest"

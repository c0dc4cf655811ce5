"""What an engine's ranks are told of transports: they import with it, as the trainer publishes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_bridge import (
    RolloutExecutor,
    TensorBridge,
    WeightBridgeError,
    WeightBridgeUnavailableError,
    make_weight_bridge,
)
from rl_bridge.engines.rank_bridges import checked_transports
from rl_bridge.engines.sglang.loaders import DiskRoute
from rl_bridge.sglang import SGLangInstallAdapter
from rl_bridge.transports import TLSFiles
from rl_bridge.vllm import VLLMEngineAdapter
from tests.installers.test_model_installer import equal, held, loaded, version
from tests.integrations.sglang_engine import Client, engine
from tests.integrations.sglang_engine import Engine as SGLangEngine
from tests.integrations.threaded_engine import Engine as VLLMEngine
from tests.integrations.vllm_engine import Client as VLLMClient

__all__ = ["engine"]  # a fixture, for this file, too


@pytest.fixture
def contained(tmp_path: Path) -> Iterator[TensorBridge]:
    """A trainer in a container of its own: it publishes in a folder that both sides share."""
    with make_weight_bridge("shared-memory", directory=tmp_path, source_worker="trainer") as bridge:
        yield bridge


@pytest.fixture
def vllm_engine() -> Iterator[VLLMEngine]:
    engine = VLLMEngine()
    yield engine
    engine.close()


def through(adapter: Any, manifest: Any, **options: Any) -> None:
    with (
        make_weight_bridge("shared-memory", source_worker="driver", **options) as bridge,
        RolloutExecutor(weight_bridge=bridge, weight_install_adapter=adapter) as executor,
    ):
        executor.update_weights(manifest)


def test_ranks_of_vllm_read_what_a_trainer_in_another_container_published(
    vllm_engine: VLLMEngine, contained: TensorBridge, tmp_path: Path
) -> None:
    given = {"shared-memory": {"directory": tmp_path}}
    manifest = contained.publish({"w": torch.ones(3)}, weight_version=1)
    through(
        VLLMEngineAdapter(VLLMClient(vllm_engine), transports=given), manifest, directory=tmp_path
    )
    assert vllm_engine.told()["update_id"] == manifest.update_id


def test_ranks_of_vllm_take_other_options_with_the_next_update(
    vllm_engine: VLLMEngine, contained: TensorBridge, tmp_path: Path
) -> None:
    with make_weight_bridge("shared-memory", source_worker="trainer") as beside:
        first = beside.publish({"w": torch.zeros(3)}, weight_version=1)
        through(VLLMEngineAdapter(VLLMClient(vllm_engine)), first)
        second = contained.publish({"w": torch.ones(3)}, weight_version=2)
        refused = VLLMEngineAdapter(VLLMClient(vllm_engine))
        with pytest.raises(WeightBridgeError, match="directory"):
            through(refused, second, directory=tmp_path)
        third = contained.publish({"w": torch.ones(3)}, weight_version=3)
        given = {"shared-memory": {"directory": str(tmp_path)}}
        through(
            VLLMEngineAdapter(VLLMClient(vllm_engine), transports=given), third, directory=tmp_path
        )
    assert vllm_engine.told()["update_id"] == third.update_id


def test_ranks_of_sglang_read_what_a_trainer_in_another_container_published(
    engine: SGLangEngine, contained: TensorBridge, tmp_path: Path
) -> None:
    given = {"shared-memory": {"directory": tmp_path}}
    manifest = contained.publish(version(1), weight_version=1)
    through(SGLangInstallAdapter(Client(engine), transports=given), manifest, directory=tmp_path)
    assert equal(held(engine.model), loaded(1))


def test_options_mean_the_same_in_the_engines_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = {"shared-memory": {"directory": str(tmp_path / "weights"), "max_slots": 3}}
    for folder in (Path("weights"), "weights"):
        given = {"shm": {"directory": folder, "max_slots": 3}}
        assert checked_transports(given) == plain


def test_files_for_tls_are_the_ranks_and_need_not_be_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = {name: str(tmp_path / name) for name in ("cert", "key", "ca")}
    for tls in (TLSFiles(cert="cert", key="key", ca="ca"), plain):
        assert checked_transports({"broadcast": {"tls": tls}}) == {"broadcast": {"tls": plain}}


@pytest.mark.parametrize("kind", [VLLMEngineAdapter, SGLangInstallAdapter])
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"shared-memory": {"folder": "/tmp"}}, TypeError, "folder"),
        ({"shared-memory": {"max_slots": 0}}, ValueError, "max_slots"),
        ({"pigeons": {}}, WeightBridgeUnavailableError, "pigeons"),
        ({"shm": {"observer": print}}, TypeError, "as JSON"),
        ({"shm": {"tls": {"cert": "a", "key": "b", "ca": "c"}}}, TypeError, "tls"),
        ({"nixl": {"tls": {"cert": "a"}}}, ValueError, "TLSFiles"),
        ({"nixl": {"source_rank": 1}}, TypeError, "source_rank"),
    ],
    ids=["no_option", "no_value", "no_transport", "no_json", "no_tls", "half_tls", "who"],
)
def test_options_that_no_transport_has_are_told_where_they_are_given(
    engine: SGLangEngine, kind: Any, given: Any, error: type[Exception], said: str
) -> None:
    client: Any = Client(engine) if kind is SGLangInstallAdapter else VLLMClient(VLLMEngine())
    with pytest.raises(error, match=said):
        kind(client, transports=given)


def test_options_for_ranks_that_import_nothing_are_told_where_they_are_given(
    engine: SGLangEngine, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    given = {"shared-memory": {"max_slots": 2}}
    with pytest.raises(ValueError, match="expected 'import'"):
        SGLangInstallAdapter(Client(engine), route=DiskRoute(tmp_path), transports=given)

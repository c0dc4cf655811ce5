"""prime-rl's names: what its trainer broadcasts, and what readers of its parameter servers get."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from pydantic import ValidationError
from torch.nn import Linear, Module
from transformers import LlamaForCausalLM

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.compat.prime_rl import (
    FileSystemWeightBroadcast,
    LoRAConfig,
    NIXLWeightBroadcastConfig,
    ParameterClient,
    ParameterServer,
    PrimeRLConfig,
    check_server_names,
    newest_version,
    setup_weight_broadcast,
    trainer_addresses,
)
from rl_bridge.errors import (
    CertificateRefused,
    IncompatibleUpdate,
    MalformedManifest,
    SegmentError,
    TransportUnavailable,
    UnknownUpdate,
    VersionNotMonotonic,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.processes import DEADLINE_S, free_port, until
from rl_bridge.trainers import StateDictExtractor, read_peft
from tests.tls_files import Certificates
from tests.trainers import peft_cases
from tests.trainers_torch.worlds import World

A = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.layers.0.self_attn.q_proj.lora_B.weight"

TOML = """
max_steps = 10

[weight_broadcast]
type = "nixl"
port = 6010
server_name = "mine"

[model]
name = "Qwen/Qwen3-0.6B"

[model.lora]
name = "my_lora"
alpha = 16.0
rank = 8
"""


# ---- configuration -------------------------------------------------------------------------------


def test_the_two_sections_of_its_toml_are_read_and_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text(TOML)
    config = PrimeRLConfig.from_toml(path)
    assert isinstance(config.weight_broadcast, NIXLWeightBroadcastConfig)
    assert (config.weight_broadcast.port, config.weight_broadcast.server_name) == (6010, "mine")
    assert config.weight_broadcast.timeout == 30.0
    assert config.model.lora == LoRAConfig(name="my_lora", alpha=16.0)
    check_server_names(config.weight_broadcast, "mine")
    with pytest.raises(ValueError, match="'mine', the inference's 'other'"):
        check_server_names(config.weight_broadcast, "other")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"weight_broadcast": {"type": "nixl"}}, "model.lora is not set"),
        ({"weight_broadcast": {"type": "rdma"}}, "'filesystem', 'nccl', 'nixl'"),
        ({"weight_broadcast": {"type": "filesystem", "prot": 1}}, "prot"),
        ({"weight_broadcast": {"handshake": "none", "type": "filesystem"}}, "'stable' or 'stages'"),
        ({"model": {"lora": {"alpha": 0}}}, "greater than 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(
    section: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        PrimeRLConfig.model_validate(section)


# ---- parameter servers ---------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    with ParameterServer("params", free_port()) as made:
        yield made


def client_of(server: ParameterServer, **options: Any) -> ParameterClient:
    return ParameterClient(server.server_name, server.host, server.port, **options)


def put(server: ParameterServer, run_idx: int, value: float) -> dict[str, torch.Tensor]:
    tensors = {A: torch.full((2, 4), value), B: torch.full((6, 2), -value)}
    for name, one in tensors.items():
        server.put(f"lora:{run_idx}:{name}", one)
    return tensors


def publish(server: ParameterServer, run_idx: int, step: int) -> None:
    shapes = server.shapes(run_idx)
    spec = AdapterSpec.inferred(f"run_{run_idx}", shapes, lora_alpha=4)
    server.publish(run_idx, step, adapter=spec)


def test_readers_get_what_was_sealed_and_not_what_the_optimizer_wrote_since(
    server: ParameterServer,
) -> None:
    tensors = put(server, 0, 1.0)
    assert server.keys() == [f"lora:0:{A}", f"lora:0:{B}"]
    publish(server, 0, 5)
    with client_of(server) as client:
        client.refresh_catalog()
        assert sorted(client.keys()) == sorted(server.keys())
        tensors[A].add_(10)
        tensors[B].sub_(10)
        got = client.batch_get(server.keys())
        assert got[f"lora:0:{A}"].equal(torch.full((2, 4), 1.0))
        publish(server, 0, 6)
        assert client.get(f"lora:0:{B}").equal(torch.full((6, 2), -1.0))
        client.refresh_catalog()
        assert client.manifest(0).weight_version == 6
        assert client.get(f"lora:0:{B}").equal(torch.full((6, 2), -11.0))
        with pytest.raises(UnknownUpdate, match="no version of run 3"):
            client.get(f"lora:3:{A}")
        with pytest.raises(ValueError, match="lora:RUN_IDX:PEFT_KEY"):
            client.get(A)


def test_runs_have_streams_of_their_own_and_one_that_ends_touches_no_other(
    server: ParameterServer,
) -> None:
    for run_idx, step in ((0, 7), (1, 2)):
        put(server, run_idx, run_idx + 1.0)
        publish(server, run_idx, step)
    with pytest.raises(VersionNotMonotonic):
        publish(server, 0, 6)
    publish(server, 1, 3)
    with client_of(server) as client:
        client.refresh_catalog()
        assert [client.manifest(at).weight_version for at in (0, 1)] == [7, 3]
        for name in (A, B):
            server.remove(f"lora:0:{name}")
        assert server.keys() == [f"lora:1:{A}", f"lora:1:{B}"]
        client.refresh_catalog()
        assert client.get(f"lora:1:{A}").equal(torch.full((2, 4), 2.0))
        with pytest.raises(UnknownUpdate, match=r"no version of run 0, expected one of \[1\]"):
            client.manifest(0)


def test_a_server_of_another_name_and_a_reader_without_the_token_are_refused() -> None:
    with ParameterServer("params", free_port(), token="secret") as server:
        put(server, 0, 1.0)
        publish(server, 0, 1)
        with pytest.raises(SegmentError, match="refuses this side: the token is not its own"):
            client_of(server).refresh_catalog()
        other = ParameterClient("lora_param_server_0", server.host, server.port, token="secret")
        with pytest.raises(WeightBridgeUnavailableError, match="this is 'params_0'"):
            other.refresh_catalog()
        with client_of(server, token="secret") as client:
            client.refresh_catalog()
            assert client.keys() == server.keys()
            assert client.get(f"lora:0:{A}").equal(torch.full((2, 4), 1.0))
            manifest = client.manifest(0)  # whoever has it, and not the secret, can read nothing
            assert manifest.handle["endpoint"]["token"] is None
            with make_weight_bridge("nixl") as reader, pytest.raises(WeightBridgeError):
                reader.import_update(manifest)
        with pytest.raises(TransportUnavailable, match=f"port {server.port}"):
            ParameterServer("params", server.port)
    with pytest.raises(SegmentError, match="cannot be reached"):
        client_of(server).refresh_catalog()
    with pytest.raises(ValueError, match="expected a token"):
        ParameterServer("params", free_port(), host="0.0.0.0")


def test_a_server_with_tls_is_read_with_tls_and_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(tmp_path, ["127.0.0.1"])
    good, foreign = certificates.good, certificates.foreign
    # The trainer by the environment, as routes of a server are told it, too.
    monkeypatch.setenv("RL_BRIDGE_PRIME_RL_TLS", good.model_dump_json())
    with ParameterServer("params", free_port()) as server:
        monkeypatch.delenv("RL_BRIDGE_PRIME_RL_TLS")
        put(server, 0, 1.0)
        publish(server, 0, 1)
        with client_of(server, tls=good) as client:
            client.refresh_catalog()
            assert client.get(f"lora:0:{A}").equal(torch.full((2, 4), 1.0))
        address = (server.host, server.port)
        found = newest_version([address], 0, server_name="params", tls=good.plain())
        assert found.weight_version == 1
        with pytest.raises(CertificateRefused, match="refuses this side's certificate"):
            newest_version([address], 0, server_name="params", tls=foreign)
        with pytest.raises(WeightBridgeError, match="it has tls= and this side has not"):
            newest_version([address], 0, server_name="params", timeout=0.5)


# ---- broadcasts ----------------------------------------------------------------------------------


class Small(Module):
    """With a module that an adapter may have."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not called."""
        found: torch.Tensor = self.q_proj(x)
        return found


def small() -> Any:
    return get_peft_model(Small(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint, and two adapters for it."""
    home, base = tmp_path_factory.mktemp("adapters"), peft_cases.base()
    base.save_pretrained(home / "base")
    found = [str(home / "base")]
    for number in (0, 1):
        options = LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(base, options)
        with torch.no_grad():
            for at, one in enumerate(p for p in model.parameters() if p.requires_grad):
                one.copy_(torch.arange(one.numel()).view(one.shape) + 100 * at + 7 * number)
        model.save_pretrained(str(home / f"adapter{number}"))
        base = model.unload()
        found.append(str(home / f"adapter{number}"))
    return found


def test_each_rank_serves_its_shards_and_together_they_are_the_adapter(
    paths: list[str], tmp_path: Path
) -> None:
    port, shards = free_port(), tmp_path / "shards"
    shards.mkdir()
    wholes = [read_peft(folder, "policy")[1] for folder in paths[1:]]
    with World(2, shards, "tests.trainers_torch.prime_rl_cases") as world:
        world.run("begin", paths=paths, folder=str(tmp_path / "run0"), port=port)
        for number, step in ((0, 4), (1, 5)):
            world.run("broadcast", number=number, steps=[[0, step]])
            folder = tmp_path / "run0" / "broadcasts" / f"step_{step}"
            assert (folder / "STABLE").exists()
            info = json.loads((folder / "nixl_info.json").read_text())
            assert info == {
                "run_idx": 0,
                "host": "127.0.0.1",
                "base_port": port,
                "world_size": 2,
                "weight_version": step,
            }
            run_idx, addresses, version = trainer_addresses(folder)
            assert (run_idx, version) == (0, step)
            assert addresses == [("127.0.0.1", port), ("127.0.0.1", port + 1)]
            (folder / "nixl_endpoints.json").unlink()
            assert trainer_addresses(folder) == (0, addresses, step)
            manifest = newest_version(addresses, 0)
            assert (manifest.weight_version, manifest.tensor_count) == (step, len(wholes[0]))
            parts = []
            for rank, (host, its) in enumerate(addresses):
                with ParameterClient(f"lora_param_server_{rank}", host, its) as client:
                    client.refresh_catalog()
                    parts.append(client.batch_get(client.keys()))
            for name, whole in wholes[number].items():
                held = [part[key] for part in parts if (key := f"lora:0:{name}") in part]
                assert torch.cat(held).equal(whole)
        assert newest_version(addresses, 0, weight_version=4).weight_version == 4  # two stay
        with pytest.raises(
            UnknownUpdate, match=r"no version 3 of run 0, expected one of.*\[4, 5\]"
        ):
            newest_version(addresses, 0, weight_version=3)
        with pytest.raises(IncompatibleUpdate, match="published by 2 ranks, and 1 addresses"):
            newest_version(addresses[:1], 0)
        with pytest.raises(WeightBridgeUnavailableError, match="this is 'lora_param_server_1'"):
            newest_version(addresses[::-1], 0)
        # Another run, of the same trainer, by its tensors alone.
        world.run("register", run_idx=3, folder=str(tmp_path / "run3"))
        world.run("broadcast", number=0, steps=[[3, 1]])
        run_idx, addresses, _ = trainer_addresses(tmp_path / "run3" / "broadcasts" / "step_1")
        assert run_idx == 3
        spec = newest_version(addresses, 3).adapter
        assert spec is not None
        assert (spec.name, spec.config["lora_alpha"], spec.scaling) == ("run_3", 16.0, 8.0)
        world.run("delete", run_idx=0)
        with pytest.raises(UnknownUpdate, match=r"no version of run 0, expected one of \{3: \[1\]"):
            newest_version(addresses, 0)
        assert newest_version(addresses, 3).weight_version == 1
        world.run("end")


def test_a_trainer_rank_that_is_gone_is_named(paths: list[str], tmp_path: Path) -> None:
    port = free_port()
    with World(2, tmp_path, "tests.trainers_torch.prime_rl_cases") as world:
        world.run("begin", paths=paths, folder=str(tmp_path), port=port)
        world.run("broadcast", number=0, steps=[[0, 1]])
        _, addresses, _ = trainer_addresses(tmp_path / "broadcasts" / "step_1")
        world.kill(1)
        with pytest.raises(SegmentError, match=r"'lora_param_server_1'.*reached"):
            newest_version(addresses, 0)
        world.kill()


def test_adapters_are_written_as_directories_of_peft_and_marked_when_they_are_whole(
    paths: list[str], tmp_path: Path
) -> None:
    model = small()
    config = PrimeRLConfig().weight_broadcast
    with setup_weight_broadcast(tmp_path, config, LoRAConfig(alpha=4)) as broadcast:
        assert isinstance(broadcast, FileSystemWeightBroadcast)
        broadcast.broadcast_weights(model, 3)
        folder = tmp_path / "broadcasts" / "step_3"
        assert (folder / "STABLE").exists()
        _, tensors = read_peft(folder, "policy")
        expected = get_peft_model_state_dict(model)
        assert tensors.keys() == expected.keys()
        assert all(tensors[name].equal(one) for name, one in expected.items())
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1)
        broadcast.broadcast_weights(model, 5)
    with setup_weight_broadcast(tmp_path, config, LoRAConfig(alpha=4)) as broadcast:
        broadcast.broadcast_weights(model, 3)  # it begins anew, from an earlier step
        assert (folder / "STABLE").exists()
        assert not (tmp_path / "broadcasts" / "step_5").exists()
        _, again = read_peft(folder, "policy")
        assert not any(again[name].equal(one) for name, one in tensors.items())
        loaded = PeftModel.from_pretrained(Small(), str(folder), adapter_name="policy")
        assert all(
            loaded.state_dict()[name.replace(".weight", ".policy.weight")].equal(one)
            for name, one in get_peft_model_state_dict(model).items()
        )
    with pytest.raises(MalformedManifest, match="does not name the trainer's parameter servers"):
        trainer_addresses(folder)
    with World(2, tmp_path, "tests.trainers_torch.prime_rl_cases") as world:
        world.run("begin", paths=paths, folder=str(tmp_path), port=0, kind="filesystem")
        world.run("broadcast", number=1, steps=[[0, 9]])
        found = read_peft(tmp_path / "broadcasts" / "step_9", "policy")[1]
        due = read_peft(paths[2], "policy")[1]
        assert all(found[name].equal(one) for name, one in due.items())
        world.run("end")


@pytest.mark.parametrize("handshake", ["stable", "stages"])
def test_whole_weights_are_written_as_checkpoints_which_transformers_loads(
    paths: list[str], tmp_path: Path, handshake: str
) -> None:
    model = peft_cases.base()
    section = {"type": "filesystem", "handshake": handshake, "timeout": 60.0}
    config = PrimeRLConfig.model_validate({"weight_broadcast": section}).weight_broadcast
    options: dict[str, Any] = {"config_dir": paths[0], "keep_last": 1}
    with (
        setup_weight_broadcast(tmp_path, config, **options) as broadcast,
        ThreadPoolExecutor(1) as pool,
    ):
        for step in (1, 2):
            with torch.no_grad():
                for one in model.parameters():
                    one.add_(step)
            folder = tmp_path / "broadcasts" / f"step_{step}"
            done = pool.submit(broadcast.broadcast_weights, model, step)
            if handshake == "stages":  # as an orchestrator that knows nothing of rl_bridge
                until((folder / ".sender_ready").exists, what="the version is offered")
                (folder / ".receiver_ready").touch()
            last = ".finished" if handshake == "stages" else "STABLE"
            until((folder / last).exists, what="the version is there")
            found = LlamaForCausalLM.from_pretrained(folder).state_dict()
            done.result(DEADLINE_S)
            assert all(found[name].equal(one) for name, one in model.state_dict().items())
        assert not (tmp_path / "broadcasts" / "step_1").exists()


def test_whole_weights_are_sent_with_the_adapter_merged_in(tmp_path: Path) -> None:
    model = small()
    config = PrimeRLConfig.model_validate({"weight_broadcast": {"type": "nccl", "backend": "gloo"}})
    with (
        setup_weight_broadcast(tmp_path, config.weight_broadcast) as broadcast,
        RolloutExecutor(weight_transport="broadcast", suspicious="off") as executor,
    ):
        for step in (1, 2):
            broadcast.broadcast_weights(model, step)
            folder = tmp_path / "broadcasts" / f"step_{step}"
            assert (folder / "STABLE").exists()
            tensors = executor.update_weights((folder / "manifest.json").read_text())
            merged = StateDictExtractor(model).full()
            for chunk in merged:
                assert all(tensors[name].equal(one) for name, one in chunk.items())
        assert executor.active_weight_version == 2

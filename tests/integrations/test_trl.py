"""TRL's seams without TRL: what a weight transfer promises, and how a class is bridged."""

import atexit
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rl_bridge import (
    ModuleInstallAdapter,
    RolloutExecutor,
    WeightBridgeUnavailableError,
    WeightUpdateRejectedError,
    make_weight_bridge,
)
from rl_bridge.compat import trl
from rl_bridge.compat.trl import BridgeWeightTransfer, UpdatedEngine, bridged
from rl_bridge.errors import BridgeClosed, IncompatibleUpdate
from rl_bridge.remote import RemoteEngine
from tests.remote.process import make_key


@pytest.fixture
def engine() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4)


@pytest.fixture
def transfer(engine: torch.nn.Linear) -> Iterator[BridgeWeightTransfer]:
    with make_weight_bridge("local-clone") as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge, weight_install_adapter=ModuleInstallAdapter(engine, mode="copy")
        )
        made = BridgeWeightTransfer(executor, bridge=bridge)
        made.init_weight_transfer()
        yield made
        made.destroy()
        executor.close()


def sync(transfer: BridgeWeightTransfer, model: torch.nn.Module) -> None:
    """Do what TRL's trainer does."""
    transfer.pause()
    transfer.send_weights((name, one.detach()) for name, one in model.named_parameters())
    transfer.resume()


def test_versions_count_from_one_and_older_ones_are_released(
    transfer: BridgeWeightTransfer, engine: torch.nn.Linear
) -> None:
    for version in range(1, 12):  # more than there are slots
        model = torch.nn.Linear(4, 4)
        sync(transfer, model)
        ack = transfer.engine.last_ack
        assert ack is not None
        assert ack.weight_version == version
        assert torch.equal(engine.weight, model.weight)


def test_a_refused_update_raises_and_the_version_before_serves(
    transfer: BridgeWeightTransfer, engine: torch.nn.Linear
) -> None:
    model = torch.nn.Linear(4, 4)
    sync(transfer, model)
    for _ in range(6):  # nothing stays of a refused one
        with pytest.raises(IncompatibleUpdate):
            sync(transfer, torch.nn.Linear(5, 4))
        assert torch.equal(engine.weight, model.weight)
    ack = transfer.engine.last_ack
    assert ack is not None
    assert ack.weight_version == 1
    sync(transfer, torch.nn.Linear(4, 4))


def test_an_engine_that_acknowledges_another_update_is_refused() -> None:
    class Other:
        last_ack = None

        def update_weights(self, manifest: Any) -> None:
            pass

    transfer = BridgeWeightTransfer(Other(), bridge="local-clone")
    with pytest.raises(WeightUpdateRejectedError, match="acknowledgement is none"):
        sync(transfer, torch.nn.Linear(4, 4))
    transfer.destroy()


def test_a_destroyed_transfer_says_so_instead_of_sending_nothing(engine: torch.nn.Linear) -> None:
    transfer = BridgeWeightTransfer("http://127.0.0.1:9")
    transfer.destroy()
    transfer.destroy()
    with pytest.raises(BridgeClosed, match="destroyed"):
        sync(transfer, engine)


def test_options_are_those_of_vllms_adapter_alone(transfer: BridgeWeightTransfer) -> None:
    with pytest.raises(TypeError, match="has its options already"):
        BridgeWeightTransfer(transfer.engine, cast=True)
    with pytest.raises(ValueError, match="staging"):
        BridgeWeightTransfer("http://127.0.0.1:9", staging="sideways")


def test_an_engine_behind_a_side_car_is_taken_as_it_is(tmp_path: Path) -> None:
    with RemoteEngine("http://127.0.0.1:9", make_key(tmp_path)) as engine:
        assert isinstance(engine, UpdatedEngine)
        transfer = BridgeWeightTransfer(engine)
        assert transfer.engine is engine
        transfer.destroy()


# ---- a trainer's class ---------------------------------------------------------------------------


class Accelerator:
    """One process, or one of several of which another one failed."""

    device = torch.device("cpu")

    def __init__(self, *, failed_elsewhere: int = 0, is_main_process: bool = True) -> None:
        self.is_main_process = is_main_process
        self._failed_elsewhere = failed_elsewhere

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return tensor + self._failed_elsewhere

    def wait_for_everyone(self) -> None:
        pass


class Generation:
    """The parts of TRL's class of that name that are built upon."""

    def __init__(self, model: Any, accelerator: Accelerator, **options: Any) -> None:
        defaults = {"mode": "server", "tensor_parallel_size": 1, "enable_sleep_mode": False}
        self.__dict__.update({**defaults, **options})
        self.model, self.accelerator = model, accelerator
        self.server_base_url, self.server_host, self.server_port = None, "127.0.0.1", 9
        self.server_timeout = 1.0
        self.read: list[str] = []
        self._dist = SimpleNamespace(is_fsdp=False, is_zero3=False)
        self._init_vllm()

    def _init_vllm(self) -> None:
        self.llm = SimpleNamespace()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self.model.named_parameters():
            self.read.append(name)
            yield name, one.data
        self.read.append("end")


class Trainer:
    def __init__(self, model: Any, use_vllm: bool = True, **options: Any) -> None:
        options.setdefault("accelerator", Accelerator())
        if use_vllm:
            self.vllm_generation = sys.modules[__name__].__dict__["VLLMGeneration"](
                model, **options
            )


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This module, as the one of TRL's trainer."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "VLLMGeneration", Generation, raising=False)
    client = lambda base_url, connection_timeout: SimpleNamespace(base_url=base_url)  # noqa: E731
    monkeypatch.setattr(here, "VLLMClient", client, raising=False)
    return here


class Sent(BridgeWeightTransfer):
    """Keeps what is sent, and refuses what is not finite."""

    sent: list[dict[str, torch.Tensor]]

    def __init__(self, engine: Any, **options: Any) -> None:
        super().__init__("http://127.0.0.1:9", **options)
        self.sent, self.on = [], engine

    def send_weights(self, iterator: Any) -> None:
        for _, one in (found := list(iterator)):
            if not one.isfinite().all():
                raise WeightUpdateRejectedError("NaN or Inf")
        self.sent.append(dict(found))


@pytest.fixture
def sending(home: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(trl, "BridgeWeightTransfer", Sent)
    return home


def test_a_server_is_updated_by_its_url_without_a_group_of_nccl(
    sending: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_end: list[object] = []
    monkeypatch.setattr(atexit, "register", at_end.append)
    model = torch.nn.Linear(2, 2)
    generation = bridged(Trainer)(model).vllm_generation
    assert at_end == [generation.weight_transfer.destroy]  # the next trainer finds no driver there
    assert sending.VLLMGeneration is Generation
    assert generation.weight_transfer.on == "http://127.0.0.1:9"
    generation.sync_weights()
    (sent,) = generation.weight_transfer.sent
    assert sent["weight"].data_ptr() == model.weight.data_ptr()  # no copy is made
    follower = bridged(Trainer)(model, accelerator=Accelerator(is_main_process=False))
    follower.vllm_generation.sync_weights()
    assert follower.vllm_generation.weight_transfer is None
    assert follower.vllm_generation.read == ["weight", "bias", "end"]


@pytest.mark.parametrize("passing", ["is_fsdp", "is_zero3", "merge_adapter"])
def test_what_is_gathered_or_merged_for_a_moment_is_copied(
    sending: ModuleType, passing: str
) -> None:
    model = torch.nn.Linear(2, 2)
    generation = bridged(Trainer)(model).vllm_generation
    target = model if passing == "merge_adapter" else generation._dist
    setattr(target, passing, True)
    generation.sync_weights()
    (sent,) = generation.weight_transfer.sent
    assert sent["weight"].data_ptr() != model.weight.data_ptr()


def test_a_colocated_engine_is_updated_itself_and_must_be_alone_and_awake(
    sending: ModuleType,
) -> None:
    model = torch.nn.Linear(2, 2)
    generation = bridged(Trainer)(model, mode="colocate").vllm_generation
    assert generation.weight_transfer.on is generation.llm
    for option in ({"tensor_parallel_size": 2}, {"enable_sleep_mode": True}):
        with pytest.raises(WeightBridgeUnavailableError, match="expected 1 and off"):
            bridged(Trainer)(model, mode="colocate", **option)


def test_a_failure_is_raised_when_all_was_read_and_in_every_process(sending: ModuleType) -> None:
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    generation = bridged(Trainer)(model).vllm_generation
    with pytest.raises(WeightUpdateRejectedError, match="NaN or Inf"):
        generation.sync_weights()
    assert generation.read[-1] == "end"
    other = bridged(Trainer)(torch.nn.Linear(2, 2), accelerator=Accelerator(failed_elsewhere=1))
    with pytest.raises(WeightUpdateRejectedError, match="failed in 1 of the trainer's processes"):
        other.vllm_generation.sync_weights()


def test_a_trainer_that_does_not_generate_with_vllm_is_refused(home: ModuleType) -> None:
    with pytest.raises(ValueError, match="use_vllm=True"):
        bridged(Trainer)(torch.nn.Linear(2, 2), use_vllm=False)
    with pytest.raises(TypeError, match="weight_transfer="):
        bridged(dict)

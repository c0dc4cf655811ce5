"""Which strategy a placement gets, how large its group is, and what the log says."""

import logging
import math
import pickle
from typing import Any

import pytest

from rl_bridge import WeightBridgeUnavailableError
from rl_bridge.errors import MalformedManifest
from rl_bridge.strategies.requests import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    PackedCudaIpcWeightUpdateRequest,
    SharedMemoryWeightUpdateRequest,
)
from rl_bridge.strategies.strategy import WeightTransferConfig, make_transfer_strategy
from tests.strategies.rig import run
from tests.strategies.test_clean_up import exchanges

CHOICES: list[tuple[dict[str, Any], type, str]] = [
    ({}, BroadcastWeightUpdateRequest, "not on the same machine"),
    ({"device": "cuda"}, BroadcastWeightUpdateRequest, "not on the same machine"),
    ({"is_colocated": True}, SharedMemoryWeightUpdateRequest, "weights lie on the CPU"),
    (
        {"is_colocated": True, "device": "cuda"},
        PackedCudaIpcWeightUpdateRequest,
        "share GPUs",
    ),
    (
        {"is_colocated": True, "device": "cuda", "is_packed": False},
        CudaIpcWeightUpdateRequest,
        "is_packed=False",
    ),
    (
        {"is_colocated": True, "device": "cuda", "backend": "gloo"},
        BroadcastWeightUpdateRequest,
        "backend='gloo' was asked for",
    ),
]


@pytest.mark.parametrize(("placement", "kind", "why"), CHOICES)
def test_the_placement_chooses_and_the_log_says_why(
    placement: dict[str, Any], kind: type, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rl_bridge"):
        strategy = make_transfer_strategy(WeightTransferConfig(**placement))
    assert strategy.get_request_type() is kind
    assert why in caplog.text


def test_the_group_has_the_sending_rank_and_every_rank_of_every_engine() -> None:
    config = WeightTransferConfig(
        num_engines=3, tensor_parallel_size=2, pipeline_parallel_size=4, data_parallel_size=5
    )
    assert config.world_size == 1 + 3 * 2 * 4 * 5
    assert [config.rank_offset(engine) for engine in range(3)] == [1, 41, 81]
    with pytest.raises(ValueError, match="expected 0 to 2"):
        config.rank_offset(3)


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "tpu"},
        {"backend": "mpi"},
        {"backend": "nccl"},
        {"num_engines": 0},
        {"tensor_parallel_size": -1},
        {"threshold_nbytes": 0},
        {"timeout_s": 0.0},
        {"timeout_s": math.nan},
        {"timeout_s": math.inf},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        WeightTransferConfig(**fields)


def test_a_pickled_strategy_opens_nothing() -> None:
    strategy = make_transfer_strategy(WeightTransferConfig())
    info = run(strategy.create_init_info())
    there = pickle.loads(pickle.dumps(strategy))
    assert there.config == strategy.config
    with pytest.raises(WeightBridgeUnavailableError, match="was not opened in this process"):
        run(there.create_sender(info))
    run(strategy.create_sender(info)).close()


def test_the_init_info_of_another_strategy_is_refused() -> None:
    strategy = make_transfer_strategy(WeightTransferConfig())
    with pytest.raises(MalformedManifest, match="Make strategies from the same config"):
        run(strategy.create_sender(EmptyWeightSyncInitInfo()))
    shared = make_transfer_strategy(WeightTransferConfig(is_colocated=True))
    info = run(strategy.create_init_info())
    with pytest.raises(MalformedManifest, match="Make strategies from the same config"):
        run(shared.create_receiver(info))
    run(strategy.create_sender(info)).close()


def test_a_helper_rank_without_an_exchange_is_refused() -> None:
    strategy = make_transfer_strategy(WeightTransferConfig(is_colocated=True))
    with pytest.raises(WeightBridgeUnavailableError, match="Pass exchange="):
        run(strategy.create_sender(EmptyWeightSyncInitInfo(), rank=1))


def test_a_rank_that_its_exchange_counts_differently_is_refused() -> None:
    strategy = make_transfer_strategy(WeightTransferConfig(is_colocated=True))
    with pytest.raises(ValueError, match="rank=0: expected 1"):
        run(strategy.create_sender(EmptyWeightSyncInitInfo(), exchange=exchanges(2)[1]))


def test_gpu_memory_cannot_be_shared_where_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    config = WeightTransferConfig(is_colocated=True, device="cuda")
    strategy = make_transfer_strategy(config)
    with pytest.raises(WeightBridgeUnavailableError, match="no CUDA device"):
        run(strategy.create_sender(EmptyWeightSyncInitInfo()))

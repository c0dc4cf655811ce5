"""One entry for each GPU: refused where copies differ, opened by the engine that is there."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rl_bridge import make_weight_bridge
from rl_bridge.errors import GroupAborted, MalformedManifest, RanksDisagree
from rl_bridge.groups.exchange import GroupExchange
from rl_bridge.strategies.receiver import BridgeTransferReceiver
from rl_bridge.strategies.requests import (
    CudaIpcWeightUpdateRequest,
    PackedCudaIpcWeightUpdateRequest,
    WeightUpdateRequest,
)
from rl_bridge.strategies.sender import CleanUp, CudaIpcTransferSender, merge_handles
from rl_bridge.trainers.chunks import WeightChunk
from tests.groups.rig import everywhere
from tests.strategies.rig import Client, chunks_of, run, weights
from tests.strategies.test_clean_up import exchanges


def bodies(*versions: int) -> list[dict[str, object]]:
    with ExitStack() as stack:
        made: list[dict[str, object]] = []
        for gpu, version in enumerate(versions):
            bridge = stack.enter_context(make_weight_bridge("shared-memory", source_rank=gpu))
            manifest = bridge.publish(weights(version), weight_version=7)
            made.append({"gpu": f"GPU-{gpu}", "manifest": manifest.to_json()})
        return made


def test_there_is_one_entry_for_each_gpu() -> None:
    here, there = bodies(1, 1)
    found = merge_handles([here, there, {**there, "gpu": "GPU-0"}])
    assert [one.gpu for one in found] == ["GPU-0", "GPU-1"]
    assert len(found[1].manifest or "") < len(str(there["manifest"]))  # without its layout


def test_copies_that_differ_are_refused_with_the_rank_and_the_gpu() -> None:
    with pytest.raises(RanksDisagree, match=r"rank 1 has version 7 with root .* on GPU GPU-1"):
        merge_handles(bodies(1, 2))


@pytest.mark.parametrize(
    "body", [{}, {"gpu": 5}, {"gpu": "a b"}, {"gpu": "GPU-9"}, {"gpu": "x", "manifest": 1}], ids=str
)
def test_a_malformed_gpu_entry_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(RanksDisagree, match="expected its UUID and a manifest"):
        merge_handles([*bodies(1), body])


def gathered(version: int, exchange: GroupExchange) -> Iterator[WeightChunk]:
    """Chunks that no rank gets before the other ones have asked for them, too."""
    exchange.begin()
    for at, chunk in enumerate(chunks_of(weights(version))):
        exchange.gather(f"chunk {at}", b"", timeout_s=20)
        yield chunk


class Ranks:
    """Two trainer ranks on two GPUs, and an engine on each; the memory is the host's."""

    def __init__(self, stack: ExitStack, kind: Any) -> None:
        self.senders = [
            stack.enter_context(
                CudaIpcTransferSender(
                    make_weight_bridge("shared-memory", source_worker="trainer", source_rank=rank),
                    kind,
                    gpu=f"GPU-{rank}",
                    threshold_nbytes=320,
                    clean_up=CleanUp(exchange=exchange, timeout_s=20),
                )
            )
            for rank, exchange in enumerate(exchanges(2))
        ]
        self.receivers = [
            stack.enter_context(
                BridgeTransferReceiver(make_weight_bridge("shared-memory"), gpu=f"GPU-{rank}")
            )
            for rank in range(2)
        ]
        self.got: list[dict[str, Any]] = [{}, {}]
        self.client = Client([self.load])

    async def load(self, request: WeightUpdateRequest) -> None:
        for receiver, got in zip(self.receivers, self.got, strict=True):
            if request.kind == "abandoned":
                continue
            async for name, tensor in receiver.receive_weights(request):
                got[name] = tensor.clone()
            if request.is_last:
                pending = receiver.finish()
                assert pending is not None
                receiver.bridge.acknowledge(pending.manifest.update_id)

    def sync(self, *versions: int) -> list[Any]:
        ranks = zip(self.senders, versions, exchanges(2), strict=True)
        return everywhere(
            [
                lambda sender=sender, version=version, exchange=exchange: run(  # type: ignore[misc]
                    sender.send_chunks(gathered(version, exchange), self.client)
                )
                for sender, version, exchange in ranks
            ]
        )


@pytest.mark.parametrize("kind", [CudaIpcWeightUpdateRequest, PackedCudaIpcWeightUpdateRequest])
def test_each_engine_opens_the_copy_on_its_own_gpu(kind: Any) -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, kind)
        for version in (1, 2):
            manifests = ranks.sync(version, version)
            assert [one.weight_version for one in manifests] == [version - 1] * 2
            for rank, sender in enumerate(ranks.senders):
                expected = weights(version)
                assert all(ranks.got[rank][name].equal(expected[name]) for name in expected)
                reports = sender.bridge.holders(manifests[rank].update_id)
                assert [one.state for one in reports] == ["acknowledged"]
        assert len(ranks.client.requests) == 2 * 3  # of rank 0 alone
        extras = ranks.client.requests[0].extras
        assert extras is not None
        assert len(extras) == (1 if kind.packed else 4)
        assert set(extras[0]["ipc_handles"]) == {"GPU-0", "GPU-1"}


def test_ranks_whose_weights_differ_publish_nothing_and_go_on_with_the_next_version() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        for error in ranks.sync(1, 2):
            assert isinstance(error, RanksDisagree)
        assert ranks.client.requests == []
        assert [one.weight_version for one in ranks.sync(3, 3)] == [1, 1]


def test_a_rank_that_cannot_publish_tells_the_others() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        before = ranks.senders[1].bridge.publish

        def broken(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room on the GPU")

        ranks.senders[1].bridge.publish = broken  # type: ignore[method-assign]
        mine, its = ranks.sync(1, 1)
        assert isinstance(mine, GroupAborted)
        assert "rank 1: MemoryError: no room on the GPU" in str(mine)
        assert isinstance(its, MemoryError)
        ranks.senders[1].bridge.publish = before  # type: ignore[method-assign]
        # Rank 0 has used up version 0, rank 1 has not: they agree on the next one all the same.
        assert [one.weight_version for one in ranks.sync(2, 2)] == [1, 1]


def test_an_engine_on_another_gpu_is_told_which_ones_there_are() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        ranks.receivers[1]._gpu = "GPU-7"
        mine, _ = ranks.sync(1, 1)
        assert isinstance(mine, MalformedManifest)
        assert "lies on the GPUs ['GPU-0', 'GPU-1'], this engine is on GPU-7" in str(mine)

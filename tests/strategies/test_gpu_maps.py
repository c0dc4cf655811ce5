"""One entry for each GPU: refused where copies differ, opened by the engine that is there."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
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
from rl_bridge.strategies.sender import CudaIpcTransferSender, merge_handles
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

    def __init__(self, stack: ExitStack, kind: Any, *, state_dir: Path | None = None) -> None:
        self._stack = stack
        self.exchanges = exchanges(2)
        self.senders = [self._make_sender(exchange, kind, state_dir) for exchange in self.exchanges]
        # Of each sync, the id of the update that each rank published last.
        self.updates: list[list[str]] = []
        self.client = Client([self.load])
        self.join_engines()

    def _make_sender(
        self, exchange: GroupExchange, kind: Any, state_dir: Path | None
    ) -> CudaIpcTransferSender:
        rank = exchange.rank
        own_dir = state_dir if rank == 1 else None
        bridge = make_weight_bridge(
            "shared-memory", source_worker="trainer", source_rank=rank, state_dir=own_dir
        )
        sender = CudaIpcTransferSender(
            bridge,
            kind,
            gpu=f"GPU-{rank}",
            threshold_nbytes=320,
            exchange=exchange,
            timeout_s=20,
        )
        return self._stack.enter_context(sender)

    def join_engines(self) -> None:
        """Start new engines, which take the place of those before."""
        self.receivers = [
            self._stack.enter_context(
                BridgeTransferReceiver(make_weight_bridge("shared-memory"), gpu=f"GPU-{rank}")
            )
            for rank in range(2)
        ]
        self.got: list[dict[str, Any]] = [{}, {}]

    def lose_requests(self) -> None:
        """Let no request reach an engine from now on."""

        def lose(_: WeightUpdateRequest) -> WeightUpdateRequest:
            raise ConnectionError("engine 0 is down")

        self.client.change = lose

    def states(self, sync: int) -> list[str]:
        """What each rank's bridge says of its copy of a sync."""
        pairs = zip(self.senders, self.updates[sync], strict=True)
        return [sender.bridge.update_status(update_id) for sender, update_id in pairs]

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
        found = everywhere(
            [
                lambda sender=sender, version=version, exchange=exchange: run(  # type: ignore[misc]
                    sender.send_chunks(gathered(version, exchange), self.client)
                )
                for sender, version, exchange in ranks
            ]
        )
        latest = [sender.bridge.latest_manifest for sender in self.senders]
        self.updates.append([one.update_id if one is not None else "" for one in latest])
        return found


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


def test_a_send_that_fails_on_rank_0_leaves_every_rank_at_the_previous_version() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        ranks.sync(1, 1)
        ranks.lose_requests()
        mine, its = ranks.sync(2, 2)
        assert isinstance(mine, ConnectionError)
        assert isinstance(its, GroupAborted)
        assert "engine 0 is down" in str(its)
        assert ranks.states(0) == ["published"] * 2
        assert ranks.states(1) == ["released"] * 2
        ranks.client.change = lambda request: request
        ranks.join_engines()
        assert run(ranks.senders[0].send_latest(ranks.client)).weight_version == 0
        expected = weights(1)
        assert all(got[name].equal(expected[name]) for got in ranks.got for name in expected)
        assert [one.weight_version for one in ranks.sync(3, 3)] == [2, 2]
        assert ranks.states(0) == ["released"] * 2
        assert ranks.states(2) == ["published"] * 2


def test_a_rank_that_does_not_hear_which_version_stands_keeps_both_until_it_does() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        ranks.sync(1, 1)
        exchange: Any = ranks.exchanges[1]
        gather = exchange.gather

        def deaf(step: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
            found: list[bytes] = gather(step, payload, timeout_s=timeout_s)
            if step == "outcome":
                raise GroupAborted("the store is gone")
            return found

        exchange.gather = deaf
        mine, its = ranks.sync(2, 2)
        assert mine.weight_version == 1
        assert isinstance(its, GroupAborted)
        assert ranks.states(0) == ["released", "published"]
        assert ranks.states(1) == ["published"] * 2
        exchange.gather = gather
        ranks.lose_requests()
        _, its = ranks.sync(3, 3)
        # A sync that fails tells it as well: the version of the sync before stands.
        assert "version 1 was sent and stands" in "".join(its.__notes__)
        assert ranks.states(0) == ranks.states(2) == ["released"] * 2
        assert ranks.states(1) == ["published"] * 2
        ranks.client.change = lambda request: request
        ranks.join_engines()
        assert run(ranks.senders[0].send_latest(ranks.client)).weight_version == 1
        expected = weights(2)
        assert all(got[name].equal(expected[name]) for got in ranks.got for name in expected)


def test_a_rank_whose_publisher_does_not_open_tells_the_others_and_no_rank_gathers(
    tmp_path: Path,
) -> None:
    state_dir = tmp_path / "state"
    state_dir.write_text("no directory")
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest, state_dir=state_dir)
        read: list[WeightChunk] = []

        def noted() -> Iterator[WeightChunk]:
            for chunk in chunks_of(weights(1)):
                read.append(chunk)
                yield chunk

        mine, its = everywhere(
            [
                lambda sender=sender: run(sender.send_chunks(noted(), ranks.client))  # type: ignore[misc]
                for sender in ranks.senders
            ]
        )
        assert isinstance(mine, GroupAborted)
        assert f"rank 1: {type(its).__name__}: {its}" in str(mine)
        assert not isinstance(its, GroupAborted)
        assert not read
        state_dir.unlink()
        assert [one.weight_version for one in ranks.sync(2, 2)] == [0, 0]


def test_an_engine_on_another_gpu_is_told_which_ones_there_are() -> None:
    with ExitStack() as stack:
        ranks = Ranks(stack, PackedCudaIpcWeightUpdateRequest)
        ranks.receivers[1]._gpu = "GPU-7"
        mine, _ = ranks.sync(1, 1)
        assert isinstance(mine, MalformedManifest)
        assert "lies on the GPUs ['GPU-0', 'GPU-1'], this engine is on GPU-7" in str(mine)

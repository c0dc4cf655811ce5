"""Ranks of a trainer in processes of their own, over Gloo; they run functions by name."""

import importlib
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch

from rl_bridge.errors import WeightBridgeError
from rl_bridge.groups.publish import placements_from, placements_text
from rl_bridge.manifest.coverage import held_pieces, prove_coverage
from rl_bridge.manifest.digest import text_digest
from rl_bridge.manifest.parallel import Piece, Placement
from rl_bridge.testing.processes import Child
from rl_bridge.trainers.base import WeightExtractor
from rl_bridge.trainers.chunks import WeightChunk
from tests.trainers_torch.counting import Collectives


class Rank:
    """One rank: what the parent's `World` talks to."""

    def __init__(self, *, rank: int, size: int, meeting: str, cases: str) -> None:
        # Gloo looks for an interface by the host's name, which need not lead anywhere.
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
        )
        self.cases = importlib.import_module(cases)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=40),
        )

    def run(self, case: str, options: dict[str, Any]) -> Any:
        return getattr(self.cases, case)(**options)

    def leave(self) -> None:
        torch.distributed.destroy_process_group()


class World:
    """Several ranks that call the same function together.

    Where one of them fails, the others may wait for it for ever: then all are killed, and the next
    call starts new ones.
    """

    def __init__(self, size: int, tmp_path: Path | str, cases: str) -> None:
        self.size = size
        self._tmp_path = tmp_path
        self._cases = cases
        self._ranks: list[Child] = []
        self._num_starts = 0

    def run(self, case: str, **options: Any) -> list[Any]:
        """What each rank answers."""
        self._start()
        try:
            for child in self._ranks:
                child.tell("run", case=case, options=options)
            return [child.answer() for child in self._ranks]
        except WeightBridgeError:
            self._kill()
            raise

    def kill(self, rank: int | None = None) -> None:
        """SIGKILL one rank, whom the others miss in the next call; or all of them."""
        if rank is None:
            self._kill()
        else:
            self._ranks[rank].kill()

    def pids(self) -> list[int]:
        """The processes of the ranks; started if there are none."""
        self._start()
        return [child.ready().pid for child in self._ranks]

    def _start(self) -> None:
        if not self._ranks:
            self._num_starts += 1
            meeting = f"{self._tmp_path}/meeting-{self._num_starts}"
            self._ranks = [
                Child(Rank, rank=rank, size=self.size, meeting=meeting, cases=self._cases)
                for rank in range(self.size)
            ]

    def leave(self) -> None:
        """End the ranks in peace: one that is killed writes down nothing of what it covered."""
        for child in self._ranks:
            child.tell("leave")
        for child in self._ranks:
            child.answer()
        assert [child.stop() for child in self._ranks] == [0] * len(self._ranks)
        self._kill()

    def _kill(self) -> None:
        for child in self._ranks:
            child.__exit__(None, None, None)
        self._ranks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.leave()
        self._kill()


# ---- values that tell where they belong ----------------------------------------------------------


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with another value in each element of each tensor, the same on every rank."""
    begin = 1
    with torch.no_grad():
        for tensor in module.state_dict().values():
            values = torch.arange(begin, begin + tensor.numel()).view(tensor.shape)
            tensor.copy_(values / 8 if tensor.is_floating_point() else values)
            begin += tensor.numel()
    return module


def as_lists(tensor: torch.Tensor) -> list[float]:
    return tensor.detach().reshape(-1).double().tolist()


def reference(module: torch.nn.Module, dtype: str | None = None) -> dict[str, Any]:
    """Name -> dtype, shape and values, of a module that nothing was done to."""
    wanted = None if dtype is None else getattr(torch, dtype)
    found = {}
    for name, tensor in module.state_dict().items():
        is_cast = wanted is not None and tensor.is_floating_point()
        cast = tensor.to(wanted) if is_cast else tensor
        found[name] = [str(cast.dtype), list(cast.shape), as_lists(cast)]
    return found


# ---- what ranks answer ---------------------------------------------------------------------------


def described(chunks: Sequence[WeightChunk]) -> dict[str, Any]:
    """Name -> dtype, shape and values."""
    return {
        name: [dtype, shape, as_lists(tensor)]
        for chunk in chunks
        for name, dtype, shape, tensor in zip(
            chunk.names, chunk.dtypes, chunk.shapes, chunk.tensors, strict=True
        )
    }


def local_report(extractor: WeightExtractor, dtype: str | None = None) -> dict[str, Any]:
    """What a rank holds and where it says that it lies."""
    wanted = None if dtype is None else getattr(torch, dtype)
    chunks = list(extractor.local(wanted))
    placements = extractor.placements(wanted)
    told = {
        name: placement
        for chunk in chunks
        for name, placement in zip(chunk.names, chunk.placements or [], strict=True)
    }
    assert told == placements
    assert all(tensor.is_contiguous() for chunk in chunks for tensor in chunk.tensors)
    return {
        "tensors": described(chunks),
        "placements": placements_text(placements),
        "metadata": {
            name: [list(one.shape), one.dtype, list(one.owners), one.is_trainable, one.tied_to]
            for name, one in extractor.metadata(wanted).items()
        },
        "trainable": sorted(extractor.trainable_names()),
    }


def full_report(extractor: WeightExtractor, dtype: str | None = None) -> dict[str, Any]:
    """The same, what a rank gathers, and how often each of the two asked other ranks."""
    with Collectives() as for_parts:
        report = local_report(extractor, dtype)
    with Collectives() as for_wholes:
        chunks = list(extractor.full(None if dtype is None else getattr(torch, dtype)))
    report["full"] = described(chunks)
    report["sizes"] = [chunk.total_size_bytes for chunk in chunks]
    report["asked"] = [len(for_parts.names), len(for_wholes.names)]
    return report


def placements_of(report: dict[str, Any]) -> dict[str, Placement]:
    """What a rank's report says of its placements."""
    text = report["placements"]
    return placements_from(text, 0, text_digest(text))


def assembled(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whole tensors, put together from what all ranks hold; each element exactly once.

    Copies must equal what they are copies of; and what is said of the parts must cover the whole.
    """
    found: dict[str, tuple[str, torch.Tensor]] = {}
    copies = []
    placed = [placements_of(report) for report in reports]
    for report, placements in zip(reports, placed, strict=True):
        for name, placement in placements.items():
            dtype, shape, values = report["tensors"][name]
            assert (dtype, tuple(shape)) == (f"torch.{placement.dtype}", placement.shape)
            local = torch.tensor(values, dtype=torch.float64).view(placement.shape)
            for piece in placement.pieces:
                nothing = torch.full(piece.global_shape, math.nan, dtype=torch.float64)
                whole = found.setdefault(piece.name, (dtype, nothing))[1]
                part, place = _part(local, piece), _place(whole, piece)
                if piece.replica:
                    copies.append((piece.name, part, place))
                else:
                    assert place.isnan().all(), f"{piece.name} doubled at {piece.offset}"
                    place.copy_(part)
    for name, part, place in copies:
        assert torch.equal(part, place), name
    for name, (_, whole) in found.items():
        assert not whole.isnan().any(), f"{name} has a gap"
    assert set(prove_coverage(held_pieces(placed))) == set(found)
    return {name: [dtype, list(t.shape), as_lists(t)] for name, (dtype, t) in found.items()}


def _part(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    at = zip(piece.local_offset, piece.shape, strict=True)
    return local[tuple(slice(begin, begin + size) for begin, size in at)]


def _place(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    if piece.is_flat:
        return whole.view(-1)[piece.offset[0] : piece.offset[0] + piece.shape[0]]
    at = zip(piece.offset, piece.shape, strict=True)
    return whole[tuple(slice(begin, begin + size) for begin, size in at)]

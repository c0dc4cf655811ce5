"""A small inference engine: a tensor-parallel model over ranks in processes of their own.

It knows nothing of rl_bridge. `Engine.ask` runs a function in every rank.
"""

import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

VOCABULARY, HIDDEN, INNER, LAYERS = 32, 16, 24, 2


def weight(rows: int, columns: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, columns), requires_grad=False)


class Layer(torch.nn.Module):
    """Two fused column-parallel weights, and a row-parallel one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_up = weight(2 * INNER // size, HIDDEN)
        self.down = weight(HIDDEN, INNER // size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.gate_up @ x).chunk(2)
        summed = self.down @ (torch.sigmoid(gate) * up)
        dist.all_reduce(summed)
        return torch.tanh(x + summed)


class Model(torch.nn.Module):
    """One rank's part."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.embed = weight(VOCABULARY, HIDDEN)
        self.head = weight(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(size) for _ in range(LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loader: it slices and fuses what checkpoints keep apart."""
        for name, tensor in weights:
            path, _, part = name.removesuffix(".weight").rpartition(".")
            layer: Any = self.get_submodule(path)
            if part == "down":
                place, mine = layer.down, tensor.chunk(self.size, 1)[self.rank]
            elif part in {"gate", "up"}:
                place = layer.gate_up.chunk(2)[part == "up"]
                mine = tensor.chunk(self.size)[self.rank]
            else:
                place, mine = getattr(layer, part), tensor
            if place.shape != mine.shape:
                raise ValueError(f"{name}: got {list(mine.shape)}, expected {list(place.shape)}")
            place.copy_(mine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head @ x


class Worker:
    """One rank: its model, and what it cached of prefixes."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        self.rank, self.size, self.model = rank, size, Model(rank, size)
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}
        self.model.load_weights(load_file(path).items())

    def state_of(self, tokens: tuple[int, ...]) -> torch.Tensor:
        state = torch.zeros(HIDDEN)
        for end, token in enumerate(tokens, 1):
            if tokens[:end] not in self.cache:
                self.cache[tokens[:end]] = self.model.embed[token] + state / 2
            state = self.cache[tokens[:end]]
        return state


def step(worker: Worker, text: str) -> str:
    """The next token of a request, and its score."""
    score, token = worker.model(worker.state_of(tuple(json.loads(text)))).max(0)
    return json.dumps([int(token), float(score)])


def reset_cache(worker: Worker, _: str) -> str:
    worker.cache.clear()
    return ""


class Engine:
    """Starts the ranks, schedules requests, and may be paused between two steps of them."""

    def __init__(self, path: Path, ranks: int = 2) -> None:
        self.version = ""
        self.ranks: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._goes_on, self._turn, self._asked = threading.Event(), threading.RLock(), 0
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(ranks):
            here, there = Pipe()
            given = [rank, ranks, str(path), f"{self._folder.name}/group", there.fileno()]
            command = [sys.executable, __file__, json.dumps(given)]
            process = subprocess.Popen(command, pass_fds=[there.fileno()])
            there.close()
            self.ranks.append((process, here))
        try:
            self.ask("engine:reset_cache", timeout_s=300.0)  # which waits until all are there
        except BaseException:
            self.close()
            raise
        self.resume()

    def generate(
        self, prompt: list[int], tokens: int = 4, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """The answer to a request: its tokens, their scores, and the version that made them."""
        made, scores = list(prompt), list[float]()
        while len(scores) < tokens:
            if not self._goes_on.wait(timeout_s):
                raise TimeoutError("the engine is paused")
            with self._turn:
                if self.is_paused:
                    continue
                token, score = json.loads(self.ask("engine:step", json.dumps(made))[0])
                made, scores = [*made, token], [*scores, score]
        return {"tokens": made, "scores": scores, "version": self.version}

    @property
    def is_paused(self) -> bool:
        return not self._goes_on.is_set()

    def pause(self) -> None:
        with self._turn:  # after the step that is under way
            self._goes_on.clear()

    def resume(self) -> None:
        self._goes_on.set()

    def ask(self, function: str, text: str = "", timeout_s: float = 60.0) -> list[str]:
        """Call ``module:function`` with a rank's `Worker` and a text, in all ranks at once.

        Raises ConnectionError if a rank ended, TimeoutError if one does not answer.
        """
        with self._turn:
            self._asked += 1
            end, message = time.monotonic() + timeout_s, json.dumps([self._asked, function, text])
            try:
                for _, line in self.ranks:
                    line.send_bytes(message.encode())
                return [self._answer(line, end) for _, line in self.ranks]
            except (EOFError, OSError) as error:
                if isinstance(error, TimeoutError):
                    raise
                raise ConnectionError(f"a rank of the engine ended ({error!r})") from error

    def _answer(self, line: Connection, end: float) -> str:
        while line.poll(max(0.0, end - time.monotonic())):
            number, text = json.loads(line.recv_bytes())
            if number == self._asked:  # else it came too late, to an earlier call
                return str(text)
        raise TimeoutError("a rank of the engine does not answer")

    def close(self) -> None:
        for process, line in self.ranks:
            line.close()
            process.kill()
            process.wait()
        self._folder.cleanup()


def serve(rank: int, size: int, path: str, group: str, descriptor: int) -> None:
    """A rank's process: answers until the engine is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=size)
    worker, line = Worker(rank, size, path), Connection(descriptor)
    while True:
        try:
            number, function, text = json.loads(line.recv_bytes())
        except (EOFError, ConnectionError):  # the engine is closed, or gone
            return
        module, _, name = function.partition(":")
        told = getattr(importlib.import_module(module), name)(worker, text)
        line.send_bytes(json.dumps([number, told]).encode())


if __name__ == "__main__" and sys.argv[1:]:
    serve(*json.loads(sys.argv[1]))

"""What the examples share: engines in processes of their own, and a client that reaches them."""

import asyncio
import hashlib
import json
import multiprocessing
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from rl_bridge import RolloutExecutor
from rl_bridge.strategies import (
    BatchedLoadAdapter,
    ExecutorWeightLoader,
    WeightTransferConfig,
    WeightUpdateRequest,
    init_info_from_json,
    make_transfer_strategy,
)

TIMEOUT_S = 100
SPAWN = multiprocessing.get_context("spawn")


def sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: what trainer and engines compare."""
    found = {}
    for name, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return found


def ask(line: Connection, **message: Any) -> Any:
    """Send JSON, and wait for JSON."""
    line.send_bytes(json.dumps(message).encode())
    return hear(line)


def hear(line: Connection) -> Any:
    """Wait for JSON; an error on the other side is one here."""
    if not line.poll(TIMEOUT_S):
        raise TimeoutError("the other process did not answer")
    answer = json.loads(line.recv_bytes())
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


class Engines:
    """The client of a sender: hands each request to all engines."""

    def __init__(self, lines: list[Connection]) -> None:
        self.lines = lines

    async def update_named_weights(self, request: WeightUpdateRequest) -> None:
        for line in self.lines:
            line.send_bytes(json.dumps({"request": request.to_json()}).encode())
        for line in self.lines:
            hear(line)

    def start(self, init_info: str) -> None:
        for number, line in enumerate(self.lines):
            ask(line, init_info=init_info, engine=number)

    def check(self, version: int, expected: Mapping[str, str]) -> None:
        """Make sure that each engine serves the version, and holds exactly these bytes."""
        for line in self.lines:
            held = ask(line, what="weights")
            assert held == {"version": version, "sums": dict(expected)}, held["version"]

    def stop(self) -> None:
        for line in self.lines:
            ask(line, what="stop")


def engine(line: Connection, config: dict[str, Any], names: dict[str, list[int]]) -> None:
    """The process of an engine: float32 tensors of these names and shapes."""
    torch.set_num_threads(1)
    weights = {name: torch.zeros(shape) for name, shape in names.items()}

    def load(pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            weights[name].copy_(tensor)

    strategy = make_transfer_strategy(WeightTransferConfig(**config))
    first = hear(line)
    offset = strategy.config.rank_offset(first["engine"])
    info = init_info_from_json(first["init_info"])
    receiver = asyncio.run(strategy.create_receiver(info, rank_offset=offset))
    executor = RolloutExecutor(
        weight_bridge=receiver.bridge, weight_install_adapter=BatchedLoadAdapter(weights, load)
    )
    loader = ExecutorWeightLoader(executor)
    answer: dict[str, Any] = {"ok": True}
    while True:
        line.send_bytes(json.dumps(answer).encode())
        message = hear(line)
        if message.get("what") == "stop":
            break
        try:
            if "request" in message:
                request = WeightUpdateRequest.from_json(message["request"])
                asyncio.run(loader.load_weights(receiver, request))
                answer = {"ok": True}
            else:
                loader.check_servable()
                answer = {"version": executor.active_weight_version, "sums": sums(weights.items())}
        except Exception as error:  # noqa: BLE001 - the trainer is told
            answer = {"error": f"{type(error).__name__}: {error}"}
    executor.close()
    receiver.close()
    line.send_bytes(b'{"ok": true}')


def run(trainer: Any, *, ranks: int, num_engines: int, config: dict[str, Any], **more: Any) -> None:
    """Start engines and trainer ranks, and wait for all of them; `more` goes to each rank."""
    names = {name: list(shape) for name, shape in more.pop("shapes").items()}
    pairs = [SPAWN.Pipe() for _ in range(num_engines)]
    processes = [
        SPAWN.Process(target=engine, args=(there, config, names), daemon=True) for _, there in pairs
    ]
    for rank in range(ranks):
        lines = [here for here, _ in pairs] if rank == 0 else []
        arguments = {"rank": rank, "ranks": ranks, "lines": lines, "config": config, **more}
        processes.append(SPAWN.Process(target=trainer, kwargs=arguments, daemon=True))
    for process in processes:
        process.start()
    for pair in pairs:
        for line in pair:  # who waits for one that died is told at once
            line.close()
    for process in processes:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes), codes

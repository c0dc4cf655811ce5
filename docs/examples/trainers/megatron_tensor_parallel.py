"""Megatron TP2 to an engine of one rank, and TP1 to an engine of two: nothing is gathered.

Each trainer rank publishes its own parts, the engine's ranks get what they want of them.
"""

import hashlib
import json
import multiprocessing
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_bridge import MegatronWeightExtractor, RolloutExecutor, make_weight_bridge
from rl_bridge.groups import (
    GroupPublisher,
    ProcessGroupExchange,
    TensorParallel,
    parallel,
)

STEPS = 3
TIMEOUT_S = 100
SPAWN = multiprocessing.get_context("spawn")

# Which dimension of which weights Megatron cuts: column-parallel layers by rows, and so on.
CUT = {
    "embedding.word_embeddings.weight": 0,
    "*.linear_qkv.weight": 0,
    "*.linear_qkv.bias": 0,
    "*.linear_proj.weight": 1,
    "*.linear_fc1.weight": 0,
    "*.linear_fc1.bias": 0,
    "*.linear_fc2.weight": 1,
    "output_layer.weight": 0,
}


def make_model(degree: int) -> torch.nn.Module:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not torch.cuda.is_available():
        without_cuda()
    parallel_state.initialize_model_parallel(degree)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=degree,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model


def without_cuda() -> None:
    """Megatron asks for the current CUDA device in a few places, also on a CPU."""
    from megatron.core.tensor_parallel import random as megatron_random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    random: Any = megatron_random
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # noqa: SLF001
    random._set_cuda_rng_state = lambda s, *_, **__: torch.set_rng_state(s)  # noqa: SLF001


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole weights, gathered by hand: Megatron says in which dimension each is cut."""
    whole = {}
    for name, parameter in model.named_parameters():
        mine = parameter.detach().contiguous()
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            mine = torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]
        whole[name] = mine
    return whole


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: what trainer and engine compare."""
    return {
        name: hashlib.sha256(one.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, one in tensors.items()
    }


def share(whole: dict[str, torch.Tensor], degree: int, rank: int) -> dict[str, torch.Tensor]:
    """One engine rank's part, cut by hand."""
    layout = TensorParallel(degree=degree, rank=rank, dims=CUT)
    cut = {}
    for name, tensor in whole.items():
        dim = layout.dim_of(name)
        cut[name] = tensor if dim is None else tensor.chunk(degree, dim)[rank]
    return cut


def engine(line: Connection, degree: int, rank: int) -> None:
    """One rank of an engine: says what it wants, and installs each version."""
    torch.set_num_threads(1)
    wanted = parallel(tensor=TensorParallel(degree=degree, rank=rank, dims=CUT))
    with make_weight_bridge("shared-memory", source_rank=rank, wanted=wanted) as bridge:
        executor = RolloutExecutor(weight_bridge=bridge)
        while text := line.recv_bytes().decode():
            executor.update_weights(text)
            held = sums(dict(executor.shared_weights))
            answer = {"version": executor.active_weight_version, "sums": held}
            line.send_bytes(json.dumps(answer).encode())
        executor.close()


def trainer(rank: int, ranks: int, lines: list[Connection], meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    model = make_model(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    extractor = MegatronWeightExtractor(model)
    tokens = torch.arange(8).unsqueeze(0)
    with make_weight_bridge("shared-memory", source_rank=rank) as bridge:
        publisher = GroupPublisher(bridge, ProcessGroupExchange(), timeout_s=TIMEOUT_S)
        previous = None
        for step in range(STEPS + 1):
            if step:
                optimizer.zero_grad()
                mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
                model(tokens, tokens, mask, labels=tokens).mean().backward()
                optimizer.step()
            manifest = publisher.publish(
                extractor.local(), extractor.placements(), weight_version=step
            )
            whole = gathered(model)
            for number, line in enumerate(lines):
                line.send_bytes(manifest.to_json().encode())
                if not line.poll(TIMEOUT_S):
                    raise TimeoutError("an engine did not answer")
                expected = sums(share(whole, len(lines), number))
                assert json.loads(line.recv_bytes()) == {"version": step, "sums": expected}
            dist.barrier()
            if previous is not None:
                publisher.release(previous)
            previous = manifest
        for line in lines:
            line.send_bytes(b"")
        dist.barrier()  # the memory of every rank is read by the engines
    dist.destroy_process_group()


def close(pairs: list[tuple[Connection, Connection]]) -> None:
    """Let go of this process's ends: who waits for one that died is told at once."""
    for pair in pairs:
        for line in pair:
            line.close()


def main(trainer_ranks: int, engine_ranks: int) -> None:
    pairs = [SPAWN.Pipe() for _ in range(engine_ranks)]
    processes = [
        SPAWN.Process(target=engine, args=(there, engine_ranks, rank), daemon=True)
        for rank, (_, there) in enumerate(pairs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        for rank in range(trainer_ranks):
            lines = [here for here, _ in pairs] if rank == 0 else []
            arguments = (rank, trainer_ranks, lines, meet)
            processes.append(SPAWN.Process(target=trainer, args=arguments, daemon=True))
        for process in processes:
            process.start()
        close(pairs)
        for process in reversed(processes):
            process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes), codes
    print(f"{STEPS + 1} versions from Megatron TP{trainer_ranks} in an engine of TP{engine_ranks}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ("2", "1")))

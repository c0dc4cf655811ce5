"""An engine that fuses what the trainer keeps apart, served by copy mode over a dict of views."""

import torch
from torch import nn

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge

WIDTH = 8


class TrainerBlock(nn.Module):
    """The trainer keeps q, k and v apart."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)


class EngineBlock(nn.Module):
    """The engine multiplies once: its rows are those of q, then of k, then of v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)


def trainer_names(engine: EngineBlock) -> dict[str, torch.Tensor]:
    """The engine's own memory under the trainer's names: views, nothing is copied."""
    named = {"o_proj.weight": engine.out.weight.detach()}
    for part in ("weight", "bias"):
        fused = getattr(engine.qkv, part).detach()
        for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
            named[f"{name}.{part}"] = fused[place * WIDTH : (place + 1) * WIDTH]
    return named


def main() -> None:
    model, engine = TrainerBlock(), EngineBlock()
    views = trainer_names(engine)
    whole = sum(parameter.numel() for parameter in engine.parameters())
    assert sum(view.numel() for view in views.values()) == whole  # nothing is left out
    with (
        make_weight_bridge("shared-memory", source_worker="trainer") as trainer,
        make_weight_bridge("shared-memory", source_worker="rollout") as rollout,
        RolloutExecutor(
            weight_bridge=rollout,
            weight_install_adapter=ModuleInstallAdapter(views, mode="copy"),
        ) as executor,
    ):
        manifest = trainer.publish(model, weight_version=1)
        executor.update_weights(manifest.to_json())

        assert torch.equal(engine.qkv.weight[WIDTH : 2 * WIDTH], model.k_proj.weight)
        assert executor.last_ack is not None
        proof = executor.last_ack.proof
        assert proof.root == manifest.root
        print(f"version {executor.active_weight_version} is in the engine: proof by {proof.method}")


if __name__ == "__main__":
    main()

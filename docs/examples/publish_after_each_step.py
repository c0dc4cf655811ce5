"""A plain training loop with one line more: each optimizer step ends with a published version."""

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge
from rl_bridge.hooks import StepPublisher

model, engine = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

with make_weight_bridge("shared-memory") as trainer, make_weight_bridge("shared-memory") as rollout:
    # Usually in another process, which gets the manifest's text.
    executor = RolloutExecutor(
        weight_bridge=rollout, weight_install_adapter=ModuleInstallAdapter(engine, mode="copy")
    )
    publisher = StepPublisher(trainer, model, send=executor.update_weights)
    publisher.publish()  # the initial sync, before the first rollout
    publisher.after_steps_of(optimizer)  # the one line

    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert executor.active_weight_version == step
        assert torch.equal(engine.weight, model.weight)
    executor.close()

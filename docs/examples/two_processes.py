"""A trainer process publishes one version; a rollout process, started with spawn, installs it."""

import json
import multiprocessing
from multiprocessing.connection import Connection

import torch

from rl_bridge import ModuleInstallAdapter, RolloutExecutor, make_weight_bridge

TIMEOUT_S = 60


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def rollout(inbox: Connection) -> None:
    """The rollout process: receives manifests as text, answers with what its engine computes."""
    engine = make_model()
    with make_weight_bridge("shared-memory", source_worker="rollout") as bridge:
        executor = RolloutExecutor(
            weight_bridge=bridge,
            weight_install_adapter=ModuleInstallAdapter(engine, mode="copy"),
        )
        executor.update_weights(inbox.recv_bytes().decode())
        with torch.no_grad():
            answer = engine(torch.ones(8)).tolist()
        reply = {"version": executor.active_weight_version, "answer": answer}
        inbox.send_bytes(json.dumps(reply).encode())
        executor.release_weights()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=rollout, args=(there,), daemon=True)
    worker.start()

    model = make_model()
    with make_weight_bridge("shared-memory", source_worker="trainer") as bridge:
        manifest = bridge.publish(model, weight_version=1, metadata={"step": 1})
        here.send_bytes(manifest.to_json().encode())
        if not here.poll(TIMEOUT_S):
            raise TimeoutError("the rollout process did not answer")
        reply = json.loads(here.recv_bytes())
        worker.join(TIMEOUT_S)
        (report,) = bridge.holders(manifest.update_id)
        bridge.release(manifest.update_id)

    with torch.no_grad():
        expected = model(torch.ones(8)).tolist()
    assert reply == {"version": 1, "answer": expected}
    assert report.proof is not None
    assert report.proof["root"] == manifest.root
    print(f"version {reply['version']} in process {report.pid}: proof by {report.proof['method']}")


if __name__ == "__main__":
    main()

"""Trainers that are killed in an update of an SGLang server, or that kill the server: ours, stock.

Both are killed behind their first contact with the server: at steps of their own, and at any moment
of an update. The stock one does what trainers around SGLang do: it pauses the server, opens a
session, broadcasts the tensors in buckets over a process group (`update_weights_from_distributed`),
closes the session, sets the version's label, and lets the server go on. It also closes a session
that was left open.
"""

import datetime as dt
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from rl_bridge.testing.processes import free_port

__all__ = ["STEPS", "OursTrainer", "StockTrainer"]

BUCKETS = 4
CALL_S = 20.0
_ANY = "at any moment"
STEPS = {
    "stock": ("paused", "between buckets", "in a bucket", "all buckets sent", "label set", _ANY),
    "ours": ("in staging", "in the install", "installed", "proven", _ANY),
}
"""Where somebody is killed; each but the last is a step of that side's own update."""


class _Trainer:
    """What both have: weights, a server, and somebody to kill at one step."""

    def __init__(self, *, url: str, key: str, folders: list[str]) -> None:
        self.url, self.key = url, key
        self.weights = [load_file(Path(folder) / "model.safetensors") for folder in folders]
        self.took_s: dict[str, float] = {}
        self._step = ""
        self._behind_s = 0.0
        self._victim = 0
        self._timer: threading.Timer | None = None

    def update(
        self, *, number: int, version: int, step: str, behind_s: float, victim: int
    ) -> dict[str, float]:
        """Bring weights number `number` into the server as `version`.

        Args:
            number: of the two sets of weights.
            version: of the trainer.
            step: where to kill.
            behind_s: how long after the step's beginning, in seconds.
            victim: the server's process group; 0 is this trainer itself.

        Returns:
            How long the whole update and the steps with a beginning and an end took, in seconds.

        """
        self._step, self._behind_s, self._victim = step, behind_s, victim
        with self.within(_ANY):
            self.bring(self.weights[number], version)
        if self._timer is not None:  # the update was faster than the kill
            self._timer.join()
        return self.took_s

    def bring(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise NotImplementedError

    @contextmanager
    def within(self, step: str) -> Iterator[None]:
        """Time a step; if it is the one, begin to wait for its kill."""
        if step == self._step:
            self._timer = threading.Timer(self._behind_s, self._kill)
            self._timer.start()
        began = time.monotonic()
        yield
        self.took_s[step] = time.monotonic() - began

    def reach(self, step: str) -> None:
        """Kill, if this is the step."""
        if step == self._step:
            self._kill()

    def _kill(self) -> None:
        if self._victim:
            os.killpg(self._victim, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class StockTrainer(_Trainer):
    """SGLang's own route, as its callers use it."""

    def __init__(self, **options: Any) -> None:
        """Meet the server's rank in a process group."""
        super().__init__(**options)
        self.client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=CALL_S,
            trust_env=False,
        )
        self.group_name, port = f"trainer-{uuid.uuid4().hex}", free_port()
        meeting = self._begin(
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=2,
            group_name=self.group_name,
            backend="gloo",
        )
        self.group = _group(port, self.group_name)
        meeting()

    def bring(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Pause, send bucket by bucket, label, go on."""
        self._do("pause_generation", mode="retract")
        self.reach("paused")
        self._do("flush_cache")
        try:
            self._do("begin_weight_update")
        except (httpx.HTTPError, RuntimeError):  # a trainer that died may have left a session open
            self._do("end_weight_update")
            self._do("begin_weight_update")
        names = list(weights)
        for index in range(BUCKETS):
            is_middle = index == BUCKETS // 2
            if is_middle:
                self.reach("between buckets")
            bucket = {name: weights[name] for name in names[index::BUCKETS]}
            self._send(bucket, is_middle=is_middle)
        self.reach("all buckets sent")
        self._do("end_weight_update")
        self._do("update_weight_version", new_version=str(version), abort_all_requests=False)
        self.reach("label set")
        self._do("continue_generation")

    def _send(self, bucket: Mapping[str, torch.Tensor], *, is_middle: bool) -> None:
        received = self._begin(
            "update_weights_from_distributed",
            names=list(bucket),
            dtypes=[str(one.dtype).removeprefix("torch.") for one in bucket.values()],
            shapes=[list(one.shape) for one in bucket.values()],
            group_name=self.group_name,
            flush_cache=False,
        )
        for index, one in enumerate(bucket.values()):
            if is_middle and index == len(bucket) // 2:
                self.reach("in a bucket")
            torch.distributed.broadcast(one, group=self.group, group_src=0)
        received()

    def _do(self, route: str, **body: Any) -> None:
        self._begin(route, **body)()

    def _begin(self, route: str, **body: Any) -> Any:
        """Call a route in a thread; what returns waits for its answer."""
        found: list[Any] = []

        def call() -> None:
            try:
                reply = self.client.post(route, json=body)
                reply.raise_for_status()
                text = reply.text if route == "flush_cache" else reply.json()
                is_refused = isinstance(text, dict) and text.get("success") is False
                found.append(RuntimeError(f"{route}: {text}") if is_refused else None)
            except httpx.HTTPError as error:
                found.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()

        def wait() -> None:
            thread.join()
            if found[0] is not None:
                raise found[0]

        return wait


def _group(port: int, name: str) -> Any:
    """Rank 0 of a group beside the default one, as trainers around SGLang make it.

    (SGLang's own function for it does the same, but takes as long to import as an update.)
    """
    from torch.distributed import distributed_c10d

    torch_group: Any = distributed_c10d  # of which no type is told
    distributed: Any = torch.distributed  # has the TCPStore; likewise
    timeout = dt.timedelta(seconds=CALL_S)
    store = distributed.TCPStore(
        "127.0.0.1", port, 2, is_master=True, timeout=timeout, wait_for_workers=False
    )
    group, _ = torch_group._new_process_group_helper(  # noqa: SLF001 - as those trainers do
        2,
        0,
        [],
        torch_group.Backend("gloo"),
        torch_group.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    torch_group._world.pg_group_ranks[group] = {0: 0, 1: 1}  # noqa: SLF001 - likewise
    return group


class OursTrainer(_Trainer):
    """A bridge and an executor in the trainer's process; the server has the plugin."""

    def __init__(self, **options: Any) -> None:
        """Take the server from a trainer that died."""
        from rl_bridge import RolloutExecutor, make_weight_bridge
        from rl_bridge.sglang import SGLangInstallAdapter, SGLangServing, connect

        super().__init__(**options)
        self.bridge = make_weight_bridge("shared-memory", source_worker="trainer")
        reach, within = self.reach, self.within

        class Adapter(SGLangInstallAdapter):
            def prepare(self, *given: Any) -> None:
                with within("in staging"):
                    super().prepare(*given)

            def install(self, *given: Any) -> None:
                with within("in the install"):
                    super().install(*given)
                reach("installed")

            def commit(self) -> None:
                reach("proven")
                super().commit()

        client = connect(self.url, timeout_s=CALL_S, api_key=self.key)
        serving = SGLangServing(label=lambda manifest: str(manifest.weight_version))
        self.executor = RolloutExecutor(
            weight_transport="shared-memory",
            weight_install_adapter=Adapter(client, serving=serving, take_over=True),
        )

    def bring(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Publish, and update."""
        manifest = self.bridge.publish(weights, weight_version=version, keep=1)
        self.executor.update_weights(manifest)

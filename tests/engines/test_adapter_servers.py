"""LoRA adapters of a vLLM server, by its URL: clients ask for them in the field ``model``."""

import asyncio
import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.compat.prime_rl import (
    PrimeRLConfig,
    StaticInferencePool,
    setup_weight_broadcast,
)
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.vllm.client import ServerClient
from rl_bridge.engines.vllm.endpoint import AdapterTable, rows_of
from rl_bridge.errors import (
    DeadlineExceeded,
    MalformedManifest,
    SessionRefused,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.processes import DEADLINE_S, free_port, until
from rl_bridge.trainers import StateDictExtractor, read_peft
from rl_bridge.vllm import VLLMAdapterFiles, VLLMEngineAdapter
from tests.engines.adapter_suite import LONG_RUNS, Adapted, check_a_long_run, of_rank, spec_of
from tests.engines.drive import PROMPTS, Answers, Setting, answers, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import DEV, Served, served
from tests.engines.test_adapters import LORA
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere

pytestmark = pytest.mark.timeout(600)  # engines start
KIND = Kind("qwen3")


@dataclass
class ServerAdapted(Adapted):
    """A server, and an executor that knows its URL."""

    engine: Served
    folders: list[str] = field(default_factory=list)
    cache: Path = Path()

    def asked(self, request: Any) -> Answers:
        return self.engine.answers(**({} if request is None else {"model": request}))


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.full)],
    ids=["tp1", "tp2"],
)
def adapted(
    request: pytest.FixtureRequest,
    checkpoints: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerAdapted]:
    from vllm.lora.request import LoRARequest

    path, folders = checkpoints.path(KIND, 0), [checkpoints.adapter(number) for number in (0, 1)]
    ranks = request.param
    with start(Setting(KIND, in_process=ranks == 1, ranks=ranks), path, **LORA) as llm:
        asked = [None, *(LoRARequest(f"file{i}", i + 1, f) for i, f in enumerate(folders))]
        # One at a time, as the server is asked: sums depend on what is computed together.
        fresh: list[Any] = [
            tuple(answers(llm, (prompt,), lora_request=one)[0] for prompt in PROMPTS)
            for one in asked
        ]
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    setting = Setting(KIND, in_process=False, ranks=ranks)
    log = tmp_path_factory.mktemp("server") / "log"
    cache = tmp_path_factory.mktemp("cache")
    environment = {
        **DEV,
        "VLLM_PLUGINS": "rl_bridge,rl_bridge_prime_rl",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "NIXL_LORA_CACHE_DIR": str(cache),
    }
    with ExitStack() as stack:
        server = stack.enter_context(
            served(setting, path, log, options=LORA, environment=environment)
        )
        bridge = stack.enter_context(make_weight_bridge("shared-memory", suspicious="off"))
        executor = stack.enter_context(
            RolloutExecutor(
                weight_install_adapter=VLLMEngineAdapter(server.url, timeout_s=60.0),
                suspicious="off",
            )
        )
        yield ServerAdapted(server, executor, bridge, fresh, weights, folders=folders, cache=cache)


def test_clients_who_ask_for_the_adapter_get_the_active_version_and_are_told_which(
    adapted: ServerAdapted,
) -> None:
    for number in (0, 1, 0):
        version = adapted.update(number)
        assert adapted.engine.answers(model="policy") == adapted.fresh[1 + number]
        assert adapted.executor.lora_request("policy") == f"policy@{version}"
        body = {"model": "policy", "prompt": PROMPTS[0], "max_tokens": 1}
        reply = adapted.engine.call("v1/completions", json=body)
        assert reply.json()["model"] == f"policy@{version}"
        listed = adapted.engine.call("v1/models", method="GET").json()["data"]
        names = [one["id"] for one in listed]
        assert {"policy", f"policy@{version}"} <= set(names)
        assert len(set(names)) == len(names)
    assert adapted.engine.answers() == adapted.fresh[0]


def test_a_version_can_be_asked_for_until_it_is_dropped_and_is_not_found_after_that(
    adapted: ServerAdapted,
) -> None:
    first, second = adapted.update(0), adapted.update(1)
    assert adapted.engine.answers(model=f"policy@{first}") == adapted.fresh[1]
    adapted.update(0)
    adapted.update(0)
    assert adapted.engine.answers(model=f"policy@{second + 1}") == adapted.fresh[1]
    assert is_unknown(adapted.engine, f"policy@{first}")
    with pytest.raises(UnknownUpdate):
        adapted.executor.lora_request("policy", first)


def test_a_request_ends_under_the_version_that_it_began_with_while_others_come(
    adapted: ServerAdapted,
) -> None:
    adapted.update(0)
    alone = adapted.engine.generate(PROMPTS[0], 300, model="policy")["token_ids"]
    with begun(adapted) as asked:
        for number in (1, 1):
            adapted.update(number)
    assert asked.result()["token_ids"] == alone
    assert adapted.engine.answers(model="policy") == adapted.fresh[2]
    until(lambda: not used(adapted), what="no request has a version")


def test_an_adapter_that_a_request_has_still_is_dropped_when_the_request_has_ended(
    adapted: ServerAdapted,
) -> None:
    version = adapted.update(0)
    alone = adapted.engine.generate(PROMPTS[0], 300, model="policy")["token_ids"]
    with begun(adapted) as asked:
        adapted.executor.drop_adapter("policy")
        assert not used(adapted)
    assert asked.result()["token_ids"] == alone
    assert all(is_unknown(adapted.engine, one) for one in ("policy", f"policy@{version}"))
    adapted.update(1)
    assert adapted.engine.answers(model="policy") == adapted.fresh[2]


def is_unknown(server: Served, name: str) -> bool:
    """Whether clients that ask for this name are told that there is none."""
    reply = server.call("v1/completions", json={"model": name, "prompt": PROMPTS[0]})
    return bool(reply.status_code == httpx.codes.NOT_FOUND)


@contextmanager
def begun(adapted: ServerAdapted) -> Iterator["Future[dict[str, Any]]"]:
    """A request for the active version that has begun; it has ended with the block."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(adapted.engine.generate, PROMPTS[0], 300, model="policy")
        # (On a busy machine a look may take as long as the request: then it has ended already.)
        until(lambda: used(adapted) or asked.done(), what="it is asked")
        yield asked


def used(adapted: ServerAdapted) -> list[int]:
    reply = adapted.engine.call("rl_bridge/adapters", method="GET")
    return list(reply.json()["used"])


def test_a_version_of_which_the_server_s_answer_is_lost_is_taken_back_from_its_clients_too(
    adapted: ServerAdapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, offer = adapted.update(0), ServerClient.offer_adapter

    def lost(client: ServerClient, name: str, active: Resident | None, residents: Any) -> None:
        offer(client, name, active, residents)
        if active is not None and active.weight_version > version:
            raise DeadlineExceeded("planted: the answer is lost. Try again.")

    with monkeypatch.context() as patched:
        patched.setattr(ServerClient, "offer_adapter", lost)
        with pytest.raises(DeadlineExceeded, match="planted"):
            adapted.executor.update_weights(adapted.publish(1))
        assert adapted.executor.lora_request("policy") == f"policy@{version}"
        assert adapted.engine.answers(model="policy") == adapted.fresh[1]
    adapted.update(1)
    assert adapted.engine.answers(model="policy") == adapted.fresh[2]


def test_an_overtaken_driver_that_takes_its_version_back_leaves_what_the_next_one_offers(
    adapted: ServerAdapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, offer = adapted.update(0), ServerClient.offer_adapter
    with RolloutExecutor(
        weight_install_adapter=VLLMEngineAdapter(adapted.engine.url, take_over=True)
    ) as second:

        def overtaken(client: ServerClient, name: str, *versions: Any) -> None:
            offer(client, name, *versions)
            if versions[0] is not None and versions[0].weight_version == before + 1:
                monkeypatch.undo()
                second.update_weights(adapted.publish(1))
                raise DeadlineExceeded("planted: the answer is lost. Try again.")

        monkeypatch.setattr(ServerClient, "offer_adapter", overtaken)
        with pytest.raises(SessionRefused, match="one driver at a time"):
            adapted.executor.update_weights(adapted.publish(0))
        assert second.lora_request("policy") == f"policy@{before + 2}"
        assert adapted.engine.answers(model="policy") == adapted.fresh[2]
        # And the call that comes next changes as little.
        with pytest.raises(SessionRefused, match="one driver at a time"):
            adapted.executor.update_weights(adapted.publish(0))
        assert adapted.engine.answers(model="policy") == adapted.fresh[2]
    adapted.executor.recover()


@LONG_RUNS
def test_a_long_run_leaves_as_much_memory_and_as_many_descriptors_as_it_found(
    adapted: ServerAdapted, updates: int
) -> None:
    check_a_long_run(adapted, updates)


def test_a_version_is_in_use_from_the_moment_in_which_it_is_looked_up() -> None:
    table = AdapterTable({}, lambda _: False)
    one = Resident("policy", 7, "0" * 32)
    told = [{"label": one.label, "number": one.number, "path": one.path}]
    table.offer("policy", one.label, told)
    request = table["policy"]
    table.offer("policy", None, [])
    assert "policy" not in table
    assert table.used() == [one.number]
    del request
    assert table.used() == []


def test_another_name_stays_with_its_version_and_is_never_that_of_something_else() -> None:
    table = AdapterTable({"file": object()}, lambda name: name == "base")
    versions = [Resident("policy", number, f"{number}" * 32) for number in (7, 6)]
    told = [{"label": one.label, "number": one.number, "path": one.path} for one in versions]
    table.offer("policy", "policy@6", told[1:])
    table.alias("step_6", "policy", "policy@6")
    table.offer("policy", "policy@7", told)
    table.alias("mine", "policy", "policy@7")
    assert [table[name].lora_name for name in ("policy", "step_6", "mine")] == [
        *("policy@7", "policy@6", "policy@7")
    ]
    assert table.label_at(versions[1].path) == "policy@6"
    for name in ("file", "base", "policy@6"):
        with pytest.raises(ValueError, match=f"'{name}' already"):
            table.alias(name, "policy", "policy@7")
    with pytest.raises(ValueError, match="'policy@5' is not offered"):
        table.alias("mine", "policy", "policy@5")
    assert table.unalias("step_6") is None
    assert "step_6" not in table
    assert table.unalias("mine") == "policy"
    table.alias("step_6", "policy", "policy@6")
    table.offer("policy", "policy@7", told[:1])  # its version is dropped, and the name with it
    assert "step_6" not in table
    assert table["mine"].lora_name == "policy@7"
    with pytest.raises(ValueError, match="'step_6' was not loaded"):
        table.unalias("step_6")


def test_each_name_is_listed_once_and_as_itself() -> None:
    table = AdapterTable({"file": SimpleNamespace(lora_name="file")}, lambda _: False)
    versions = [Resident("policy", number, f"{number}" * 32) for number in (7, 6)]
    table.offer("policy", "policy@7", rows_of(versions))
    table.alias("mine", "policy", "policy@6")
    listed = [one.lora_name for one in table.values()]  # as /v1/models does it
    assert sorted(listed) == ["file", "mine", "policy", "policy@6", "policy@7"]
    table.pop("policy@6")  # as an unload by vLLM's own route does it
    table.offer("policy", "policy@7", rows_of(versions[:1]))
    assert sorted(table) == ["file", "policy", "policy@7"]


@pytest.mark.parametrize(("adapters", "model"), [({"policy": object()}, ""), ({}, "policy")])
def test_a_name_that_the_server_has_already_is_not_taken(
    adapters: dict[str, Any], model: str
) -> None:
    table = AdapterTable(adapters, lambda name: name == model)
    with pytest.raises(ValueError, match=r"\['policy'\]. Unload them first"):
        table.offer("policy", None, [])  # before a version is staged
    assert table.keys() == adapters.keys()


# ---- by prime-rl's names -------------------------------------------------------------------------


def pool(client: httpx.AsyncClient, **section: object) -> StaticInferencePool:
    config = PrimeRLConfig.model_validate(
        {"weight_broadcast": section, "model": {"lora": {"name": "policy"}}}
    )
    return StaticInferencePool(
        admin_clients=[client], weight_broadcast_config=config.weight_broadcast, lora_alpha=16.0
    )


def make_room(adapted: ServerAdapted) -> None:
    """Another driver brings versions now, and the engine has places for one adapter."""
    adapted.update(0)
    adapted.executor.drop_adapter("policy")


def told(adapted: ServerAdapted, path: str, body: dict[str, object]) -> tuple[int, str]:
    reply = adapted.engine.call(path, json=body)
    said = reply.json()
    return reply.status_code, str(said.get("error", said.get("status")))


def assert_refused(answer: tuple[int, str], status: int, said: str) -> None:
    code, text = answer
    assert (code, said in text) == (status, True), text


def test_directories_of_prime_rl_s_trainer_are_versions_of_one_adapter(
    adapted: ServerAdapted, tmp_path: Path
) -> None:
    make_room(adapted)
    for step, folder in enumerate(adapted.folders):
        shutil.copytree(folder, tmp_path / f"step_{step}")

    async def updated(step: int) -> None:
        async with httpx.AsyncClient(base_url=adapted.engine.url, timeout=60) as client:
            one = pool(client, type="filesystem")
            await one.update_weights(tmp_path / f"step_{step}", "by_files", step)

    with pytest.raises(MalformedManifest, match="STABLE is missing"):
        asyncio.run(updated(0))
    for step in (0, 1):
        (tmp_path / f"step_{step}" / "STABLE").touch()
        asyncio.run(updated(step))
        assert adapted.engine.answers(model="by_files") == adapted.fresh[1 + step]
    (tmp_path / "step_0" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(WeightBridgeUnavailableError, match=r"1 of 1 servers.*is damaged"):
        asyncio.run(updated(0))
    assert adapted.engine.answers(model="by_files") == adapted.fresh[2]
    unload: dict[str, object] = {"lora_name": "by_files"}
    with ThreadPoolExecutor(1) as threads:
        with paused(adapted.engine):  # so that the request cannot end
            asked = threads.submit(adapted.engine.generate, PROMPTS[0], 30, model="by_files")
            until(lambda: used(adapted), what="it is asked")
            assert told(adapted, "unload_lora_adapter", {**unload, "timeout": 0.1})[0] == 503
            with pytest.raises(WeightBridgeUnavailableError, match="is damaged"):
                asyncio.run(updated(0))  # which does not make it forgotten: the engine has it
        asked.result()
    assert told(adapted, "unload_lora_adapter", unload) == (200, "ok")


class PrimeTrainer:
    """prime-rl's trainer of two ranks, and the orchestrator of its runs."""

    def __init__(self, adapted: ServerAdapted, ranks: Elsewhere, base: str, home: Path) -> None:
        self.adapted, self.ranks, self.home, self.port = adapted, ranks, home, free_port()
        paths = [base, *adapted.folders]
        self.run("begin", paths=paths, folder=str(home / "run0"), port=self.port)
        self.steps = itertools.count(1)

    def run(self, case: str, **options: object) -> None:
        self.ranks.ask("run", case=case, **options)

    def broadcast(self, number: int, run_idx: int = 0) -> int:
        step = next(self.steps)
        self.run("broadcast", number=number, steps=[[run_idx, step]])
        return step

    def update(self, number: int, name: str, run_idx: int = 0) -> int:
        """Broadcast, and have the pool bring it to the server under a name."""
        step = self.broadcast(number, run_idx)
        self.bring(step, name, run_idx)
        return step

    def bring(self, step: int, name: str, run_idx: int = 0) -> None:
        """Have the pool bring a step to the server under a name."""
        folder = self.home / f"run{run_idx}" / "broadcasts" / f"step_{step}"

        async def updated() -> None:
            url = self.adapted.engine.url
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                await pool(client, type="nixl").update_weights(folder, name, step)

        asyncio.run(updated())

    def load(self, **changes: object) -> tuple[int, str]:
        """Ask the server as prime-rl does; its status, and what it says."""
        body = {
            "lora_name": "my_lora",
            "run_idx": 0,
            "trainer_addresses": [["127.0.0.1", self.port + rank] for rank in (0, 1)],
            "lora_alpha": 16.0,
            "timeout": 30.0,
        }
        return told(self.adapted, "load_lora_adapter_nixl", {**body, **changes})


@pytest.fixture(scope="module")
def prime(
    adapted: ServerAdapted, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrimeTrainer]:
    if not Path(PYTHON).exists():
        pytest.skip(f"needs {PYTHON}, which `make test-engines` makes")
    make_room(adapted)
    home = tmp_path_factory.mktemp("prime_rl")
    with Elsewhere(2, home, "tests.trainers_torch.prime_rl_cases", PYTHON, "peft") as ranks:
        yield PrimeTrainer(adapted, ranks, checkpoints.path(KIND, 0), home)
        ranks.ask("kill")


def test_shards_of_its_trainer_are_served_under_the_names_that_its_orchestrator_asks_for(
    prime: PrimeTrainer,
) -> None:
    server, fresh = prime.adapted.engine, prime.adapted.fresh
    steps = []
    for number in (0, 1, 0):
        steps.append(prime.update(number, f"run_0_step_{next(prime.steps)}"))
        assert server.answers(model=f"run_0_step_{steps[-1] - 1}") == fresh[1 + number]
        assert server.answers(model="policy") == fresh[1 + number]
    assert server.answers(model=f"run_0_step_{steps[1] - 1}") == fresh[2]
    assert is_unknown(server, f"run_0_step_{steps[0] - 1}")  # its version was dropped
    _, tensors = read_peft(prime.adapted.cache / f"run_0_step_{steps[2] - 1}", "policy")
    assert all(tensors[name].equal(one) for name, one in prime.adapted.weights[0].items())
    # Of an older version the name alone goes.
    older: dict[str, object] = {"lora_name": f"run_0_step_{steps[1] - 1}"}
    assert told(prime.adapted, "unload_lora_adapter", older) == (200, "ok")
    assert server.answers(model="policy") == fresh[1]
    prime.broadcast(1)
    for _ in range(2):  # asked for once more, it is there already
        assert prime.load() == (200, "ok")
        assert server.answers(model="my_lora") == fresh[2]


def test_the_step_that_a_directory_marks_is_loaded_also_when_the_trainer_is_a_step_ahead(
    prime: PrimeTrainer,
) -> None:
    server, fresh = prime.adapted.engine, prime.adapted.fresh
    steps = [prime.broadcast(number) for number in (0, 1, 0)]
    prime.bring(steps[1], "late")
    assert server.answers(model="late") == fresh[2]
    assert_refused(prime.load(weight_version=steps[0]), 409, f"no version {steps[0]} of run 0")
    prime.bring(steps[2], "my_lora")
    assert server.answers(model="my_lora") == fresh[1]
    assert server.answers(model="late") == fresh[2]
    # The adapter's own name is the active version's: it goes back to none.
    assert_refused(prime.load(lora_name="policy", weight_version=steps[1]), 409, "StaleUpdate")
    assert prime.load(lora_name="policy", weight_version=steps[2]) == (200, "ok")
    assert server.answers(model="policy") == fresh[1]


def test_what_its_route_cannot_do_changes_nothing_and_says_why(prime: PrimeTrainer) -> None:
    prime.broadcast(0)
    assert prime.load() == (200, "ok")
    prime.broadcast(1)
    second = ["127.0.0.1", prime.port + 1]
    for status, said, changes in (
        (409, "lora_alpha 16, and 8.0", {"lora_alpha": 8.0}),
        (409, "no version of run 5", {"run_idx": 5}),
        (409, "published by 2 ranks", {"trainer_addresses": [["127.0.0.1", prime.port]]}),
        (503, "this is 'lora_param_server_1'", {"trainer_addresses": [second]}),
        (503, "cannot be reached", {"trainer_addresses": [["127.0.0.1", free_port()]]}),
    ):
        assert_refused(prime.load(**changes), status, said)
        assert prime.adapted.engine.answers(model="my_lora") == prime.adapted.fresh[1]
    assert prime.load(lora_name="policy@1")[0] == httpx.codes.BAD_REQUEST


def test_runs_of_its_trainer_begin_and_end_beside_each_other(prime: PrimeTrainer) -> None:
    server, fresh = prime.adapted.engine, prime.adapted.fresh
    prime.update(0, "my_lora")
    prime.run("register", run_idx=1, folder=str(prime.home / "run1"))
    prime.update(1, "run_1", run_idx=1)
    assert server.answers(model="run_1") == fresh[2]
    assert server.answers(model="my_lora") == fresh[1]
    assert_refused(prime.load(lora_name="run_1"), 409, "serves 'run_1' already")
    assert told(prime.adapted, "unload_lora_adapter", {"lora_name": "run_1"}) == (200, "ok")
    assert_refused(
        told(prime.adapted, "unload_lora_adapter", {"lora_name": "run_1"}), 409, "expected one of"
    )
    prime.run("delete", run_idx=1)
    prime.update(1, "my_lora")
    assert server.answers(model="my_lora") == fresh[2]


def test_an_unload_whose_deadline_passes_is_taken_back_by_a_load_or_ended_by_the_next_one(
    prime: PrimeTrainer,
) -> None:
    server, fresh = prime.adapted.engine, prime.adapted.fresh
    prime.update(0, "my_lora")
    expected = server.generate(PROMPTS[0], 30, model="my_lora")["token_ids"]
    unload: dict[str, object] = {"lora_name": "my_lora"}
    with ThreadPoolExecutor(1) as threads:
        with paused(server):  # so that the request cannot end
            asked = threads.submit(server.generate, PROMPTS[0], 30, model="my_lora")
            until(lambda: used(prime.adapted), what="it is asked")
            code, text = told(prime.adapted, "unload_lora_adapter", {**unload, "timeout": 0.1})
            assert (code, text.partition(":")[0]) == (503, "DeadlineExceeded"), text
            assert is_unknown(server, "my_lora")
            assert prime.load() == (200, "ok")
        assert asked.result()["token_ids"] == expected
    for name in ("my_lora", "policy"):
        assert server.answers(model=name) == fresh[1]
    assert told(prime.adapted, "unload_lora_adapter", unload) == (200, "ok")
    assert_refused(told(prime.adapted, "unload_lora_adapter", unload), 409, "was not loaded here")
    prime.update(1, "my_lora")
    assert server.answers(model="my_lora") == fresh[2]


@contextmanager
def paused(server: Served) -> Iterator[None]:
    """Requests are taken, and none goes on."""
    assert server.call("pause", params={"mode": "keep", "clear_cache": "false"}).is_success
    try:
        yield
    finally:
        assert server.call("resume").is_success


def test_a_rank_of_its_trainer_that_is_killed_is_named_and_the_version_before_serves(
    prime: PrimeTrainer,
) -> None:
    prime.update(0, "my_lora")
    prime.broadcast(1)
    prime.ranks.ask("kill", rank=1)
    assert_refused(prime.load(), 503, "'lora_param_server_1'")
    assert prime.adapted.engine.answers(model="my_lora") == prime.adapted.fresh[1]
    assert told(prime.adapted, "unload_lora_adapter", {"lora_name": "my_lora"}) == (200, "ok")


@pytest.mark.parametrize(
    "section",
    [
        {"type": "nccl", "backend": "gloo"},
        {"type": "filesystem"},
        {"type": "filesystem", "handshake": "stages", "timeout": 60.0},
    ],
    ids=["nccl", "stable", "stages"],
)
def test_whole_weights_of_prime_rl_s_trainer_are_brought_to_the_servers(
    adapted: ServerAdapted, checkpoints: Checkpoints, tmp_path: Path, section: dict[str, object]
) -> None:
    weights = load_file(f"{checkpoints.path(KIND, 0)}/model.safetensors")
    config = PrimeRLConfig.model_validate({"weight_broadcast": section}).weight_broadcast

    async def updated(step: int) -> None:
        async with httpx.AsyncClient(base_url=adapted.engine.url) as client:
            one = StaticInferencePool(admin_clients=[client], weight_broadcast_config=config)
            with closing(one):
                await one.update_weights(tmp_path / "broadcasts" / f"step_{step}", step=step)

    with setup_weight_broadcast(tmp_path, config) as broadcast, ThreadPoolExecutor(1) as trainer:
        for step in (1, 2):
            source = StateDictExtractor(weights)
            done = trainer.submit(broadcast.broadcast_weights, source, step)
            if section.get("handshake") != "stages":  # there it waits for the orchestrator
                done.result(DEADLINE_S)
            asyncio.run(updated(step))
            done.result(DEADLINE_S)
            assert adapted.engine.label().startswith(f"{step}@")
            assert adapted.engine.answers() == adapted.fresh[0]


# ---- by files, last: vLLM gives them slots as it likes, and of two ranks that both refuse one it
# ---- reads the first one's answer alone, so that all later answers are out of step ---------------


def test_a_server_without_rl_bridge_takes_files_and_the_acknowledgement_says_unproven(
    adapted: ServerAdapted, tmp_path: Path
) -> None:
    with RolloutExecutor(
        weight_install_adapter=VLLMAdapterFiles(adapted.engine.url, tmp_path), suspicious="off"
    ) as executor:
        for number in (1, 0, 1):
            manifest = adapted.publish(number)
            executor.update_weights(manifest)
            name = executor.lora_request("policy")
            assert name.startswith(f"policy@{manifest.weight_version}-")
            assert adapted.engine.answers(model=name) == adapted.fresh[1 + number]
            ack = executor.last_ack
            assert ack is not None
            assert (ack.proof.method, ack.proof.root) == ("unproven", "")
        with pytest.raises(UnknownUpdate):
            executor.lora_request("policy", manifest.weight_version - 2)
        # (A matrix of another width it would take, which is what "unproven" means.)
        wrong = of_rank(adapted.weights[0], 32)
        bad = adapted.publish_as(spec_of(wrong), wrong)
        with pytest.raises(WeightBridgeUnavailableError, match="answered /v1/load_lora_adapter"):
            executor.update_weights(bad)
        assert executor.adapter_version("policy") == manifest.weight_version
        assert adapted.engine.answers(model=name) == adapted.fresh[2]
        assert not list(tmp_path.glob(f"policy@{bad.weight_version}-*"))
        executor.drop_adapter("policy")
        assert is_unknown(adapted.engine, name)

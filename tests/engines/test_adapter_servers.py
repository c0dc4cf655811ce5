"""LoRA adapters of a vLLM server, by its URL: clients ask for them in the field ``model``."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.vllm.client import ServerClient
from rl_bridge.engines.vllm.endpoint import AdapterTable
from rl_bridge.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    SessionRefused,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.testing.processes import until
from rl_bridge.vllm import VLLMAdapterFiles, VLLMEngineAdapter
from tests.engines.adapter_suite import LONG_RUNS, Adapted, check_a_long_run, of_rank, spec_of
from tests.engines.drive import PROMPTS, Answers, Setting, answers, start
from tests.engines.models import Checkpoints, Kind
from tests.engines.served import DEV, Served, served
from tests.engines.test_adapters import LORA

pytestmark = pytest.mark.timeout(600)  # engines start
KIND = Kind("qwen3")


class ServerAdapted(Adapted):
    """A server, and an executor that knows its URL."""

    engine: Served

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
    with start(Setting(KIND), path, **LORA) as llm:
        asked = [None, *(LoRARequest(f"file{i}", i + 1, f) for i, f in enumerate(folders))]
        # One at a time, as the server is asked: sums depend on what is computed together.
        fresh: list[Any] = [
            tuple(answers(llm, (prompt,), lora_request=one)[0] for prompt in PROMPTS)
            for one in asked
        ]
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    setting = Setting(KIND, in_process=False, ranks=request.param)
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**DEV, "VLLM_PLUGINS": "rl_bridge", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
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
        yield ServerAdapted(server, executor, bridge, fresh, weights)


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
    assert adapted.engine.answers() == adapted.fresh[0]


def test_a_version_can_be_asked_for_until_it_is_dropped_and_is_not_found_after_that(
    adapted: ServerAdapted,
) -> None:
    first, second = adapted.update(0), adapted.update(1)
    assert adapted.engine.answers(model=f"policy@{first}") == adapted.fresh[1]
    adapted.update(0)
    adapted.update(0)
    assert adapted.engine.answers(model=f"policy@{second + 1}") == adapted.fresh[1]
    body = {"model": f"policy@{first}", "prompt": PROMPTS[0]}
    reply = adapted.engine.call("v1/completions", json=body)
    assert reply.status_code == httpx.codes.NOT_FOUND
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
    for name in ("policy", f"policy@{version}"):
        reply = adapted.engine.call("v1/completions", json={"model": name, "prompt": PROMPTS[0]})
        assert reply.status_code == httpx.codes.NOT_FOUND
    adapted.update(1)
    assert adapted.engine.answers(model="policy") == adapted.fresh[2]


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


def test_a_byte_that_changed_on_its_way_is_found_and_clients_get_the_version_before(
    adapted: ServerAdapted,
) -> None:
    version = adapted.update(0)
    manifest = adapted.publish(1)
    flip_byte(arena_address(adapted.bridge.publisher.end, manifest.update_id, manifest.handle))
    with pytest.raises(ChecksumMismatch):
        adapted.executor.update_weights(manifest)
    assert adapted.engine.answers(model="policy") == adapted.fresh[1]
    body = {"model": f"policy@{version + 1}", "prompt": PROMPTS[0]}
    reply = adapted.engine.call("v1/completions", json=body)
    assert reply.status_code == httpx.codes.NOT_FOUND


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


def test_the_next_driver_offers_what_is_resident(adapted: ServerAdapted) -> None:
    version = adapted.update(1)
    with RolloutExecutor(
        weight_install_adapter=VLLMEngineAdapter(adapted.engine.url, take_over=True)
    ) as second:
        manifest = adapted.publish(0)
        second.update_weights(manifest)
        assert adapted.engine.answers(model="policy") == adapted.fresh[1]
        assert second.lora_request("policy", version) == f"policy@{version}"
        assert adapted.engine.answers(model=f"policy@{version}") == adapted.fresh[2]
    adapted.executor.recover()


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


@pytest.mark.parametrize(("adapters", "model"), [({"policy": object()}, ""), ({}, "policy")])
def test_a_name_that_the_server_has_already_is_not_taken(
    adapters: dict[str, Any], model: str
) -> None:
    table = AdapterTable(adapters, lambda name: name == model)
    with pytest.raises(ValueError, match=r"\['policy'\]. Unload them first"):
        table.offer("policy", None, [])  # before a version is staged
    assert table.keys() == adapters.keys()


# ---- by files, last: vLLM gives them slots as it likes -------------------------------------------


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
            assert name == f"policy@{manifest.weight_version}"
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
        assert adapted.engine.answers(model=f"policy@{manifest.weight_version}") == adapted.fresh[2]
        assert not list(tmp_path.glob(f"policy@{bad.weight_version}-*"))
        executor.drop_adapter("policy")
        body = {"model": f"policy@{manifest.weight_version}", "prompt": PROMPTS[0]}
        reply = adapted.engine.call("v1/completions", json=body)
        assert reply.status_code == httpx.codes.NOT_FOUND

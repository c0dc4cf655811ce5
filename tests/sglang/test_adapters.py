"""LoRA adapters of real SGLang engines: each version answers as a fresh engine that reads files."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.engines.adapters import Resident
from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.front import acquire, offered_by
from rl_bridge.errors import (
    DeadlineExceeded,
    IncompatibleUpdate,
    SlotsExhausted,
    UnknownUpdate,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest import AdapterSpec
from rl_bridge.sglang import SGLangInstallAdapter
from rl_bridge.trainers import read_peft, write_peft
from tests.engines.adapter_suite import AdapterSuite, Breakable, cut_to_rank, spec_of
from tests.engines.models import ADAPTER, Checkpoints, Kind
from tests.sglang.bench import (
    ASK,
    CALL_S,
    PROMPTS,
    SAMPLING,
    Answers,
    Engines,
    answers_of,
    call_in_ranks,
    executor_for,
)
from tests.sglang.served import KEY, served
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import RealTrainer

LORA: dict[str, Any] = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_loras_per_batch": 4,
    "max_lora_rank": 16,
    "lora_target_modules": ADAPTER["target_modules"],
}
"""What the engines are started with; one slot is for requests without an adapter."""

pytestmark = pytest.mark.timeout(600)  # engines start
KIND = Kind("qwen3")


class SGLangAdapted(Breakable):
    """An ``Engine``."""

    folder: Path

    def asked(self, request: Any) -> Answers:
        return answers_of(self.engine, request)

    def driver(self) -> SGLangInstallAdapter:
        return SGLangInstallAdapter(self.engine, timeout_s=CALL_S)

    def plant(self, step: str, rank: int) -> None:
        self._ask({"ask": "plant", "step": step, "fault": "raises", "rank": rank})

    def damage(self, what: str) -> None:
        call_in_ranks(self.engine, {"point": what, "nth": 0, "rank": None})

    def drop_all(self) -> None:
        self.damage("drop adapters")

    def uproot(self) -> None:
        self._ask({"ask": "uproot"})
        call_in_ranks(self.engine, {"point": "", "rank": None})

    def _ask(self, what: dict[str, Any]) -> None:
        call_in_ranks(self.engine, {"text": json.dumps(what), "answer": str(self.folder)}, ASK)


@contextmanager
def adapted(
    engines: Engines, checkpoints: Checkpoints, folder: Path, ranks: int
) -> Iterator[SGLangAdapted]:
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    weights = [load_file(f"{one}/adapter_model.safetensors") for one in folders]
    weights.append(cut_to_rank(read_peft(folders[1], "policy")[1], 4))
    write_peft(str(folder / "small"), spec_of(weights[2]), weights[2])
    made = engines.start(KIND, 0, ranks, **LORA)
    fresh = [answers_of(made)]
    for number, path in enumerate([*folders, str(folder / "small")]):
        assert made.load_lora_adapter(f"file{number}", path).success
        fresh.append(answers_of(made, f"file{number}"))
    assert all(one not in fresh[:index] for index, one in enumerate(fresh))
    made = engines.start(KIND, 0, ranks, **LORA)
    with ExitStack() as stack:
        bridge = stack.enter_context(make_weight_bridge("shared-memory", suspicious="off"))
        executor = stack.enter_context(
            RolloutExecutor(
                weight_bridge=stack.enter_context(make_weight_bridge("shared-memory")),
                weight_install_adapter=SGLangInstallAdapter(made, timeout_s=CALL_S),
                suspicious="off",
            )
        )
        engine = SGLangAdapted(made, executor, bridge, fresh, weights, ranks=range(ranks))
        engine.folder = folder
        yield engine


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.full), 2],
    ids=["tp1", "tp2"],
)
def engine(
    request: pytest.FixtureRequest,
    engines: Engines,
    checkpoints: Checkpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SGLangAdapted]:
    with adapted(engines, checkpoints, tmp_path_factory.mktemp("asked"), request.param) as made:
        yield made


class TestSGLang(AdapterSuite):
    """An ``Engine``, with one rank and with two."""


def test_cached_prefixes_of_one_version_are_never_used_for_another(engine: SGLangAdapted) -> None:
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for number in (0, 1, 0, 1):
        engine.update(number)
        cached = []
        for _ in range(2):  # the second time from the cache
            (output,) = engine.engine.generate(
                input_ids=[[7] * 100], sampling_params=SAMPLING, lora_path=["policy"]
            )
            cached.append(output["meta_info"]["cached_tokens"])
            seen[number].append(output["output_ids"])
        assert not cached[0]
        assert cached[1] > 0
    assert seen[0] == seen[0][:1] * 4
    assert seen[1] == seen[1][:1] * 4
    assert seen[0] != seen[1]


def test_a_request_ends_under_the_version_that_it_began_with_and_keeps_its_slot(
    engine: SGLangAdapted,
) -> None:
    """Requests of the three versions that have room are under way, and no further one is let in."""
    tokens = {**SAMPLING, "max_new_tokens": 200}
    due = []
    for number in (0, 1):
        engine.update(number)
        due.append(ended(engine, [begun(engine, tokens)])[0])
    asked = []
    for number in (0, 1, 0):
        engine.update(number)
        asked.append(begun(engine, tokens))
    manifest = engine.publish(1)
    with pytest.raises(SlotsExhausted, match=r"4 slots, of which one is.*max_loras_per_batch"):
        engine.executor.update_weights(manifest)
    assert ended(engine, asked) == [due[0], due[1], due[0]]
    engine.executor.update_weights(manifest)  # nothing was wrong with it
    assert engine.answers() == engine.fresh[2]


def test_an_adapter_that_requests_have_still_is_dropped_when_they_have_ended(
    engine: SGLangAdapted,
) -> None:
    engine.update(0)
    client = connect(engine.engine, timeout_s=CALL_S)
    with executor_for(engine.engine, timeout_s=5.0, take_over=True) as executor:
        executor.update_weights(engine.publish(1))
        asked = begun(engine, {**SAMPLING, "max_new_tokens": 100})
        client.pause("in_place")
        with pytest.raises(DeadlineExceeded, match=r"policy@.*requests have them still"):
            executor.drop_adapter("policy")
        client.resume()
        with pytest.raises(ValueError, match="policy"):  # it is offered no more
            engine.asked("policy")
        assert len(ended(engine, [asked])[0]) == 100
        executor.drop_adapter("policy")
    engine.executor.recover()
    engine.update(1)
    assert engine.answers() == engine.fresh[2]


def test_what_sglang_s_own_call_unloaded_is_offered_no_more_and_the_next_version_lands(
    engine: SGLangAdapted,
) -> None:
    engine.update(0)
    assert engine.engine.unload_lora_adapter("policy").success
    engine.executor.recover()
    with pytest.raises(UnknownUpdate):
        engine.executor.lora_request("policy")
    engine.update(1)
    assert engine.answers() == engine.fresh[2]
    assert engine.asked("policy") == engine.fresh[2]


def test_a_version_whose_name_is_being_looked_up_counts_as_used() -> None:
    """SGLang may wait between the lookup of a name and its count."""
    from sglang.srt.lora.lora_registry import LoRARegistry

    version = Resident("policy", 7, "ab" * 16)

    async def look() -> None:
        registry = LoRARegistry()
        offered = offered_by(registry)
        await offered.offer("policy", version.label, [asdict(version)])
        async with registry._counters[version.update_id]._condition:
            asking = asyncio.create_task(acquire(LoRARegistry.acquire, registry, "policy"))
            await asyncio.wait({asking}, timeout=0.05)
            assert not asking.done()
            await offered.offer("policy", None, [])
            assert offered.used() == [version.number]
        assert await asking == version.update_id
        assert offered.used() == [version.number]
        await registry.release(version.update_id)
        assert offered.used() == []
        with pytest.raises(ValueError, match="policy"):
            await registry.acquire("policy")

    asyncio.run(look())


def begun(engine: SGLangAdapted, sampling: dict[str, Any]) -> Any:
    """A request for the active version, of which the first token is here."""

    async def begin() -> Any:
        outputs = await engine.engine.async_generate(
            input_ids=list(PROMPTS[0]),
            sampling_params=sampling,
            stream=True,
            lora_path="policy",
        )
        await anext(outputs)
        return outputs

    return engine.engine.loop.run_until_complete(begin())


def ended(engine: SGLangAdapted, requests: list[Any]) -> list[list[int]]:
    """The tokens of requests, when all have ended."""

    async def end(outputs: Any) -> list[int]:
        last: dict[str, Any] = {}
        async for output in outputs:
            last = output
        return list(last["output_ids"])

    return [engine.engine.loop.run_until_complete(end(one)) for one in requests]


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-sglang` makes"
)
def test_shards_of_a_trainer_s_ranks_reach_all_ranks_of_the_engine_and_nobody_gathers(
    engine: SGLangAdapted, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    paths = [checkpoints.path(KIND, 0), *(checkpoints.adapter(number) for number in (0, 1))]
    with (
        Elsewhere(2, tmp_path, "tests.trainers_torch.publishing", PYTHON, "peft") as ranks,
        executor_for(engine.engine, take_over=True) as executor,
    ):
        trainer = RealTrainer(ranks, "begin_adapter", paths, transport="shared-memory")
        for number in (1, 0, 1):
            manifest = trainer.publish(number)
            executor.update_weights(manifest)
            assert engine.asked(executor.lora_request("policy")) == engine.fresh[1 + number]
        assert trainer.told(manifest) >= {("sglang", rank, "released") for rank in engine.ranks}
        assert trainer.asked == []
    engine.executor.recover()


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-sglang` makes"
)
def test_tokens_are_those_of_transformers_and_peft_themselves(
    engines: Engines, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """In float32, where no two candidates are nearly as likely as each other.

    In 16 bits, or of a model whose candidates are near-ties, engines and peft sum in other orders,
    and tokens part after some steps although the adapter is right: there, they are compared with a
    fresh engine's.
    """
    base, folders = checkpoints.path(KIND, 0), [checkpoints.adapter(one) for one in (0, 1)]
    cases = "tests.trainers_torch.peft_tokens"
    with Elsewhere(1, tmp_path, cases, PYTHON, "peft") as ranks:
        ask: dict[str, Any] = {"base": base, "prompts": PROMPTS}
        ask["count"] = SAMPLING["max_new_tokens"]
        due = [ranks.ask("run", case="tokens", adapter=one, **ask)[0] for one in (None, *folders)]
    assert due[0] != due[1] != due[2]
    with adapted(engines, checkpoints, tmp_path, 1) as engine:
        assert tokens_of(engine.asked(None)) == due[0]
        for number in (0, 1, 0):
            engine.update(number)
            assert tokens_of(engine.answers()) == due[1 + number]


def tokens_of(answers: Answers) -> list[list[int]]:
    return [list(tokens) for tokens, _ in answers]


def test_adapters_stay_over_an_update_of_their_base_and_name_the_root_that_they_belong_to(
    engines: Engines, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    other = engines.start(KIND, 1, 1, **LORA)
    assert other.load_lora_adapter("file", checkpoints.adapter(0)).success
    due = answers_of(other), answers_of(other, "file")
    base = checkpoints.weights(KIND, 1)
    with (
        adapted(engines, checkpoints, tmp_path, 1) as engine,
        make_weight_bridge("shared-memory") as trainer,
    ):
        engine.update(0)
        manifest = trainer.publish(base, weight_version=1)
        engine.executor.update_weights(manifest)
        assert (engine.asked(None), engine.answers()) == due
        spec = AdapterSpec.of_peft("policy", ADAPTER, [], base_root="0" * 32)
        with pytest.raises(IncompatibleUpdate, match=f"holds root {manifest.root}"):
            engine.executor.update_weights(engine.publish_as(spec, engine.weights[1]))
        spec = AdapterSpec.of_peft("policy", ADAPTER, [], base_root=manifest.root)
        engine.executor.update_weights(engine.publish_as(spec, engine.weights[0]))
        assert engine.answers() == due[1]


def test_an_engine_without_lora_refuses_and_says_how_to_start_it(
    engines: Engines, checkpoints: Checkpoints
) -> None:
    weights = load_file(f"{checkpoints.adapter(0)}/adapter_model.safetensors")
    made = engines.start(KIND, 0, 1)
    with make_weight_bridge("shared-memory") as bridge, executor_for(made) as executor:
        manifest = bridge.publish(weights, weight_version=1, adapter=spec_of(weights))
        with pytest.raises(WeightBridgeUnavailableError, match="enable_lora=True"):
            executor.update_weights(manifest)


def test_clients_of_a_server_get_the_active_version_and_end_under_the_one_that_they_began_with(
    engines: Engines, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    engines.close()
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    weights = [load_file(f"{one}/adapter_model.safetensors") for one in folders]
    with (
        served(checkpoints.path(KIND, 0), tmp_path / "log", **LORA) as server,
        make_weight_bridge("shared-memory", suspicious="off") as bridge,
        executor_for(server.url, api_key=KEY) as executor,
    ):
        due = [server.answers()]
        for number, folder in enumerate(folders):
            name = f"file{number}"
            body = {"lora_name": name, "lora_path": folder}
            assert server.call("load_lora_adapter", json=body).json()["success"]
            due.append(server.answers(name))
            assert server.call("unload_lora_adapter", json={"lora_name": name}).json()["success"]

        def update(number: int, version: int) -> None:
            manifest = bridge.publish(
                weights[number], weight_version=version, adapter=spec_of(weights[number])
            )
            executor.update_weights(manifest)
            bridge.release(manifest.update_id)

        update(0, 1)
        assert [server.answers(), server.answers("policy")] == due[:2]
        alone = server.stream(PROMPTS[0], 200, lambda: None, "policy")["output_ids"]
        come = iter((2, 3))

        def update_twice() -> None:
            for version in come:
                update(1, version)

        last = server.stream(PROMPTS[0], 200, update_twice, "policy")
        assert last["output_ids"] == alone
        assert server.answers("policy") == due[2]
        update(0, 4)
        update(1, 5)
        wrong: dict[str, Any] = {"input_ids": PROMPTS[0], "lora_path": "policy@1"}
        assert server.call("generate", json=wrong).status_code == httpx.codes.BAD_REQUEST
        assert server.answers("policy@4") == due[1]

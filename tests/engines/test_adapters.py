"""LoRA adapters of real vLLM engines, version after version: as a fresh engine that reads files."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, make_weight_bridge
from rl_bridge.engines.vllm.endpoint import Handed
from rl_bridge.errors import (
    EngineLost,
    IncompatibleUpdate,
    SlotsExhausted,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest import AdapterSpec
from rl_bridge.trainers import read_peft, write_peft
from rl_bridge.vllm import VLLMEngineAdapter
from tests.engines.adapter_suite import AdapterSuite, Breakable, cut_to_rank, spec_of
from tests.engines.drive import (
    PROMPTS,
    Answers,
    Setting,
    answers,
    executor_for,
    greedy,
    prompts_for,
    read,
    start,
)
from tests.engines.looped import looped
from tests.engines.models import ADAPTER, Checkpoints, Kind
from tests.trainers_torch.elsewhere import PYTHON, Elsewhere
from tests.trainers_torch.publishing import RealTrainer

LORA = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16}
"""What the engines are started with; on a CPU the last slot stays empty."""

pytestmark = pytest.mark.timeout(600)  # engines start
SETTINGS = [Setting(Kind("qwen3")), Setting(Kind("qwen3"), in_process=False, ranks=2)]


class VLLMAdapted(Breakable):
    """An ``LLM``."""

    def asked(self, request: Any) -> Answers:
        return answers(self.engine, lora_request=request)

    def driver(self) -> VLLMEngineAdapter:
        return VLLMEngineAdapter(self.engine, timeout_s=60.0)

    def plant(self, step: str, rank: int) -> None:
        plant = {"ask": "plant", "step": step, "fault": "raises", "rank": rank}
        self.engine.collective_rpc("in_rank", args=(json.dumps(plant),))

    def damage(self, what: str) -> None:
        self.engine.collective_rpc("damage_slots", args=(what,))

    def drop_all(self) -> None:
        self.engine.collective_rpc("drop_adapters")

    def uproot(self) -> None:
        self.engine.collective_rpc("in_rank", args=(json.dumps({"ask": "uproot"}),))
        self.engine.collective_rpc("uproot_fault")


@contextmanager
def adapted(setting: Setting, checkpoints: Checkpoints, **options: Any) -> Iterator[VLLMAdapted]:
    from vllm.lora.request import LoRARequest

    folders = [checkpoints.adapter(number) for number in (0, 1)]
    options = {**LORA, **options}
    path = checkpoints.path(setting.kind, 0)
    with start(setting, path, **options) as llm, tempfile.TemporaryDirectory() as home:
        # One as it was saved, two as `write_peft` writes them.
        spec, tensors = read_peft(folders[1], "policy")
        small = cut_to_rank(tensors, 4)
        write_peft(f"{home}/1", spec, tensors)
        write_peft(f"{home}/2", spec_of(small), small)
        paths = [folders[0], f"{home}/1", f"{home}/2"]
        requests = [None, *(LoRARequest(f"file{i}", i + 1, p) for i, p in enumerate(paths))]
        fresh = [answers(llm, lora_request=one) for one in requests]
    assert len(set(fresh)) == 4
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    weights.append(small)
    with ExitStack() as stack:
        llm = stack.enter_context(start(setting, path, **options))
        bridge = stack.enter_context(make_weight_bridge("shared-memory", suspicious="off"))
        executor = stack.enter_context(
            RolloutExecutor(
                weight_bridge=stack.enter_context(make_weight_bridge("shared-memory")),
                weight_install_adapter=VLLMEngineAdapter(llm, timeout_s=60.0),
                suspicious="off",
            )
        )
        yield VLLMAdapted(llm, executor, bridge, fresh, weights, ranks=range(setting.ranks))


@pytest.fixture(
    scope="module",
    params=[pytest.param(SETTINGS[0], marks=pytest.mark.full), SETTINGS[1]],
    ids=str,
)
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[VLLMAdapted]:
    with adapted(request.param, checkpoints) as made:
        yield made


class TestVLLM(AdapterSuite):
    """An ``LLM``, in one process and on two ranks."""


# ---- several versions side by side ---------------------------------------------------------------


def test_a_request_ends_under_the_version_that_it_began_with(engine: VLLMAdapted) -> None:
    engine.update(0)
    began = engine.executor.lora_request("policy")
    llm = engine.engine
    assert llm.reset_prefix_cache()
    llm.enqueue(prompts_for(PROMPTS), greedy(), use_tqdm=False, lora_request=began)
    engine.update(1)
    engine.update(1)
    assert read(llm.wait_for_completion(use_tqdm=False)) == engine.fresh[1]
    assert engine.answers() == engine.fresh[2]


def test_a_version_that_requests_ask_for_is_not_dropped_however_many_come(
    engine: VLLMAdapted,
) -> None:
    engine.update(0)
    began, llm = engine.executor.lora_request("policy"), engine.engine
    llm.enqueue(prompts_for(PROMPTS), greedy(), use_tqdm=False, lora_request=began)
    engine.update(1)
    llm.enqueue(
        prompts_for(PROMPTS),
        greedy(),
        use_tqdm=False,
        lora_request=engine.executor.lora_request("policy"),
    )
    engine.update(0)
    manifest = engine.publish(1)
    with pytest.raises(SlotsExhausted, match=r"3 slots for adapters.*larger max_loras"):
        engine.executor.update_weights(manifest)
    llm.wait_for_completion(use_tqdm=False)
    engine.executor.update_weights(manifest)  # nothing was wrong with it
    assert engine.answers() == engine.fresh[2]


def test_a_version_stays_while_somebody_holds_a_request_of_it_and_goes_when_he_lets_go(
    engine: VLLMAdapted,
) -> None:
    first = engine.update(0)
    held = engine.executor.lora_request("policy")
    for number in (1, 0, 1, 0):
        engine.update(number)
        assert engine.asked(held) == engine.fresh[1]
        assert engine.answers() == engine.fresh[1 + number]
    del held
    engine.update(1)
    with pytest.raises(UnknownUpdate):
        engine.executor.lora_request("policy", first)


def test_an_update_that_finds_no_place_for_held_versions_says_so_and_lands_without_them(
    engine: VLLMAdapted,
) -> None:
    held = []
    for number in (0, 1, 0):
        engine.update(number)
        held.append(engine.executor.lora_request("policy"))
    manifest = engine.publish(1)
    with pytest.raises(SlotsExhausted) as caught:
        engine.executor.update_weights(manifest)
    assert any("somebody holds what lora_request() gave" in one for one in caught.value.__notes__)
    assert engine.asked(held.pop(0)) == engine.fresh[1]
    engine.executor.update_weights(manifest)
    assert engine.answers() == engine.fresh[2]


def test_a_request_that_is_handed_out_equals_vllm_s_own_of_its_name() -> None:
    from vllm.lora.request import LoRARequest

    handed = Handed().hand("policy@1-ab", 7, "/rl_bridge/policy/ab")
    again = Handed().hand("policy@1-ab", 7, "/rl_bridge/policy/ab")
    own, other = LoRARequest("policy@1-ab", 7, "/a"), LoRARequest("policy@2-cd", 8, "/b")
    for one in (own, again):
        assert handed == one
        assert one == handed
        assert len({one, handed}) == 1
    assert handed != other
    assert other != handed
    assert handed != "policy@1-ab"


def test_a_request_for_a_version_that_was_dropped_is_refused_and_the_engine_serves_on(
    engine: VLLMAdapted,
) -> None:
    from vllm.lora.request import LoRARequest

    engine.update(0)
    given = engine.executor.lora_request("policy")
    # As one comes out of a pickle: nobody sees that it is there.
    copied = LoRARequest(given.lora_name, given.lora_int_id, given.lora_path)
    outputs = [
        *engine.engine.generate(prompts_for(PROMPTS), greedy(), use_tqdm=False, lora_request=given)
    ]
    del given
    for number in (1, 0, 1):
        engine.update(number)
    with pytest.raises(UnknownUpdate, match=r"is not in the engine any more.*'policy@"):
        engine.asked(copied)
    assert engine.answers() == engine.fresh[2]
    assert engine.asked(None) == engine.fresh[0]
    engine.update(0)
    assert engine.answers() == engine.fresh[1]
    assert outputs[0].lora_request.lora_name == copied.lora_name


def test_a_number_that_comes_again_after_its_version_was_dropped_has_another_name(
    engine: VLLMAdapted,
) -> None:
    """Below 0.31, vLLM looks cached prefixes up by the name alone."""
    names = set()
    prompt = prompts_for([[7] * 300])
    for number in (0, 1, 0):
        with make_weight_bridge("shared-memory", suspicious="off") as bridge:
            weights = engine.weights[number]
            manifest = bridge.publish(weights, weight_version=7, adapter=spec_of(weights))
            engine.executor.update_weights(manifest)
            request = engine.executor.lora_request("policy")
            names.add(request.lora_name)
            engine.engine.enqueue(prompt, greedy(), use_tqdm=False, lora_request=request)
            (output,) = engine.engine.wait_for_completion(use_tqdm=False)
            assert not output.num_cached_tokens
            engine.executor.drop_adapter("policy")
    assert len(names) == 3


def test_cached_prefixes_of_one_version_are_never_used_for_another(engine: VLLMAdapted) -> None:
    prompt = prompts_for([[7] * 300])
    seen: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for number in (0, 1, 0, 1):
        engine.update(number)
        request = engine.executor.lora_request("policy")
        cached = []
        for _ in range(2):  # the second time from the cache
            engine.engine.enqueue(prompt, greedy(), use_tqdm=False, lora_request=request)
            (output,) = engine.engine.wait_for_completion(use_tqdm=False)
            cached.append(output.num_cached_tokens)
            seen[number].add(tuple(output.outputs[0].token_ids))
        assert not cached[0]
        assert cached[1] > 0
    assert [len(one) for one in seen.values()] == [1, 1]
    assert seen[0] != seen[1]


@pytest.mark.full  # an engine starts
def test_adapters_of_several_names_are_streams_of_their_own(checkpoints: Checkpoints) -> None:
    with adapted(SETTINGS[0], checkpoints, max_loras=6) as engine:
        engine.update(0, name="left")
        right = engine.update(1, name="right")
        for number in (1, 0, 1):
            engine.update(number, name="left")
            assert engine.answers("left") == engine.fresh[1 + number]
            assert engine.answers("right") == engine.fresh[2]
        assert engine.executor.adapter_version("right") == right


def test_requests_of_a_serving_engine_go_on_while_versions_come_and_end_under_their_own(
    checkpoints: Checkpoints,
) -> None:
    from vllm.lora.request import LoRARequest

    setting = Setting(Kind("qwen3"), in_process=False)
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    spec = AdapterSpec.of_peft("policy", ADAPTER, [])
    with (
        looped(setting, checkpoints.path(setting.kind, 0), **LORA) as engine,
        make_weight_bridge("shared-memory", suspicious="off") as bridge,
        executor_for(engine.llm, loop=engine.loop) as executor,
    ):
        alone, running = [], []
        for version in range(6):
            manifest = bridge.publish(weights[version % 2], weight_version=version, adapter=spec)
            executor.update_weights(manifest)
            bridge.release(manifest.update_id)
            request = executor.lora_request("policy")
            if version < 2:
                alone.append(engine.answers(PROMPTS[:1], tokens=120, lora_request=request))
            else:
                running.append(engine.ask(PROMPTS[0], 120, lora_request=request))
                running[-1].reach(2)
            if len(running) > 1:  # there are three places
                assert read([running.pop(0).result()]) == alone[(version - 1) % 2]
            if not version:
                late = LoRARequest(request.lora_name, request.lora_int_id, request.lora_path)
        assert read([running.pop().result()]) == alone[1]
        assert alone[0] != alone[1]
        with pytest.raises(UnknownUpdate, match="is not in the engine any more"):
            engine.answers(PROMPTS[:1], lora_request=late)


@pytest.mark.full  # an engine starts
def test_a_serving_engine_keeps_versions_that_are_held_and_refuses_requests_for_dropped_ones(
    checkpoints: Checkpoints,
) -> None:
    from vllm.lora.request import LoRARequest

    setting = Setting(Kind("qwen3"), in_process=False)
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
    spec = AdapterSpec.of_peft("policy", ADAPTER, [])
    with (
        looped(setting, checkpoints.path(setting.kind, 0), **LORA) as engine,
        make_weight_bridge("shared-memory", suspicious="off") as bridge,
        executor_for(engine.llm, loop=engine.loop) as executor,
    ):
        due, held = [], list[Any]()
        for version in range(6):
            manifest = bridge.publish(weights[version % 2], weight_version=version, adapter=spec)
            executor.update_weights(manifest)
            bridge.release(manifest.update_id)
            request = executor.lora_request("policy")
            due.append(engine.answers(PROMPTS[:1], lora_request=request))
            held = held or [request]
            del request
            assert engine.answers(PROMPTS[:1], lora_request=held[0]) == due[0]
        assert due[4:] == due[:2]
        assert due[0] != due[1]
        given = held.pop()
        copied = LoRARequest(given.lora_name, given.lora_int_id, given.lora_path)
        del given
        manifest = bridge.publish(weights[0], weight_version=6, adapter=spec)
        executor.update_weights(manifest)
        with pytest.raises(UnknownUpdate, match="is not in the engine any more"):
            engine.answers(PROMPTS[:1], lora_request=copied)
        request = executor.lora_request("policy")
        assert engine.answers(PROMPTS[:1], lora_request=request) == due[0]


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-engines` makes"
)
@pytest.mark.parametrize(
    ("carrier", "size"),
    [("nixl", 4), pytest.param("shared-memory", 2, marks=pytest.mark.full)],
)
def test_shards_of_a_trainer_s_ranks_reach_all_ranks_of_the_engine_and_nobody_gathers(
    engine: VLLMAdapted, checkpoints: Checkpoints, tmp_path: Path, carrier: str, size: int
) -> None:
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    paths = [checkpoints.path(SETTINGS[0].kind, 0), *folders]
    with (
        Elsewhere(size, tmp_path, "tests.trainers_torch.publishing", PYTHON, "peft") as ranks,
        RolloutExecutor(
            weight_transport=carrier,
            weight_install_adapter=VLLMEngineAdapter(engine.engine, timeout_s=60.0, take_over=True),
        ) as executor,
    ):
        trainer = RealTrainer(ranks, "begin_adapter", paths, transport=carrier)
        for number in (1, 0, 1):
            manifest = trainer.publish(number)
            executor.update_weights(manifest)
            got = answers(engine.engine, lora_request=executor.lora_request("policy"))
            assert got == engine.fresh[1 + number]
        assert trainer.told(manifest) >= {("vllm", rank, "released") for rank in engine.ranks}
        assert trainer.asked == []
    engine.executor.recover()


# ---- the base below ------------------------------------------------------------------------------


def test_adapters_stay_over_an_update_of_their_base(
    checkpoints: Checkpoints,
) -> None:
    from vllm.lora.request import LoRARequest

    setting = SETTINGS[0]
    paths = [checkpoints.path(setting.kind, number) for number in (0, 1)]
    folder = checkpoints.adapter(0)
    with start(setting, paths[1], **LORA) as llm:
        other = answers(llm, lora_request=LoRARequest("file", 1, folder))
    base = load_file(f"{paths[1]}/model.safetensors")
    with adapted(setting, checkpoints) as engine, make_weight_bridge("shared-memory") as trainer:
        engine.update(0)
        manifest = trainer.publish(base, weight_version=1)
        engine.executor.update_weights(manifest)
        assert engine.answers() == other
        assert engine.executor.active_weight_version == 1


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-engines` makes"
)
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "within"])
def test_a_rank_of_the_trainer_that_dies_while_it_is_read_costs_no_more_than_its_version(
    engine: VLLMAdapted, checkpoints: Checkpoints, tmp_path: Path, when: str
) -> None:
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    paths = [checkpoints.path(SETTINGS[0].kind, 0), *folders]
    llm = engine.engine
    with (
        Elsewhere(2, tmp_path, "tests.trainers_torch.publishing", PYTHON, "peft") as ranks,
        RolloutExecutor(
            weight_transport="nixl",
            weight_install_adapter=VLLMEngineAdapter(llm, timeout_s=60.0, take_over=True),
        ) as executor,
    ):
        trainer = RealTrainer(ranks, "begin_adapter", paths, transport="nixl")
        first = trainer.publish(0)
        executor.update_weights(first)
        manifest, holds = trainer.publish(1), 0
        llm.collective_rpc("kill_in_import", args=(trainer.pids[1], when, 0))
        try:
            executor.update_weights(manifest)
            holds = 1  # each rank had read and verified all of it by then
        except WeightBridgeError:
            assert executor.adapter_version("policy") == first.weight_version
        assert not (holds and when == "before")
        llm.collective_rpc("uproot_fault")
        trainer.end()
        got = answers(llm, lora_request=executor.lora_request("policy"))
        assert got == engine.fresh[1 + holds]
        executor.update_weights(trainer.publish(1 - holds))
        got = answers(llm, lora_request=executor.lora_request("policy"))
        assert got == engine.fresh[2 - holds]
    engine.executor.recover()


@pytest.mark.full  # an engine starts
def test_a_worker_that_is_killed_while_it_stages_is_a_typed_error_and_no_version_is_claimed(
    checkpoints: Checkpoints,
) -> None:
    setting = SETTINGS[1]
    weights = [
        load_file(f"{checkpoints.adapter(number)}/adapter_model.safetensors") for number in (0, 1)
    ]
    with (
        start(setting, checkpoints.path(setting.kind, 0), **LORA) as llm,
        make_weight_bridge("shared-memory", suspicious="off") as bridge,
        RolloutExecutor(weight_install_adapter=VLLMEngineAdapter(llm, timeout_s=60.0)) as executor,
    ):
        spec = AdapterSpec.of_peft("policy", ADAPTER, [])
        executor.update_weights(bridge.publish(weights[0], weight_version=1, adapter=spec))
        plant = {"ask": "plant", "step": "prepare", "fault": "dies", "rank": 1}
        llm.collective_rpc("in_rank", args=(json.dumps(plant),))
        manifest = bridge.publish(weights[1], weight_version=2, adapter=spec)
        with pytest.raises(EngineLost, match="Start a fresh engine"):
            executor.update_weights(manifest)
        assert executor.adapter_version("policy") is None
        with pytest.raises(EngineLost):
            executor.recover()
        assert executor.adapter_version("policy") is None


def test_an_engine_without_lora_refuses_and_says_how_to_start_it(checkpoints: Checkpoints) -> None:
    setting = SETTINGS[0]
    weights = load_file(f"{checkpoints.adapter(0)}/adapter_model.safetensors")
    with (
        start(setting, checkpoints.path(setting.kind, 0)) as llm,
        make_weight_bridge("shared-memory") as bridge,
        RolloutExecutor(weight_install_adapter=VLLMEngineAdapter(llm)) as executor,
    ):
        spec = AdapterSpec.of_peft("policy", ADAPTER, [])
        manifest = bridge.publish(weights, weight_version=1, adapter=spec)
        with pytest.raises(WeightBridgeUnavailableError, match="enable_lora=True"):
            executor.update_weights(manifest)
        reloads = VLLMEngineAdapter(llm, staging="reload")
        with pytest.raises(IncompatibleUpdate, match=r"vLLM drops all adapters.*merged=True"):
            reloads.for_adapter("policy")

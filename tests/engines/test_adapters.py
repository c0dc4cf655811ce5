"""LoRA adapters of real vLLM engines, version after version: as a fresh engine that reads files."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_bridge import RolloutExecutor, TensorBridge, WeightUpdateManifest, make_weight_bridge
from rl_bridge.errors import (
    ChecksumMismatch,
    IncompatibleUpdate,
    SessionRefused,
    SlotsExhausted,
    UnknownUpdate,
    WeightBridgeError,
    WeightBridgeUnavailableError,
)
from rl_bridge.manifest import AdapterSpec
from rl_bridge.testing.faults import arena_address, flip_byte
from rl_bridge.trainers import read_peft, write_peft
from rl_bridge.vllm import VLLMEngineAdapter
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


@dataclass
class Adapted:
    """An engine, a trainer's bridge, and what a fresh engine answers with each adapter."""

    llm: Any
    executor: RolloutExecutor
    bridge: TensorBridge
    fresh: list[Answers]
    """With no adapter, and with each of the two."""
    weights: list[dict[str, torch.Tensor]]
    ranks: range
    count: int = 0
    manifests: list[WeightUpdateManifest] = field(default_factory=list)

    def publish(
        self,
        number: int,
        changes: Mapping[str, torch.Tensor] | None = None,
        *,
        name: str = "policy",
    ) -> WeightUpdateManifest:
        spec = AdapterSpec.of_peft(name, ADAPTER, [])
        return self.publish_as(spec, {**self.weights[number], **(changes or {})})

    def publish_as(
        self, spec: AdapterSpec, weights: Mapping[str, torch.Tensor]
    ) -> WeightUpdateManifest:
        for earlier in self.manifests[-1:]:
            self.bridge.release(earlier.update_id)
        self.count += 1
        manifest = self.bridge.publish(weights, weight_version=self.count, adapter=spec)
        self.manifests = [*self.manifests[-1:], manifest]
        return manifest

    def update(self, number: int, *, name: str = "policy") -> int:
        manifest = self.publish(number, name=name)
        self.executor.update_weights(manifest)
        return manifest.weight_version

    def answers(self, name: str = "policy", version: int | None = None) -> Answers:
        return answers(self.llm, lora_request=self.executor.lora_request(name, version))


@contextmanager
def adapted(setting: Setting, checkpoints: Checkpoints, **options: Any) -> Iterator[Adapted]:
    from vllm.lora.request import LoRARequest

    folders = [checkpoints.adapter(number) for number in (0, 1)]
    options = {**LORA, **options}
    path = checkpoints.path(setting.kind, 0)
    with start(setting, path, **options) as llm, tempfile.TemporaryDirectory() as home:
        # One as it was saved, one as `write_peft` writes it.
        write_peft(f"{home}/1", *read_peft(folders[1], "policy"))
        paths = [folders[0], f"{home}/1"]
        requests = [None, *(LoRARequest(f"file{i}", i + 1, p) for i, p in enumerate(paths))]
        fresh = [answers(llm, lora_request=one) for one in requests]
    assert len(set(fresh)) == 3
    weights = [load_file(f"{folder}/adapter_model.safetensors") for folder in folders]
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
        yield Adapted(llm, executor, bridge, fresh, weights, range(setting.ranks))


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def engine(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Adapted]:
    with adapted(request.param, checkpoints) as made:
        yield made


def test_every_version_answers_as_a_fresh_engine_that_read_it_from_files(engine: Adapted) -> None:
    for number in (0, 1, 0, 1):
        version = engine.update(number)
        assert engine.answers() == engine.fresh[1 + number]
        assert answers(engine.llm) == engine.fresh[0]
        assert engine.executor.adapter_version("policy") == version
        ack = engine.executor.last_ack
        assert ack is not None
        assert (ack.weight_version, ack.proof.method, ack.proof.root) == (
            version,
            "digest",
            engine.manifests[-1].root,
        )
    assert engine.executor.active_weight_version is None  # of the engine's own weights


def held() -> dict[int, tuple[int, int]]:
    """Of this process and all below it: descriptors, and resident memory of its own in KiB."""
    found, left = {}, [os.getpid()]
    while left:
        pid = left.pop()
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        left += [int(child) for path in lists for child in path.read_text().split()]
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["RssAnon"].split()[0])
    return found


@pytest.mark.parametrize("updates", [60, pytest.param(1000, marks=pytest.mark.full)])
def test_a_long_run_leaves_as_much_memory_and_as_many_descriptors_as_it_found(
    engine: Adapted, updates: int
) -> None:
    for number in range(updates // 3):
        engine.update(number % 2)
        assert engine.answers() == engine.fresh[1 + number % 2]
    before, names = held(), set(Path("/dev/shm").iterdir())
    # Without a request: the first one in each block of keys and values takes memory for good.
    for number in range(updates):
        engine.update(number % 2)
    after = held()
    grown = {
        pid: (after[pid][0] - descriptors, (after[pid][1] - memory) >> 10)
        for pid, (descriptors, memory) in before.items()
    }
    assert all(more == 0 and mib < 4 for more, mib in grown.values()), grown
    assert len(set(Path("/dev/shm").iterdir()) - names) <= 1  # the serving version has its own
    assert engine.answers() == engine.fresh[1 + (updates - 1) % 2]
    engine.executor.lora_request("policy", engine.count - 1)  # the one before, and no older one
    with pytest.raises(UnknownUpdate):
        engine.executor.lora_request("policy", engine.count - 2)


# ---- several versions side by side ---------------------------------------------------------------


def test_a_request_ends_under_the_version_that_it_began_with(engine: Adapted) -> None:
    engine.update(0)
    began = engine.executor.lora_request("policy")
    llm = engine.llm
    assert llm.reset_prefix_cache()
    llm.enqueue(prompts_for(PROMPTS), greedy(), use_tqdm=False, lora_request=began)
    engine.update(1)
    engine.update(1)
    assert read(llm.wait_for_completion(use_tqdm=False)) == engine.fresh[1]
    assert engine.answers() == engine.fresh[2]


def test_a_version_that_requests_ask_for_is_not_dropped_however_many_come(
    engine: Adapted,
) -> None:
    engine.update(0)
    began, llm = engine.executor.lora_request("policy"), engine.llm
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


def test_the_version_before_can_be_asked_for_and_older_ones_are_refused_by_name(
    engine: Adapted,
) -> None:
    first, second, third = engine.update(0), engine.update(1), engine.update(0)
    assert engine.answers(version=second) == engine.fresh[2]
    assert engine.answers(version=third) == engine.fresh[1]
    with pytest.raises(UnknownUpdate, match=rf"version {first} of adapter 'policy'.*{third}"):
        engine.executor.lora_request("policy", first)


def test_cached_prefixes_of_one_version_are_never_used_for_another(engine: Adapted) -> None:
    prompt = prompts_for([[7] * 300])
    seen: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for number in (0, 1, 0, 1):
        engine.update(number)
        request = engine.executor.lora_request("policy")
        cached = []
        for _ in range(2):  # the second time from the cache
            engine.llm.enqueue(prompt, greedy(), use_tqdm=False, lora_request=request)
            (output,) = engine.llm.wait_for_completion(use_tqdm=False)
            cached.append(output.num_cached_tokens)
            seen[number].add(tuple(output.outputs[0].token_ids))
        assert not cached[0]
        assert cached[1] > 0
    assert [len(one) for one in seen.values()] == [1, 1]
    assert seen[0] != seen[1]


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
                alone.append(engine.answers(PROMPTS[:1], tokens=300, lora_request=request))
            else:
                running.append(engine.ask(PROMPTS[0], 300, lora_request=request))
                running[-1].reach(2)
            if len(running) > 1:  # there are three places
                assert read([running.pop(0).result()]) == alone[(version - 1) % 2]
        assert read([running.pop().result()]) == alone[1]
        assert alone[0] != alone[1]


@pytest.mark.skipif(
    not Path(PYTHON).exists(), reason=f"needs {PYTHON}, which `make test-engines` makes"
)
@pytest.mark.parametrize(
    ("carrier", "size"),
    [("nixl", 4), pytest.param("shared-memory", 2, marks=pytest.mark.full)],
)
def test_shards_of_a_trainer_s_ranks_reach_all_ranks_of_the_engine_and_nobody_gathers(
    engine: Adapted, checkpoints: Checkpoints, tmp_path: Path, carrier: str, size: int
) -> None:
    folders = [checkpoints.adapter(number) for number in (0, 1)]
    paths = [checkpoints.path(SETTINGS[0].kind, 0), *folders]
    with (
        Elsewhere(size, tmp_path, "tests.trainers_torch.publishing", PYTHON, "peft") as ranks,
        RolloutExecutor(
            weight_transport=carrier,
            weight_install_adapter=VLLMEngineAdapter(engine.llm, timeout_s=60.0, take_over=True),
        ) as executor,
    ):
        trainer = RealTrainer(ranks, "begin_adapter", paths, transport=carrier)
        for number in (1, 0, 1):
            manifest = trainer.publish(number)
            executor.update_weights(manifest)
            got = answers(engine.llm, lora_request=executor.lora_request("policy"))
            assert got == engine.fresh[1 + number]
        assert trainer.told(manifest) >= {("vllm", rank, "released") for rank in engine.ranks}
        assert trainer.asked == []
    engine.executor.recover()


# ---- what is refused, and what fails -------------------------------------------------------------


def some_name(engine: Adapted, end: str) -> str:
    return next(name for name in engine.weights[0] if name.endswith(end))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_proj.lora_B.weight": float("nan")}, r"lora_B\.weight'.*are NaN or Inf"),
        ({"q_proj.lora_A.weight": (8, 129)}, r"lora_A\.weight'.*expected 128 in dimension 1"),
        ({"o_proj.lora_B.weight": (64, 8)}, r"lora_B\.weight'.*expected 128 in dimension 0"),
    ],
)
def test_tensors_that_the_engine_cannot_serve_are_refused_by_name(
    engine: Adapted, changes: dict[str, Any], message: str
) -> None:
    engine.update(0)
    wrong = {}
    for end, value in changes.items():
        name = some_name(engine, end)
        is_shape = isinstance(value, tuple)
        wrong[name] = torch.ones(value) if is_shape else engine.weights[0][name] * value
    with pytest.raises(IncompatibleUpdate, match=message):
        engine.executor.update_weights(engine.publish(1, wrong))
    assert engine.answers() == engine.fresh[1]


def renamed(weights: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): one for name, one in weights.items()}


def of_rank(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(
            *((rank, one.shape[1]) if "lora_A" in name else (one.shape[0], rank)), dtype=one.dtype
        )
        for name, one in weights.items()
    }


def test_an_adapter_that_the_engine_was_not_started_for_is_refused_by_name(
    engine: Adapted,
) -> None:
    engine.update(0)
    weights = engine.weights[1]
    saved = weights | {"base_model.model.lm_head.weight": torch.ones(2, 2)}
    cases: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
        (renamed(weights, "q_proj", "w_pack"), {}, r"w_pack'.*it adapts .*'q_proj'"),
        (of_rank(weights, 32), {}, r"rank 32.*max_lora_rank=32"),
        (saved, {}, r"tensors beside its pairs.*lm_head\.weight"),
        (weights, {"use_dora": True}, r"use_dora=True, expected plain LoRA"),
        (weights, {"alora_invocation_tokens": [3]}, r"alora_invocation_tokens"),
        (weights, {"init_lora_weights": "pissa_niter_4"}, r"changes the trainer's base.*base_root"),
    ]
    for wrong, config, message in cases:
        spec = AdapterSpec.of_peft("policy", {**ADAPTER, **config}, [])
        with pytest.raises(IncompatibleUpdate, match=message):
            engine.executor.update_weights(engine.publish_as(spec, wrong))
    assert engine.answers() == engine.fresh[1]


@pytest.mark.parametrize("step", ["prepare", "install", "prove", "commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_at_any_step_on_any_rank_leaves_the_version_before(
    engine: Adapted, step: str, rank: int
) -> None:
    if rank not in engine.ranks:
        pytest.skip("the engine has one rank")
    before = engine.update(0)
    plant = {"ask": "plant", "step": step, "fault": "raises", "rank": rank}
    engine.llm.collective_rpc("in_rank", args=(json.dumps(plant),))
    manifest = engine.publish(1)
    try:
        if step == "commit":  # proven on all ranks: forward is the only way
            engine.executor.update_weights(manifest)
            assert engine.executor.adapter_version("policy") == manifest.weight_version
            assert engine.answers() == engine.fresh[2]
        else:
            with pytest.raises(WeightBridgeError, match="planted in a rank"):
                engine.executor.update_weights(manifest)
            assert engine.executor.adapter_version("policy") == before
            assert engine.answers() == engine.fresh[1]
    finally:
        engine.llm.collective_rpc("in_rank", args=(json.dumps({"ask": "uproot"}),))
    engine.update(1)
    assert engine.answers() == engine.fresh[2]


@pytest.mark.parametrize(
    "what",
    [
        # unsloth-zoo #941: gate's adapter in the place of up's
        "swap gate and up",
        # SkyRL #2250: B scaled once more each time that it is put into a slot
        "scale B twice",
        # of an earlier version in the same slot, which had a larger rank
        "leave what was behind the rank",
        # the slot of another version
        "leave the slot empty",
        # an adapter that vLLM has dropped
        "drop it",
    ],
)
def test_a_slot_that_holds_anything_else_is_never_acknowledged(engine: Adapted, what: str) -> None:
    engine.update(0)
    engine.llm.collective_rpc("damage_slots", args=(what,))
    try:
        with pytest.raises(WeightBridgeError, match=r"is not what was published|is in no slot"):
            engine.executor.update_weights(engine.publish(1))
    finally:
        engine.llm.collective_rpc("uproot_fault")
    assert engine.answers() == engine.fresh[1]
    engine.update(1)
    assert engine.answers() == engine.fresh[2]


def test_a_byte_that_changed_on_its_way_is_found_and_the_version_before_serves(
    engine: Adapted,
) -> None:
    engine.update(0)
    manifest = engine.publish(1)
    flip_byte(arena_address(engine.bridge.publisher.end, manifest.update_id, manifest.handle))
    with pytest.raises(ChecksumMismatch):
        engine.executor.update_weights(manifest)
    assert engine.answers() == engine.fresh[1]


def test_a_second_driver_is_refused_by_name_and_takes_over_what_is_resident(
    engine: Adapted,
) -> None:
    version = engine.update(0)
    with RolloutExecutor(
        weight_transport="shared-memory",
        weight_install_adapter=VLLMEngineAdapter(engine.llm, timeout_s=60.0),
    ) as second:
        with pytest.raises(SessionRefused, match="one driver at a time"):
            second.update_weights(engine.publish(1))
        second.recover()
        second.update_weights(engine.publish(1))
        assert answers(engine.llm, lora_request=second.lora_request("policy")) == engine.fresh[2]
        assert second.lora_request("policy", version).lora_name == f"policy@{version}"
    engine.executor.recover()
    engine.update(0)
    assert engine.answers() == engine.fresh[1]


def test_what_something_else_dropped_is_not_asked_for_and_the_next_version_lands(
    engine: Adapted,
) -> None:
    engine.update(0)
    engine.llm.collective_rpc("drop_adapters")
    engine.executor.recover()
    with pytest.raises(
        UnknownUpdate, match=r"any version of adapter 'policy', expected one of \[\]"
    ):
        engine.executor.lora_request("policy")
    engine.update(1)
    assert engine.answers() == engine.fresh[2]


# ---- the base below ------------------------------------------------------------------------------


def test_adapters_stay_over_an_update_of_their_base_and_name_the_root_that_they_belong_to(
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
        spec = AdapterSpec.of_peft("policy", ADAPTER, [], base_root="0" * 32)
        wrong = engine.publish_as(spec, engine.weights[1])
        with pytest.raises(
            IncompatibleUpdate, match=f"root {'0' * 32}.*holds root {manifest.root}"
        ):
            engine.executor.update_weights(wrong)
        spec = AdapterSpec.of_peft("policy", ADAPTER, [], base_root=manifest.root)
        right = engine.publish_as(spec, engine.weights[0])
        engine.executor.update_weights(right)
        assert engine.answers() == other


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

"""Versions that are written into the memory that serves: the same answers, proof and way back."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from rl_bridge import RolloutExecutor, WeightUpdateRejectedError, make_weight_bridge
from rl_bridge.engines.load_plan import LoadPlan
from rl_bridge.engines.model_installer import layers_of
from rl_bridge.engines.vllm.model_installer import VLLMModelInstaller
from rl_bridge.errors import IncompatibleUpdate, ProofFailed, TornEngine
from tests.engines.drive import Setting, executor_for, model_of
from tests.engines.engines import Bench, bench
from tests.engines.faults import plant, uproot
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References
from tests.peaks import peak_nbytes

KINDS = [
    Kind("qwen3", tied=True),
    pytest.param(Kind("qwen2", dtype="bfloat16"), marks=pytest.mark.full),
    Kind("moe"),
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References
) -> Iterator[Bench]:
    with bench(Setting(request.param), checkpoints, references) as made:
        yield made


@contextmanager
def through(engine: Bench, **options: Any) -> Iterator[RolloutExecutor]:
    options = {"staging": "through", **options}
    with executor_for(engine.llm, **options) as executor:
        engine.executor = executor
        yield executor
    uproot()


def test_versions_that_take_turns_answer_as_fresh_engines(engine: Bench) -> None:
    with through(engine) as executor:
        for turn in range(3):
            manifest = engine.update()
            engine.check(f"update {turn}")
            ack = executor.last_ack
            assert ack is not None
            assert (ack.proof.root, ack.proof.staging) == (manifest.root, "through")
            assert ack.proof.method == "digest+canary"


@pytest.mark.parametrize(
    ("point", "updates"),
    [
        pytest.param("layer", 0, id="layer-the first"),
        *(
            pytest.param(point, 1, id=f"{point}-later")
            for point in ("layer", "half a layer", "process", "pack")
        ),
        *(
            pytest.param(point, 0, id=f"{point}-the first", marks=pytest.mark.full)
            for point in ("half a layer", "process", "pack")
        ),
    ],
)
def test_a_fault_at_every_layer_is_undone(engine: Bench, point: str, updates: int) -> None:
    for nth in itertools.count():
        assert nth < 200
        with through(engine):  # anew: nothing is known of what serves
            for _ in range(updates):
                engine.update()
            plant(point, nth)
            try:
                engine.update()
            except WeightUpdateRejectedError:
                uproot()
                engine.check(f"{point} {nth}")
                engine.update()
                engine.check(f"behind {point} {nth}")
                continue
            engine.check("no fault")
        assert nth > 2
        return


@pytest.mark.parametrize("point", ["layer", "pack"])
def test_requests_under_way_do_not_notice_an_update_that_fails(engine: Bench, point: str) -> None:
    with through(engine):
        engine.update()
        for nth in range(3):
            assert engine.llm.reset_prefix_cache()
            ids = engine.begin(f"{point}{nth}", steps=7)
            plant(point, nth)
            with pytest.raises(WeightUpdateRejectedError):
                engine.update()
            uproot()
            assert engine.rest(ids) == engine.fresh[engine.holds]


def test_requests_go_on_over_an_update(engine: Bench) -> None:
    with through(engine):
        engine.update()
        ids = engine.begin("over", steps=7)
        engine.update()
        assert len(engine.finish(ids)) == len(ids)
        engine.check("behind requests")


# ---- proof --------------------------------------------------------------------------------------


@pytest.mark.parametrize("goes_bad", ["the next version", "the one before"])
def test_a_weight_that_goes_bad_before_it_is_packed_is_not_proven(
    engine: Bench, goes_bad: str
) -> None:
    """A pack cannot be read: what it was made of is."""
    model, config = model_of(engine.llm), engine.llm.llm_engine.vllm_config
    installer = VLLMModelInstaller(model, config, staging="through")
    with make_weight_bridge("local-clone") as bridge:
        first = bridge.publish(engine.next(), weight_version=1)
        before = bridge.import_update(first)
        installer.prepare(first, before)
        lent = sorted(installer._evidence._lent())  # type: ignore[union-attr]
        installer.install(first, before)
        installer.prove()
        installer.commit()
        engine.holds = 1 - engine.holds
        manifest = bridge.publish(engine.next(), weight_version=2)
        tensors = bridge.import_update(manifest)
        installer.prepare(manifest, tensors)
        if not lent:
            pytest.skip("nothing of this model is packed right out of an update")
        changed = (tensors if goes_bad == "the next version" else before)[lent[-1]].view(-1)
        kept = changed.clone()
        changed[3] += 1
        installer.install(manifest, tensors)
        if goes_bad == "the next version":
            with pytest.raises(ProofFailed, match=f"tensor '{lent[-1]}' went bad"):
                installer.prove()
        else:
            with pytest.raises(TornEngine, match=f"tensor '{lent[-1]}' went bad"):
                installer.undo()
            changed.copy_(kept)
        installer.undo()
    engine.check("undone")


# ---- memory -------------------------------------------------------------------------------------


def let_torch_count_packs(patch: pytest.MonkeyPatch) -> None:
    """Give each pack a tensor of its size, for as long: oneDNN takes its memory past torch."""
    from vllm import _custom_ops as ops

    create: Callable[..., Any] = ops.create_onednn_mm

    def counted(weight: Any, *given: Any) -> Any:
        made = create(weight, *given)
        made.counted = torch.empty(weight.nbytes, dtype=torch.uint8)
        return made

    patch.setattr(ops, "create_onednn_mm", counted)


def largest_layer(plan: LoadPlan) -> int:
    return max(
        sum(plan.targets[i].nbytes for group in groups for i in group)
        for groups in layers_of(plan).values()
    )


def install_twice(installer: VLLMModelInstaller, manifest: Any, tensors: Any) -> None:
    installer.prepare(manifest, tensors)
    installer.install(manifest, tensors)
    installer.undo()
    installer.prepare(manifest, tensors)
    installer.install(manifest, tensors)


def test_one_layer_is_made_at_a_time(engine: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    let_torch_count_packs(monkeypatch)
    model, config = model_of(engine.llm), engine.llm.llm_engine.vllm_config
    installer = VLLMModelInstaller(model, config, staging="through")
    with make_weight_bridge("shared-memory", source_worker="reader") as bridge:
        for turn in range(3):
            manifest = engine.trainer.publish(engine.next())
            tensors = bridge.import_update(manifest)

            update = partial(install_twice, installer, manifest, tensors)
            peak = peak_nbytes(update)
            assert installer.prove().root == manifest.root
            installer.commit()
            bridge.release_imported(manifest.update_id)
            engine.holds = 1 - engine.holds
            if turn > 1:  # each pack is one that is counted, and nothing is copied any more
                plan = next(iter(installer._plans.values()))
                assert peak < 1.1 * largest_layer(plan)
    engine.check("memory")


def test_a_budget_that_is_too_small_for_both_says_what_each_takes(engine: Bench) -> None:
    both = r"staging it beside .* takes \d+ bytes more, .*; writing it through .* takes \d+ bytes"
    with through(engine, staging=None, memory_budget_nbytes=1) as executor:
        with pytest.raises(IncompatibleUpdate, match=both):
            executor.update_weights(engine.trainer.publish(engine.next()))
        engine.check("refused")

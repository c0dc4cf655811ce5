"""More traps, with engines of their own: packed experts, and adapters over a base that changes."""

from tests.engines.drive import Setting, answers, start
from tests.engines.engines import bench
from tests.engines.models import Checkpoints, Kind
from tests.engines.references import References


def test_packed_experts_are_right_where_vllms_own_reload_is_wrong(
    checkpoints: Checkpoints, references: References
) -> None:
    setting = Setting(Kind("moe", dtype="bfloat16"))
    with bench(setting, checkpoints, references) as moe:
        moe.update()
        moe.check("updated")
        path = checkpoints.path(setting.kind, 1 - moe.holds)
        moe.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        assert moe.answers() not in moe.fresh  # loaded, and not packed
        for by in ("executor", "vLLM's calls", "executor"):
            moe.update(by)
            moe.check(f"updated by {by} after the reload")


def test_adapters_stay_over_updates_of_their_base(
    checkpoints: Checkpoints, references: References
) -> None:
    from vllm.lora.request import LoRARequest

    kind = Kind("qwen3")
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    adapters = [LoRARequest(f"a{i}", i + 1, checkpoints.adapter(i)) for i in (0, 1)]
    paths = [checkpoints.path(kind, version) for version in (0, 1)]
    with start(Setting(kind), paths[1], **options) as llm:
        fresh = [answers(llm), *(answers(llm, lora_request=one) for one in adapters)]
    with bench(Setting(kind), checkpoints, references, **options) as based:
        first = [based.answers(), *(answers(based.llm, lora_request=one) for one in adapters)]
        assert len({*fresh, *first}) == 6
        for by in ("executor", "vLLM's calls"):
            for expected in (fresh, first):
                based.update(by)
                assert answers(based.llm) == expected[0], by
                for one, adapted in zip(adapters, expected[1:], strict=True):
                    assert answers(based.llm, lora_request=one) == adapted, (by, one.lora_name)

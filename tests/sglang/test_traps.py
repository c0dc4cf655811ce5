"""Traps of SGLang's own routes, each by its name."""

from typing import Any

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError, WeightUpdateRejectedError
from rl_bridge.engines.sglang.client import connect
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.loaders import DistributedRoute, RouteName
from rl_bridge.errors import IncompatibleUpdate, SessionRefused
from tests.sglang.bench import CALL_S, Bench, executor_for, sums_of

QKV = "model.layers.0.self_attn.{}_proj.weight"


def refused(bench: Bench, weights: dict[str, torch.Tensor], match: str, **options: Any) -> None:
    """The update is refused, and nothing of the engine was touched."""
    with executor_for(bench.engine, **options) as executor:
        with pytest.raises(IncompatibleUpdate, match=match):
            executor.update_weights(bench.trainer.publish(weights))
        bench.check(match)


def test_a_second_session_is_refused_and_nothing_is_touched(bench: Bench) -> None:
    """SGLang has one session; who begins another one is refused, and must not end the first."""
    assert bench.engine.begin_weight_update()[0]
    with executor_for(bench.engine, route="tensor") as executor:
        with pytest.raises(WeightUpdateRejectedError, match="already open"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        assert bench.engine.end_weight_update()[0], "the first one's session was ended"
        bench.check()
        bench.update(executor)
        bench.check()


@pytest.mark.parametrize("route", ["tensor", "distributed"])
def test_a_session_that_a_driver_left_open_does_not_keep_the_next_one_out(
    route: RouteName, bench: Bench
) -> None:
    """All that a driver sent that was killed when its session had begun."""
    manifest = bench.trainer.publish(bench.next())
    client = connect(bench.engine, timeout_s=CALL_S)
    client.epoch = 1 + client.ask("describe")[0]["epoch"]
    client.ask("open", name="one that was killed", take_over=False)
    client.ask("prepare", manifest=manifest.to_json(), options={}, imports=False)
    client.ask("pauses", on=True)
    client.pause("retract")
    client.ask("install", update_id=manifest.update_id)
    assert bench.engine.begin_weight_update()[0]
    with executor_for(bench.engine, route=route) as executor:
        with pytest.raises(SessionRefused, match="driver one that was killed has this engine"):
            executor.update_weights(manifest)
        executor.recover()
        bench.check("nothing was proven: it is taken back")
        bench.update(executor)
        bench.check()
    assert not bench.engine.end_weight_update()[0]


def test_a_failed_load_leaves_no_session_open(bench: Bench) -> None:
    with executor_for(bench.engine, route="tensor") as executor:
        bench.plant("fail", 7)
        with pytest.raises(WeightUpdateRejectedError, match="planted at tensor 7"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        assert not bench.engine.end_weight_update()[0]
        bench.check()


def test_a_failing_distributed_load_leaves_weights_partly_updated_and_is_undone(
    bench: Bench,
) -> None:
    """SGLang says to discard the whole weights then: here they are put back."""
    left: list[dict[str, str]] = []
    with executor_for(bench.engine, route="distributed") as executor:
        adapter = executor.weight_install_adapter
        original = adapter._undo_on_ranks  # type: ignore[union-attr]

        def back(**given: Any) -> None:
            left.append(sums_of(bench.engine))
            original(**given)

        adapter._undo_on_ranks = back  # type: ignore[union-attr]
        bench.plant("fail", 7)
        with pytest.raises(WeightUpdateRejectedError, match="partially updated"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        [mixture] = left
        assert mixture not in bench.sums
        bench.check()
        bench.uproot()
        bench.update(executor)
        bench.check()


def test_a_group_that_the_engine_lost_is_made_anew(bench: Bench) -> None:
    with executor_for(bench.engine, route="distributed") as executor:
        bench.update(executor)
        name = executor.weight_install_adapter._loader._name  # type: ignore[union-attr]
        assert bench.engine.destroy_weights_update_group(name)[0]
        with pytest.raises(WeightUpdateRejectedError, match="Failed to receive"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.check()
        bench.update(executor)
        bench.check()


def test_an_address_of_another_machine_is_refused(bench: Bench) -> None:
    # 192.0.2.0/24 belongs to nobody: it is for documentation.
    with executor_for(bench.engine, route=DistributedRoute("192.0.2.1")) as executor:
        with pytest.raises(WeightBridgeUnavailableError, match="address of this machine"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.check()


def test_the_parameter_that_get_weights_by_name_cannot_tell_is_proven_all_the_same(
    bench: Bench,
) -> None:
    """Qwen2 has no such method, so SGLang answers nothing, for any name."""
    assert bench.engine.get_weights_by_name("model.norm.weight") is None
    with executor_for(bench.engine) as executor:
        bench.update(executor)
        assert executor.last_ack is not None
        assert executor.last_ack.proof.method == "digest"


def test_a_parameter_that_comes_without_its_fused_parts_is_refused(bench: Bench) -> None:
    """SGLang would load q alone, and say success: k and v stay those of the old version."""
    only_q = bench.next()
    del only_q[QKV.format("k")], only_q[QKV.format("v")]
    refused(bench, only_q, "in none of the update's tensors")


def test_a_tensor_that_sglang_would_skip_in_silence_is_refused(bench: Bench) -> None:
    refused(bench, bench.next(**{"model.layers.9.norm.weight": torch.ones(4)}), "nowhere")


def test_a_model_without_a_layer_is_refused(bench: Bench) -> None:
    whole = bench.next()
    part = {name: tensor for name, tensor in whole.items() if ".layers.1." not in name}
    refused(bench, part, "Publish the whole model")


@pytest.mark.parametrize("route", ["import", "tensor"])
def test_a_wrong_shape_is_refused_where_sglang_would_end_the_engine(
    route: str, bench: Bench
) -> None:
    name = QKV.format("k")
    refused(bench, bench.next(**{name: torch.zeros(3, 3)}), name, route=route)


def test_a_dtype_that_sglang_would_cast_in_silence_is_refused(bench: Bench) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in bench.next().items()}
    refused(bench, half, "is bfloat16, parameter")


def test_a_model_that_is_compiled_on_the_cpu_is_refused(bench: Bench) -> None:
    """SGLang compiles its weights in: an update would change what no request is computed with."""
    bench.plant("compiled")
    with executor_for(bench.engine) as executor:
        with pytest.raises(WeightBridgeUnavailableError, match="enable_torch_compile"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        bench.uproot()
        bench.check()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"route": "ipc"}, "expected one of 'import', 'tensor'"),
        ({"route": "disk"}, "expected a folder for the versions"),
        ({"serving": {"pause": "keep"}}, "expected 'retract', 'in_place' or 'abort'"),
        ({"serving": {"cache": "reset"}}, "expected 'flush' or 'keep'"),
    ],
    ids=str,
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match), executor_for("http://127.0.0.1:1", **options):
        pytest.fail("it was made")


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an Engine of SGLang or a server's URL"):
        SGLangInstallAdapter(object())

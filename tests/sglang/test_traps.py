"""Traps of SGLang's own routes, each by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_bridge import WeightBridgeUnavailableError, WeightUpdateRejectedError
from rl_bridge.engines.sglang.engine_adapter import SGLangInstallAdapter
from rl_bridge.engines.sglang.loaders import DistributedRoute
from rl_bridge.errors import IncompatibleUpdate
from tests.sglang.bench import Bench, executor_for

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


def test_a_failed_load_leaves_no_session_open(bench: Bench) -> None:
    with executor_for(bench.engine, route="tensor") as executor:
        bench.plant("fail", 7)
        with pytest.raises(WeightUpdateRejectedError, match="planted at tensor 7"):
            executor.update_weights(bench.trainer.publish(bench.next()))
        assert not bench.engine.end_weight_update()[0]
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


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def without(*parts: str) -> Change:
    return lambda sent: {
        name: one for name, one in sent.items() if not any(part in name for part in parts)
    }


SILENT: dict[str, tuple[Change, str]] = {
    # SGLang would load q alone, and say success: k and v stay those of the old version.
    "q alone": (without(QKV.format("k"), QKV.format("v")), "in none of the update's tensors"),
    "without a layer": (without(".layers.1."), "Publish the whole model"),
    "skipped": (lambda sent: {**sent, "model.layers.9.norm.weight": torch.ones(4)}, "nowhere"),
    "cast": (
        lambda sent: {name: one.to(torch.bfloat16) for name, one in sent.items()},
        "is bfloat16, parameter",
    ),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_sglang_would_take_in_silence_is_refused(what: str, bench: Bench) -> None:
    change, match = SILENT[what]
    refused(bench, change(bench.next()), match)


@pytest.mark.parametrize("route", ["import", "tensor"])
def test_a_wrong_shape_is_refused_where_sglang_would_end_the_engine(
    route: str, bench: Bench
) -> None:
    name = QKV.format("k")
    refused(bench, bench.next(**{name: torch.zeros(3, 3)}), name, route=route)


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

"""Loaders that compute: refused beside the serving model, and noted where vLLM itself reloads."""

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch

from rl_bridge.engines.load_plan import LoadPlan, learn
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import IncompatibleUpdate

Load = Callable[["Model", Mapping[str, torch.Tensor]], None]

ROWS, WIDTH = 4, 6


class Model(torch.nn.Module):
    """A fused weight that is copied, a gain that may be computed, a buffer."""

    fused: torch.nn.Parameter
    gain: torch.nn.Parameter
    turn: torch.Tensor

    def __init__(self, load: Load) -> None:
        super().__init__()
        for name, shape in (("fused", (2 * ROWS, WIDTH)), ("gain", (WIDTH,))):
            made = torch.empty(shape, dtype=torch.float32, device="meta")
            setattr(self, name, torch.nn.Parameter(made, requires_grad=False))
        self.register_buffer("turn", torch.zeros(1))
        self.load = load

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do: what they do not know goes nowhere."""
        sent = dict(given)
        for position, name in enumerate(("q", "k")):
            if name in sent:
                self.fused.data[position * ROWS :][:ROWS].copy_(sent[name])
        self.load(self, sent)


def composed(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    if "gain" in sent:
        model.gain.data.copy_(sent["gain"])
        model.gain.data.copy_(-torch.exp(model.gain.float()))


def computed_first(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    if "gain" in sent:
        model.gain.data.copy_(1 + sent["gain"])


def gathered(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    if "gain" in sent and "more" in sent:
        room = torch.empty(2, WIDTH, device=sent["gain"].device)
        room[0].copy_(sent["gain"])
        room[1].copy_(sent["more"])
        model.gain.data.copy_(torch.stack([room[0], room[1]]).sum(0))


def in_halves(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    for name, part in (("gain", model.gain.data[:3]), ("more", model.gain.data[3:])):
        if name in sent:
            part.copy_(2 * sent[name][:3])


def buffered(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    model.gain.data.copy_(sent["gain"])
    if "turn" in sent:
        model.turn.copy_(sent["turn"])


def buffered_as_a_number(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    model.gain.data.copy_(sent["gain"])
    if "turn" in sent:
        model.turn.fill_(sent["turn"].item())


def buffered_when_computed(model: Model, sent: Mapping[str, torch.Tensor]) -> None:
    model.gain.data.copy_(sent["gain"])
    if "turn" in sent:
        model.turn.copy_(-sent["turn"])


SHAPES = {"q": (ROWS, WIDTH), "k": (ROWS, WIDTH), "gain": (WIDTH,)}
COMPUTED: Mapping[Load, str] = {
    composed: "",
    computed_first: "",
    gathered: "more",
    in_halves: "more",
}
BUFFERED = (buffered, buffered_as_a_number, buffered_when_computed)


def learned(load: Load, *, more: str = "", leave: str = "", allows: bool = True) -> LoadPlan:
    kinds = {name: (torch.float32, shape) for name, shape in SHAPES.items() if name != leave}
    if more and more != leave:
        kinds[more] = (torch.float32, (1,) if more == "turn" else (WIDTH,))
    return learn(Model(load), kinds, EngineCompat(), admit=lambda *_: None, allows_computed=allows)


@pytest.mark.parametrize("load", COMPUTED)
def test_what_is_computed_is_noted_with_what_it_is_made_of_and_the_rest_is_learned(
    load: Load,
) -> None:
    plan = learned(load, more=COMPUTED[load])
    assert plan.unfollowed() == {"gain"}
    assert plan.taken == {"q", "k", "gain", COMPUTED[load]} - {""}
    assert {route.source for route in plan.routes} == {"q", "k"}


@pytest.mark.parametrize("load", COMPUTED)
def test_beside_the_serving_model_nothing_may_be_computed(load: Load) -> None:
    with pytest.raises(IncompatibleUpdate, match="parameter 'gain' is computed"):
        learned(load, more=COMPUTED[load], allows=False)


@pytest.mark.parametrize("load", BUFFERED)
def test_a_buffer_is_noted_with_what_it_is_made_of(load: Load) -> None:
    plan = learned(load, more="turn")
    assert plan.unfollowed() == {"turn"}
    assert plan.taken == {"q", "k", "gain", "turn"}


@pytest.mark.parametrize("load", BUFFERED)
def test_beside_the_serving_model_no_buffer_may_be_loaded(load: Load) -> None:
    with pytest.raises(IncompatibleUpdate, match="buffer 'turn' is loaded"):
        learned(load, more="turn", allows=False)


@pytest.mark.parametrize("load", COMPUTED)
def test_beside_what_is_computed_a_stranger_lands_nowhere(load: Load) -> None:
    kinds = {name: (torch.float32, shape) for name, shape in SHAPES.items()}
    kinds |= {"more": (torch.float32, (WIDTH,)), "other": (torch.float32, (WIDTH,))}
    plan = learn(Model(load), kinds, EngineCompat(), admit=lambda *_: None, allows_computed=True)
    assert "other" not in plan.taken


@pytest.mark.parametrize("load", COMPUTED)
def test_beside_what_is_computed_half_of_a_fused_weight_is_refused(load: Load) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"'fused': 24 of its 48 elements are in none"):
        learned(load, more=COMPUTED[load], leave="k")


@pytest.mark.parametrize("load", [composed, computed_first, gathered])
def test_what_would_be_computed_is_missed(load: Load) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"parameters of the engine as they are: .'gain'"):
        learned(load, more=COMPUTED[load], leave="gain")


@pytest.mark.parametrize("leave", ["gain", "more"])
def test_half_of_what_is_computed_is_refused(leave: str) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"'gain': the update writes 3 of its 6 elements"):
        learned(in_halves, more="more", leave=leave)

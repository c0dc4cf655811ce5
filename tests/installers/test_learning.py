"""Learning where tensors go: the trial of a loader finds every element, and takes what it says."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from rl_bridge import make_weight_bridge
from rl_bridge.engines.load_plan import SMALL_NBYTES, Fill, LoadPlan, Numbering, learn
from rl_bridge.engines.model_installer import ModelInstaller
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import IncompatibleUpdate
from tests.peaks import peak_nbytes

Given = Iterable[tuple[str, torch.Tensor]]
Mishap = Callable[[torch.Tensor], None]

WIDTH = 512
# One of which the trial takes little, one of which it takes much: numbers of one and more digits.
ROWS = {"small": 64, "large": 17 << 10}
PADDING = 8
SLACK_NBYTES = 2 << 20


class Model(torch.nn.Module):
    """A vocabulary that is longer than its tensor, and loaded twice: noted, then tried."""

    def __init__(
        self, rows: int, mishap: Mishap = lambda _: None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        made = torch.empty(rows + PADDING, WIDTH, dtype=dtype, device="meta")
        self.words = torch.nn.Parameter(made, requires_grad=False)
        self.mishap = mishap

    def load_weights(self, given: Given) -> None:
        """What engines do."""
        for _, tensor in given:
            self.words.data[: len(tensor)].copy_(tensor)
            self.words.data[len(tensor) :].fill_(0)
        if self.words.device.type != "meta":
            self.mishap(self.words.data)


def learned(model: Model, admit: Callable[[LoadPlan, int], None] = lambda *_: None) -> LoadPlan:
    shape = (len(model.words) - PADDING, WIDTH)
    kinds = {"words": (model.words.dtype, shape)}
    return learn(model, kinds, EngineCompat(), admit=admit)


def exchanged(*places: tuple[int, int]) -> Mishap:
    """Elements that change places."""

    def mishap(words: torch.Tensor) -> None:
        values = [words[place].clone() for place in places]
        for place, value in zip(places, values[1:] + values[:1], strict=True):
            words[place] = value

    return mishap


def written(place: Any, value: Callable[[torch.Tensor], Any]) -> Mishap:
    def mishap(words: torch.Tensor) -> None:
        words[place] = value(words)

    return mishap


MISHAPS = {
    "neighbours": exchanged((5, 7), (5, 8)),
    "first and last": exchanged((0, 0), (63, WIDTH - 1)),
    "above each other": exchanged((31, 3), (63, 3)),
    "three in a ring": exchanged((1, 1), (40, 9), (63, 500)),
    "one twice": written((9, 9), lambda words: words[9, 10].clone()),
    "one left out": written((9, 9), lambda _: -128),
    "one zero": written((9, 9), lambda _: 0),
    "last padding": written((-1, -1), lambda words: words[0, 0].clone() | 1),
    "padding left out": written((-1, 0), lambda _: -128),
    "rows turned": written(slice(0, 64), lambda words: words[:64].flip(0)),
    "shifted by one": written(slice(0, 64), lambda words: words[:64].roll(1)),
}


@pytest.mark.parametrize("size", ROWS)
def test_a_loader_that_does_twice_the_same_is_learned(size: str) -> None:
    plan = learned(Model(ROWS[size]))
    assert plan.taken == {"words"}
    (padding,) = (step for step in plan.steps[0] if isinstance(step, Fill))
    assert padding.target_view.numel == PADDING * WIDTH


@pytest.mark.parametrize("mishap", MISHAPS)
@pytest.mark.parametrize("size", ROWS)
def test_each_element_that_goes_elsewhere_the_second_time_is_found(size: str, mishap: str) -> None:
    with pytest.raises(IncompatibleUpdate, match=r"'words'.* twice into the same place"):
        learned(Model(ROWS[size], MISHAPS[mishap]))


@pytest.mark.parametrize("far", [1, 1 << 14, 1 << 21, (1 << 23) - 1])
def test_two_elements_of_a_large_tensor_that_change_places_are_found(far: int) -> None:
    one, other = divmod(3, WIDTH), divmod(3 + far, WIDTH)
    with pytest.raises(IncompatibleUpdate, match="twice into the same place"):
        learned(Model(ROWS["large"], exchanged(one, other)))


@pytest.mark.parametrize("digit", range(4))
def test_elements_whose_numbers_share_a_digit_are_found_by_the_others(digit: int) -> None:
    count = ROWS["large"] * WIDTH
    numbering = Numbering.of(count, 2 * count)
    assert numbering.digits == 4
    memory = torch.empty(count, dtype=numbering.dtype)
    numbering.write(memory, digit)
    alike = (memory == memory[3]).nonzero().flatten().tolist()
    mishap = exchanged(divmod(alike[0], WIDTH), divmod(alike[-1], WIDTH))
    with pytest.raises(IncompatibleUpdate, match="twice into the same place"):
        learned(Model(ROWS["large"], mishap))


def test_trying_a_loader_takes_what_was_asked_for_and_no_more_than_the_weights() -> None:
    asked: list[int] = []
    model = Model(ROWS["large"])
    peak = peak_nbytes(lambda: learned(model, lambda _, nbytes: asked.append(nbytes)))
    (nbytes,) = asked
    assert nbytes <= peak <= nbytes + SLACK_NBYTES
    assert nbytes <= model.words.numel() * model.words.element_size()


def test_the_memory_of_one_parameters_trial_is_gone_before_the_next_ones() -> None:
    class Two(Model):
        """A vocabulary and an untied head."""

        def __init__(self) -> None:
            super().__init__(ROWS["large"])
            self.head = torch.nn.Parameter(self.words.clone(), requires_grad=False)

        def load_weights(self, given: Given) -> None:
            for name, tensor in given:
                getattr(self, name).data.copy_(tensor)

    asked: list[int] = []
    model = Two()
    kinds = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}

    def admit(_: LoadPlan, nbytes: int) -> None:
        asked.append(nbytes)

    peak = peak_nbytes(lambda: learn(model, kinds, EngineCompat(), admit=admit))
    assert [peak <= nbytes + SLACK_NBYTES for nbytes in asked] == [True]


def test_of_small_parameters_as_many_are_tried_at_once_as_take_little() -> None:
    class Many(Model):
        """Each of these is small; together they are not."""

        def __init__(self) -> None:
            super().__init__(8)
            for index in range(64):
                made = torch.empty(256, WIDTH, dtype=torch.bfloat16, device="meta")
                setattr(self, f"layer{index}", torch.nn.Parameter(made, requires_grad=False))

        def load_weights(self, given: Given) -> None:
            self.mishap(torch.empty(0))
            for name, tensor in given:
                getattr(self, name).data[: len(tensor)].copy_(tensor)

    calls: list[None] = []
    asked: list[int] = []
    model = Many()
    model.mishap = lambda _: calls.append(None)
    kinds = {name: (p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}

    def admit(_: LoadPlan, nbytes: int) -> None:
        asked.append(nbytes)

    def learn_all() -> None:
        learn(model, kinds, EngineCompat(), admit=admit)

    assert peak_nbytes(learn_all) <= SMALL_NBYTES + SLACK_NBYTES
    assert asked == [0]
    assert len(calls) < 10  # loaders walk the whole model in each


def test_who_is_not_admitted_takes_no_memory() -> None:
    def refuse(_: LoadPlan, nbytes: int) -> None:
        raise IncompatibleUpdate(f"{nbytes} bytes")

    def refused() -> None:
        with pytest.raises(IncompatibleUpdate, match=r"\d+ bytes"):
            learned(Model(ROWS["large"]), refuse)

    assert peak_nbytes(refused) < SLACK_NBYTES


@pytest.mark.parametrize(
    ("share", "refusal"),
    [(0.9, "staging it beside"), (1.1, "trying the engine's loader on numbers")],
    ids=["for the copy", "for the trial"],
)
def test_a_first_update_without_room_is_refused_before_it_takes_memory(
    share: float, refusal: str
) -> None:
    model = Model(ROWS["large"], dtype=torch.uint8)  # (of one byte: numbers take twice as much)
    # (Nobody else has this memory: what others look at is asked for once more.)
    made = torch.nn.Parameter(
        torch.zeros(model.words.shape, dtype=torch.uint8), requires_grad=False
    )
    model.words = made
    budget = int(made.numel() * share)
    installer = ModelInstaller(model, EngineCompat(), memory_budget_nbytes=budget)
    sent = {"words": torch.zeros(ROWS["large"], WIDTH, dtype=torch.uint8)}
    with make_weight_bridge("local-clone") as bridge:
        manifest = bridge.publish(sent, weight_version=1)

        def refused() -> None:
            match = rf"version 1: {refusal}.* takes \d+ bytes more, .* allows {budget}"
            with pytest.raises(IncompatibleUpdate, match=match):
                installer.prepare(manifest, sent)

        assert peak_nbytes(refused) < SLACK_NBYTES
        bridge.release(manifest.update_id)


class Casting(torch.nn.Module):
    """Casts to its own dtype: nothing at the noting. As vLLM's MiniMax-M2 loads a router's bias."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        made = torch.empty(rows, WIDTH, dtype=torch.float32, device="meta")
        self.bias = torch.nn.Parameter(made, requires_grad=False)

    def load_weights(self, given: Given) -> None:
        """What engines do."""
        for _, tensor in given:
            self.bias.data.copy_(tensor.to(torch.float32))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_loader_that_casts_to_the_dtype_that_is_there_is_learned(rows: int) -> None:
    kinds = {"bias": (torch.float32, (rows, WIDTH))}
    plan = learn(Casting(rows), kinds, EngineCompat(), admit=lambda *_: None)
    assert plan.taken == {"bias"}

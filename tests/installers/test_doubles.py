"""A second name of what an engine ties: loaders pass over it, and its bytes must be the first's."""

from collections.abc import Iterable

import pytest
import torch

from rl_bridge import SharedMemoryTensorBridge
from rl_bridge.engines.evidence import Evidence
from rl_bridge.engines.load_checks import check_taken
from rl_bridge.engines.load_plan import LoadPlan, learn
from rl_bridge.engines.skeleton import EngineCompat
from rl_bridge.errors import IncompatibleUpdate


class Model(torch.nn.Module):
    """Its loader passes over the head, whether that is tied or not, and takes the first part."""

    def __init__(self, *, is_tied: bool, rows: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(rows, 2).requires_grad_(False)
        self.head: torch.nn.Module
        if is_tied:
            head = torch.nn.Linear(2, rows, bias=False)
            head.weight = self.embed.weight
            self.head = head

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What engines do."""
        for name, tensor in given:
            if name == "embed":
                self.embed.weight.data.copy_(tensor.narrow(0, 0, self.embed.num_embeddings))


def learned(model: torch.nn.Module, sent: dict[str, torch.Tensor]) -> LoadPlan:
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()}
    return learn(model, kinds, EngineCompat(), admit=lambda *_: None)


def test_a_second_name_with_equal_bytes_is_proven_with_the_first(
    trainer: SharedMemoryTensorBridge,
) -> None:
    model, sent = Model(is_tied=True), {"embed": torch.ones(3, 2), "head": torch.ones(3, 2)}
    plan = learned(model, sent)
    manifest = trainer.publish(sent, weight_version=1)
    check_taken(plan, manifest)
    evidence = Evidence(manifest, plan, num_threads=1)
    model.load_weights(sent.items())
    assert evidence.check(None).root == manifest.root


def test_a_second_name_is_taken_by_ranks_that_have_a_part_each(
    trainer: SharedMemoryTensorBridge,
) -> None:
    sent = {"embed": torch.ones(4, 2), "head": torch.ones(4, 2)}
    plan = learned(Model(is_tied=True, rows=2), sent)
    check_taken(plan, trainer.publish(sent, weight_version=1))


@pytest.mark.parametrize(
    ("head", "is_tied"),
    [
        (torch.zeros(3, 2), True),
        (torch.ones(2, 3), True),
        (torch.ones(3, 2).view(torch.int32), True),
        (torch.ones(3, 2), False),
    ],
    ids=["other bytes", "other shape", "other dtype", "not tied"],
)
def test_anything_else_that_goes_nowhere_is_refused(
    trainer: SharedMemoryTensorBridge, head: torch.Tensor, *, is_tied: bool
) -> None:
    sent = {"embed": torch.ones(3, 2), "head": head}
    plan = learned(Model(is_tied=is_tied), sent)
    with pytest.raises(IncompatibleUpdate, match=r"puts 1 tensors .* nowhere: \['head'\]") as told:
        check_taken(plan, trainer.publish(sent, weight_version=1))
    is_alike = is_tied and (head.shape, head.dtype) == ((3, 2), torch.float32)
    assert ("ties to ['embed'] must have the same bytes" in str(told.value)) == is_alike


class Placed(Model):
    """Has one layer in two places, as SGLang and some models of vLLM tie their heads."""

    def __init__(self) -> None:
        super().__init__(is_tied=False)
        self.head = self.embed


def test_an_equal_copy_is_taken_where_one_layer_has_two_places(
    trainer: SharedMemoryTensorBridge,
) -> None:
    sent = {"embed": torch.ones(3, 2), "head": torch.ones(3, 2)}
    check_taken(learned(Placed(), sent), trainer.publish(sent, weight_version=1))


class Normed(Model):
    def __init__(self) -> None:
        super().__init__(is_tied=False)
        self.norm = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        sent = dict(given)
        super().load_weights(sent.items())
        self.norm.weight.data.copy_(sent["norm"])


@pytest.mark.parametrize("shared", ["embed", "norm"])
def test_a_name_that_goes_nowhere_may_share_the_memory_of_an_embedding_only(
    trainer: SharedMemoryTensorBridge, shared: str
) -> None:
    """An engine without a layer for its head computes with its embedding."""
    sent = {"embed": torch.ones(3, 2), "norm": torch.ones(1, 2)}
    sent["other"] = sent[shared]
    plan, manifest = learned(Normed(), sent), trainer.publish(sent, weight_version=1)
    if shared == "embed":
        check_taken(plan, manifest)
        return
    with pytest.raises(IncompatibleUpdate, match=r"puts 1 tensors .* nowhere: \['other'\]"):
        check_taken(plan, manifest)


def test_names_of_a_wrapper_are_told_by_its_prefix(trainer: SharedMemoryTensorBridge) -> None:
    sent = {"embed": torch.ones(3, 2), "module.embed": torch.zeros(3, 2)}
    plan, manifest = learned(Model(is_tied=False), sent), trainer.publish(sent, weight_version=1)
    with pytest.raises(IncompatibleUpdate, match=r"put 'module\.' before the names"):
        check_taken(plan, manifest)


class Padded(torch.nn.Module):
    """The last of three ranks that share two heads: its part is padding alone, as in SGLang."""

    def __init__(self) -> None:
        super().__init__()
        self.k = torch.nn.Linear(2, 3, bias=False).requires_grad_(False)

    def load_weights(self, given: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _ in given:
            part = self.k.weight.data
            part.narrow(0, 0, 3).zero_()
            part.narrow(0, 0, 0).copy_(torch.zeros_like(part.narrow(0, 0, 0)))


def test_a_part_that_is_padding_alone_is_a_part(trainer: SharedMemoryTensorBridge) -> None:
    sent = {"k": torch.ones(6, 2)}
    plan, manifest = learned(Padded(), sent), trainer.publish(sent, weight_version=1)
    check_taken(plan, manifest)
    assert not list(plan.routes)

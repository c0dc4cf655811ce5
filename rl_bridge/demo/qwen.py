"""What the real engines share: a small Qwen3 that they serve, and a fault that is planted in them.

The Qwen3 is trained with transformers and torch, in fp32. Its vocabulary is the task's tokens,
padded to what engines like; the digits are tokens 0 and up. Engines start from a checkpoint with
random weights; whatever they sample with comes in over the bridge. Their log-probabilities are
those of the distribution that they draw from, and their outputs carry version labels.
"""

import importlib
import io
import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rl_bridge.demo.learning import LearnerConfig, Policy, SampleBatch, SortTask
from rl_bridge.demo.model import Sampler
from rl_bridge.engines.staging import Exchange, Staged
from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.testing.installer_faults import EngineFault

MAX_SEQUENCES = 512
"""That an engine samples at once: one step's batch."""

LEARNER = LearnerConfig(learning_rate=3e-3, epochs=2, entropy_bonus=0.02)
"""Settings that learn the task reliably with this model."""

_WIDTH = 64
_HEAD_WIDTH = 32  # the smallest for which vLLM has attention on the CPU
_NUM_LAYERS = 2
_VOCABULARY_UNIT = 64


class QwenPolicy(Policy):
    """A Qwen3 of transformers that answers with digits."""

    def __init__(self, model: Any, task: SortTask) -> None:
        """Take a ``Qwen3ForCausalLM``."""
        super().__init__()
        self.model: Any = model
        self.task = task

    @property
    def weights(self) -> nn.Module:
        """The model inside: engines know its tensors by transformers' names."""
        weights: nn.Module = self.model
        return weights

    def digit_logits(self, tokens: Tensor) -> Tensor:
        """See `Policy`."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits[..., : self.task.base]


def vocabulary_size(task: SortTask) -> int:
    """How many tokens the model knows."""
    return -(-(task.base + 1) // _VOCABULARY_UNIT) * _VOCABULARY_UNIT


def build_qwen(task: SortTask, seed: int) -> QwenPolicy:
    """Make a model from a seed and leave the global random state as it was."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.Qwen3Config(
        vocab_size=vocabulary_size(task),
        hidden_size=_WIDTH,
        intermediate_size=4 * _WIDTH,
        num_hidden_layers=_NUM_LAYERS,
        num_attention_heads=_WIDTH // _HEAD_WIDTH,
        num_key_value_heads=_WIDTH // _HEAD_WIDTH,
        head_dim=_HEAD_WIDTH,
        max_position_embeddings=max(64, task.num_tokens),
        # Positions are few: turned by much from one to the next, they are easy to tell apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        initializer_range=0.1,  # about what keeps the scale in layers this narrow
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).float()
        # As in the module's policy: tokens that differ clearly, and a nearly flat first policy.
        nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
        nn.init.normal_(model.lm_head.weight, std=0.02)
    return QwenPolicy(model, task)


class Answer(NamedTuple):
    """What an engine answered to a prompt."""

    tokens: Sequence[int]
    log_probs: list[float]  # of each token
    label: str | None  # the version of the weights that made it; None if the engine tells none


class EngineSampler(Sampler):
    """An engine that serves the Qwen3."""

    product: ClassVar[str]

    def __init__(self, task: SortTask, *, model_seed: int, seed: int) -> None:
        """Start the engine with random weights of its own; its environment is changed for it.

        Args:
            task: what it answers.
            model_seed: of the weights.
            seed: of prompts and samples.

        Raises:
            WeightBridgeUnavailableError: it does not start.

        """
        self._task = task
        self._generator = torch.Generator().manual_seed(seed)
        try:
            with tempfile.TemporaryDirectory() as checkpoint:
                with redirect_stderr(io.StringIO()):  # a bar of its progress
                    self._built(model_seed).model.save_pretrained(Path(checkpoint))
                version = self._start(checkpoint, seed)
        except Exception as error:
            raise WeightBridgeUnavailableError(
                f"{self.product} did not start ({type(error).__name__}: {error}). Look at what it "
                "printed."
            ) from error
        self.name = f"{self.product} {version.partition('+')[0]}"

    def _built(self, seed: int) -> QwenPolicy:
        """The model that the engine starts with."""
        return build_qwen(self._task, seed)

    @abstractmethod
    def _start(self, checkpoint: str, seed: int) -> str:
        """Start the engine from a checkpoint, and return its version."""

    @abstractmethod
    def _answers(self, prompts: list[list[int]], group_size: int) -> list[Answer]:
        """Draw that many answers to each prompt, one prompt after the other."""

    @abstractmethod
    def _plant(self, *, is_armed: bool) -> None:
        """Call `plant_fault` in the process that has the weights."""

    def sample(self, *, num_groups: int, group_size: int) -> SampleBatch:
        """See `Sampler`."""
        prompts = self._task.prompts(num_groups, self._generator)
        answers = self._answers(prompts.tolist(), group_size)
        drawn = torch.tensor([answer.tokens for answer in answers])
        tokens = torch.cat([prompts.repeat_interleave(group_size, dim=0), drawn], dim=1)
        log_probs = torch.tensor([answer.log_probs for answer in answers])
        labels = Counter(answer.label for answer in answers if answer.label is not None)
        return SampleBatch.graded(self._task, tokens, log_probs, group_size, labels)

    @contextmanager
    def failing_half_way(self) -> Iterator[None]:
        """See `Sampler`."""
        self._plant(is_armed=True)
        try:
            yield
        finally:
            self._plant(is_armed=False)


def version_label(spans: list[tuple[int, int, object]], num_tokens: int) -> str:
    """The version label of an output, which must reach from its first token to its last.

    Args:
        spans: (start, end, label) of each part of the output.
        num_tokens: its length.

    """
    if [span[:2] for span in spans] == [(0, num_tokens)]:
        return str(spans[0][2])
    return f"in parts: {spans}"


# ---- the planted fault ---------------------------------------------------------------------------

_apply = Exchange.apply


def _apply_half(exchange: Exchange, staged: Staged) -> None:
    """Fail when half of the exchange has really been made: the serving model is a mixture."""
    steps = len(staged.tensors) + len(staged.attributes)
    half = steps // 2
    tensors = staged.tensors[:half]
    _apply(exchange, Staged(tensors, staged.attributes[: half - len(tensors)]))
    raise EngineFault(f"the engine failed after {half} of {steps} exchanges")


def plant_fault(*, is_armed: bool) -> None:
    """Let every exchange of weights in this process fail half-way from now on, or none."""
    Exchange.apply = _apply_half if is_armed else _apply  # type: ignore[method-assign,assignment]

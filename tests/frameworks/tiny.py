"""A Qwen2 of two layers and a tokenizer, made offline, and a reward that it learns fast."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DIGITS = range(2, 12)
"""Tokens of the digits."""
LENGTH = 8
"""Tokens of an answer."""
_WORDS = 64
_CONFIG = {
    "vocab_size": _WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_checkpoint(home: Path) -> str:
    """Write model and tokenizer into a folder; returns its path."""
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{str(digit): DIGITS[digit] for digit in range(10)}}
    words |= {f"w{number}": number for number in range(len(words), _WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    # One that TRL knows how to read answers of.
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    tokenizer.save_pretrained(home)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_CONFIG))
    model.save_pretrained(home)
    return str(home)


def digits(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Reward: which part of the longest answer is digits; 0.16 for random weights."""
    return [sum(token in DIGITS for token in ids) / LENGTH for ids in completion_ids]


class Attention:
    """Stands for the kernel that `AsyncGRPOTrainer` fetches for packed rows: it needs a GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends_q: torch.Tensor,
        ends_k: torch.Tensor,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Attend within each row, causally, aligned at the rows' ends: tokens, heads, width."""
        rows = []
        for row in range(len(ends_q) - 1):
            begin, end = ends_q[row : row + 2].tolist()
            first, last = ends_k[row : row + 2].tolist()
            heads = (query[begin:end], key[first:last], value[first:last])
            earlier = (last - first) - (end - begin)
            mask = torch.ones(end - begin, last - first, dtype=torch.bool).tril(earlier)
            one, other, values = (part.transpose(0, 1) for part in heads)
            told = torch.nn.functional.scaled_dot_product_attention(
                one, other, values, attn_mask=mask, scale=softmax_scale
            )
            rows.append(told.transpose(0, 1))
        return torch.cat(rows)

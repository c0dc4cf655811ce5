"""mbridge and Megatron-Bridge: which of the two it is, and what Hugging Face calls a part.

Both export whole tensors under Hugging Face's names. Where a part of a rank lies in those is told
here, without a gather, from mbridge's own table of names.
"""

from collections.abc import Sequence
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.extractors.layouts import box_piece
from rl_bridge.manifest.placement import Piece

__all__ = ["Block", "hf_pieces", "is_mbridge", "is_megatron_bridge", "row_blocks"]

Block = tuple[int, int, str, int, int]
"""First row in a fused tensor, number of rows, name of the tensor that they belong to, their first
row there, and how many rows that one has."""

_NUM_QKV = 3
_NUM_GATE_AND_UP = 2
_USE_RAW = (
    "Make the extractor without bridge= for local parts under Megatron's names, or use full()."
)


def is_mbridge(bridge: Any) -> bool:
    """Whether it is a bridge of mbridge."""
    return hasattr(bridge, "export_weights")


def is_megatron_bridge(bridge: Any) -> bool:
    """Whether it is a bridge of Megatron-Bridge."""
    return hasattr(bridge, "export_hf_weights")


def hf_pieces(bridge: Any, config: Any, name: str, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same elements as pieces of Hugging Face's tensors; padding of the vocabulary is left out.

    Args:
        bridge: of mbridge.
        config: the model's ``TransformerConfig``.
        name: of Megatron's whole tensor.
        pieces: what this rank holds of it.

    Raises:
        WeightBridgeUnavailableError: the bridge converts this tensor in a way of its own.

    """
    names = _hf_names(bridge, name)
    rows = pieces[0].global_shape[0] if pieces[0].global_shape else 0
    if len(names) == 1:
        kept = rows
        is_padded = getattr(bridge, "make_vocab_size_divisible_by", None) is not None
        if is_padded and name.endswith(("word_embeddings.weight", "output_layer.weight")):
            kept = bridge.vocab_size
        if not pieces[0].global_shape:
            return tuple(box_piece(names[0], (), (), (), replica=piece.replica) for piece in pieces)
        return row_blocks(pieces, [(0, kept, names[0], 0, kept)])
    if len(names) == _NUM_GATE_AND_UP and ".linear_fc1." in name:
        half = rows // 2
        blocks = [(0, half, names[0], 0, half), (half, half, names[1], 0, half)]
        return row_blocks(pieces, blocks)
    if len(names) == _NUM_QKV and ".linear_qkv." in name:
        return row_blocks(pieces, _qkv_blocks(names, config, name, rows))
    msg = f"tensor {name!r} becomes {names}, and how is not known here. {_USE_RAW}"
    raise WeightBridgeUnavailableError(msg)


def _hf_names(bridge: Any, name: str) -> list[str]:
    convert = getattr(type(bridge), "_weight_to_hf_format", None)
    # (A subclass that converts in its own way says so by having its own.)
    if convert is None or convert.__qualname__ != "Bridge._weight_to_hf_format":
        msg = (
            f"{type(bridge).__name__} converts weights in a way of its own, so where tensor "
            f"{name!r} goes is not known before it is exported. {_USE_RAW}"
        )
        raise WeightBridgeUnavailableError(msg)
    return list(bridge._weight_name_mapping_mcore_to_hf(name))  # noqa: SLF001 - it has no public one


def _qkv_blocks(names: Sequence[str], config: Any, name: str, rows: int) -> list[Block]:
    """Each query group's queries, keys and values stand together in Megatron's tensor."""
    groups, head = config.num_query_groups, config.kv_channels
    queries = head * config.num_attention_heads // groups
    each = queries + 2 * head
    if groups * each != rows:
        msg = (
            f"tensor {name!r} has {rows} rows, expected {groups} groups of {each}: a fused layout "
            f"that is not known here. {_USE_RAW}"
        )
        raise WeightBridgeUnavailableError(msg)
    blocks = []
    for group in range(groups):
        begin = group * each
        blocks.append((begin, queries, names[0], group * queries, groups * queries))
        for at, which in ((begin + queries, names[1]), (begin + queries + head, names[2])):
            blocks.append((at, head, which, group * head, groups * head))
    return blocks


def row_blocks(pieces: Sequence[Piece], blocks: Sequence[Block]) -> tuple[Piece, ...]:
    """Name the rows of fused tensors anew.

    Args:
        pieces: boxes of the fused tensor.
        blocks: what its rows are.

    """
    found = []
    for piece in pieces:
        first, last = piece.offset[0], piece.offset[0] + piece.shape[0]
        for begin, length, name, there, total in blocks:
            low, high = max(first, begin), min(last, begin + length)
            if low < high:
                found.append(
                    box_piece(
                        name,
                        (total, *piece.global_shape[1:]),
                        (there + low - begin, *piece.offset[1:]),
                        (high - low, *piece.shape[1:]),
                        replica=piece.replica,
                        local_offset=(piece.local_offset[0] + low - first, *piece.local_offset[1:]),
                    )
                )
    return tuple(found)

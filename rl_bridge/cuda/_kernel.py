"""The Triton kernel of X3T-128K: one warp reads a leaf, packs it if asked to, writes its digest.

Importing this module imports Triton, so it is imported where the kernel is wanted. Where Triton
interprets (``TRITON_INTERPRET=1`` when it is first imported) the same source runs on CPU tensors.

How the work lies on the machine: a block of a leaf is 16 stripes of 8 words, and the sum over the
stripes of a block does not depend on the blocks before it. So a warp takes a block at once, 16
bytes in each of two loads per thread, adjacent threads at adjacent addresses; a thread has words 2j
and 2j + 1 of a stripe, which are the two that XXH3 crosses. Four blocks are in flight before the
first is used. The stripes' sums meet by three shuffles; only the scramble between blocks is serial.
There is no shared memory and no barrier.
"""

import triton
import triton.language as tl

from rl_bridge.cuda import leaves
from rl_bridge.manifest.table import ALIGNMENT

# Triton's language is a dialect: types are inferred, compile-time arguments are in capitals, a
# number has to stand where it is used, and everything that a function works on is an argument.
# ruff: noqa: ANN001, ANN202, N803, PLR0915, PLR0917, PLR2004
# mypy: ignore-errors


_LANES = tl.constexpr(leaves.LANES)
_STRIPES = tl.constexpr(leaves.STRIPES)
_PAIRS = tl.constexpr(leaves.LANES // 2)
_BLOCK = tl.constexpr(leaves.STRIPES * leaves.LANES)
_BLOCK_NBYTES = tl.constexpr(8 * leaves.STRIPES * leaves.LANES)
_ALIGN = tl.constexpr(ALIGNMENT)

_KEY_END = tl.constexpr(leaves.KEY_END)
_KEY_SCRAMBLE = tl.constexpr(leaves.LANES * leaves.KEY_SCRAMBLE)
_KEY_LOW = tl.constexpr(leaves.LANES * leaves.KEY_LOW)
_KEY_HIGH = tl.constexpr(leaves.LANES * leaves.KEY_HIGH)
_KEY_FIRST = tl.constexpr(leaves.LANES * leaves.KEY_FIRST)

_PRIME32_1 = tl.constexpr(leaves.PRIME32_1)
_PRIME64_1 = tl.constexpr(leaves.PRIME64_1)
_PRIME64_2 = tl.constexpr(leaves.PRIME64_2)
_AVALANCHE = tl.constexpr(leaves.AVALANCHE)

_ALL_ONES = tl.constexpr(2**64 - 1)

_PLAIN = tl.constexpr(leaves.LOOK_PLAIN)


@triton.jit
def _key(keys, at):
    return tl.load(keys + at).to(tl.uint64, bitcast=True)


@triton.jit
def _words(address, word, keep, WIDTH: tl.constexpr):
    """Read words, each as `8 // WIDTH` parts of `WIDTH` bytes unless the address is aligned."""
    if WIDTH == 16:
        # The hint stands on the pointer: on the integer it would be lost with the conversion.
        at = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + word
        return tl.load(at) if keep is None else tl.load(at, mask=keep, other=0)
    else:  # noqa: RET505 - Triton compiles one branch, and wants to see two
        found = tl.zeros(word.shape, tl.uint64)
        for part in tl.static_range(8 // WIDTH):
            if WIDTH == 4:
                at = address.to(tl.pointer_type(tl.uint32)) + word * 2 + part
            elif WIDTH == 2:
                at = address.to(tl.pointer_type(tl.uint16)) + word * 4 + part
            else:
                at = address.to(tl.pointer_type(tl.uint8)) + word * 8 + part
            some = tl.load(at) if keep is None else tl.load(at, mask=keep, other=0)
            found |= some.to(tl.uint64) << (8 * WIDTH * part)
        return found


@triton.jit
def _last_block(address, word, left, WIDTH: tl.constexpr):
    """Read the `left` bytes (1 to 1,024) of a leaf's last block and nothing behind them."""
    whole = left // 8
    found = _words(address, word, word < whole, WIDTH)
    byte = tl.arange(0, 8)
    at = (address + whole * 8).to(tl.pointer_type(tl.uint8)) + byte
    rest = tl.load(at, mask=byte < left % 8, other=0)
    rest = tl.sum(rest.to(tl.uint64) << (8 * byte).to(tl.uint64), 0)
    return tl.where(word == whole, rest, found)


@triton.jit
def _store(address, word, value, keep):
    at = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + word
    if keep is None:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=keep)


@triton.jit
def _product(value):
    # Truncating to 32 bits lets the compiler use one wide multiplication.
    return value.to(tl.uint32).to(tl.uint64) * (value >> 32).to(tl.uint32).to(tl.uint64)


@triton.jit
def _sums(block, key0, key1):
    """The sums of a block for the even and for the odd accumulators: two times [4]."""
    even, odd = tl.split(tl.reshape(block, (_STRIPES, _PAIRS, 2)))
    return (
        tl.sum(_product(even ^ key0) + odd, 0),
        tl.sum(_product(odd ^ key1) + even, 0),
    )


@triton.jit
def _scramble(lane, key):
    return ((lane ^ (lane >> 47)) ^ key) * _PRIME32_1


@triton.jit
def _absorb(lane0, lane1, block, key0, key1, scramble0, scramble1):
    sum0, sum1 = _sums(block, key0, key1)
    return _scramble(lane0 + sum0, scramble0), _scramble(lane1 + sum1, scramble1)


@triton.jit
def _fold(lane0, lane1, keys, pair2):
    one = lane0 ^ _key(keys, pair2)
    other = lane1 ^ _key(keys, pair2 + 1)
    return tl.sum((one * other) ^ tl.umulhi(one, other), 0)


@triton.jit
def _canonical(value):
    """Spread the last differences, and put the highest byte first."""
    value = (value ^ (value >> 37)) * _AVALANCHE
    value = value ^ (value >> 32)
    value = ((value >> 8) & 0x00FF00FF00FF00FF) | ((value & 0x00FF00FF00FF00FF) << 8)
    value = ((value >> 16) & 0x0000FFFF0000FFFF) | ((value & 0x0000FFFF0000FFFF) << 16)
    value = (value >> 32) | (value << 32)
    return value.to(tl.int64, bitcast=True)


@triton.jit
def _sign_bits(block, mask, one, flip, rest, LOOK: tl.constexpr):
    """Words whose sign bits tell the numbers that are NaN or Inf: see `dtypes.NonFinite`."""
    if LOOK == _PLAIN:
        found = (block & mask) + one
    else:
        bits = block ^ flip
        found = ((bits & mask) + one) & (bits | rest)
    even, odd = tl.split(tl.reshape(found, (_STRIPES, _PAIRS, 2)))
    return even | odd  # half as many registers, and both are the thread's own


@triton.jit
def digest_leaves(
    rows,
    keys,
    out,
    source: "i64",  # noqa: F821 - Triton's name of a type: an address never fits 32 bits
    target: "i64",  # noqa: F821
    numbers,
    COPY: tl.constexpr,
    WIDTH: tl.constexpr,
    LOOK: tl.constexpr,
):
    """Digest one leaf per program, and copy it on the way with `COPY`.

    Args:
        rows: int64 [leaves, 4]: where the leaf begins behind `source`, where behind `target`, its
            bytes (1 to 131,072, as packed), and where in `out` its digest goes, in words.
        keys: int64 [21, 8], `leaves.key_words`.
        out: int64, two words for each leaf: the digest's 16 bytes in canonical order.
        source: address.
        target: address, a multiple of 256 behind which each leaf has room up to the next one.
        numbers: int64 [leaves, 6]: the pattern of the numbers in the leaf (as packed), and the
            place in `out`, in words, that gets a 1 if one of them is NaN or Inf. Only with `LOOK`.
        COPY: write the leaf to `target`, and zeros behind it up to a multiple of 256 bytes.
        WIDTH: what all leaves' addresses are multiples of: 16, 4, 2 or 1.
        LOOK: 0, or how to look for NaN and Inf: `leaves.LOOK_PLAIN` where every
            pattern has `any` in full, else `leaves.LOOK_ANY`.

    """
    row = rows + tl.program_id(0).to(tl.int64) * 4
    source += tl.load(row)
    target += tl.load(row + 1)
    nbytes = tl.load(row + 2)

    stripe = tl.arange(0, _STRIPES)
    pair2 = 2 * tl.arange(0, _PAIRS)
    word = (stripe * _LANES)[:, None] + tl.arange(0, _LANES)[None, :]
    lane = (stripe * _LANES)[:, None] + pair2[None, :]
    key0 = _key(keys, lane)
    key1 = _key(keys, lane + 1)
    scramble0 = _key(keys, _KEY_SCRAMBLE + pair2)
    scramble1 = _key(keys, _KEY_SCRAMBLE + pair2 + 1)
    lane0 = _key(keys, _KEY_FIRST + pair2)
    lane1 = _key(keys, _KEY_FIRST + pair2 + 1)
    if LOOK:
        look = numbers + tl.program_id(0).to(tl.int64) * 6
        mask, one, sign = _key(look, 0), _key(look, 1), _key(look, 2)
        flip, rest = _key(look, 3), _key(look, 4)
        seen = tl.zeros((_STRIPES, _PAIRS), tl.uint64)

    whole = (nbytes - 1) // _BLOCK_NBYTES
    groups = whole // 4
    for group in range(groups):
        at = source + group * (4 * _BLOCK_NBYTES)
        # Counted in words from one pointer: a constant added to the address would take the hint of
        # `_words` away from it, and the wide loads with it.
        first = _words(at, word, None, WIDTH)
        second = _words(at, word + _BLOCK, None, WIDTH)
        third = _words(at, word + 2 * _BLOCK, None, WIDTH)
        fourth = _words(at, word + 3 * _BLOCK, None, WIDTH)
        if COPY:
            to = target + group * (4 * _BLOCK_NBYTES)
            _store(to, word, first, None)
            _store(to, word + _BLOCK, second, None)
            _store(to, word + 2 * _BLOCK, third, None)
            _store(to, word + 3 * _BLOCK, fourth, None)
        if LOOK:
            seen |= _sign_bits(first, mask, one, flip, rest, LOOK)
            seen |= _sign_bits(second, mask, one, flip, rest, LOOK)
            seen |= _sign_bits(third, mask, one, flip, rest, LOOK)
            seen |= _sign_bits(fourth, mask, one, flip, rest, LOOK)
        lane0, lane1 = _absorb(lane0, lane1, first, key0, key1, scramble0, scramble1)
        lane0, lane1 = _absorb(lane0, lane1, second, key0, key1, scramble0, scramble1)
        lane0, lane1 = _absorb(lane0, lane1, third, key0, key1, scramble0, scramble1)
        lane0, lane1 = _absorb(lane0, lane1, fourth, key0, key1, scramble0, scramble1)
    for block in range(groups * 4, whole):
        only = _words(source + block * _BLOCK_NBYTES, word, None, WIDTH)
        if COPY:
            _store(target + block * _BLOCK_NBYTES, word, only, None)
        if LOOK:
            seen |= _sign_bits(only, mask, one, flip, rest, LOOK)
        lane0, lane1 = _absorb(lane0, lane1, only, key0, key1, scramble0, scramble1)

    # The last block: bytes that are not there count as zeros, its last stripe has a key of its own,
    # and nothing is scrambled behind it.
    left = nbytes - whole * _BLOCK_NBYTES
    last = _last_block(source + whole * _BLOCK_NBYTES, word, left, WIDTH)
    if COPY:
        padded = (left + (_ALIGN - 1)) // _ALIGN * (_ALIGN // 8)
        _store(target + whole * _BLOCK_NBYTES, word, last, word < padded)
    if LOOK:  # (zeros behind the end are finite in every dtype)
        seen |= _sign_bits(last, mask, one, flip, rest, LOOK)
        is_there = tl.max(tl.max(((seen & sign) != 0).to(tl.int32), 0), 0)
        tl.store(out + tl.load(look + 5), is_there.to(tl.int64), mask=is_there != 0)
    lane = (tl.where(stripe == _STRIPES - 1, _KEY_END, stripe) * _LANES)[:, None] + pair2[None, :]
    sum0, sum1 = _sums(last, _key(keys, lane), _key(keys, lane + 1))
    lane0 += sum0
    lane1 += sum1

    length = ((whole + 1) * _BLOCK_NBYTES).to(tl.uint64)
    low = _fold(lane0, lane1, keys + _KEY_LOW, pair2) + length * _PRIME64_1
    # Not by `~`: the interpreter of Triton 3.7 has none for unsigned words.
    high = _fold(lane0, lane1, keys + _KEY_HIGH, pair2) + ((length * _PRIME64_2) ^ _ALL_ONES)
    place = out + tl.load(row + 3)
    tl.store(place, _canonical(high))
    tl.store(place + 1, _canonical(low))


INTERPRETED = not isinstance(digest_leaves, triton.JITFunction)
"""Whether Triton interprets the kernel, on CPU tensors, instead of compiling it."""

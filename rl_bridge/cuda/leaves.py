"""The parts of XXH3-128 that a leaf of X3T-128K needs, and how tensors are cut into leaves.

A leaf has 1 to 131,072 bytes and is hashed padded to whole blocks of 1,024 (the tail rule of
``docs/explanation/manifest-format.md``). So XXH3's branches for inputs of up to 240 bytes never
apply, and neither does its partial block: a leaf is 1 to 128 whole blocks, each of 16 stripes of 8
words of 64 bits.

Constants and steps are those of the public xxHash specification (``doc/xxhash_spec.md`` of
github.com/Cyan4973/xxHash, "XXH3 Algorithm Overview"), for seed 0 and the default secret.
"""

import numpy as np
import numpy.typing as npt

from rl_bridge.manifest.digest import DIGEST_NBYTES, LEAF_NBYTES, tensor_digest
from rl_bridge.manifest.table import ALIGNMENT
from rl_bridge.memory import passes
from rl_bridge.memory.passes import Addresses

LANES = 8
"""Words of 64 bits in a stripe; the state has one accumulator for each."""
STRIPES = 16
"""Stripes in a block."""

PRIME32_1 = 0x9E3779B1
PRIME64_1 = 0x9E3779B185EBCA87
PRIME64_2 = 0xC2B2AE3D27D4EB4F
AVALANCHE = 0x165667919E3779F9
"""Factor of XXH3's own avalanche step."""
_PRIME32_2 = 0x85EBCA77
_PRIME32_3 = 0xC2B2AE3D
_PRIME64_3 = 0x165667B19E3779F9
_PRIME64_4 = 0x85EBCA77C2B2AE63
_PRIME64_5 = 0x27D4EB2F165667C5

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe 7c01812cf721ad1c ded46de9839097db 7240a4a4b7b3671f"
    "cb79e64eccc0e578 825ad07dccff7221 b8084674f743248e e03590e6813a264c"
    "3c2852bb91c300cb 88d0658b1b532ea3 71644897a20df94e 3819ef46a9deacd8"
    "a8fa763fe39c343f f9dcbbc7c70b4f1d 8a51e04bcdb45931 c89f7ec9d9787364"
    "eac5ac8334d3ebc3 c581a0fffa1363eb 170ddd51b7f0da49 d316552629d4689e"
    "2b16be587d47a1fc 8ff8b8d17ad031ce 45cb3a8f95160428 afd7fbcabb4b407e"
)

# Rows of 8 words in the table of keys; before them one row for each stripe of a block.
KEY_END = STRIPES
"""Row of the key of a leaf's very last stripe."""
KEY_SCRAMBLE = STRIPES + 1
"""Row of the key between two blocks."""
KEY_LOW = STRIPES + 2
"""Row of the keys that fold the state into the digest's low half."""
KEY_HIGH = STRIPES + 3
"""Row of the keys that fold the state into the digest's high half."""
KEY_FIRST = STRIPES + 4
"""Row of the accumulators that a leaf begins with."""

LOOK_PLAIN, LOOK_ANY = 1, 2
"""How to look for NaN and Inf: by the exponent alone, or as some dtypes of 8 bits need it."""

WIDTHS = (16, 4, 2, 1)
"""Alignments, in bytes, that the kernel is compiled for."""
WIDEST = WIDTHS[0]


def most_registers(width: int, look: int) -> int | None:
    """Registers that a thread of this variant of the kernel may have; None: as the compiler likes.

    Where it looks for NaN and Inf the compiler likes some more than the usual variant needs, and
    then fewer warps find room. The other variants would spill.
    """
    return 64 if (width, look) == (WIDEST, LOOK_PLAIN) else None


def key_words() -> npt.NDArray[np.int64]:
    """Lay out all words of the secret that a leaf needs: int64, shape [21, 8], rows as named."""
    end, state = len(_SECRET), 8 * LANES
    places = [8 * stripe for stripe in range(STRIPES)]
    places += [end - state - 7, end - state, 11, end - state - 11]
    rows = [np.frombuffer(_SECRET, "<u8", LANES, place) for place in places]
    first = (_PRIME32_3, PRIME64_1, PRIME64_2, _PRIME64_3)
    rows.append(np.array([*first, _PRIME64_4, _PRIME32_2, _PRIME64_5, PRIME32_1], "<u8"))
    return np.stack(rows).view(np.int64)


class LeafTable:
    """The leaves of some tensors, one row each, where they lie in an arena, where digests go.

    The digests of a tensor's leaves stand one behind the other, and behind them 8 bytes for the
    tensor's length: what the tensor's own digest is computed over.

    Attributes:
        nbytes: sizes of the tensors, int64 [tensors].
        offsets: where each tensor begins in a packed arena, in bytes, int64 [tensors].
        tensor: which tensor each leaf belongs to, int64 [leaves].
        start: where in its tensor each leaf begins, in bytes, int64 [leaves].
        size: bytes of each leaf, 1 to 131,072, int64 [leaves].
        place: where each leaf's digest stands among the digests, in words, int64 [leaves].
        num_words: words of 64 bits that all digests and lengths take.

    """

    def __init__(self, nbytes: Addresses) -> None:
        """Cut tensors of `nbytes` (uint64 [tensors]) into leaves."""
        self.nbytes = np.ascontiguousarray(nbytes, np.uint64).astype(np.int64)
        rooms = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        self.offsets = np.cumsum(rooms) - rooms
        leaves = -(-self.nbytes // LEAF_NBYTES)
        self._first = np.zeros(len(leaves) + 1, np.uint64)
        np.cumsum(leaves, out=self._first[1:], dtype=np.uint64)
        rows = np.arange(int(self._first[-1]), dtype=np.int64)
        self.tensor = np.repeat(np.arange(len(leaves), dtype=np.int64), leaves)
        self.start = (rows - self._first.astype(np.int64)[self.tensor]) * LEAF_NBYTES
        self.size = np.minimum(self.nbytes[self.tensor] - self.start, LEAF_NBYTES)
        self.place = 2 * rows + self.tensor
        self.num_words = 2 * len(rows) + len(leaves)

    def __len__(self) -> int:
        """Count the leaves."""
        return len(self.start)

    def rows(
        self, sources: npt.NDArray[np.int64], chosen: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Lay out the kernel's arguments for each leaf: int64 [leaves, 4].

        Args:
            sources: where each tensor begins behind the kernel's source address, int64 [tensors].
            chosen: which tensors, bool [tensors].

        """
        of = self.tensor
        starts = sources[of] + self.start, self.offsets[of] + self.start
        rows = np.stack((*starts, self.size, self.place), 1)
        return np.ascontiguousarray(rows[chosen[of]])

    def combine(self, words: npt.NDArray[np.int64]) -> bytes:
        """Digest each tensor's leaf digests with its length: 16 bytes per tensor.

        Args:
            words: the digests, int64 [num_words]; the lengths are written into it.

        """
        sizes, native = self.nbytes.astype(np.uint64), passes.NATIVE
        if native is None:
            return self._combine_in_python(words)
        out = np.empty(len(sizes) * DIGEST_NBYTES, np.uint8)
        native.combine(
            passes._HASH,  # noqa: SLF001 - the function that the pass on the CPU was tested with
            len(sizes),
            sizes.ctypes.data,
            self._first.ctypes.data,
            words.ctypes.data,
            out.ctypes.data,
        )
        return out.tobytes()

    def _combine_in_python(self, words: npt.NDArray[np.int64]) -> bytes:
        text = words.tobytes()
        starts = (2 * self._first.astype(np.int64)[:-1] + np.arange(len(self.nbytes))) * 8
        counts = np.diff(self._first).astype(np.int64) * DIGEST_NBYTES
        rows = zip(starts.tolist(), counts.tolist(), self.nbytes.tolist(), strict=True)
        return b"".join(tensor_digest(text[at : at + n], nbytes) for at, n, nbytes in rows)

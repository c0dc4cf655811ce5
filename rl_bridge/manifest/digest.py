"""The digest X3T-128K: what makes two tensors, or two updates, the same.

    leaf(i)   = XXH3-128(bytes[i*131072 : (i+1)*131072]), the last padded to a multiple of 1024
    digest(T) = XXH3-128(leaf(0) || ... || leaf(k-1) || le64(nbytes)),   k = ceil(nbytes / 131072)
    root      = XXH3-128(line(0) || ... || line(n-1)), one line per tensor, sorted by name

over a tensor's logical, row-major bytes: never the storage behind a view. XXH3-128 is the public
xxHash algorithm with seed 0 and its default secret, written in its canonical big-endian form. It
detects accidents, not forgers: authenticity is a signature's job. Normative text, reasons and test
vectors: ``docs/explanation/manifest-format.md``.
"""

import json
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from rl_bridge.errors import MalformedManifest

ALGORITHM = "X3T-128K"
LEAF_NBYTES = 131_072
LENGTH_NBYTES = 8
"""Size of the length that stands behind a tensor's leaf digests."""
PAD_NBYTES = 1_024
DIGEST_NBYTES = 16

DIGEST = np.dtype((np.void, DIGEST_NBYTES))
"""One digest, as an item of an array."""
_DIGITS = np.dtype((np.void, 2 * DIGEST_NBYTES))
_FILLING = threading.Lock()
_quote = json.encoder.encode_basestring_ascii


def leaf_digests(data: memoryview) -> bytes:
    """Digest each leaf of `data` (contiguous bytes): 16 bytes a leaf, in order."""
    digest = xxhash.xxh3_128_digest
    nbytes = data.nbytes
    whole = nbytes // LEAF_NBYTES * LEAF_NBYTES
    leaves = [digest(data[i : i + LEAF_NBYTES]) for i in range(0, whole, LEAF_NBYTES)]
    tail = nbytes - whole
    if tail:
        if tail % PAD_NBYTES:
            padded = bytearray(-(-tail // PAD_NBYTES) * PAD_NBYTES)
            padded[:tail] = data[whole:]
            leaves.append(digest(padded))
        else:
            leaves.append(digest(data[whole:]))
    return b"".join(leaves)


def tensor_digest(leaves: bytes, nbytes: int) -> bytes:
    """Combine a tensor's leaf digests with its byte length into its 16-byte digest."""
    return xxhash.xxh3_128_digest(leaves + nbytes.to_bytes(8, "little"))


def digest_bytes(data: bytes | bytearray | memoryview) -> bytes:
    """X3T-128K digest (16 bytes) of contiguous bytes: the reference that all others must equal."""
    view = memoryview(data).cast("B")
    return tensor_digest(leaf_digests(view), view.nbytes)


def text_digest(text: str) -> str:
    """XXH3-128 of ASCII text, as 32 hexadecimal digits (layouts are named by it)."""
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))


def digest_rows(block: bytes | bytearray) -> npt.NDArray[np.uint8]:
    """A block of digests as an array, shape [digests, 16]."""
    return np.frombuffer(block, np.uint8).reshape(-1, DIGEST_NBYTES)


def digests_differ(one: bytes, other: bytes) -> npt.NDArray[np.bool_]:
    """Which digests of two blocks differ."""
    return rows_differ(digest_rows(one), digest_rows(other))


def rows_differ(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which digests of two arrays, shape [digests, 16], differ: half a digest at a time."""
    high, low = (one.view(np.uint64) != other.view(np.uint64)).T
    differs: npt.NDArray[np.bool_] = high | low
    return differs


class RootPlan:
    """Everything of the canonical lines but the digests, made once per layout.

    A line is the canonical JSON array ``[name, dtype, [dims...], "digest in hex"]`` and a newline.
    With 40,000 tensors, writing the lines anew for every update costs more than hashing small
    tensors; filling 32 digits per line into a prepared block costs a millisecond.
    """

    def __init__(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        ties: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the block of lines, sorted by name (code points, which is UTF-8 order).

        A name in `ties` gets a line of its own with the digest of the tensor it shares, so that a
        root tells what the weights are, not how they were stored.
        """
        rows = {name: row for row, name in enumerate(names)}
        self._num_digests = len(rows)
        rows |= {name: rows[target] for name, target in (ties or {}).items()}
        order = sorted(rows)
        blank = ',"' + "0" * (2 * DIGEST_NBYTES) + '"]\n'
        # 40,000 tensors are of few kinds: the text behind a name is made once for each kind.
        kinds = [(dtypes[row], tuple(shapes[row])) for row in map(rows.__getitem__, order)]
        texts = {
            (dtype, shape): f',"{dtype}",[{",".join(map(str, shape))}]{blank}'
            for dtype, shape in set(kinds)
        }
        heads = map(_quote, order)
        lines = [f"[{name}{texts[kind]}" for name, kind in zip(heads, kinds, strict=True)]
        self._order = np.array([rows[name] for name in order], np.int64)
        self._block = np.frombuffer(bytearray("".join(lines).encode("ascii")), np.uint8)
        # Where each line's 32 digits start: the line ends with `"]\n`, three bytes after them.
        ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
        self._starts = ends - 3 - 2 * DIGEST_NBYTES

    def root(self, digests: bytes) -> bytes:
        """Root (16 bytes) of the update whose tensor digests are `digests`, in layout order."""
        expected = self._num_digests * DIGEST_NBYTES
        if len(digests) != expected:
            raise MalformedManifest(
                f"digest block has {len(digests)} bytes, expected {expected}: {DIGEST_NBYTES} for "
                "each tensor of the layout. Send WeightUpdateManifest.to_json() as it is."
            )
        if not expected:  # a rank of a group may hold nothing
            return xxhash.xxh3_128_digest(b"")
        ordered = np.frombuffer(digests, DIGEST)[self._order]
        # In the block itself unless another thread uses it: a copy takes as long as all the rest.
        if not _FILLING.acquire(blocking=False):  # another thread; or was, when this child forked
            return self._filled(self._block.copy(), ordered)
        try:
            return self._filled(self._block, ordered)
        finally:
            _FILLING.release()

    def _filled(self, block: npt.NDArray[np.uint8], ordered: npt.NDArray[np.void]) -> bytes:
        """Write every digest over that of last time, and hash the lines."""
        # One 32-byte item at every byte offset: a gather that moves whole digests at a time.
        windows = np.ndarray(len(block) - 2 * DIGEST_NBYTES + 1, _DIGITS, block, strides=(1,))
        windows[self._starts] = np.frombuffer(ordered.tobytes().hex().encode("ascii"), _DIGITS)
        return xxhash.xxh3_128_digest(block.data)

"""One pass over the bytes of many tensors: copy, digest, or both at once, on several threads.

The pass is the only place where weights' bytes are read or written on the CPU; publishing,
verifying, installing and proving are all made of it. The compiled module does it without the GIL;
without a compiler the same pass runs in Python over the same xxHash, slower and equal to the byte.
"""

import ctypes
import importlib
import logging
import operator
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rl_bridge.manifest.columns import Blocks, ColumnBlocks
from rl_bridge.manifest.digest import (
    DIGEST_NBYTES,
    LEAF_NBYTES,
    LENGTH_NBYTES,
    digest_bytes,
    leaf_digests,
    tensor_digest,
)
from rl_bridge.manifest.dtypes import NON_FINITE

_LOG = logging.getLogger(__name__)

Addresses = npt.NDArray[np.uint64]

# Leaves that a thread takes at a time: 2 MiB, so that threads end together and the shared counter
# costs nothing.
_BLOCK = 16
# Below this a second thread costs more (tens of microseconds to wake it) than it saves.
_SERIAL_NBYTES = 4 << 20
# Above this the written bytes would only push others out of the cache.
_STREAM_NBYTES = 8 << 20
_MAX_THREADS = 8
_CURSOR_NBYTES = 8
# What the compiled module says of itself: that of an earlier build does not, and is not used.
_LOOKS_FOR = "non-finite"


def _address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's first item lies: asked in the way that takes the least time."""
    address: int = array.__array_interface__["data"][0]
    return address


def default_threads() -> int:
    """Threads for a pass where the caller names no number: the usable cores, at most 8."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def checked_flag(name: str, value: object) -> bool:
    """Check an option that is on or off.

    Raises:
        TypeError: it is no bool.

    """
    if type(value) is not bool:
        raise TypeError(f"{name}={value!r}: expected True or False.")
    return value


def checked_count(name: str, value: object) -> int:
    """Check an option that counts: 1 or more; integers of any library's are taken.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less than 1.

    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # that is what is tried
    except TypeError as error:
        raise TypeError(f"{name}={value!r}: expected an int of 1 or more.") from error
    if count < 1:
        raise ValueError(f"{name}={value!r}: expected an int of 1 or more.")
    return count


def checked_threads(number: object) -> int | None:
    """Check ``num_threads``: as `checked_count`, or None, which stands for `default_threads`."""
    return None if number is None else checked_count("num_threads", number)


def _load_native() -> tuple[ModuleType | None, int, str | None]:
    """Find the compiled pass and xxHash's function; say why not, where one is missing."""
    try:
        # By name: a type checker cannot see a module that is built, or not, at install time.
        native = importlib.import_module("rl_bridge.memory._native")
    except ImportError as error:
        return None, 0, f"the compiled module is missing ({error}); no C compiler at install time?"
    if getattr(native, "looks_for", None) != _LOOKS_FOR:
        # In a clone that was updated and not built anew. Used in part, it would be slow unsaid.
        cause = f"the compiled module {native.__file__} is of an earlier build"
        _LOG.warning("%s. Digests are slow without it: build it anew (pip install -e .).", cause)
        return None, 0, cause
    try:
        library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    except (ImportError, OSError) as error:
        return None, 0, f"xxhash's library cannot be opened ({error})"
    # xxhash exports the C functions that its wheel was built from; the dispatching one picks the
    # widest vectors of this CPU. It is no documented interface, hence the self-test below.
    for name in ("XXH3_128bits_dispatch", "XXH3_128bits"):
        function = getattr(library, name, None)
        if function is not None:
            address = ctypes.cast(function, ctypes.c_void_p).value or 0
            return native, address, None
    return None, 0, "xxhash's library does not export XXH3_128bits"


class BytePlan:
    """Which bytes: the sizes of some tensors, cut into leaves. Made once per layout.

    The digests of the leaves, and of column blocks, can be taken after a pass.

    Attributes:
        non_finite: by tensor: the last pass that digested found NaN or Inf in it. Empty if the plan
            was made without dtypes.

    """

    def __init__(
        self,
        nbytes: npt.NDArray[np.uint64],
        *,
        dtypes: Sequence[str] | None = None,
        cuts: ColumnBlocks | None = None,
        native: bool = True,
    ) -> None:
        """Cut tensors of `nbytes` (uint64, shape [tensors]) into leaves.

        Args:
            nbytes: sizes.
            dtypes: wire names, to look for NaN and Inf as well; None does not.
            cuts: digest column blocks, too, of the tensors that these cut; None does not.
            native: False keeps to the Python pass (tests, and comparison).

        """
        self._nbytes = np.ascontiguousarray(nbytes, np.uint64)
        leaves = (self._nbytes + np.uint64(LEAF_NBYTES - 1)) // np.uint64(LEAF_NBYTES)
        self._start = np.zeros(len(leaves) + 1, np.uint64)
        np.cumsum(leaves, out=self._start[1:])
        self._table_nbytes = int(self._start[-1]) * DIGEST_NBYTES + 8 * len(leaves)
        self.total_nbytes = int(self._nbytes.sum())
        self._native = NATIVE if native else None
        self._fixed = _address_of(self._nbytes), _address_of(self._start)
        self._dtypes = dtypes
        self._numbers = None if dtypes is None else _Numbers(dtypes)
        self.non_finite = np.zeros(0 if dtypes is None else len(dtypes), bool)
        self._cuts = cuts
        self._cut_columns = np.empty((0, 5), np.uint64)
        if cuts is not None and cuts.nbytes and self._native is not None:
            columns = (cuts.strips, cuts.rows, cuts.row_nbytes, cuts.band_rows, cuts.starts)
            self._cut_columns = np.stack(columns, 1).astype(np.uint64)
        # Of the last pass, until they are taken.
        self._leaves = self._columns = np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy anew: its columns lie elsewhere."""
        native = self._native is not None
        made = partial(type(self), dtypes=self._dtypes, cuts=self._cuts, native=native)
        return made, (self._nbytes,)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._nbytes)

    def digest(self, src: Addresses, *, num_threads: int | None = None) -> bytes:
        """Digest the bytes at `src` (addresses, uint64, shape [tensors]): 16 bytes per tensor."""
        return self._run(src, None, digest=True, num_threads=num_threads)

    def copy(self, src: Addresses, dst: Addresses, *, num_threads: int | None = None) -> None:
        """Copy each tensor from `src` to `dst`; the ranges must not overlap."""
        self._run(src, dst, digest=False, num_threads=num_threads)

    def copy_digest(
        self, src: Addresses, dst: Addresses, *, num_threads: int | None = None
    ) -> bytes:
        """Copy and digest in one pass; a tensor whose two addresses are equal is digested only."""
        return self._run(src, dst, digest=True, num_threads=num_threads)

    def _run(
        self, src: Addresses, dst: Addresses | None, *, digest: bool, num_threads: int | None
    ) -> bytes:
        src = self._checked(src)
        dst = None if dst is None else self._checked(dst)
        if self._native is None:
            return self._run_python(src, dst, digest=digest)
        # The threads' cursor, and behind it the leaves' digests.
        room = np.empty(_CURSOR_NBYTES + self._table_nbytes, np.uint8)
        room[:_CURSOR_NBYTES] = 0
        cursor = _address_of(room)
        arguments = (
            _HASH if digest else 0,
            len(self),
            _address_of(src),
            0 if dst is None else _address_of(dst),
            *self._fixed,
            cursor + _CURSOR_NBYTES,
            cursor,
            _BLOCK,
            int(self.total_nbytes >= _STREAM_NBYTES),
        )
        more: tuple[int, ...] = ()
        if self._cuts is not None and len(self._cut_columns):
            self._columns = np.empty(self._cuts.nbytes, np.uint8)
            more = self._cut_columns.ctypes.data, self._columns.ctypes.data
        numbers = self._numbers if digest else None
        found = np.zeros(0 if numbers is None else len(self), np.uint8)
        if numbers is not None:
            more = (*(more or (0, 0)), *numbers.addresses, _address_of(found))
        run = partial(self._native.run, *arguments, *more)
        _run_shared(run, self.total_nbytes, int(self._start[-1]), num_threads)
        if not digest:
            return b""
        if numbers is not None:
            self.non_finite = found.astype(bool)
        self._leaves = room[_CURSOR_NBYTES:]
        return self._combine(self._leaves)

    def _combine(self, table: npt.NDArray[np.uint8]) -> bytes:
        """Each tensor's digest from those of its leaves; their lengths are filled in here."""
        assert self._native is not None
        out = np.empty(len(self._nbytes) * DIGEST_NBYTES, np.uint8)
        self._native.combine(
            _HASH,
            len(self._nbytes),
            *self._fixed,
            table.__array_interface__["data"][0],
            out.__array_interface__["data"][0],
        )
        return out.tobytes()

    def take_block(self) -> npt.NDArray[np.uint8]:
        """The leaf list of the last pass, as `rl_bridge.manifest.table` describes it."""
        taken, self._leaves = self._leaves, np.empty(0, np.uint8)
        return taken

    def take_columns(self, src: Addresses) -> npt.NDArray[np.uint8]:
        """The column list of the last pass, which was over the bytes at `src`."""
        taken, self._columns = self._columns, np.empty(0, np.uint8)
        if len(taken) or self._cuts is None:
            return taken
        return block_digests(blocks_at(self._cuts.all_blocks(), src)).ravel()

    @property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Leaves of each tensor."""
        return (self._start[1:] - self._start[:-1]).astype(np.int64)

    def combine(self, block: bytes) -> bytes:
        """The digests that a leaf list makes."""
        if self._native is None:
            ends = np.cumsum(self.leaf_counts * DIGEST_NBYTES + LENGTH_NBYTES).tolist()
            view = memoryview(block)
            pairs = zip([0, *ends[:-1]], ends, strict=True)
            return b"".join(xxhash.xxh3_128_digest(view[start:end]) for start, end in pairs)
        return self._combine(np.frombuffer(bytearray(block), np.uint8))

    def leaves(self, src: Addresses, *, num_threads: int | None = None) -> npt.NDArray[np.uint8]:
        """Digest the leaves of the bytes at `src`: uint8, shape [leaves, 16], tensor by tensor."""
        self.digest(src, num_threads=num_threads)
        block = self.take_block()
        starts = self._start[:-1].astype(np.int64) * DIGEST_NBYTES
        # Behind each tensor's leaves stands its length, which is no digest.
        ends = self._start[1:].astype(np.int64) * DIGEST_NBYTES + 8 * np.arange(len(starts))
        keep = np.ones(len(block), bool)
        keep[(ends[:, None] + np.arange(8)).ravel()] = False
        return block[keep].reshape(-1, DIGEST_NBYTES)

    def _run_python(self, src: Addresses, dst: Addresses | None, *, digest: bool) -> bytes:
        digests = []
        noted = []
        for index, (address, nbytes) in enumerate(
            zip(src.tolist(), self._nbytes.tolist(), strict=True)
        ):
            target = address if dst is None else int(dst[index])
            leaves = []
            for begin in range(0, nbytes, LEAF_NBYTES):
                size = min(LEAF_NBYTES, nbytes - begin)
                if digest:
                    leaf = (ctypes.c_char * size).from_address(address + begin)
                    leaves.append(leaf_digests(memoryview(leaf).cast("B")))
                if target != address:
                    ctypes.memmove(target + begin, address + begin, size)
            if digest:
                digests.append(tensor_digest(b"".join(leaves), nbytes))
                noted += [*leaves, nbytes.to_bytes(8, "little")]
        if digest:
            self._leaves = np.frombuffer(b"".join(noted), np.uint8)
            if self._numbers is not None:
                self.non_finite = self._numbers.find(src, self._nbytes)
        return b"".join(digests)

    def _checked(self, addresses: Addresses) -> Addresses:
        addresses = np.ascontiguousarray(addresses, np.uint64)
        if addresses.shape != self._nbytes.shape:
            raise ValueError(f"{addresses.shape[0]} addresses for a plan of {len(self)} tensors")
        return addresses


class _Numbers:
    """Which numbers some tensors hold, as far as a pass has to know that to find NaN and Inf."""

    def __init__(self, dtypes: Sequence[str]) -> None:
        """Those of tensors with these wire names."""
        kinds = {name: kind for kind, name in enumerate(NON_FINITE, start=1)}
        self._kinds = np.array([kinds.get(name, 0) for name in dtypes], np.uint8)
        self._patterns = np.array(list(NON_FINITE.values()), np.uint64)
        self.addresses = _address_of(self._kinds), _address_of(self._patterns)

    def find(self, src: Addresses, nbytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Look through the tensors at some addresses, by numpy: a pass of its own."""
        rows = zip(src.tolist(), nbytes.tolist(), self._kinds.tolist(), strict=True)
        found = [kind > 0 and self._is_in(at, size, kind) for at, size, kind in rows]
        return np.array(found, np.bool_)

    def _is_in(self, address: int, nbytes: int, kind: int) -> bool:
        mask, one, sign, flip, rest = self._patterns[kind - 1]
        for begin in range(0, nbytes, LEAF_NBYTES):
            size = min(LEAF_NBYTES, nbytes - begin)
            words = np.zeros(-(-size // 8), np.uint64)
            ctypes.memmove(words.ctypes.data, address + begin, size)
            words ^= flip
            if ((((words & mask) + one) & (words | rest)) & sign).any():
                return True
        return False


def blocks_at(blocks: Blocks, addresses: Addresses) -> npt.NDArray[np.uint64]:
    """Blocks as `block_digests` takes them, of tensors at `addresses`, one for each stored one."""
    at = addresses[blocks.tensors] + blocks.starts.astype(np.uint64)
    rest = (blocks.rows, blocks.widths, blocks.pitches)
    return np.stack((at, *(column.astype(np.uint64) for column in rest)), 1)


def block_digests(
    blocks: npt.NDArray[np.uint64], *, num_threads: int | None = None
) -> npt.NDArray[np.uint8]:
    """Digest column blocks: uint8, shape [blocks, 16]. See `rl_bridge.manifest.columns`.

    Args:
        blocks: uint64, shape [blocks, 4]: address of the first byte, rows, bytes of a row's piece,
            and how far one piece is behind the one before it.
        num_threads: threads to use; None takes the usable cores, at most 8.

    """
    blocks = np.ascontiguousarray(blocks, np.uint64)
    num = len(blocks)
    if NATIVE is None:
        digests = [_block_digest(*block) for block in blocks.tolist()]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(num, DIGEST_NBYTES)
    sizes = blocks[:, 1] * blocks[:, 2]
    out = np.empty((num, DIGEST_NBYTES), np.uint8)
    cursor = np.zeros(1, np.uint64)
    most = int(sizes.max(initial=0))
    given = (num, _address_of(blocks), _address_of(out), _address_of(cursor), _BLOCK, most)
    _run_shared(partial(NATIVE.digest_blocks, _HASH, *given), int(sizes.sum()), num, num_threads)
    return out


def _block_digest(address: int, rows: int, width: int, pitch: int) -> bytes:
    raw = (ctypes.c_char * ((rows - 1) * pitch + width)).from_address(address)
    pieces = np.ndarray((rows, width), np.uint8, memoryview(raw), strides=(pitch, 1))
    return xxhash.xxh3_128_digest(pieces.tobytes())


def _run_shared(
    run: Callable[[], object], nbytes: int, units: int, num_threads: int | None
) -> None:
    """Run a pass in this thread, and in others if it is long: each takes blocks of units."""
    helpers = 0
    if nbytes >= _SERIAL_NBYTES:
        threads = default_threads() if num_threads is None else max(1, num_threads)
        helpers = min(threads, -(-units // _BLOCK)) - 1
    if helpers <= 0:
        run()
        return
    shares: list[_Share] = [Future() for _ in range(helpers)]
    try:
        _POOL.start(shares, run)
        run()
    finally:
        _finish(shares)  # they use the caller's arrays


_Share = Future[None]


class _Pool:
    """Helper threads, made when first needed and anew in a forked child (threads do not fork)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        os.register_at_fork(after_in_child=self._reset)

    def start(self, shares: list[_Share], run: Callable[[], object]) -> None:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(64, thread_name_prefix="rl_bridge-pass")
            try:
                for share in shares:
                    self._executor.submit(_take_part, share, run)
            except RuntimeError:
                # The interpreter is ending, or no thread can be started: the caller's own thread
                # takes all blocks that nobody else takes.
                _LOG.debug("not all of %d helper threads", len(shares), exc_info=True)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._executor = None


def _take_part(share: _Share, run: Callable[[], object]) -> None:
    """What a helper does of a pass, unless the pass is over by then.

    The pool's own future does not suffice: where a thread cannot be started, `submit` raises and
    keeps the work all the same, for whichever thread gets free when the pass is long over.
    """
    if share.set_running_or_notify_cancel():
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            share.set_exception(error)
        else:
            share.set_result(None)


def _finish(shares: list[_Share]) -> None:
    """Wait for the helpers, whatever arrives meanwhile: they are in memory that is not theirs."""
    interrupt: BaseException | None = None
    for share in shares:
        is_over = False
        while not is_over:
            try:
                is_over = share.cancel() or share.done()
                if not is_over:
                    wait([share])
            except BaseException as error:  # noqa: BLE001 - raised below, when no helper writes
                interrupt = error
    errors = (share.exception() for share in shares if not share.cancelled())
    problems = [error for error in (interrupt, *errors) if error is not None]
    if problems:
        try:
            raise problems[0]
        finally:
            # Else the traceback would hold this frame, this frame the error, and both the bytes.
            del interrupt, errors, problems, shares


_POOL = _Pool()
NATIVE, _HASH, _CAUSE = _load_native()


def native_cause() -> str | None:
    """Why the compiled pass is not in use, or None if it is (``rl-bridge doctor`` says it)."""
    return _CAUSE


def _self_test() -> None:
    """Compare the compiled pass with the reference; a wrong digest must never leave this module."""
    global NATIVE, _CAUSE
    if NATIVE is None:
        _LOG.info("digests run in Python: %s", _CAUSE)
        return
    sizes = np.array([0, 1, 1024, LEAF_NBYTES - 1, LEAF_NBYTES, 2 * LEAF_NBYTES + 77], np.uint64)
    data = (np.arange(int(sizes.max()), dtype=np.uint64) * 2_654_435_761 >> 7).astype(np.uint8)
    copy = np.zeros_like(data)
    plan = BytePlan(sizes)
    found = plan.copy_digest(
        np.full(len(sizes), data.ctypes.data, np.uint64),
        np.full(len(sizes), copy.ctypes.data, np.uint64),
    )
    expected = b"".join(digest_bytes(data[:size].tobytes()) for size in sizes.tolist())
    if found != expected or not np.array_equal(copy, data):
        NATIVE, _CAUSE = None, "the compiled module disagrees with xxhash on this machine"
        _LOG.warning("digests run in Python: %s", _CAUSE)


_self_test()

/* One pass over the leaves of many tensors: copy them, digest them, or both, without the GIL.
 *
 * Why C: a Python loop takes the GIL back twice per 128 KiB leaf. In a process whose other threads
 * are busy with Python each of these can wait for a whole switch interval (5 ms), which turns a
 * 60 ms pass over 1 GiB into minutes. The digest itself stays xxHash's: the caller hands in the
 * address of XXH3_128bits from the xxhash package that Python loaded, and checks the result.
 * digest.py is the reference that this file must equal to the bit.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define LEAF 131072u
#define PAD 1024u
#define DIGEST 16u
#define BAND 524288u /* most bytes of several rows that make a band */

typedef struct { uint64_t low64, high64; } hash128;
typedef hash128 (*hash_fn)(const void *, size_t);

/* How the bits of a dtype's NaN and Inf look: five words that hold the same for each number in them.
 * With y = bits ^ flip, a number is not finite if (((y & mask) + one) & (y | any)) has its sign bit. */
typedef struct { uint64_t mask, one, sign, flip, any; } pattern;

typedef struct {
    hash_fn hash;               /* NULL: copy only */
    uint64_t num_tensors;
    const uint64_t *src, *dst;  /* addresses; dst NULL: digest only */
    const uint64_t *nbytes;
    const uint64_t *start;      /* leaves before tensor i; num_tensors + 1 entries */
    uint8_t *table;             /* leaf digests, then 8 bytes for the length, per tensor */
    uint64_t *cursor;           /* next leaf that nobody took; shared by the threads */
    uint64_t block;             /* leaves taken at a time */
    int stream;                 /* bypass the cache when writing */
    const uint64_t *columns;    /* per tensor: strips of a row (0: none), rows, bytes of a row, rows of
                                 * a band, first byte in the column list; NULL: no column list */
    uint8_t *blocks;            /* the column list: digests of the column blocks */
    const uint8_t *kinds;       /* per tensor: which of `patterns` it has (0: none); NULL: nobody asks */
    const pattern *patterns;    /* of kind 1, 2, ... */
    uint8_t *found;             /* per tensor: set where some number is not finite */
} job;

static void put_be64(uint8_t *out, uint64_t value) {
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void put_digest(uint8_t *out, hash128 value) {
    put_be64(out, value.high64);
    put_be64(out + 8, value.low64);
}

static uint64_t look(const void *at, size_t n, const pattern *p) {
    uint64_t word = 0;
    memcpy(&word, at, n);
    word ^= p->flip;
    return ((word & p->mask) + p->one) & (word | p->any);
}

#if defined(__SSE2__)
typedef struct { __m128i mask, one, flip, any, found; } search;

static inline void look_at(search *s, __m128i bits, int is_plain) {
    if (!is_plain) bits = _mm_xor_si128(bits, s->flip);
    __m128i sum = _mm_add_epi64(_mm_and_si128(bits, s->mask), s->one);
    if (!is_plain) sum = _mm_and_si128(sum, _mm_or_si128(bits, s->any));
    s->found = _mm_or_si128(s->found, sum);
}

/* Look at `n` bytes, a multiple of 64, and copy them past the cache on the way if there is a `dst`:
 * the copy waits for memory, so that the look costs no time. `is_plain`: the pattern has no flip. */
static inline uint64_t search_in(uint8_t *dst, const uint8_t *src, size_t n, const pattern *p, int is_plain) {
    search s = {_mm_set1_epi64x((long long)p->mask), _mm_set1_epi64x((long long)p->one),
                _mm_set1_epi64x((long long)p->flip), _mm_set1_epi64x((long long)p->any),
                _mm_setzero_si128()};
    search other = s; /* two, so that not every step waits for the one before it */
    for (size_t i = 0; i < n; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
        if (dst) {
            _mm_stream_si128((__m128i *)(dst + i), a);
            _mm_stream_si128((__m128i *)(dst + i + 16), b);
            _mm_stream_si128((__m128i *)(dst + i + 32), c);
            _mm_stream_si128((__m128i *)(dst + i + 48), d);
        }
        look_at(&s, a, is_plain);
        look_at(&other, b, is_plain);
        look_at(&s, c, is_plain);
        look_at(&other, d, is_plain);
    }
    uint64_t words[2];
    _mm_storeu_si128((__m128i *)words, _mm_or_si128(s.found, other.found));
    return words[0] | words[1];
}
#endif

/* Whether some number in these bytes is not finite; with a `dst`, copy them past the cache on the way.
 * What is missing in the last word counts as zeros, which are finite in every dtype. */
static int has_non_finite(uint8_t *dst, const uint8_t *src, size_t n, const pattern *p) {
    uint64_t found = 0;
    size_t i = 0;
#if defined(__SSE2__)
    i = n & ~(size_t)63;
    if (~p->any) found = search_in(dst, src, i, p, 0);
    else if (dst) found = search_in(dst, src, i, p, 1);
    else found = search_in(NULL, src, i, p, 1);
#endif
    if (dst) memcpy(dst + i, src + i, n - i);
    for (; i < n; i += 8) found |= look(src + i, n - i < 8 ? n - i : 8, p);
    return (found & p->sign) != 0;
}

/* memcpy reads the destination's lines before it overwrites them; for data that does not fit the
 * cache that is a third of the traffic. libc avoids it only for single copies far above a leaf. */
static int is_streamed(const uint8_t *dst, size_t n, int stream) {
#if defined(__SSE2__)
    return stream && n >= 4096 && ((uintptr_t)dst & 15u) == 0;
#else
    (void)dst, (void)n, (void)stream;
    return 0;
#endif
}

static void copy_leaf(uint8_t *dst, const uint8_t *src, size_t n, int stream) {
#if defined(__SSE2__)
    if (is_streamed(dst, n, stream)) {
        size_t whole = n & ~(size_t)63;
        for (size_t i = 0; i < whole; i += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
            __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
            _mm_stream_si128((__m128i *)(dst + i), a);
            _mm_stream_si128((__m128i *)(dst + i + 16), b);
            _mm_stream_si128((__m128i *)(dst + i + 32), c);
            _mm_stream_si128((__m128i *)(dst + i + 48), d);
        }
        memcpy(dst + whole, src + whole, n - whole);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(dst, src, n);
}

/* Copy a leaf, and say whether some number in it is not finite. */
static int copy_looking(uint8_t *dst, const uint8_t *src, size_t n, int stream, const pattern *p) {
    if (is_streamed(dst, n, stream)) return has_non_finite(dst, src, n, p);
    memcpy(dst, src, n);
    return has_non_finite(NULL, src, n, p);
}

static void digest_leaf(const job *j, const uint8_t *src, size_t n, uint8_t *scratch, uint8_t *out) {
    size_t padded = (n + PAD - 1) / PAD * PAD;
    if (padded != n) {
        memcpy(scratch, src, n);
        memset(scratch + n, 0, padded - n);
        src = scratch;
    }
    put_digest(out, j->hash(src, padded));
}

/* Digest a column block: `rows` pieces of `width` bytes, each `pitch` behind the one before it. Put
 * together first: a digest piece by piece costs more than the copy, which stays in the cache. */
static void digest_block(hash_fn hash, const uint8_t *src, uint64_t rows, uint64_t width, uint64_t pitch,
                         uint8_t *scratch, uint8_t *out) {
    if (rows > 1) {
        for (uint64_t i = 0; i < rows; i++) memcpy(scratch + i * width, src + i * pitch, width);
        src = scratch;
    }
    put_digest(out, hash(src, rows * width));
}

/* Digest the blocks of the bands that begin in bytes [begin, end) of a tensor and end by `there`.
 * Returns where the first band begins that is left. */
static uint64_t run_bands(const job *j, uint64_t tensor, uint64_t begin, uint64_t end, uint64_t there,
                          uint8_t *scratch) {
    const uint64_t *c = j->columns + 5 * tensor;
    uint64_t strips = c[0], row = c[2], width = row / strips;
    uint64_t band = (begin + row * c[3] - 1) / (row * c[3]);
    for (;; band++) {
        uint64_t first = band * c[3], start = first * row;
        uint64_t rows = first < c[1] && c[1] - first < c[3] ? c[1] - first : c[3];
        if (start >= end || start + rows * row > there) return start;
        const uint8_t *src = (const uint8_t *)(uintptr_t)j->src[tensor] + start;
        uint8_t *out = j->blocks + c[4] + DIGEST * band * strips;
        for (uint64_t i = 0; i < strips; i++)
            digest_block(j->hash, src + i * width, rows, width, row, scratch, out + DIGEST * i);
    }
}

static uint64_t tensor_of(const job *j, uint64_t leaf) {
    uint64_t low = 0, high = j->num_tensors; /* the last tensor with start <= leaf */
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (j->start[middle] <= leaf) low = middle; else high = middle;
    }
    return low;
}

static void run_leaves(const job *j, uint64_t first, uint64_t last, uint8_t *scratch) {
    uint64_t tensor = tensor_of(j, first), band = 0; /* where the next band begins in the tensor */
    for (uint64_t leaf = first; leaf < last; leaf++) {
        while (j->start[tensor + 1] <= leaf) tensor++;
        uint64_t begin = (leaf - j->start[tensor]) * LEAF;
        if (leaf == first || !begin) band = begin;
        uint64_t left = j->nbytes[tensor] - begin;
        size_t n = left < LEAF ? (size_t)left : LEAF;
        const uint8_t *src = (const uint8_t *)(uintptr_t)j->src[tensor] + begin;
        /* Copy first: it brings the leaf into this core's cache, and while the digest reads it
         * there the streamed stores drain. The other way round costs 15 % more. */
        const pattern *p = j->kinds && j->kinds[tensor] ? j->patterns + j->kinds[tensor] - 1 : NULL;
        uint8_t *dst = j->dst && j->dst[tensor] != j->src[tensor]
                           ? (uint8_t *)(uintptr_t)j->dst[tensor] + begin : NULL;
        if (p) {
            /* Whoever finds something writes the same, so that the threads need not agree. */
            if (dst ? copy_looking(dst, src, n, j->stream, p) : has_non_finite(NULL, src, n, p))
                __atomic_store_n(j->found + tensor, 1, __ATOMIC_RELAXED);
        } else if (dst) {
            copy_leaf(dst, src, n, j->stream);
        }
        if (j->hash) digest_leaf(j, src, n, scratch, j->table + DIGEST * leaf + 8 * tensor);
        if (!j->hash || !j->columns || !j->columns[5 * tensor]) continue;
        /* The bands of these leaves, while they are in the cache; a band that goes on behind the
         * last of them belongs to the thread that has its beginning. */
        int is_last = leaf + 1 == last || left <= LEAF;
        band = run_bands(j, tensor, band, begin + n, is_last ? UINT64_MAX : begin + n, scratch);
    }
}

static PyObject *py_run(PyObject *self, PyObject *args) {
    unsigned long long hash, num, src, dst, nbytes, start, table, cursor, block, columns = 0, blocks = 0;
    unsigned long long kinds = 0, patterns = 0, found = 0;
    int stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKi|KKKKK", &hash, &num, &src, &dst, &nbytes, &start, &table,
                          &cursor, &block, &stream, &columns, &blocks, &kinds, &patterns, &found))
        return NULL;
    job j = {(hash_fn)(uintptr_t)hash, num, (const uint64_t *)(uintptr_t)src,
             (const uint64_t *)(uintptr_t)dst, (const uint64_t *)(uintptr_t)nbytes,
             (const uint64_t *)(uintptr_t)start, (uint8_t *)(uintptr_t)table,
             (uint64_t *)(uintptr_t)cursor, block, stream, (const uint64_t *)(uintptr_t)columns,
             (uint8_t *)(uintptr_t)blocks, (const uint8_t *)(uintptr_t)kinds,
             (const pattern *)(uintptr_t)patterns, (uint8_t *)(uintptr_t)found};
    uint8_t *scratch = malloc(columns ? BAND : LEAF);
    if (!scratch) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    uint64_t total = j.start[j.num_tensors];
    for (;;) {
        uint64_t first = __atomic_fetch_add(j.cursor, j.block, __ATOMIC_RELAXED);
        if (first >= total) break;
        run_leaves(&j, first, first + j.block < total ? first + j.block : total, scratch);
    }
#if defined(__SSE2__)
    _mm_sfence(); /* streamed bytes are visible before the caller says that they are there */
#endif
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}

/* Column blocks wherever they lie: per block its address, rows, bytes of a piece, and pitch. */
static PyObject *py_digest_blocks(PyObject *self, PyObject *args) {
    unsigned long long hash, num, given, out, cursor, block, most;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKK", &hash, &num, &given, &out, &cursor, &block, &most))
        return NULL;
    uint8_t *scratch = malloc(most ? most : 1);
    if (!scratch) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        uint64_t first = __atomic_fetch_add((uint64_t *)(uintptr_t)cursor, block, __ATOMIC_RELAXED);
        if (first >= num) break;
        for (uint64_t i = first; i < num && i < first + block; i++) {
            const uint64_t *b = (const uint64_t *)(uintptr_t)given + 4 * i;
            digest_block((hash_fn)(uintptr_t)hash, (const uint8_t *)(uintptr_t)b[0], b[1], b[2], b[3],
                         scratch, (uint8_t *)(uintptr_t)out + DIGEST * i);
        }
    }
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}

static PyObject *py_combine(PyObject *self, PyObject *args) {
    unsigned long long hash, num, nbytes, start, table, out;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKK", &hash, &num, &nbytes, &start, &table, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    const uint64_t *size = (const uint64_t *)(uintptr_t)nbytes;
    const uint64_t *leaves = (const uint64_t *)(uintptr_t)start;
    for (uint64_t i = 0; i < num; i++) {
        uint8_t *first = (uint8_t *)(uintptr_t)table + DIGEST * leaves[i] + 8 * i;
        size_t n = DIGEST * (size_t)(leaves[i + 1] - leaves[i]);
        for (int k = 0; k < 8; k++) first[n + k] = (uint8_t)(size[i] >> (8 * k));
        put_digest((uint8_t *)(uintptr_t)out + DIGEST * i,
                   ((hash_fn)(uintptr_t)hash)(first, n + 8));
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Are these tensors, and the modules that hold them, what they were? Asked of every tensor before and
 * after every update, so with 40,000 of them a microsecond each is half of what an update may cost.
 *
 * Tensors are asked through the function table that array libraries show each other since DLPack 1.3
 * (github.com/dmlc/dlpack, dlpack.h): some nanoseconds for address, shape, dtype, strides and device,
 * which are 200 as Python attributes. The declarations below are that header's, as far as needed. */
typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *unused[3];
    int (*describe)(void *object, dl_tensor *out);
    void *unused_too;
} dl_table;

#define DL_MAJOR 1u

/* What is noted of one tensor, followed by its shape and strides. */
typedef struct {
    uint64_t data, byte_offset;
    int32_t device[2], ndim;
    uint32_t dtype;
} fact;

static const dl_table *table_of(PyObject *capsule) {
    const dl_table *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (table && (table->version.major != DL_MAJOR || !table->describe)) {
        PyErr_SetString(PyExc_BufferError, "another version of DLPack's exchange table");
        return NULL;
    }
    return table;
}

static int describe(const dl_table *table, PyObject *object, fact *out, dl_tensor *seen) {
    if (table->describe(object, seen) != 0) return -1;
    memset(out, 0, sizeof *out);
    out->data = (uint64_t)(uintptr_t)seen->data;
    out->byte_offset = seen->byte_offset;
    out->device[0] = seen->device.type;
    out->device[1] = seen->device.id;
    out->ndim = seen->ndim;
    out->dtype = (uint32_t)seen->dtype.code | (uint32_t)seen->dtype.bits << 8 |
                 (uint32_t)seen->dtype.lanes << 16;
    return 0;
}

/* With nothing of them in the cache, as behind a training step, two thirds of a look at 40,000 tensors
 * would be waiting for memory: so what comes next is asked for before its turn. These are hints: what
 * they say decides nothing, and asking for any address does no harm.
 *
 * Where a tensor object has the address of what torch knows of the tensor, and where that has the
 * address of its storage, in words, as found in one tensor whose addresses torch told. */
static struct {
    PyTypeObject *kind; /* of every tensor object; NULL: nothing was found */
    Py_ssize_t known, storage;
} layout;

#define AHEAD 12
#define LINE 64

static Py_ssize_t find_word(const void *where, Py_ssize_t count, uint64_t value) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (((const uintptr_t *)where)[i] == value) return i;
    return -1;
}

static PyObject *py_learn_layout(PyObject *self, PyObject *args) {
    PyObject *kind, *sample;
    unsigned long long known, storage;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!OKK", &PyType_Type, &kind, &sample, &known, &storage)) return NULL;
    if (!PyObject_TypeCheck(sample, (PyTypeObject *)kind))
        return PyErr_Format(PyExc_TypeError, "the sample is no tensor");
    Py_ssize_t words = ((PyTypeObject *)kind)->tp_basicsize / (Py_ssize_t)sizeof(uintptr_t);
    Py_ssize_t at = known ? find_word(sample, words, known) : -1;
    if (at < 0 || layout.kind) return PyBool_FromLong(layout.kind != NULL);
    layout.known = at;
    layout.storage = find_word((const void *)(uintptr_t)known, LINE / sizeof(uintptr_t), storage);
    layout.kind = (PyTypeObject *)Py_NewRef(kind);
    Py_RETURN_TRUE;
}

static const uintptr_t *known_of(PyObject *object) {
    if (!layout.kind || !PyObject_TypeCheck(object, layout.kind)) return NULL;
    return (const uintptr_t *)((const uintptr_t *)(const void *)object)[layout.known];
}

static void prefetch(const void *address, int lines) {
    for (int line = 0; address && line < lines; line++)
        __builtin_prefetch((const char *)address + LINE * line);
}

/* Ask for what stands behind the tensor at `i`: each step reads what an earlier one asked for. */
static void prefetch_tensors(PyObject *tensors, Py_ssize_t i) {
    Py_ssize_t left = PySequence_Fast_GET_SIZE(tensors) - i;
    PyObject **next = PySequence_Fast_ITEMS(tensors) + i;
    if (left > 3 * AHEAD) prefetch(next[3 * AHEAD], 1);
    if (left > 2 * AHEAD) prefetch(known_of(next[2 * AHEAD]), 3);
    const uintptr_t *known = left > AHEAD ? known_of(next[AHEAD]) : NULL;
    if (known && layout.storage >= 0) prefetch((const void *)known[layout.storage], 2);
}

static PyObject *py_tensor_facts(PyObject *self, PyObject *args) {
    PyObject *capsule, *given;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &given)) return NULL;
    const dl_table *table = table_of(capsule);
    if (!table) return NULL;
    PyObject *result = NULL, *tensors = PySequence_Fast(given, "expected tensors");
    if (!tensors) return NULL;
    size_t used = 0, room = 4096;
    char *facts = PyMem_Malloc(room);
    if (!facts) goto no_memory;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); i++) {
        fact one;
        dl_tensor seen;
        prefetch_tensors(tensors, i);
        if (describe(table, PySequence_Fast_GET_ITEM(tensors, i), &one, &seen) != 0) goto done;
        size_t dims = (size_t)one.ndim * sizeof(int64_t);
        if (used + sizeof one + 2 * dims > room) {
            room = 2 * (used + sizeof one + 2 * dims);
            char *larger = PyMem_Realloc(facts, room);
            if (!larger) goto no_memory;
            facts = larger;
        }
        memcpy(facts + used, &one, sizeof one);
        if (dims) { /* of a tensor without dimensions there may be no arrays */
            memcpy(facts + used + sizeof one, seen.shape, dims);
            memcpy(facts + used + sizeof one + dims, seen.strides, dims);
        }
        used += sizeof one + 2 * dims;
    }
    result = PyBytes_FromStringAndSize(facts, (Py_ssize_t)used);
    goto done;
no_memory:
    PyErr_NoMemory();
done:
    PyMem_Free(facts);
    Py_DECREF(tensors);
    return result;
}

/* Whether `question`, a callable, says no of an object: 1 or 0, and -1 where it raised. */
static int denies(PyObject *question, PyObject *object) {
    Py_INCREF(object); /* whatever is called may run Python, in other threads too */
    PyObject *answer = PyObject_CallOneArg(question, object);
    Py_DECREF(object);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return yes < 0 ? -1 : !yes;
}

/* Are these tensors what was noted, and does `question`, if there is one, say no of each? Asked here,
 * while the tensor is in the cache, that takes a third of what it takes on its own. */
static PyObject *py_facts_hold(PyObject *self, PyObject *args) {
    PyObject *capsule, *given, *facts, *question = Py_None;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOS|O", &capsule, &given, &facts, &question)) return NULL;
    const dl_table *table = table_of(capsule);
    if (!table) return NULL;
    PyObject *tensors = PySequence_Fast(given, "expected tensors");
    if (!tensors) return NULL;
    const char *at = PyBytes_AS_STRING(facts), *end = at + PyBytes_GET_SIZE(facts);
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PySequence_Fast_GET_SIZE(tensors); i++) {
        fact one;
        dl_tensor seen;
        prefetch_tensors(tensors, i);
        PyObject *tensor = PySequence_Fast_GET_ITEM(tensors, i);
        if (describe(table, tensor, &one, &seen) != 0) {
            same = -1;
            break;
        }
        size_t dims = (size_t)one.ndim * sizeof(int64_t);
        same = (size_t)(end - at) >= sizeof one + 2 * dims && memcmp(at, &one, sizeof one) == 0 &&
               (!dims || (memcmp(at + sizeof one, seen.shape, dims) == 0 &&
                          memcmp(at + sizeof one + dims, seen.strides, dims) == 0));
        if (same) at += sizeof one + 2 * dims;
        if (same && question != Py_None) same = denies(question, tensor);
    }
    Py_DECREF(tensors);
    return same < 0 ? NULL : PyBool_FromLong(same && at == end);
}

/* CPython before 3.12 gives a dictionary a number that no dictionary ever had at each change (PEP 509):
 * with the same number it is the same one and holds the same. 0 where there is none. */
static uint64_t version_of(PyObject *dict) {
#if PY_VERSION_HEX < 0x030C0000
    return ((PyDictObject *)dict)->ma_version_tag;
#else
    (void)dict;
    return 0;
#endif
}

/* What `same_modules` was given, and how far it is. */
typedef struct {
    PyObject *names, *parts, *keys, *values;
    Py_ssize_t num_dicts, kinds, item;
    const uint32_t *size;
    uint64_t *version; /* of a module's own dictionary, then of its first containers */
} walk;

static int same_items(walk *w, PyObject *part) {
    uint64_t now = version_of(part);
    Py_ssize_t first = w->item;
    w->item += (Py_ssize_t)*w->size;
    if (now && now == *w->version) return 1;
    int same = PyObject_Size(part) == (Py_ssize_t)*w->size && w->item <= PyList_GET_SIZE(w->keys);
    for (Py_ssize_t i = first; same && i < w->item; i++)
        same = PyDict_GetItemWithError(part, PyList_GET_ITEM(w->keys, i)) ==
               PyList_GET_ITEM(w->values, i);
    if (same) *w->version = now;
    return same;
}

static int same_module(walk *w, PyObject *own, PyObject **parts) {
    uint64_t now = version_of(own), *noted = w->version++;
    int same = 1, is_known = now && now == *noted;
    for (Py_ssize_t kind = 0; same && kind < w->kinds; kind++, w->size++) {
        same = is_known ||
               PyDict_GetItemWithError(own, PyTuple_GET_ITEM(w->names, kind)) == parts[kind];
        if (same && kind < w->num_dicts && PyDict_Check(parts[kind]))
            same = same_items(w, parts[kind]);
        else if (same)
            same = PyObject_Size(parts[kind]) == (Py_ssize_t)*w->size;
        if (kind < w->num_dicts) w->version++;
    }
    if (same) *noted = now;
    return same;
}

/* Each module keeps a container under each of `names`; those were `parts`, module by module, with
 * `sizes` (uint32 in a bytes object) items each. The first `num_dicts` of a module are dictionaries:
 * their items were `keys` and `values`, in order. One visit per module, while it is in the cache.
 * `versions` (uint64, 1 + `num_dicts` for each module) is ours, from one call to the next. */
static PyObject *py_same_modules(PyObject *self, PyObject *args) {
    PyObject *modules, *sizes, *versions;
    walk w = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!nO!SO!O!Y", &PyList_Type, &modules, &PyTuple_Type, &w.names,
                          &w.num_dicts, &PyList_Type, &w.parts, &sizes, &PyList_Type, &w.keys,
                          &PyList_Type, &w.values, &versions))
        return NULL;
    Py_ssize_t num = PyList_GET_SIZE(modules), count = PyList_GET_SIZE(w.parts);
    w.kinds = PyTuple_GET_SIZE(w.names);
    w.size = (const uint32_t *)(const void *)PyBytes_AS_STRING(sizes);
    w.version = (uint64_t *)(void *)PyByteArray_AS_STRING(versions);
    if (count != w.kinds * num || w.num_dicts < 0 || w.num_dicts > w.kinds ||
        PyBytes_GET_SIZE(sizes) != count * (Py_ssize_t)sizeof *w.size ||
        PyByteArray_GET_SIZE(versions) != num * (1 + w.num_dicts) * (Py_ssize_t)sizeof *w.version ||
        PyList_GET_SIZE(w.keys) != PyList_GET_SIZE(w.values))
        return PyErr_Format(PyExc_ValueError, "the lists do not fit each other");
    for (Py_ssize_t i = 0; i < num; i++) {
        PyObject **parts = PySequence_Fast_ITEMS(w.parts) + i * w.kinds;
        if (i + AHEAD < num) {
            prefetch(PyList_GET_ITEM(modules, i + AHEAD), 1);
            for (Py_ssize_t kind = 0; kind < w.kinds; kind++)
                prefetch(parts[AHEAD * w.kinds + kind], 1);
        }
        PyObject *own = PyObject_GenericGetDict(PyList_GET_ITEM(modules, i), NULL);
        if (!own) return NULL;
        int same = same_module(&w, own, parts);
        Py_DECREF(own);
        if (PyErr_Occurred()) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"run", py_run, METH_VARARGS, "Take blocks of leaves until none is left; copy and digest them."},
    {"combine", py_combine, METH_VARARGS, "Digest each tensor's leaf digests with its length."},
    {"digest_blocks", py_digest_blocks, METH_VARARGS, "Take column blocks until none is left."},
    {"tensor_facts", py_tensor_facts, METH_VARARGS, "Note what some tensors are, as bytes."},
    {"facts_hold", py_facts_hold, METH_VARARGS, "Compare tensors with what was noted of them."},
    {"learn_layout", py_learn_layout, METH_VARARGS, "Find where a tensor object has what."},
    {"same_modules", py_same_modules, METH_VARARGS, "Compare modules with what was noted of them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    /* What `run` looks for, if it is asked to. passes.py refuses a module that says anything else: one
     * of an earlier build. Whoever changes what these functions take changes the text here and there. */
    if (made && PyModule_AddStringConstant(made, "looks_for", "non-finite")) Py_CLEAR(made);
    return made;
}

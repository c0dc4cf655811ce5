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

typedef struct { uint64_t low64, high64; } hash128;
typedef hash128 (*hash_fn)(const void *, size_t);

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
} job;

static void put_be64(uint8_t *out, uint64_t value) {
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void put_digest(uint8_t *out, hash128 value) {
    put_be64(out, value.high64);
    put_be64(out + 8, value.low64);
}

/* memcpy reads the destination's lines before it overwrites them; for data that does not fit the
 * cache that is a third of the traffic. libc avoids it only for single copies far above a leaf. */
static void copy_leaf(uint8_t *dst, const uint8_t *src, size_t n, int stream) {
#if defined(__SSE2__)
    if (stream && n >= 4096 && ((uintptr_t)dst & 15u) == 0) {
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

static void digest_leaf(const job *j, const uint8_t *src, size_t n, uint8_t *scratch, uint8_t *out) {
    size_t padded = (n + PAD - 1) / PAD * PAD;
    if (padded != n) {
        memcpy(scratch, src, n);
        memset(scratch + n, 0, padded - n);
        src = scratch;
    }
    put_digest(out, j->hash(src, padded));
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
    uint64_t tensor = tensor_of(j, first);
    for (uint64_t leaf = first; leaf < last; leaf++) {
        while (j->start[tensor + 1] <= leaf) tensor++;
        uint64_t begin = (leaf - j->start[tensor]) * LEAF;
        uint64_t left = j->nbytes[tensor] - begin;
        size_t n = left < LEAF ? (size_t)left : LEAF;
        const uint8_t *src = (const uint8_t *)(uintptr_t)j->src[tensor] + begin;
        /* Copy first: it brings the leaf into this core's cache, and while the digest reads it
         * there the streamed stores drain. The other way round costs 15 % more. */
        if (j->dst && j->dst[tensor] != j->src[tensor])
            copy_leaf((uint8_t *)(uintptr_t)j->dst[tensor] + begin, src, n, j->stream);
        if (j->hash) digest_leaf(j, src, n, scratch, j->table + DIGEST * leaf + 8 * tensor);
    }
}

static PyObject *py_run(PyObject *self, PyObject *args) {
    unsigned long long hash, num, src, dst, nbytes, start, table, cursor, block;
    int stream;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKi", &hash, &num, &src, &dst, &nbytes, &start, &table,
                          &cursor, &block, &stream))
        return NULL;
    job j = {(hash_fn)(uintptr_t)hash, num, (const uint64_t *)(uintptr_t)src,
             (const uint64_t *)(uintptr_t)dst, (const uint64_t *)(uintptr_t)nbytes,
             (const uint64_t *)(uintptr_t)start, (uint8_t *)(uintptr_t)table,
             (uint64_t *)(uintptr_t)cursor, block, stream};
    uint8_t *scratch = malloc(LEAF);
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

/* Are these tensors what they were? Asked of every tensor before and after every update: one visit
 * each, because with 40,000 of them four passes over objects that do not fit the cache cost more
 * than the questions. Returns False at the first difference. */
static PyObject *name_data_ptr, *name_shape, *name_dtype, *name_stride, *name_is_contiguous;

static int same_object(PyObject *found, PyObject *expected) {
    if (!found) return -1;
    int same = PyObject_RichCompareBool(found, expected, Py_EQ);
    Py_DECREF(found);
    return same;
}

static PyObject *py_unchanged(PyObject *self, PyObject *args) {
    PyObject *tensors, *pointers, *shapes, *dtypes, *strides;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O", &PyList_Type, &tensors, &PyList_Type, &pointers,
                          &PyList_Type, &shapes, &PyList_Type, &dtypes, &strides))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(tensors);
    if (strides != Py_None && !PyList_Check(strides))
        return PyErr_Format(PyExc_TypeError, "strides must be a list or None");
    if (PyList_GET_SIZE(pointers) != count || PyList_GET_SIZE(shapes) != count ||
        PyList_GET_SIZE(dtypes) != count ||
        (strides != Py_None && PyList_GET_SIZE(strides) != count))
        Py_RETURN_FALSE;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        same = same_object(PyObject_CallMethodNoArgs(tensor, name_data_ptr),
                           PyList_GET_ITEM(pointers, i));
        if (same == 1)
            same = same_object(PyObject_GetAttr(tensor, name_shape), PyList_GET_ITEM(shapes, i));
        if (same == 1)
            same = same_object(PyObject_GetAttr(tensor, name_dtype), PyList_GET_ITEM(dtypes, i));
        if (same == 1 && strides == Py_None)
            same = same_object(PyObject_CallMethodNoArgs(tensor, name_is_contiguous), Py_True);
        else if (same == 1)
            same = same_object(PyObject_CallMethodNoArgs(tensor, name_stride),
                               PyList_GET_ITEM(strides, i));
    }
    if (same < 0) return NULL;
    return PyBool_FromLong(same);
}

/* The same three questions about the modules of an engine: is the attribute still that object, has
 * the container still that size, does the dictionary still hold that object? */
static int same_length(PyObject *a, PyObject *b) { return PyList_GET_SIZE(a) == PyList_GET_SIZE(b); }

static PyObject *py_same_attributes(PyObject *self, PyObject *args) {
    PyObject *owners, *name, *values;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!UO!", &PyList_Type, &owners, &name, &PyList_Type, &values))
        return NULL;
    if (!same_length(owners, values)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(owners); i++) {
        PyObject *found = PyObject_GetAttr(PyList_GET_ITEM(owners, i), name);
        if (!found) return NULL;
        Py_DECREF(found); /* its owner keeps it; only the address is compared */
        if (found != PyList_GET_ITEM(values, i)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *py_same_sizes(PyObject *self, PyObject *args) {
    PyObject *containers, *sizes;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &containers, &PyList_Type, &sizes))
        return NULL;
    if (!same_length(containers, sizes)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(containers); i++) {
        Py_ssize_t size = PyObject_Size(PyList_GET_ITEM(containers, i));
        Py_ssize_t expected = PyLong_AsSsize_t(PyList_GET_ITEM(sizes, i));
        if (size < 0 || (expected == -1 && PyErr_Occurred())) return NULL;
        if (size != expected) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *py_same_items(PyObject *self, PyObject *args) {
    PyObject *dicts, *keys, *values;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &dicts, &PyList_Type, &keys, &PyList_Type,
                          &values))
        return NULL;
    if (!same_length(dicts, values) || !same_length(keys, values)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(dicts); i++) {
        PyObject *dict = PyList_GET_ITEM(dicts, i);
        if (!PyDict_Check(dict)) Py_RETURN_FALSE;
        PyObject *found = PyDict_GetItemWithError(dict, PyList_GET_ITEM(keys, i)); /* borrowed */
        if (!found && PyErr_Occurred()) return NULL;
        if (found != PyList_GET_ITEM(values, i)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"run", py_run, METH_VARARGS, "Take blocks of leaves until none is left; copy and digest them."},
    {"combine", py_combine, METH_VARARGS, "Digest each tensor's leaf digests with its length."},
    {"same_attributes", py_same_attributes, METH_VARARGS, "Compare an attribute of many objects."},
    {"same_sizes", py_same_sizes, METH_VARARGS, "Compare the sizes of many containers."},
    {"same_items", py_same_items, METH_VARARGS, "Compare one item each of many dictionaries."},
    {"unchanged", py_unchanged, METH_VARARGS, "Compare tensors with what was noted of them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_shape = PyUnicode_InternFromString("shape");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_stride = PyUnicode_InternFromString("stride");
    name_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    if (!name_data_ptr || !name_shape || !name_dtype || !name_stride || !name_is_contiguous)
        return NULL;
    return PyModule_Create(&module);
}

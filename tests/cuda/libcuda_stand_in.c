/* A stand-in for libcuda.so.1 on host memory: two devices, the calls that rl_bridge makes, CUDA's rules.

   With it the real cuda-bindings run without a GPU, so that a wrong name, argument, struct field or
   context is found. Every memory call needs the right context on its thread, which a real driver
   asks of some calls only. It says nothing about kernels, graphs, or a real driver's own ways. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OOM = 2, NOT_INIT = 3, NO_DEVICE = 100, BAD_DEVICE = 101, NO_CTX = 201,
       BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };
#define UNIT (2ul << 20)
#define NUM 512
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

typedef struct { int type, handle_types, location_type, location_id; void *win32; uint8_t flags[8]; } Prop;
typedef struct { int location_type, location_id, flags; } Access;
typedef struct { int used, fd, device; size_t size; int count; } Handle;
typedef struct { int used; uintptr_t at; size_t size; int fd, device, count; uint64_t handle; int64_t key[4]; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static int contexts[2]; /* their addresses are the contexts */
static __thread void *current;
static volatile int work[2]; /* whether each device has some to do; what it is never ends by itself */
static struct { int used, device, recorded; } events[NUM];
static Handle handles[NUM];
static Range reserved[NUM], mapped[NUM], allocated[NUM], opened[NUM];

#define ENTER() \
    int device = current_device(); \
    if (!initialised) return NOT_INIT; \
    if (device < 0) return NO_CTX;

static int current_device(void) {
    for (int i = 0; i < 2; i++) if (current == &contexts[i]) return i;
    return -1;
}
static Range *find(Range *in, uintptr_t at, size_t size) {
    for (int i = 0; i < NUM; i++) if (in[i].used && in[i].at == at && (!size || in[i].size == size)) return &in[i];
    return NULL;
}
static Range *around(Range *in, uintptr_t at, size_t size) {
    for (int i = 0; i < NUM; i++)
        if (in[i].used && in[i].at <= at && at + size <= in[i].at + in[i].size) return &in[i];
    return NULL;
}
static Range *add(Range *in, uintptr_t at, size_t size) {
    for (int i = 0; i < NUM; i++) if (!in[i].used) {
        in[i] = (Range){.used = 1, .at = at, .size = size, .fd = -1, .count = 1};
        return &in[i];
    }
    return NULL;
}
static int make_memfd(size_t size) {
    int fd = memfd_create("stand-in", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, SEALS))) { close(fd); fd = -1; }
    return fd;
}

int cuInit(unsigned flags) { if (flags) return INVALID; initialised = 1; return OK; }
int cuDriverGetVersion(int *v) { *v = 13000; return OK; }
int cuDeviceGetCount(int *n) { if (!initialised) return NOT_INIT; *n = 2; return OK; }
int cuDeviceGet(int *dev, int ordinal) {
    if (!initialised) return NOT_INIT;
    if (ordinal < 0 || ordinal > 1) return BAD_DEVICE;
    *dev = ordinal;
    return OK;
}
int cuDeviceGetUuid(unsigned char *uuid, int dev) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(16 * (dev + 1) + i);
    return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int dev) {
    (void)dev;
    *value = attribute == 102 || attribute == 103 || attribute == 125;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **ctx, int dev) { *ctx = &contexts[dev]; return OK; }
int cuCtxGetCurrent(void **ctx) { *ctx = current; return OK; }
int cuCtxSetCurrent(void *ctx) { current = ctx; return OK; }
int cuCtxSynchronize(void) {
    ENTER()
    while (work[device]) usleep(1000);
    return OK;
}

/* ---- work, and events behind it */

void stand_in_work(int device, int is_there) { work[device] = is_there; }
int stand_in_events(void) {
    int count = 0;
    for (int i = 0; i < NUM; i++) count += events[i].used;
    return count;
}
int cuEventCreate(void **event, unsigned flags) {
    ENTER()
    if (flags != 2) return INVALID;
    int i = 0;
    while (i < NUM && events[i].used) i++;
    events[i].used = 1, events[i].device = device, events[i].recorded = 0;
    *event = &events[i];
    return OK;
}
static int number(void *event) {
    for (int i = 0; i < NUM; i++) if (event == &events[i] && events[i].used) return i;
    return -1;
}
int cuCtxRecordEvent(void *ctx, void *event) {
    int i = number(event);
    if (i < 0 || ctx != &contexts[events[i].device]) return BAD_HANDLE;
    events[i].recorded = 1;
    return OK;
}
int cuEventQuery(void *event) {
    int i = number(event);
    if (i < 0) return BAD_HANDLE;
    return events[i].recorded && work[events[i].device] ? NOT_READY : OK;
}
int cuEventDestroy(void *event) {
    int i = number(event);
    if (i < 0) return BAD_HANDLE;
    events[i].used = 0;
    return OK;
}

static int good(const Prop *p, int device) {
    return p && p->type == 1 && p->handle_types == 1 && p->location_type == 1 && p->location_id == device;
}
int cuMemGetAllocationGranularity(size_t *g, const Prop *p, int option) {
    ENTER()
    if (!good(p, device) || option != 1) return INVALID;
    *g = UNIT;
    return OK;
}
int cuMemCreate(uint64_t *handle, size_t size, const Prop *p, unsigned long long flags) {
    ENTER()
    if (!good(p, device) || flags || !size || size % UNIT) return INVALID;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < NUM && handles[i].used) i++;
    handles[i] = (Handle){1, make_memfd(size), device, size, 1};
    pthread_mutex_unlock(&lock);
    *handle = 0xfeed00000000ull + (uint64_t)i;
    return handles[i].fd < 0 ? OOM : OK;
}
static Handle *get(uint64_t handle) {
    uint64_t i = handle - 0xfeed00000000ull;
    return i < NUM && handles[i].used ? &handles[i] : NULL;
}
int cuMemRelease(uint64_t handle) {
    ENTER()
    Handle *h = get(handle);
    if (!h) return INVALID;
    if (--h->count) return OK;
    close(h->fd);
    h->used = 0;
    return OK;
}
int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags) {
    ENTER()
    Handle *h = get(handle);
    if (!h || type != 1 || flags) return INVALID;
    *(int *)out = fcntl(h->fd, F_DUPFD, 0); /* inheritable: the caller must see to that */
    return OK;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *os_handle, int type) {
    ENTER()
    int fd = (int)(intptr_t)os_handle;
    struct stat st;
    if (type != 1 || fstat(fd, &st) || fcntl(fd, F_GET_SEALS) != SEALS) return INVALID;
    int i = 0;
    while (i < NUM && handles[i].used) i++;
    handles[i] = (Handle){1, fcntl(fd, F_DUPFD_CLOEXEC, 0), device, (size_t)st.st_size, 1};
    *handle = 0xfeed00000000ull + (uint64_t)i;
    return OK;
}
int cuMemAddressReserve(uintptr_t *at, size_t size, size_t align, uintptr_t addr, unsigned long long flags) {
    ENTER()
    if (!size || size % UNIT || addr || flags || (align & (align - 1))) return INVALID;
    if (align < UNIT) align = UNIT;
    char *start = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OOM;
    uintptr_t first = ((uintptr_t)start + align - 1) / align * align;
    if (first > (uintptr_t)start) munmap(start, first - (uintptr_t)start);
    munmap((void *)(first + size), (uintptr_t)start + align - first);
    add(reserved, first, size);
    *at = first;
    return OK;
}
int cuMemAddressFree(uintptr_t at, size_t size) {
    ENTER()
    Range *r = find(reserved, at, size);
    if (!r || !size) return INVALID;
    for (int i = 0; i < NUM; i++)
        if (mapped[i].used && mapped[i].at >= at && mapped[i].at < at + size) return INVALID;
    munmap((void *)at, size);
    r->used = 0;
    return OK;
}
int cuMemMap(uintptr_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER()
    Handle *h = get(handle);
    if (!h || !size || flags || offset || size != h->size || at % UNIT || !around(reserved, at, size)) return INVALID;
    for (int i = 0; i < NUM; i++)
        if (mapped[i].used && mapped[i].at < at + size && at < mapped[i].at + mapped[i].size) return INVALID;
    if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, h->fd, 0) == MAP_FAILED) return OOM;
    Range *r = add(mapped, at, size);
    r->device = h->device;
    r->handle = handle;
    return OK;
}
int cuMemRetainAllocationHandle(uint64_t *handle, void *at) {
    ENTER()
    Range *r = around(mapped, (uintptr_t)at, 1);
    Handle *h = r ? get(r->handle) : NULL;
    if (!h) return INVALID;
    h->count++;
    *handle = r->handle;
    return OK;
}
int cuMemSetAccess(uintptr_t at, size_t size, const Access *desc, size_t count) {
    ENTER()
    if (count != 1 || desc->location_type != 1 || desc->location_id != device) return INVALID;
    if (desc->flags != 1 && desc->flags != 3) return INVALID;
    uintptr_t next = at;
    for (Range *r; next < at + size && (r = find(mapped, next, 0)); next += r->size) {}
    if (next != at + size) return INVALID;
    return mprotect((void *)at, size, desc->flags) ? OOM : OK;
}
int cuMemUnmap(uintptr_t at, size_t size) {
    ENTER()
    Range *r = find(mapped, at, size);
    if (!r || !size) return INVALID;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    r->used = 0;
    return OK;
}

/* ---- legacy memory and IPC */

int cuMemAlloc(uintptr_t *at, size_t size) {
    ENTER()
    if (!size) return INVALID;
    int fd = make_memfd(size);
    void *found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found == MAP_FAILED) return OOM;
    Range *r = add(allocated, (uintptr_t)found, size);
    r->fd = fd;
    r->device = device;
    *at = r->at;
    return OK;
}
int cuMemFree(uintptr_t at) {
    ENTER()
    Range *r = find(allocated, at, 0);
    if (!r) return INVALID;
    munmap((void *)at, r->size);
    close(r->fd);
    r->used = 0;
    return OK;
}
int cuIpcGetMemHandle(int64_t out[8], uintptr_t at) {
    ENTER()
    Range *r = find(allocated, at, 0);
    if (!r) return INVALID;
    memset(out, 0x5a, 64);
    out[0] = getpid();
    out[1] = r->fd;
    out[2] = (int64_t)r->size;
    out[7] = r->device;
    return OK;
}
typedef struct { int64_t words[8]; } Ipc;
int cuIpcOpenMemHandle(uintptr_t *at, Ipc handle, unsigned flags) {
    ENTER()
    if (flags != 1) return INVALID;
    if (handle.words[0] == getpid()) return NO_CTX;
    if (handle.words[7] != device) return BAD_HANDLE;
    for (int i = 0; i < NUM; i++) if (opened[i].used && !memcmp(opened[i].key, handle.words, 32)) {
        opened[i].count++;
        *at = opened[i].at;
        return OK;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%ld", (long)handle.words[0], (long)handle.words[1]);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return BAD_HANDLE;
    void *found = mmap(NULL, (size_t)handle.words[2], PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found == MAP_FAILED) return BAD_HANDLE;
    Range *r = add(opened, (uintptr_t)found, (size_t)handle.words[2]);
    memcpy(r->key, handle.words, 32);
    *at = r->at;
    return OK;
}
int cuMemGetAddressRange(uintptr_t *base, size_t *size, uintptr_t at) {
    ENTER()
    Range *r = around(allocated, at, 1);
    if (!r) r = around(opened, at, 1);
    if (!r) return NOT_FOUND;
    *base = r->at;
    *size = r->size;
    return OK;
}
int cuIpcCloseMemHandle(uintptr_t at) {
    ENTER()
    Range *r = find(opened, at, 0);
    if (!r) return INVALID;
    if (--r->count) return OK;
    munmap((void *)at, r->size);
    r->used = 0;
    return OK;
}

/* ---- how the bindings find all this */

#define NAMED(f) {#f, (void *)f}
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
static const struct { const char *name; void *function; } table[] = {
    NAMED(cuInit), NAMED(cuDriverGetVersion), NAMED(cuDeviceGetCount), NAMED(cuDeviceGet), NAMED(cuDeviceGetUuid),
    NAMED(cuDeviceGetAttribute), NAMED(cuDevicePrimaryCtxRetain), NAMED(cuCtxGetCurrent), NAMED(cuCtxSetCurrent),
    NAMED(cuCtxSynchronize), NAMED(cuEventCreate), NAMED(cuCtxRecordEvent), NAMED(cuEventQuery), NAMED(cuEventDestroy),
    NAMED(cuMemGetAllocationGranularity), NAMED(cuMemCreate),
    NAMED(cuMemRelease), NAMED(cuMemExportToShareableHandle), NAMED(cuMemImportFromShareableHandle),
    NAMED(cuMemAddressReserve), NAMED(cuMemAddressFree), NAMED(cuMemMap), NAMED(cuMemSetAccess), NAMED(cuMemUnmap),
    NAMED(cuMemRetainAllocationHandle),
    NAMED(cuMemAlloc), NAMED(cuMemFree), NAMED(cuIpcGetMemHandle),
    NAMED(cuIpcOpenMemHandle), NAMED(cuMemGetAddressRange), NAMED(cuIpcCloseMemHandle), {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
    NAMED(cuGetProcAddress_v2),
};
int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, symbol) || (!strncmp(table[i].name, symbol, strlen(table[i].name))
            && !strcmp(symbol + strlen(table[i].name), "_v2")))
            *out = table[i].function;
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}

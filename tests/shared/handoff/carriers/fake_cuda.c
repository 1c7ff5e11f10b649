/* A libcuda of one device whose memory is the process's own, to prove the calls that are made to the
 * real one: it is declared by cuda.h's signatures, and refuses whatever they do not allow. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char bytes[16]; } CUuuid;

enum { INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_CONTEXT = 201,
       MAP_FAILED = 205, INVALID_HANDLE = 400 };

static int context;  /* only its address is used */
#define STREAM ((void *)0x57)  /* torch's */
static int ready, retained, opened, pinned;
static _Thread_local void *current;
static struct { char *at; size_t size; } memory[16];

/* What a test may ask. */
int fake_retained(void) { return retained; }
int fake_opened(void) { return opened; }
int fake_pinned(void) { return pinned; }
int fake_allocated(void) {
    int count = 0;
    for (int i = 0; i < 16; i++) count += memory[i].at != NULL;
    return count;
}

static int find(CUdeviceptr address, size_t length) {
    for (int i = 0; i < 16; i++) {
        uintptr_t start = (uintptr_t)memory[i].at;
        if (start && address >= start && address + length <= start + memory[i].size) return i;
    }
    return -1;
}

CUresult cuInit(unsigned int flags) { ready = 1; return flags ? INVALID : 0; }

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = error == INVALID ? "CUDA_ERROR_INVALID_VALUE"
          : error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
          : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : NULL;
    return *text ? 0 : INVALID;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory"
          : error == INVALID_HANDLE ? "invalid resource handle" : "something else";
    return 0;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 12080;
    return 0;
}

CUresult cuDeviceGetCount(int *count) {
    if (!ready) return NOT_INITIALIZED;
    *count = 4;
    return 0;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!ready) return NOT_INITIALIZED;
    if (ordinal != 3) return NO_DEVICE;
    *device = 7;
    return 0;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (device != 7) return INVALID;
    for (int i = 0; i < 16; i++) uuid->bytes[i] = (char)(0xf0 + i);
    return 0;
}

CUresult cuDevicePrimaryCtxRetain(void **found, CUdevice device) {
    if (device != 7) return INVALID;
    retained++;
    *found = &context;
    return 0;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    if (device != 7 || !retained) return INVALID;
    retained--;
    return 0;
}

CUresult cuCtxSetCurrent(void *wanted) {
    if (wanted != &context) return INVALID_CONTEXT;
    current = wanted;
    return 0;
}

CUresult cuStreamSynchronize(void *which) { return which == STREAM ? 0 : INVALID_HANDLE; }

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    if (!current) return INVALID_CONTEXT;
    if (!size || size % (2 << 20)) return INVALID;  /* smaller ones would share an allocation */
    if (size > ((size_t)1 << 30)) return OUT_OF_MEMORY;
    for (int i = 0; i < 16; i++) {
        if (memory[i].at) continue;
        memory[i].at = malloc(size);
        memory[i].size = size;
        *address = (uintptr_t)memory[i].at;
        return 0;
    }
    return OUT_OF_MEMORY;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    int i = find(address, 1);
    if (i < 0 || (uintptr_t)memory[i].at != address) return INVALID;
    free(memory[i].at);
    memory[i].at = NULL;
    return 0;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    int i = find(address, 1);
    if (i < 0) return INVALID;
    *base = (uintptr_t)memory[i].at;
    *size = memory[i].size;
    return 0;
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr into, CUdeviceptr from, size_t length, void *which) {
    if (which != STREAM) return INVALID_HANDLE;
    if (find(into, length) < 0 || find(from, length) < 0) return INVALID;
    memcpy((void *)(uintptr_t)into, (void *)(uintptr_t)from, length);
    return 0;
}

/* All 64 bytes count, so a handle that was not passed whole is none. */
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    if (find(address, 1) < 0) return INVALID;
    for (int i = 0; i < 64; i++) handle->reserved[i] = (char)(255 - i);
    memcpy(handle->reserved + 20, &address, sizeof address);
    return 0;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    if (flags != 1) return INVALID;
    for (int i = 0; i < 64; i++)
        if ((i < 20 || i >= 28) && handle.reserved[i] != (char)(255 - i)) return INVALID_HANDLE;
    CUdeviceptr found;
    memcpy(&found, handle.reserved + 20, sizeof found);
    if (find(found, 1) < 0) return INVALID_HANDLE;
    opened++;
    *address = found;
    return 0;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    if (!opened || find(address, 1) < 0) return INVALID;
    opened--;
    return 0;
}

CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned int flags) {
    if ((uintptr_t)at % 4096 || !size || flags != 1) return INVALID;
    pinned++;
    return 0;
}

CUresult cuMemHostUnregister(void *at) {
    if ((uintptr_t)at % 4096 || !pinned) return INVALID;
    pinned--;
    return 0;
}

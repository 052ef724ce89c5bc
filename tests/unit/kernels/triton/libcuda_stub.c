// A stand-in for the CUDA driver library, for Triton's launcher on a machine without a device. Launches run nothing; each is
// kept: its function, its grid and the bytes of its arguments, whose sizes the loaded binary's caller has told.

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { MAX_FUNCTIONS = 4096, MAX_PARAMS = 128, MAX_BYTES = 1024 };

typedef struct {
    int num_params;
    int sizes[MAX_PARAMS];
} Function;

typedef struct {
    int64_t function;
    int32_t grid[3], block, shared, num_bytes;
    unsigned char bytes[MAX_BYTES];
} Launch;

static Function functions[MAX_FUNCTIONS];
static int num_functions = 1;  // a handle of 0 would be none
Launch last_launch;
int64_t num_launches;

// Says the sizes of a function's arguments, as its PTX declares them.
void stub_declare(int64_t function, int num_params, const int* sizes) {
    functions[function].num_params = num_params;
    memcpy(functions[function].sizes, sizes, num_params * sizeof *sizes);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** params, void** extra) {
    const int64_t function = (int64_t)handle;
    const Function* known = &functions[function];
    ++num_launches;
    last_launch = (Launch){.function = function,
                    .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                    .block = config->blockDimX,
                    .shared = config->sharedMemBytes};
    for (int i = 0; i < known->num_params; ++i) {
        memcpy(last_launch.bytes + last_launch.num_bytes, params[i], known->sizes[i]);
        last_launch.num_bytes += known->sizes[i];
    }
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    *module = (CUmodule)(int64_t)num_functions;
    return num_functions < MAX_FUNCTIONS ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    *function = (CUfunction)(int64_t)num_functions++;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr*)out = pointer;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    *value = 1 << 20;  // enough of whatever is asked for
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
    *text = "the stub of the driver library failed";
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

/* The few functions of CUDA's driver (libcuda.so.1) that torch needs to find; it calls three of them. */
#include "gpu.h"
#include <stdio.h>
#include <string.h>

Status cuInit(unsigned flags) { return 0; }
Status cuCtxGetCurrent(void **context) { return *context = (void *)64, 0; }
Status cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { return *flags = 0, *is_active = 1, 0; }
Status cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }

#define NOT_THERE(_) _(cuCtxSetCurrent) _(cuDeviceGetAttribute) _(cuDevicePrimaryCtxRetain) _(cuFuncGetAttribute) \
  _(cuFuncSetAttribute) _(cuFuncSetCacheConfig) _(cuGetErrorString) _(cuLaunchCooperativeKernel) _(cuLaunchKernel) \
  _(cuLinkAddData_v2) _(cuLinkComplete) _(cuLinkCreate_v2) _(cuModuleGetFunction) _(cuModuleLoad) _(cuModuleLoadData) \
  _(cuModuleLoadDataEx) _(cuModuleUnload) _(cuOccupancyMaxActiveBlocksPerMultiprocessor) _(cuPointerGetAttribute) \
  _(cuTensorMapEncodeTiled)
#define REFUSE(name) Status name(void) { return FAILED(801, #name " is not modelled"); }
NOT_THERE(REFUSE)

static Status ignore(void) { return 0; }
static Status refuse(void) { return FAILED(801, "a driver's function is not modelled"); }
Status cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                        int *result) {
  *function = !strcmp(name, "cuCtxGetCurrent")              ? (void *)cuCtxGetCurrent
              : !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)cuDevicePrimaryCtxGetState
              : !strncmp(name, "cuLogs", 6)                ? (void *)ignore
                                                            : (void *)refuse;
  if (result) *result = 0;
  return 0;
}

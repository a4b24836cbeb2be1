/* What happened to a GPU's memory (ECC, remapped rows, retired pages, recovery action), and its processes. */
#define _GNU_SOURCE
#include <time.h>

#include "client.h"

/* --- errors of memory ---------------------------------------------------------------------------------- */

API int nvmlDeviceGetEccMode(handle_t device, unsigned int *current, unsigned int *pending) {
    ENTER_DEVICE(nvmlDeviceGetEccMode, device);
    int code = answer_number(gpu->ecc_mode, current);
    return code ? code : answer_number(gpu->ecc_mode, pending);
}

static const uint64_t *ecc_counters(const struct gpu_config *gpu, unsigned int type, unsigned int counter) {
    return gpu->ecc + (type * ABI_ECC_COUNTERS + counter) * ABI_ECC_LOCATIONS;
}

#define ENTER_ECC(name)                                                                                      \
    ENTER_DEVICE(name, device);                                                                              \
    REQUIRE(type < ABI_ECC_TYPES && counter < ABI_ECC_COUNTERS && out);                                      \
    if (number(gpu->ecc_mode) != 1) return RC_NOT_SUPPORTED;                                                 \
    const uint64_t *counters = ecc_counters(gpu, type, counter)

API int nvmlDeviceGetTotalEccErrors(handle_t device, unsigned int type, unsigned int counter,
                                    unsigned long long *out) {
    ENTER_ECC(nvmlDeviceGetTotalEccErrors);
    *out = 0;
    for (int location = 0; location < ABI_ECC_LOCATIONS; location++) *out += number(counters + location);
    return RC_SUCCESS;
}

API int nvmlDeviceGetRemappedRows(handle_t device, unsigned int *corrected, unsigned int *uncorrected,
                                  unsigned int *pending, unsigned int *failed) {
    ENTER_DEVICE(nvmlDeviceGetRemappedRows, device);
    unsigned int *outs[4] = {corrected, uncorrected, pending, failed};
    for (int i = 0; i < 4; i++) {
        int code = answer_number(gpu->remapped_rows + i, outs[i]);
        if (code) return code;
    }
    return RC_SUCCESS;
}

static int field_value(const struct gpu_config *gpu, abi_field_value_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
    out->latencyUsec = 0;
    out->valueType = ABI_VALUE_UNSIGNED_INT;
    out->value.ullVal = 0;
    if (out->fieldId != ABI_FI_GPU_RECOVERY_ACTION) return RC_NOT_SUPPORTED;
    return answer_number(gpu->recovery_action, &out->value.uiVal);
}

API int nvmlDeviceGetFieldValues(handle_t device, int count, abi_field_value_t *values) {
    ENTER_DEVICE(nvmlDeviceGetFieldValues, device);
    REQUIRE(count > 0 && values);
    for (int i = 0; i < count; i++) values[i].nvmlReturn = field_value(gpu, values + i);
    return RC_SUCCESS;
}

/* --- processes ----------------------------------------------------------------------------------------- */

static unsigned int processes_of(const struct target *at, uint64_t kinds, abi_process_v2_t *out) {
    const struct gpu_config *gpu = gpu_config(at->gpu);
    unsigned int found;
    struct node_read read = {0};
    do {
        found = 0;
        node_read_begin(node_current(), &read);
        uint64_t all = number(gpu->processes);
        for (uint64_t i = 0; i < all && i < NODE_PROCESSES; i++) {
            uint64_t gi = number(gpu->process_gi + i), ci = number(gpu->process_ci + i);
            if (!(number(gpu->process_kind + i) & kinds)) continue;
            if (at->kind == MIG_DEVICE && (gi != at->gi || ci != at->ci)) continue;
            out[found++] =
                (abi_process_v2_t){(unsigned int)number(gpu->process_pid + i), number(gpu->process_memory + i),
                                   (unsigned int)gi, (unsigned int)ci};
        }
    } while (node_read_again(node_current(), &read));
    return found;
}

static int list_processes(int function, handle_t device, uint64_t kinds, bool first_version,
                          unsigned int *count, void *out) {
    struct target at = resolve(device);
    int code = gate(function, at.gpu);
    if (!code && at.kind != MIG_DEVICE) code = whole_device(&at);
    if (code) return code;
    REQUIRE(count);
    abi_process_v2_t found[NODE_PROCESSES];
    unsigned int room = *count;
    *count = processes_of(&at, kinds, found);
    if (*count > room) return RC_INSUFFICIENT_SIZE;
    REQUIRE(out || !*count);
    for (unsigned int i = 0; i < *count; i++)
        if (first_version)
            ((abi_process_v1_t *)out)[i] = (abi_process_v1_t){found[i].pid, found[i].usedGpuMemory};
        else
            ((abi_process_v2_t *)out)[i] = found[i];
    return RC_SUCCESS;
}

#define ANSWER_PROCESSES(name, kinds, first_version)                                                         \
    API int name(handle_t device, unsigned int *count, void *out) {                                          \
        return list_processes(FN_##name, device, kinds, first_version, count, out);                          \
    }
ANSWER_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, ABI_PROCESS_COMPUTE, false)
ANSWER_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, ABI_PROCESS_COMPUTE, false)
ANSWER_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, ABI_PROCESS_GRAPHICS, false)
ANSWER_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, ABI_PROCESS_GRAPHICS, false)
ANSWER_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, ABI_PROCESS_MPS, false)
ANSWER_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, ABI_PROCESS_MPS, false)

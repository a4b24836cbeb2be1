/* The answers about the node and about what its GPUs are and read.
 *
 * A number that is NODE_UNSUPPORTED and an empty text answer NOT_SUPPORTED. What each call means is NVML's
 * public API reference; where the reference leaves it open, a comment notes it.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"

/* --- readings ------------------------------------------------------------------------------------------ */

#define ANSWER_NUMBER(name, field)                                                                           \
    API int name(handle_t device, unsigned int *out) {                                                       \
        ENTER_DEVICE(name, device);                                                                          \
        return answer_number(gpu->field, out);                                                               \
    }
#define ANSWER_TEXT(name, field)                                                                             \
    API int name(handle_t device, char *out, unsigned int length) {                                          \
        ENTER_DEVICE(name, device);                                                                          \
        return answer_text(gpu->field[0], out, length);                                                      \
    }
#define ANSWER_LONG(name, field)                                                                             \
    API int name(handle_t device, unsigned long long *out) {                                                 \
        ENTER_DEVICE(name, device);                                                                          \
        REQUIRE(out);                                                                                        \
        *out = number(gpu->field);                                                                           \
        return *out == NODE_UNSUPPORTED ? RC_NOT_SUPPORTED : RC_SUCCESS;                                     \
    }

ANSWER_NUMBER(nvmlDeviceGetMinorNumber, minor)
ANSWER_NUMBER(nvmlDeviceGetBrand, brand)
ANSWER_NUMBER(nvmlDeviceGetArchitecture, architecture)
ANSWER_NUMBER(nvmlDeviceGetNumaNodeId, numa_node)
ANSWER_NUMBER(nvmlDeviceGetPowerUsage, power_mw)
ANSWER_NUMBER(nvmlDeviceGetPowerManagementLimit, power_limit_mw)
ANSWER_NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
ANSWER_NUMBER(nvmlDeviceGetPerformanceState, performance_state)
ANSWER_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, pages_pending)
ANSWER_NUMBER(nvmlDeviceGetPcieReplayCounter, pcie_replays)
ANSWER_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
ANSWER_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
ANSWER_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_max_generation)
ANSWER_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_max_width)
ANSWER_TEXT(nvmlDeviceGetSerial, serial)
ANSWER_TEXT(nvmlDeviceGetBoardPartNumber, board_part_number)
ANSWER_TEXT(nvmlDeviceGetVbiosVersion, vbios_version)
ANSWER_TEXT(nvmlDeviceGetInforomImageVersion, inforom_image)
ANSWER_LONG(nvmlDeviceGetTotalEnergyConsumption, energy_mj)
ANSWER_LONG(nvmlDeviceGetCurrentClocksEventReasons, clock_reasons)
ANSWER_LONG(nvmlDeviceGetCurrentClocksThrottleReasons, clock_reasons)
ANSWER_LONG(nvmlDeviceGetSupportedEventTypes, event_types)

/* One of a list of numbers, chosen by an argument. */
#define ANSWER_ONE_OF(name, field, count)                                                                    \
    API int name(handle_t device, unsigned int which, unsigned int *out) {                                   \
        ENTER_DEVICE(name, device);                                                                          \
        REQUIRE(which < (count));                                                                            \
        return answer_number(gpu->field + which, out);                                                       \
    }
ANSWER_ONE_OF(nvmlDeviceGetTemperatureThreshold, thresholds, ABI_THRESHOLDS)
ANSWER_ONE_OF(nvmlDeviceGetTemperature, temperature, 1)
ANSWER_ONE_OF(nvmlDeviceGetClockInfo, clocks, ABI_CLOCKS)
ANSWER_ONE_OF(nvmlDeviceGetMaxClockInfo, max_clocks, ABI_CLOCKS)
ANSWER_ONE_OF(nvmlDeviceGetPcieThroughput, pcie_throughput, 2)

API int nvmlDeviceGetAddressingMode(handle_t device, abi_addressing_mode_t *out) {
    ENTER_DEVICE(nvmlDeviceGetAddressingMode, device);
    REQUIRE(out);
    if (out->version != ABI_VERSION(abi_addressing_mode_t, 1)) return RC_ARGUMENT_VERSION_MISMATCH;
    return answer_number(gpu->addressing_mode, &out->value);
}

API int nvmlDeviceGetCudaComputeCapability(handle_t device, int *major, int *minor) {
    ENTER_DEVICE(nvmlDeviceGetCudaComputeCapability, device);
    REQUIRE(major && minor);
    *major = (int)number(gpu->compute_capability);
    *minor = (int)number(gpu->compute_capability + 1);
    return RC_SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(handle_t device, abi_utilization_t *out) {
    ENTER_DEVICE(nvmlDeviceGetUtilizationRates, device);
    REQUIRE(out);
    out->gpu = (unsigned int)number(gpu->utilization);
    out->memory = (unsigned int)number(gpu->utilization + 1);
    return RC_SUCCESS;
}

/* --- the node ------------------------------------------------------------------------------------------ */

API int nvmlSystemGetDriverVersion(char *out, unsigned int length) {
    ENTER_NODE(nvmlSystemGetDriverVersion);
    return answer_text(node->config.driver_version[0], out, length);
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned int length) {
    ENTER_NODE(nvmlSystemGetNVMLVersion);
    return answer_text(node->config.nvml_version[0], out, length);
}

API int nvmlSystemGetCudaDriverVersion(int *out) {
    ENTER_NODE(nvmlSystemGetCudaDriverVersion);
    return answer_number(node->config.cuda_version, (unsigned int *)out);
}

API int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    ENTER_NODE(nvmlSystemGetCudaDriverVersion_v2);
    return answer_number(node->config.cuda_version, (unsigned int *)out);
}

/* --- finding GPUs -------------------------------------------------------------------------------------- */

int gpu_count(void) {
    const struct node *node = node_current();
    return node ? (int)number(node->config.gpus) : 0;
}

bool visible(int gpu) { return number(gpu_config(gpu)->visible) != 0; }

/* NVML's index counts the GPUs that are there, so a removed one moves the later ones up. */
static int gpu_of_index(unsigned int index) {
    for (int gpu = 0; gpu < gpu_count(); gpu++)
        if (visible(gpu) && index-- == 0) return gpu;
    return NODE_NO_GPU;
}

static unsigned int count_before(int end) {
    unsigned int count = 0;
    for (int gpu = 0; gpu < end; gpu++) count += visible(gpu);
    return count;
}

static int count_devices(int function, unsigned int *out) {
    int code = gate(function, NODE_NO_GPU);
    if (code) return code;
    REQUIRE(out);
    *out = count_before(gpu_count());
    return RC_SUCCESS;
}

API int nvmlDeviceGetCount(unsigned int *out) { return count_devices(FN_nvmlDeviceGetCount, out); }
API int nvmlDeviceGetCount_v2(unsigned int *out) { return count_devices(FN_nvmlDeviceGetCount_v2, out); }

static int found_device(int function, int gpu, int otherwise, handle_t *out) {
    int code = gate(function, gpu);
    if (code) return code;
    REQUIRE(out);
    if (gpu == NODE_NO_GPU) return otherwise;
    device_open(gpu);
    *out = device_handle(gpu);
    return RC_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex(unsigned int index, handle_t *out) {
    return found_device(FN_nvmlDeviceGetHandleByIndex, gpu_of_index(index), RC_INVALID_ARGUMENT, out);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle_t *out) {
    return found_device(FN_nvmlDeviceGetHandleByIndex_v2, gpu_of_index(index), RC_INVALID_ARGUMENT, out);
}

static int by_uuid(const char *uuid) {
    for (int gpu = 0; gpu < gpu_count(); gpu++)
        if (visible(gpu) && strcmp(gpu_config(gpu)->uuid[0], uuid) == 0) return gpu;
    return NODE_NO_GPU;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *out) {
    REQUIRE(uuid && out);
    int gpu = by_uuid(uuid);
    handle_t mig;
    if (gpu != NODE_NO_GPU || !node_current() || !mig_by_uuid(uuid, &mig, &gpu))
        return found_device(FN_nvmlDeviceGetHandleByUUID, gpu, RC_NOT_FOUND, out);
    int code = gate(FN_nvmlDeviceGetHandleByUUID, gpu);
    if (!code) *out = mig;
    return code;
}

/* Domain:bus:device.function in hexadecimal, the domain and the function are optional. */
static int by_bus_id(const char *text) {
    unsigned int domain, bus, device;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &device) != 2) return NODE_NO_GPU;
    }
    for (int gpu = 0; gpu < gpu_count(); gpu++) {
        const struct gpu_config *at = gpu_config(gpu);
        if (visible(gpu) && number(at->pci_domain) == domain && number(at->pci_bus) == bus &&
            number(at->pci_device) == device)
            return gpu;
    }
    return NODE_NO_GPU;
}

API int nvmlDeviceGetHandleByPciBusId(const char *bus_id, handle_t *out) {
    REQUIRE(bus_id);
    return found_device(FN_nvmlDeviceGetHandleByPciBusId, by_bus_id(bus_id), RC_NOT_FOUND, out);
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, handle_t *out) {
    REQUIRE(bus_id);
    return found_device(FN_nvmlDeviceGetHandleByPciBusId_v2, by_bus_id(bus_id), RC_NOT_FOUND, out);
}

/* --- what a GPU is ------------------------------------------------------------------------------------- */

API int nvmlDeviceGetIndex(handle_t device, unsigned int *out) {
    ENTER_DEVICE(nvmlDeviceGetIndex, device);
    (void)gpu;
    REQUIRE(out);
    *out = count_before(at.gpu);
    return RC_SUCCESS;
}

API int nvmlDeviceGetUUID(handle_t device, char *out, unsigned int length) {
    ENTER(nvmlDeviceGetUUID, device);
    if (at.kind == MIG_DEVICE) return mig_text(&at, true, out, length);
    int code = whole_device(&at);
    if (code) return code;
    uint64_t damage = number(gpu_config(at.gpu)->uuid_damage);
    if (!damage) return answer_text(gpu_config(at.gpu)->uuid[0], out, length);
    REQUIRE(out);
    memset(out, damage == NODE_UUID_EMPTY ? 0 : 'G', length);
    return RC_SUCCESS;
}

API int nvmlDeviceGetName(handle_t device, char *out, unsigned int length) {
    ENTER(nvmlDeviceGetName, device);
    if (at.kind == MIG_DEVICE) return mig_text(&at, false, out, length);
    int code = whole_device(&at);
    return code ? code : answer_text(gpu_config(at.gpu)->name[0], out, length);
}

static int memory_of(const struct target *at, uint64_t *total, uint64_t *reserved, uint64_t *used) {
    *reserved = 0;
    if (at->kind == MIG_DEVICE) return mig_memory(at, total, used);
    int code = whole_device(at);
    if (code) return code;
    const struct gpu_config *gpu = gpu_config(at->gpu);
    struct node_read read = {0};
    do {
        node_read_begin(node_current(), &read);
        *total = number(gpu->memory_total);
        *reserved = number(gpu->memory_reserved);
        *used = number(gpu->memory_used);
    } while (node_read_again(node_current(), &read));
    return RC_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(handle_t device, abi_memory_t *out) {
    ENTER(nvmlDeviceGetMemoryInfo, device);
    REQUIRE(out);
    uint64_t total, reserved, used;
    int code = memory_of(&at, &total, &reserved, &used);
    if (code) return code;
    *out = (abi_memory_t){.total = total, .used = reserved + used, .free = total - reserved - used};
    return RC_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(handle_t device, abi_memory_v2_t *out) {
    ENTER(nvmlDeviceGetMemoryInfo_v2, device);
    REQUIRE(out);
    if (out->version != ABI_VERSION(abi_memory_v2_t, 2)) return RC_ARGUMENT_VERSION_MISMATCH;
    uint64_t total, reserved, used;
    int code = memory_of(&at, &total, &reserved, &used);
    if (code) return code;
    *out = (abi_memory_v2_t){out->version, total, reserved, total - reserved - used, used};
    return RC_SUCCESS;
}

void fill_pci(abi_pci_t *out, uint64_t domain, uint64_t bus, uint64_t device, uint64_t id, uint64_t subsystem) {
    unsigned int d = domain & 0xffffffff, b = bus & 0xff, n = device & 0x1f;
    memset(out, 0, sizeof *out);
    out->domain = d;
    out->bus = b;
    out->device = n;
    out->pciDeviceId = (unsigned int)id;
    out->pciSubSystemId = (unsigned int)subsystem;
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", d & 0xffff, b, n);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", d, b, n);
}

void pci_of(const struct gpu_config *gpu, abi_pci_t *out) {
    fill_pci(out, number(gpu->pci_domain), number(gpu->pci_bus), number(gpu->pci_device),
             number(gpu->pci_device_id), number(gpu->pci_subsystem_id));
}

/* The older versions of the call have a shorter structure with the same beginning. */
#define ANSWER_PCI(name, length)                                                                             \
    API int name(handle_t device, void *out) {                                                               \
        ENTER_DEVICE(name, device);                                                                          \
        REQUIRE(out);                                                                                        \
        abi_pci_t pci;                                                                                       \
        pci_of(gpu, &pci);                                                                                   \
        memcpy(out, &pci, length);                                                                           \
        return RC_SUCCESS;                                                                                   \
    }
ANSWER_PCI(nvmlDeviceGetPciInfo_v3, sizeof(abi_pci_t))

static void set_bit(unsigned long *set, unsigned int words, unsigned long bit) {
    unsigned long width = 8 * sizeof *set;
    if (bit / width < words) set[bit / width] |= 1ul << bit % width;
}

/* The configuration keeps a list of ranges, as sysfs writes it: 0-55,112-167. */
API int nvmlDeviceGetCpuAffinity(handle_t device, unsigned int words, unsigned long *set) {
    ENTER_DEVICE(nvmlDeviceGetCpuAffinity, device);
    REQUIRE(words && set);
    if (!gpu->cpu_affinity[0][0]) return RC_NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    for (const char *text = gpu->cpu_affinity[0]; *text;) {
        char *end;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < 64ul * words; cpu++) set_bit(set, words, cpu);
        if (*end != ',') break;
        text = end + 1;
    }
    return RC_SUCCESS;
}

/* --- everything else ----------------------------------------------------------------------------------- */

/* Most have a handle first; where they do not, the value is no handle and the call belongs to no GPU. */
static int unanswered(int function, handle_t first) {
    struct target at = resolve(first);
    int code = gate(function, at.gpu);
    return code ? code : RC_NOT_SUPPORTED;
}

#define NOT_SUPPORTED(name)                                                                                  \
    API int name(handle_t first) { return unanswered(FN_##name, first); }
UNANSWERED_FUNCTIONS(NOT_SUPPORTED)

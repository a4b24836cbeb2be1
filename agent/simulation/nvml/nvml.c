/* The simulated libnvidia-ml.so.1: the gate, and the answers about the node, its GPUs and their events.
 *
 * Guarantees
 * - Every exported function goes through gate(): it is counted, can be made to hang and to answer any code.
 * - Nothing busy-waits: a hung call and an event wait sleep on a futex in the shared node.
 * - A number that is NODE_UNSUPPORTED and an empty text answer NOT_SUPPORTED.
 * What each call means is NVML's public API reference; where that leaves it open the comment says so.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "client.h"

/* --- handles ------------------------------------------------------------------------------------------- */

/* tag 16 | kind 4 | unused 4 | gpu 8 | generation 16 | gi 8 | ci 8 */
static const uint64_t HANDLE_TAG = 0x5347;

handle_t instance_handle(enum kind kind, int gpu, uint64_t generation, uint64_t gi, uint64_t ci) {
    return (handle_t)(uintptr_t)(HANDLE_TAG << 48 | (uint64_t)kind << 44 | (uint64_t)gpu << 32 |
                                 (generation & 0xffff) << 16 | (gi & 0xff) << 8 | (ci & 0xff));
}

handle_t device_handle(int gpu) {
    return instance_handle(gpu == NODE_UNREADABLE_GPU ? UNREADABLE : DEVICE, gpu, 0, 0, 0);
}

struct target resolve(handle_t handle) {
    uint64_t bits = (uint64_t)(uintptr_t)handle;
    struct target at = {(bits >> 44) & 0xf, (bits >> 32) & 0xff, (bits >> 8) & 0xff, bits & 0xff};
    const struct node *node = node_current();
    if (bits >> 48 != HANDLE_TAG || !node) return (struct target){INVALID, NODE_NO_GPU, 0, 0};
    if (at.kind == UNREADABLE) return (struct target){UNREADABLE, NODE_NO_GPU, 0, 0};
    if (at.kind > COMPUTE_INSTANCE || at.gpu >= (int)number(node->config.gpus))
        return (struct target){INVALID, NODE_NO_GPU, 0, 0};
    if (at.kind != DEVICE && ((bits >> 16) & 0xffff) != (number(node->gpus[at.gpu].mig_generation) & 0xffff))
        at.kind = INVALID;
    return at;
}

int whole_device(const struct target *at) {
    switch (at->kind) {
    case DEVICE: return RC_SUCCESS;
    case UNREADABLE: return RC_UNKNOWN;
    case MIG_DEVICE: return RC_NOT_SUPPORTED;
    default: return RC_INVALID_ARGUMENT;
    }
}

/* --- the gate ------------------------------------------------------------------------------------------ */

static unsigned int initialised; /* successful nvmlInit calls not yet shut down, in this process */

static bool is_initialised(void) { return __atomic_load_n(&initialised, __ATOMIC_ACQUIRE) != 0; }

static int forced(const struct node *node, int function, int gpu) {
    const int places[4][2] = {{function, gpu}, {function, NODE_GPUS}, {FUNCTIONS, gpu}, {FUNCTIONS, NODE_GPUS}};
    for (int i = 0; i < 4; i++) { /* the most particular one counts */
        if (places[i][1] < 0) continue;
        int found = __atomic_load_n(&node->forced[places[i][0]][places[i][1]], __ATOMIC_RELAXED);
        if (found) return found;
    }
    return 0;
}

static bool hanging(const struct node *node, int function, int gpu) {
    return number(node->config.hang) || (gpu >= 0 && number(node->gpus[gpu].hang)) ||
           forced(node, function, gpu) == FORCED_HANG;
}

static void sleep_while_hanging(struct node *node, int function, int gpu) {
    bool told = false;
    for (;;) {
        uint32_t seen = __atomic_load_n(&node->wake, __ATOMIC_ACQUIRE);
        if (!hanging(node, function, gpu)) return;
        if (!told) {
            told = true;
            __atomic_fetch_add(&node->hangs_entered, 1, __ATOMIC_RELAXED);
            node_wake(&node->activity);
        }
        node_sleep(&node->wake, seen, UINT64_MAX);
    }
}

/* What a call that is not hanging must answer instead. */
static int refusal(const struct node *node, int function, int gpu) {
    int driver = (int)number(node->config.driver_code);
    if (driver) return driver;
    int found = forced(node, function, gpu);
    if (found > 0) return found - 1; /* forcing success lifts a broader rule */
    if (gpu >= 0 && !number(node->gpus[gpu].visible)) {
        int gone = (int)number(node->gpus[gpu].gone_code);
        return gone ? gone : RC_GPU_IS_LOST;
    }
    return RC_SUCCESS;
}

static int pass(struct node *node, int function, int gpu) {
    __atomic_fetch_add(&node->calls[function][gpu < 0 ? NODE_GPUS : gpu], 1, __ATOMIC_RELAXED);
    sleep_while_hanging(node, function, gpu);
    return refusal(node, function, gpu);
}

int gate(int function, int gpu) {
    struct node *node = node_current();
    if (!node || !is_initialised()) return RC_UNINITIALIZED;
    return pass(node, function, gpu);
}

/* --- starting and ending --------------------------------------------------------------------------------- */

static int initialise(int function) {
    struct node *node = node_current();
    if (!node || !is_initialised()) node = node_attach();
    if (!node) return RC_DRIVER_NOT_LOADED;
    int refused = pass(node, function, NODE_NO_GPU);
    if (refused) return refused;
    __atomic_fetch_add(&initialised, 1, __ATOMIC_ACQ_REL);
    __atomic_fetch_add(&node->inits, 1, __ATOMIC_RELAXED);
    node_wake(&node->activity);
    return RC_SUCCESS;
}

API int nvmlInit(void) { return initialise(FN_nvmlInit); }
API int nvmlInit_v2(void) { return initialise(FN_nvmlInit_v2); }
API int nvmlInitWithFlags(unsigned int flags) {
    (void)flags; /* no GPUs, no attach: both make no difference here */
    return initialise(FN_nvmlInitWithFlags);
}

static void free_event_sets(void);

API int nvmlShutdown(void) {
    int refused = gate(FN_nvmlShutdown, NODE_NO_GPU);
    if (refused) return refused;
    unsigned int before = __atomic_load_n(&initialised, __ATOMIC_ACQUIRE);
    do {
        if (!before) return RC_UNINITIALIZED;
    } while (!__atomic_compare_exchange_n(&initialised, &before, before - 1, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    struct node *node = node_current();
    if (before == 1) {
        free_event_sets();
        node_wake(&node->wake); /* a wait under way in another thread ends */
    }
    __atomic_fetch_add(&node->shutdowns, 1, __ATOMIC_RELAXED);
    node_wake(&node->activity);
    return RC_SUCCESS;
}

API const char *nvmlErrorString(int code) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power",
        "Driver Not Loaded", "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found",
        "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "The operating system has blocked the request", "Driver/library version mismatch", "In use by another client",
        "Insufficient Memory", "No data", "Not supported with ECC enabled", "Insufficient resources",
        "Requested frequency not supported", "Argument version mismatch", "Deprecated", "Not ready",
        "GPU not found", "Invalid state", "Reset type not supported"};
    return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "Unknown Error";
}

/* --- answering ----------------------------------------------------------------------------------------- */

int answer_text(const char *text, char *out, unsigned int length) {
    REQUIRE(out);
    if (!*text) return RC_NOT_SUPPORTED;
    if (strlen(text) >= length) return RC_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return RC_SUCCESS;
}

int answer_number(const uint64_t *at, unsigned int *out) {
    uint64_t value = number(at);
    REQUIRE(out);
    if (value == NODE_UNSUPPORTED) return RC_NOT_SUPPORTED;
    *out = (unsigned int)value;
    return RC_SUCCESS;
}

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
ANSWER_NUMBER(nvmlDeviceGetPersistenceMode, persistence_mode)
ANSWER_NUMBER(nvmlDeviceGetNumaNodeId, numa_node)
ANSWER_NUMBER(nvmlDeviceGetPowerUsage, power_mw)
ANSWER_NUMBER(nvmlDeviceGetPowerManagementLimit, power_limit_mw)
ANSWER_NUMBER(nvmlDeviceGetEnforcedPowerLimit, power_limit_mw)
ANSWER_NUMBER(nvmlDeviceGetPerformanceState, performance_state)
ANSWER_NUMBER(nvmlDeviceGetPowerState, performance_state)
ANSWER_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, pages_pending)
ANSWER_NUMBER(nvmlDeviceGetPcieReplayCounter, pcie_replays)
ANSWER_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation)
ANSWER_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
ANSWER_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_max_generation)
ANSWER_NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, pcie_max_generation)
ANSWER_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, pcie_max_width)
ANSWER_TEXT(nvmlDeviceGetSerial, serial)
ANSWER_TEXT(nvmlDeviceGetBoardPartNumber, board_part_number)
ANSWER_TEXT(nvmlDeviceGetVbiosVersion, vbios_version)
ANSWER_TEXT(nvmlDeviceGetInforomImageVersion, inforom_image)
ANSWER_LONG(nvmlDeviceGetTotalEnergyConsumption, energy_mj)
ANSWER_LONG(nvmlDeviceGetCurrentClocksEventReasons, clock_reasons)
ANSWER_LONG(nvmlDeviceGetCurrentClocksThrottleReasons, clock_reasons)
ANSWER_LONG(nvmlDeviceGetSupportedClocksEventReasons, clock_reasons_supported)
ANSWER_LONG(nvmlDeviceGetSupportedClocksThrottleReasons, clock_reasons_supported)
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

API int nvmlDeviceGetTemperatureV(handle_t device, abi_temperature_t *out) {
    ENTER_DEVICE(nvmlDeviceGetTemperatureV, device);
    REQUIRE(out);
    if (out->version != ABI_VERSION(abi_temperature_t, 1)) return RC_ARGUMENT_VERSION_MISMATCH;
    REQUIRE(out->sensorType == 0);
    out->temperature = (int)number(gpu->temperature);
    return RC_SUCCESS;
}

API int nvmlDeviceGetInforomVersion(handle_t device, unsigned int object, char *out, unsigned int length) {
    ENTER_DEVICE(nvmlDeviceGetInforomVersion, device);
    REQUIRE(object < 3);
    return answer_text(gpu->inforom[object], out, length);
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

#define ENTER_NODE(name)                                                                                     \
    {                                                                                                        \
        int refused = gate(FN_##name, NODE_NO_GPU);                                                          \
        if (refused) return refused;                                                                         \
    }                                                                                                        \
    const struct node *node = node_current()

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

static int slots(void) {
    const struct node *node = node_current();
    return node ? (int)number(node->config.gpus) : 0;
}

static bool visible(int gpu) { return number(gpu_config(gpu)->visible) != 0; }

/* NVML's index counts the GPUs that are there, so a removed one moves the later ones up. */
static int slot_of_index(unsigned int index) {
    for (int gpu = 0; gpu < slots(); gpu++)
        if (visible(gpu) && index-- == 0) return gpu;
    return NODE_NO_GPU;
}

static unsigned int count_before(int end) {
    unsigned int count = 0;
    for (int gpu = 0; gpu < end; gpu++) count += visible(gpu);
    return count;
}

static int count_devices(int function, unsigned int *out) {
    int refused = gate(function, NODE_NO_GPU);
    if (refused) return refused;
    REQUIRE(out);
    *out = count_before(slots());
    return RC_SUCCESS;
}

API int nvmlDeviceGetCount(unsigned int *out) { return count_devices(FN_nvmlDeviceGetCount, out); }
API int nvmlDeviceGetCount_v2(unsigned int *out) { return count_devices(FN_nvmlDeviceGetCount_v2, out); }

static int found_device(int function, int gpu, int otherwise, handle_t *out) {
    int refused = gate(function, gpu);
    if (refused) return refused;
    REQUIRE(out);
    if (gpu == NODE_NO_GPU) return otherwise;
    *out = device_handle(gpu);
    return RC_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex(unsigned int index, handle_t *out) {
    return found_device(FN_nvmlDeviceGetHandleByIndex, slot_of_index(index), RC_INVALID_ARGUMENT, out);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned int index, handle_t *out) {
    return found_device(FN_nvmlDeviceGetHandleByIndex_v2, slot_of_index(index), RC_INVALID_ARGUMENT, out);
}

static int by_uuid(const char *uuid) {
    for (int gpu = 0; gpu < slots(); gpu++)
        if (visible(gpu) && strcmp(gpu_config(gpu)->uuid[0], uuid) == 0) return gpu;
    return NODE_NO_GPU;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *out) {
    REQUIRE(uuid && out);
    int gpu = by_uuid(uuid);
    handle_t mig;
    if (gpu != NODE_NO_GPU || !node_current() || !mig_by_uuid(uuid, &mig, &gpu))
        return found_device(FN_nvmlDeviceGetHandleByUUID, gpu, RC_NOT_FOUND, out);
    int refused = gate(FN_nvmlDeviceGetHandleByUUID, gpu);
    if (!refused) *out = mig;
    return refused;
}

API int nvmlDeviceGetHandleBySerial(const char *serial, handle_t *out) {
    REQUIRE(serial);
    int found = NODE_NO_GPU;
    for (int gpu = 0; gpu < slots() && found == NODE_NO_GPU; gpu++)
        if (visible(gpu) && strcmp(gpu_config(gpu)->serial[0], serial) == 0) found = gpu;
    return found_device(FN_nvmlDeviceGetHandleBySerial, found, RC_NOT_FOUND, out);
}

/* Domain:bus:device.function in hexadecimal, the domain and the function may be left out. */
static int by_bus_id(const char *text) {
    unsigned int domain, bus, device;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &device) != 2) return NODE_NO_GPU;
    }
    for (int gpu = 0; gpu < slots(); gpu++) {
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
    int refused = whole_device(&at);
    return refused ? refused : answer_text(gpu_config(at.gpu)->uuid[0], out, length);
}

API int nvmlDeviceGetName(handle_t device, char *out, unsigned int length) {
    ENTER(nvmlDeviceGetName, device);
    if (at.kind == MIG_DEVICE) return mig_text(&at, false, out, length);
    int refused = whole_device(&at);
    return refused ? refused : answer_text(gpu_config(at.gpu)->name[0], out, length);
}

static int memory_of(const struct target *at, uint64_t *total, uint64_t *reserved, uint64_t *used) {
    *reserved = 0;
    if (at->kind == MIG_DEVICE) return mig_memory(at, total, used);
    int refused = whole_device(at);
    if (refused) return refused;
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
    int refused = memory_of(&at, &total, &reserved, &used);
    if (refused) return refused;
    *out = (abi_memory_t){.total = total, .used = reserved + used, .free = total - reserved - used};
    return RC_SUCCESS;
}

API int nvmlDeviceGetMemoryInfo_v2(handle_t device, abi_memory_v2_t *out) {
    ENTER(nvmlDeviceGetMemoryInfo_v2, device);
    REQUIRE(out);
    if (out->version != ABI_VERSION(abi_memory_v2_t, 2)) return RC_ARGUMENT_VERSION_MISMATCH;
    uint64_t total, reserved, used;
    int refused = memory_of(&at, &total, &reserved, &used);
    if (refused) return refused;
    *out = (abi_memory_v2_t){out->version, total, reserved, total - reserved - used, used};
    return RC_SUCCESS;
}

API int nvmlDeviceGetBAR1MemoryInfo(handle_t device, abi_bar1_t *out) {
    ENTER_DEVICE(nvmlDeviceGetBAR1MemoryInfo, device);
    REQUIRE(out);
    uint64_t total = number(gpu->bar1_total), used = number(gpu->bar1_used);
    *out = (abi_bar1_t){.bar1Total = total, .bar1Used = used, .bar1Free = total - used};
    return RC_SUCCESS;
}

static void fill_pci(abi_pci_t *out, uint64_t domain, uint64_t bus, uint64_t device, uint64_t id, uint64_t subsystem) {
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

static void pci_of(const struct gpu_config *gpu, abi_pci_t *out) {
    fill_pci(out, number(gpu->pci_domain), number(gpu->pci_bus), number(gpu->pci_device), number(gpu->pci_device_id),
             number(gpu->pci_subsystem_id));
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
ANSWER_PCI(nvmlDeviceGetPciInfo, offsetof(abi_pci_t, pciSubSystemId))
ANSWER_PCI(nvmlDeviceGetPciInfo_v2, offsetof(abi_pci_t, busId))
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

API int nvmlDeviceGetMemoryAffinity(handle_t device, unsigned int words, unsigned long *set, unsigned int scope) {
    ENTER_DEVICE(nvmlDeviceGetMemoryAffinity, device);
    REQUIRE(words && set && scope <= 1);
    uint64_t numa = number(gpu->numa_node);
    if (numa == NODE_UNSUPPORTED) return RC_NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    set_bit(set, words, numa);
    return RC_SUCCESS;
}

/* --- errors of memory ---------------------------------------------------------------------------------- */

API int nvmlDeviceGetEccMode(handle_t device, unsigned int *current, unsigned int *pending) {
    ENTER_DEVICE(nvmlDeviceGetEccMode, device);
    int refused = answer_number(gpu->ecc_mode, current);
    return refused ? refused : answer_number(gpu->ecc_mode, pending);
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

API int nvmlDeviceGetDetailedEccErrors(handle_t device, unsigned int type, unsigned int counter,
                                       abi_ecc_counts_t *out) {
    ENTER_ECC(nvmlDeviceGetDetailedEccErrors);
    *out = (abi_ecc_counts_t){number(counters), number(counters + 1), number(counters + 2), number(counters + 3)};
    return RC_SUCCESS;
}

API int nvmlDeviceGetMemoryErrorCounter(handle_t device, unsigned int type, unsigned int counter,
                                        unsigned int location, unsigned long long *out) {
    ENTER_ECC(nvmlDeviceGetMemoryErrorCounter);
    REQUIRE(location < ABI_ECC_LOCATIONS);
    *out = number(counters + location);
    return RC_SUCCESS;
}

API int nvmlDeviceGetRemappedRows(handle_t device, unsigned int *corrected, unsigned int *uncorrected,
                                  unsigned int *pending, unsigned int *failed) {
    ENTER_DEVICE(nvmlDeviceGetRemappedRows, device);
    unsigned int *outs[4] = {corrected, uncorrected, pending, failed};
    for (int i = 0; i < 4; i++) {
        int refused = answer_number(gpu->remapped_rows + i, outs[i]);
        if (refused) return refused;
    }
    return RC_SUCCESS;
}

API int nvmlDeviceGetRowRemapperHistogram(handle_t device, abi_remap_histogram_t *out) {
    ENTER_DEVICE(nvmlDeviceGetRowRemapperHistogram, device);
    REQUIRE(out);
    const uint64_t *banks = gpu->remap_histogram;
    if (number(gpu->remapped_rows) == NODE_UNSUPPORTED) return RC_NOT_SUPPORTED;
    *out = (abi_remap_histogram_t){number(banks), number(banks + 1), number(banks + 2), number(banks + 3),
                                   number(banks + 4)};
    return RC_SUCCESS;
}

/* No page was ever retired here: what can be pending is told by the pending status. */
static int retired_pages(const struct gpu_config *gpu, unsigned int cause, unsigned int *count) {
    REQUIRE(cause < 2 && count);
    if (number(gpu->pages_pending) == NODE_UNSUPPORTED) return RC_NOT_SUPPORTED;
    *count = 0;
    return RC_SUCCESS;
}

API int nvmlDeviceGetRetiredPages(handle_t device, unsigned int cause, unsigned int *count,
                                  unsigned long long *addresses) {
    ENTER_DEVICE(nvmlDeviceGetRetiredPages, device);
    (void)addresses;
    return retired_pages(gpu, cause, count);
}

API int nvmlDeviceGetRetiredPages_v2(handle_t device, unsigned int cause, unsigned int *count,
                                     unsigned long long *addresses, unsigned long long *times) {
    ENTER_DEVICE(nvmlDeviceGetRetiredPages_v2, device);
    (void)addresses, (void)times;
    return retired_pages(gpu, cause, count);
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
            out[found++] = (abi_process_v2_t){(unsigned int)number(gpu->process_pid + i),
                                              number(gpu->process_memory + i), (unsigned int)gi, (unsigned int)ci};
        }
    } while (node_read_again(node_current(), &read));
    return found;
}

static int list_processes(int function, handle_t device, uint64_t kinds, bool first_version, unsigned int *count,
                          void *out) {
    struct target at = resolve(device);
    int refused = gate(function, at.gpu);
    if (!refused && at.kind != MIG_DEVICE) refused = whole_device(&at);
    if (refused) return refused;
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
ANSWER_PROCESSES(nvmlDeviceGetComputeRunningProcesses, ABI_PROCESS_COMPUTE, true)
ANSWER_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, ABI_PROCESS_COMPUTE, false)
ANSWER_PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, ABI_PROCESS_COMPUTE, false)
ANSWER_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, ABI_PROCESS_GRAPHICS, true)
ANSWER_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, ABI_PROCESS_GRAPHICS, false)
ANSWER_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, ABI_PROCESS_GRAPHICS, false)
ANSWER_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, ABI_PROCESS_MPS, true)
ANSWER_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, ABI_PROCESS_MPS, false)
ANSWER_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, ABI_PROCESS_MPS, false)

/* --- links, topology, fabric --------------------------------------------------------------------------- */

#define ENTER_LINK(name)                                                                                     \
    ENTER_DEVICE(name, device);                                                                              \
    if (!number(gpu->links)) return RC_NOT_SUPPORTED;                                                        \
    REQUIRE(link < number(gpu->links))

API int nvmlDeviceGetNvLinkState(handle_t device, unsigned int link, unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkState);
    return answer_number(gpu->link_state + link, out);
}

API int nvmlDeviceGetNvLinkVersion(handle_t device, unsigned int link, unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkVersion);
    return answer_number(gpu->link_version, out);
}

API int nvmlDeviceGetNvLinkCapability(handle_t device, unsigned int link, unsigned int capability,
                                      unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkCapability);
    REQUIRE(capability <= ABI_LINK_CAP_VALID && out);
    *out = capability != ABI_LINK_CAP_SLI;
    return RC_SUCCESS;
}

API int nvmlDeviceGetNvLinkErrorCounter(handle_t device, unsigned int link, unsigned int counter,
                                        unsigned long long *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkErrorCounter);
    REQUIRE(counter < ABI_LINK_ERRORS && out);
    *out = number(gpu->link_errors + link * ABI_LINK_ERRORS + counter);
    return RC_SUCCESS;
}

/* The peer is kept as domain << 32 | bus << 16 | device; what is no GPU of this node is an NVSwitch. */
static unsigned int peer_of(const struct gpu_config *gpu, unsigned int link, abi_pci_t *out) {
    uint64_t peer = number(gpu->link_peer + link);
    for (int other = 0; other < slots(); other++) {
        const struct gpu_config *at = gpu_config(other);
        if ((number(at->pci_domain) << 32 | number(at->pci_bus) << 16 | number(at->pci_device)) == peer) {
            pci_of(at, out);
            return ABI_LINK_TO_GPU;
        }
    }
    fill_pci(out, peer >> 32, (peer >> 16) & 0xffff, peer & 0xffff, number(gpu->switch_device_id), 0);
    return ABI_LINK_TO_SWITCH;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(handle_t device, unsigned int link, unsigned int *out) {
    ENTER_LINK(nvmlDeviceGetNvLinkRemoteDeviceType);
    REQUIRE(out);
    abi_pci_t pci;
    *out = peer_of(gpu, link, &pci);
    return RC_SUCCESS;
}

#define ANSWER_PEER(name, length)                                                                            \
    API int name(handle_t device, unsigned int link, void *out) {                                            \
        ENTER_LINK(name);                                                                                    \
        REQUIRE(out);                                                                                        \
        abi_pci_t pci;                                                                                       \
        peer_of(gpu, link, &pci);                                                                            \
        memcpy(out, &pci, length);                                                                           \
        return RC_SUCCESS;                                                                                   \
    }
ANSWER_PEER(nvmlDeviceGetNvLinkRemotePciInfo, offsetof(abi_pci_t, busId))
ANSWER_PEER(nvmlDeviceGetNvLinkRemotePciInfo_v2, sizeof(abi_pci_t))

static bool shared(const uint64_t *one, const uint64_t *other) {
    return number(one) == number(other) && number(one) != NODE_UNSUPPORTED;
}

static unsigned int common_ancestor(int one, int other) {
    const struct gpu_config *a = gpu_config(one), *b = gpu_config(other);
    if (one == other) return ABI_TOPOLOGY_INTERNAL;
    if (shared(a->pcie_switch, b->pcie_switch)) return ABI_TOPOLOGY_MULTIPLE;
    if (shared(a->host_bridge, b->host_bridge)) return ABI_TOPOLOGY_HOSTBRIDGE;
    return shared(a->numa_node, b->numa_node) ? ABI_TOPOLOGY_NODE : ABI_TOPOLOGY_SYSTEM;
}

API int nvmlDeviceGetTopologyCommonAncestor(handle_t device, handle_t second, unsigned int *out) {
    ENTER_DEVICE(nvmlDeviceGetTopologyCommonAncestor, device);
    (void)gpu;
    struct target other = resolve(second);
    REQUIRE(out && other.kind == DEVICE);
    int refused = refusal(node_current(), FN_nvmlDeviceGetTopologyCommonAncestor, other.gpu);
    if (!refused) *out = common_ancestor(at.gpu, other.gpu);
    return refused;
}

API int nvmlDeviceGetTopologyNearestGpus(handle_t device, unsigned int level, unsigned int *count, handle_t *out) {
    ENTER_DEVICE(nvmlDeviceGetTopologyNearestGpus, device);
    (void)gpu;
    REQUIRE(count);
    unsigned int room = out ? *count : 0, found = 0;
    for (int other = 0; other < slots(); other++) {
        if (other == at.gpu || !visible(other) || common_ancestor(at.gpu, other) != level) continue;
        if (found < room) out[found] = device_handle(other);
        found++;
    }
    *count = out && found > room ? room : found;
    return RC_SUCCESS;
}

static int fill_fabric(const struct gpu_config *gpu, abi_fabric_v3_t *out) {
    unsigned int state, status;
    int refused = answer_number(gpu->fabric_state, &state);
    if (refused) return refused;
    refused = answer_number(gpu->fabric_status, &status);
    if (refused) return refused;
    for (int byte = 0; byte < 16; byte++)
        out->clusterUuid[byte] = (unsigned char)(number(gpu->fabric_cluster + byte / 8) >> (56 - byte % 8 * 8));
    out->status = (int)status;
    out->cliqueId = (unsigned int)number(gpu->fabric_clique);
    out->state = (unsigned char)state;
    out->healthMask = (unsigned int)number(gpu->fabric_health_mask);
    out->healthSummary = (unsigned char)number(gpu->fabric_health_summary);
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuFabricInfo(handle_t device, abi_fabric_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfo, device);
    REQUIRE(out);
    abi_fabric_v3_t full = {0};
    int refused = fill_fabric(gpu, &full);
    if (refused) return refused;
    memcpy(out->clusterUuid, full.clusterUuid, sizeof out->clusterUuid);
    out->status = full.status;
    out->cliqueId = full.cliqueId;
    out->state = full.state;
    return RC_SUCCESS;
}

API int nvmlDeviceGetGpuFabricInfoV(handle_t device, abi_fabric_v3_t *out) {
    ENTER_DEVICE(nvmlDeviceGetGpuFabricInfoV, device);
    REQUIRE(out);
    bool second = out->version == ABI_VERSION(abi_fabric_v2_t, 2);
    if (!second && out->version != ABI_VERSION(abi_fabric_v3_t, 3)) return RC_ARGUMENT_VERSION_MISMATCH;
    abi_fabric_v3_t full = {.version = out->version};
    int refused = fill_fabric(gpu, &full);
    /* Version 2 is version 3 without its last byte. */
    if (!refused) memcpy(out, &full, second ? offsetof(abi_fabric_v3_t, healthSummary) : sizeof full);
    return refused;
}

/* --- events -------------------------------------------------------------------------------------------- */

enum { EVENT_SETS = 64 };

struct event_set {
    bool used;
    pthread_mutex_t reading;
    uint64_t next; /* sequence of the next event to look at */
    uint64_t types[NODE_GPUS], since[NODE_GPUS];
};

static struct event_set event_sets[EVENT_SETS] = {
    [0 ... EVENT_SETS - 1] = {.reading = PTHREAD_MUTEX_INITIALIZER}};
static pthread_mutex_t making_sets = PTHREAD_MUTEX_INITIALIZER;

static struct event_set *event_set(handle_t handle) {
    for (int i = 0; i < EVENT_SETS; i++)
        if (handle == &event_sets[i]) return __atomic_load_n(&event_sets[i].used, __ATOMIC_ACQUIRE) ? handle : NULL;
    return NULL;
}

API int nvmlEventSetCreate(handle_t *out) {
    ENTER_NODE(nvmlEventSetCreate);
    REQUIRE(out);
    int made = RC_INSUFFICIENT_RESOURCES;
    pthread_mutex_lock(&making_sets);
    for (int i = 0; i < EVENT_SETS && made; i++) {
        struct event_set *set = &event_sets[i];
        if (set->used) continue;
        pthread_mutex_lock(&set->reading); /* a wait on its last user may not be over */
        memset(set->types, 0, sizeof set->types);
        set->next = __atomic_load_n(&node->event_head, __ATOMIC_ACQUIRE);
        pthread_mutex_unlock(&set->reading);
        __atomic_store_n(&set->used, true, __ATOMIC_RELEASE);
        *out = set;
        made = RC_SUCCESS;
    }
    pthread_mutex_unlock(&making_sets);
    return made;
}

static void free_event_sets(void) {
    for (int i = 0; i < EVENT_SETS; i++) __atomic_store_n(&event_sets[i].used, false, __ATOMIC_RELEASE);
}

API int nvmlEventSetFree(handle_t handle) {
    ENTER_NODE(nvmlEventSetFree);
    (void)node;
    struct event_set *set = event_set(handle);
    REQUIRE(set);
    __atomic_store_n(&set->used, false, __ATOMIC_RELEASE);
    return RC_SUCCESS;
}

API int nvmlDeviceRegisterEvents(handle_t device, unsigned long long types, handle_t handle) {
    ENTER_DEVICE(nvmlDeviceRegisterEvents, device);
    struct event_set *set = event_set(handle);
    REQUIRE(set);
    if (types & ~number(gpu->event_types)) return RC_NOT_SUPPORTED;
    pthread_mutex_lock(&set->reading);
    if (!set->types[at.gpu]) set->since[at.gpu] = __atomic_load_n(&node_current()->event_head, __ATOMIC_ACQUIRE);
    set->types[at.gpu] |= types;
    pthread_mutex_unlock(&set->reading);
    return RC_SUCCESS;
}

/* An event of a device that cannot be told belongs to every set that listens to that type. */
static bool wanted(const struct event_set *set, const struct node_event *event) {
    for (int gpu = 0; gpu < NODE_GPUS; gpu++)
        if ((event->gpu == gpu || event->gpu == NODE_UNREADABLE_GPU) && (set->types[gpu] & event->type) &&
            event->sequence >= set->since[gpu])
            return true;
    return false;
}

/* Copies event `sequence`; false where it was overwritten before or while being read. */
static bool read_event(const struct node *node, uint64_t sequence, struct node_event *out) {
    *out = node->events[sequence % NODE_EVENTS];
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    /* The writer of event n + NODE_EVENTS starts on the slot of n while the head still says so. */
    return __atomic_load_n(&node->event_head, __ATOMIC_RELAXED) - sequence < NODE_EVENTS;
}

static void mark_returned(struct node *node, uint64_t sequence) {
    struct node_event *slot = &node->events[sequence % NODE_EVENTS];
    uint64_t never = 0;
    __atomic_compare_exchange_n(&slot->returned_ns, &never, node_now_ns(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    __atomic_fetch_add(&slot->deliveries, 1, __ATOMIC_RELAXED);
    node_wake(&node->activity);
}

static bool take_event(struct node *node, struct event_set *set, abi_event_t *out) {
    bool found = false;
    pthread_mutex_lock(&set->reading);
    for (;;) {
        uint64_t head = __atomic_load_n(&node->event_head, __ATOMIC_ACQUIRE);
        if (set->next >= head) break;
        struct node_event event;
        if (!read_event(node, set->next, &event)) {
            uint64_t oldest = __atomic_load_n(&node->event_head, __ATOMIC_ACQUIRE) - NODE_EVENTS + 1;
            __atomic_fetch_add(&node->events_lost, oldest - set->next, __ATOMIC_RELAXED);
            set->next = oldest;
            continue;
        }
        set->next++;
        if (!wanted(set, &event)) continue;
        *out = (abi_event_t){device_handle(event.gpu), event.type, event.data, event.gi, event.ci};
        mark_returned(node, event.sequence);
        found = true;
        break;
    }
    pthread_mutex_unlock(&set->reading);
    return found;
}

static int wait_event(int function, handle_t handle, abi_event_t *out, unsigned int timeout_ms) {
    uint64_t deadline = node_now_ns() + timeout_ms * 1000000ull;
    int refused = gate(function, NODE_NO_GPU);
    if (refused) return refused;
    struct node *node = node_current();
    bool in_time = true;
    for (;;) {
        uint32_t seen = __atomic_load_n(&node->wake, __ATOMIC_ACQUIRE);
        sleep_while_hanging(node, function, NODE_NO_GPU); /* a wait under way hangs with the driver */
        refused = is_initialised() ? refusal(node, function, NODE_NO_GPU) : RC_UNINITIALIZED;
        if (refused) return refused;
        struct event_set *set = event_set(handle);
        REQUIRE(set && out);
        if (take_event(node, set, out)) return RC_SUCCESS;
        if (!in_time) return RC_TIMEOUT;
        in_time = node_sleep(&node->wake, seen, deadline);
    }
}

API int nvmlEventSetWait(handle_t set, abi_event_t *out, unsigned int timeout_ms) {
    return wait_event(FN_nvmlEventSetWait, set, out, timeout_ms);
}

API int nvmlEventSetWait_v2(handle_t set, abi_event_t *out, unsigned int timeout_ms) {
    return wait_event(FN_nvmlEventSetWait_v2, set, out, timeout_ms);
}

/* --- everything else ----------------------------------------------------------------------------------- */

/* Most take a handle first; where they do not, the value is no handle and the call belongs to no GPU. */
static int unanswered(int function, handle_t first) {
    struct target at = resolve(first);
    int refused = gate(function, at.gpu);
    return refused ? refused : RC_NOT_SUPPORTED;
}

#define REFUSE(name)                                                                                         \
    API int name(handle_t first) { return unanswered(FN_##name, first); }
UNANSWERED_FUNCTIONS(REFUSE)

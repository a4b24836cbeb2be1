/* The part of NVML's binary interface that the simulation answers.
 *
 * Our own declarations, written from NVML's public API reference; field names are NVML's, so that
 * tests/simulation/test_nvml_library.py can compare sizes, offsets and values with the real nvml.h.
 */
#pragma once

enum abi_return {
    RC_SUCCESS = 0,
    RC_UNINITIALIZED = 1,
    RC_INVALID_ARGUMENT = 2,
    RC_NOT_SUPPORTED = 3,
    RC_NO_PERMISSION = 4,
    RC_ALREADY_INITIALIZED = 5,
    RC_NOT_FOUND = 6,
    RC_INSUFFICIENT_SIZE = 7,
    RC_INSUFFICIENT_POWER = 8,
    RC_DRIVER_NOT_LOADED = 9,
    RC_TIMEOUT = 10,
    RC_IRQ_ISSUE = 11,
    RC_LIBRARY_NOT_FOUND = 12,
    RC_FUNCTION_NOT_FOUND = 13,
    RC_CORRUPTED_INFOROM = 14,
    RC_GPU_IS_LOST = 15,
    RC_RESET_REQUIRED = 16,
    RC_OPERATING_SYSTEM = 17,
    RC_LIB_RM_VERSION_MISMATCH = 18,
    RC_IN_USE = 19,
    RC_MEMORY = 20,
    RC_NO_DATA = 21,
    RC_VGPU_ECC_NOT_SUPPORTED = 22,
    RC_INSUFFICIENT_RESOURCES = 23,
    RC_FREQ_NOT_SUPPORTED = 24,
    RC_ARGUMENT_VERSION_MISMATCH = 25,
    RC_DEPRECATED = 26,
    RC_NOT_READY = 27,
    RC_GPU_NOT_FOUND = 28,
    RC_INVALID_STATE = 29,
    RC_RESET_TYPE_NOT_SUPPORTED = 30,
    RC_UNKNOWN = 999,
};

enum {
    ABI_CLOCKS = 4,          /* graphics, SM, memory, video */
    ABI_ECC_TYPES = 2,       /* corrected, uncorrected */
    ABI_ECC_COUNTERS = 2,    /* volatile, aggregate */
    ABI_ECC_LOCATIONS = 8,   /* L1, L2, DRAM, registers, texture, texture shared, CBU, SRAM */
    ABI_THRESHOLDS = 4,      /* shutdown, slowdown, memory maximum, GPU maximum */
    ABI_LINK_TO_GPU = 0,
    ABI_LINK_TO_SWITCH = 2,
    ABI_PROCESS_COMPUTE = 1, /* our own kinds: bits of what a process does on a GPU */
    ABI_PROCESS_GRAPHICS = 2,
    ABI_PROCESS_MPS = 4,
    ABI_TOPOLOGY_INTERNAL = 0,
    ABI_TOPOLOGY_MULTIPLE = 20,
    ABI_TOPOLOGY_HOSTBRIDGE = 30,
    ABI_TOPOLOGY_NODE = 40,
    ABI_TOPOLOGY_SYSTEM = 50,
    ABI_FI_GPU_RECOVERY_ACTION = 230,
    ABI_VALUE_UNSIGNED_INT = 1,
    ABI_GPU_UNBOUND = 1,
    ABI_GPU_BOUND = 2,
};

#define ABI_NO_INSTANCE 0xFFFFFFFFu
#define ABI_VERSION(type, number) ((unsigned int)(sizeof(type) | ((number) << 24u)))

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} abi_pci_t;

typedef struct {
    unsigned int gpu, memory;
} abi_utilization_t;

typedef struct {
    unsigned long long total, free, used;
} abi_memory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} abi_memory_v2_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} abi_process_v1_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} abi_process_v2_t;

typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount,
        sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} abi_attributes_t;

typedef struct {
    unsigned int version, value;
} abi_addressing_mode_t;

typedef struct {
    void *device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} abi_event_t;

typedef struct {
    unsigned int version;
    void *set;
} abi_system_set_t; /* of a request to make or to free one */

typedef struct {
    unsigned int version;
    unsigned long long eventTypes;
    void *set;
} abi_system_register_t;

typedef struct {
    unsigned long long eventType;
    unsigned int gpuId;
} abi_system_event_t;

typedef struct {
    unsigned int version, timeoutms;
    void *set;
    abi_system_event_t *data;
    unsigned int dataSize, numEvent;
} abi_system_wait_t;

typedef union {
    double dVal;
    unsigned int uiVal;
    unsigned long long ullVal;
} abi_value_t;

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType;
    int nvmlReturn;
    abi_value_t value;
} abi_field_value_t;

typedef struct {
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
} abi_fabric_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
} abi_fabric_v2_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    int status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
    unsigned char healthSummary;
} abi_fabric_v3_t;

typedef struct {
    unsigned int id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
        decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
} abi_gi_profile_t;

typedef struct {
    unsigned int version, id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount,
        decoderCount, encoderCount, jpegCount, ofaCount;
    unsigned long long memorySizeMB;
    char name[96];
    unsigned int capabilities;
} abi_gi_profile_v3_t;

typedef struct {
    unsigned int start, size;
} abi_placement_t;

typedef struct {
    void *device;
    unsigned int id, profileId;
    abi_placement_t placement;
} abi_gi_info_t;


/* The simulated node: one file, mapped by every NVML client and by the controllers of the simulation.
 *
 * Invariants
 * - The layout lives here alone. Other languages go through the gpusim_* functions of control.c, by field name.
 * - Controllers are serialised by flock on the file, so the kernel releases a killed one's lock.
 *   Clients hold no lock in the file at all: killing one at any moment leaves nothing behind.
 * - A scalar is one aligned 64-bit word. What must be read together is read under `revision` (a sequence
 *   lock with a bounded number of tries: a controller killed inside its few microseconds of copying
 *   cannot block a client).
 * - An event is written into its entry before `event_head` counts it; readers keep their own position.
 * - Sleepers wait on `wake`; every change of the configuration and every event bumps and wakes it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "functions.h"

enum {
    NODE_GPUS = 32,        /* GPUs of a node */
    NODE_MIGS = 64,        /* MIG devices of a GPU: 8 GPU instances of up to 8 compute instances */
    NODE_PROFILES = 16,    /* MIG profiles of a GPU */
    NODE_LINKS = 36,       /* NVLinks of a GPU, as NVML_NVLINK_MAX_LINKS */
    NODE_PROCESSES = 128,  /* processes on a GPU */
    NODE_EVENTS = 1024,    /* events a slow reader may be behind before it loses the oldest */
    NODE_REBINDS = 64,     /* of GPUs bound to their driver or unbound, the same */
};

#define NODE_MAGIC 0x6d6973757067ull /* "gpusim", so `file` and people see what it is */
#define NODE_LAYOUT 4u
#define NODE_UNSUPPORTED UINT64_MAX  /* a number that makes the call that reads it answer NOT_SUPPORTED */
#define NODE_NO_GPU (-1)             /* a call or event that belongs to no GPU */
#define NODE_UUID_EMPTY 1u           /* uuid_damage: the call succeeds with an empty UUID */
#define NODE_UUID_UNTERMINATED 2u    /* the same with one that fills its buffer and does not end */
#define NODE_UNREADABLE_GPU 255      /* an event whose device answers nothing, not even its UUID */

/* Every field of the configuration: its name, for texts its size in bytes, and how many there are. */
#define NODE_TEXT_FIELDS(F) F(driver_version, 80, 1) F(nvml_version, 80, 1)
#define NODE_NUMBER_FIELDS(F) F(gpus, 1) F(cuda_version, 1) F(driver_code, 1) F(hang, 1) F(system_events, 1)

#define GPU_TEXT_FIELDS(F)                                                                                   \
    F(uuid, 80, 1) F(name, 96, 1) F(serial, 32, 1) F(board_part_number, 80, 1) F(vbios_version, 32, 1)       \
    F(inforom_image, 16, 1) F(cpu_affinity, 96, 1) F(profile_name, 32, NODE_PROFILES)                        \
    F(mig_uuid, 80, NODE_MIGS)
#define GPU_NUMBER_FIELDS(F)                                                                                 \
    F(visible, 1) F(gone_code, 1) F(hang, 1) F(uuid_damage, 1)                                               \
    F(brand, 1) F(architecture, 1) F(compute_capability, 2) F(minor, 1)                                      \
    F(memory_total, 1) F(memory_reserved, 1) F(memory_used, 1)                                               \
    F(pci_domain, 1) F(pci_bus, 1) F(pci_device, 1) F(pci_device_id, 1) F(pci_subsystem_id, 1)               \
    F(pcie_switch, 1) F(host_bridge, 1) F(numa_node, 1) F(addressing_mode, 1)                                \
    F(pcie_generation, 1) F(pcie_width, 1) F(pcie_max_generation, 1) F(pcie_max_width, 1)                    \
    F(pcie_replays, 1) F(pcie_throughput, 2)                                                                 \
    F(temperature, 1) F(thresholds, ABI_THRESHOLDS) F(utilization, 2)                                        \
    F(power_mw, 1) F(power_limit_mw, 1) F(energy_mj, 1) F(performance_state, 1)                              \
    F(clocks, ABI_CLOCKS) F(max_clocks, ABI_CLOCKS) F(clock_reasons, 1)                                      \
    F(ecc_mode, 1) F(ecc, ABI_ECC_TYPES * ABI_ECC_COUNTERS * ABI_ECC_LOCATIONS)                              \
    F(remapped_rows, 4) F(pages_pending, 1)                                                                  \
    F(event_types, 1) F(recovery_action, 1)                                                                  \
    F(fabric_state, 1) F(fabric_status, 1) F(fabric_clique, 1) F(fabric_health_mask, 1)                      \
    F(fabric_health_summary, 1) F(fabric_cluster, 2)                                                         \
    F(links, 1) F(switch_device_id, 1) F(link_state, NODE_LINKS)                                             \
    F(link_peer, NODE_LINKS)                                                                                 \
    F(mig_mode, 1) F(mig_pending, 1) F(mig_maximum, 1) F(mig_generation, 1) F(mig_count, 1)                  \
    F(mig_profile, NODE_MIGS) F(mig_gi, NODE_MIGS) F(mig_ci, NODE_MIGS) F(mig_slices, NODE_MIGS)             \
    F(mig_start, NODE_MIGS) F(mig_memory_used, NODE_MIGS)                    \
    F(profiles, 1) F(profile_key, NODE_PROFILES) F(profile_id, NODE_PROFILES)                                \
    F(profile_slices, NODE_PROFILES) F(profile_instances, NODE_PROFILES) F(profile_sms, NODE_PROFILES)       \
    F(profile_copy_engines, NODE_PROFILES) F(profile_decoders, NODE_PROFILES)                                \
    F(profile_encoders, NODE_PROFILES) F(profile_jpegs, NODE_PROFILES) F(profile_ofas, NODE_PROFILES)        \
    F(profile_memory_mib, NODE_PROFILES) F(profile_starts, NODE_PROFILES) F(profile_size, NODE_PROFILES)     \
    F(profile_first_gi, NODE_PROFILES)                                                                       \
    F(processes, 1) F(process_pid, NODE_PROCESSES) F(process_memory, NODE_PROCESSES)                         \
    F(process_gi, NODE_PROCESSES) F(process_ci, NODE_PROCESSES) F(process_kind, NODE_PROCESSES)

#define DECLARE_TEXT(name, size, count) char name[count][size];
#define DECLARE_NUMBER(name, count) uint64_t name[count];

struct node_config {
    NODE_TEXT_FIELDS(DECLARE_TEXT)
    NODE_NUMBER_FIELDS(DECLARE_NUMBER)
};

struct gpu_config {
    GPU_TEXT_FIELDS(DECLARE_TEXT)
    GPU_NUMBER_FIELDS(DECLARE_NUMBER)
};

struct node_event {
    uint64_t sequence; /* of this entry's event, counted from 0 */
    int32_t gpu;       /* position, or NODE_UNREADABLE_GPU */
    uint32_t gi, ci;
    uint64_t type, data;
    uint64_t pushed_ns, returned_ns; /* CLOCK_MONOTONIC; returned: by the first wait that handed it over, or 0 */
    uint64_t deliveries;
};

struct node_rebind {
    uint64_t type; /* bind or unbind */
    uint64_t gpu;  /* PCI address as NVML packs it */
};

struct node {
    uint64_t magic;
    uint32_t layout;
    uint32_t size;
    uint64_t fingerprint; /* of all field and function names: two builds of the library must mean the same */

    uint32_t wake;     /* futex: the configuration changed or an event came */
    uint32_t activity; /* futex: a client initialised, shut down, entered a hang or was handed an event */
    uint32_t revision; /* odd while a controller copies a new configuration in */

    uint64_t inits, shutdowns, hangs_entered, events_lost;
    uint64_t event_head; /* events ever pushed */
    struct node_event events[NODE_EVENTS];
    uint64_t rebind_head; /* as event_head */
    struct node_rebind rebinds[NODE_REBINDS];

    struct node_config config;
    struct gpu_config gpus[NODE_GPUS];

    /* What a call must answer instead: 0 nothing, code + 1, or FORCED_HANG. The last row is every function,
     * the last column every GPU and the calls that belong to none. */
    int32_t forced[FUNCTIONS + 1][NODE_GPUS + 1];
    uint64_t calls[FUNCTIONS][NODE_GPUS + 1];
};

enum { FORCED_HANG = -1 };

/* One number of the configuration, as it is now. */
static inline uint64_t number(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }

/* The node this process is attached to, or NULL. */
struct node *node_current(void);
/* Finds and maps the state file of the simulated node; NULL where there is none or it has another layout. */
struct node *node_attach(void);
/* Where a file of the node's directory is, by its path below that; false where the path is too long. */
bool node_path(const char *name, char *path, size_t size);
/* Maps a state file and checks its header; NULL with errno. The descriptor is the caller's, if he wants it. */
struct node *node_map(const char *path, int *descriptor);
uint64_t node_fingerprint(void);
extern const char *const node_functions[FUNCTIONS];

/* What must be read together: do { begin; copy; } while (node_read_again(...)). */
struct node_read {
    uint32_t revision;
    int tries;
};
void node_read_begin(const struct node *node, struct node_read *read);
bool node_read_again(const struct node *node, struct node_read *read);

/* Sleeps until the word differs from `seen`, at the latest until `deadline_ns` of CLOCK_MONOTONIC
 * (UINT64_MAX: without a limit). False when the deadline passed. */
bool node_sleep(uint32_t *word, uint32_t seen, uint64_t deadline_ns);
/* Bumps the word and wakes its sleepers. */
void node_wake(uint32_t *word);
uint64_t node_now_ns(void);

/* What the answers share: handles, and the gate every call goes through. */
#pragma once

#include "node.h"

#define API __attribute__((visibility("default")))

typedef void *handle_t;

enum kind { INVALID, UNREADABLE, DEVICE, MIG_DEVICE, GPU_INSTANCE };

struct target {
    enum kind kind;
    int gpu; /* position, or NODE_NO_GPU */
    unsigned int gi, ci;
};

/* Handles are values, not pointers: nothing to allocate, and one of an earlier MIG configuration is detected. */
struct target resolve(handle_t handle);
handle_t device_handle(int gpu);
handle_t instance_handle(enum kind kind, int gpu, uint64_t generation, uint64_t gi, uint64_t ci);

/* Counts the call, blocks while it is to hang, and returns what it must answer instead (RC_SUCCESS: go on). */
int gate(int function, int gpu);

/* The parts of the gate, for a call that sleeps on its way: an event wait. */
void sleep_while_hanging(struct node *node, int function, int gpu);
int answer_code(const struct node *node, int function, int gpu);
bool is_initialised(void);
void free_event_sets(void); /* in events.c, when the process shuts down */

/* Device nodes, in devices.c; NODE_NO_GPU is the driver's own. */
void device_open(int gpu);
void device_ask(int gpu); /* may block for as long as the node's file system likes */
void device_close_all(void);

/* GPUs by position, in nvml.c. */
int gpu_count(void);
bool visible(int gpu);
void pci_of(const struct gpu_config *gpu, abi_pci_t *out);
void fill_pci(abi_pci_t *out, uint64_t domain, uint64_t bus, uint64_t device, uint64_t id, uint64_t subsystem);

/* The code of a call that only a whole GPU answers; RC_SUCCESS for one. */
int whole_device(const struct target *at);

int answer_text(const char *text, char *out, unsigned int length);
int answer_number(const uint64_t *at, unsigned int *out);

static inline const struct gpu_config *gpu_config(int gpu) { return &node_current()->gpus[gpu]; }

#define REQUIRE(condition)                                                                                   \
    if (!(condition)) return RC_INVALID_ARGUMENT

/* Opens a function: `at` is what its handle stands for. */
#define ENTER(name, handle)                                                                                  \
    struct target at = resolve(handle);                                                                      \
    {                                                                                                        \
        int code = gate(FN_##name, at.gpu);                                                                  \
        if (code) return code;                                                                               \
    }

/* Opens a function of a whole GPU: `gpu` is its configuration. */
#define ENTER_DEVICE(name, handle)                                                                           \
    ENTER(name, handle)                                                                                      \
    {                                                                                                        \
        int code = whole_device(&at);                                                                        \
        if (code) return code;                                                                               \
    }                                                                                                        \
    const struct gpu_config *gpu = gpu_config(at.gpu)

/* Opens a function that belongs to no GPU. */
#define ENTER_NODE(name)                                                                                     \
    {                                                                                                        \
        int code = gate(FN_##name, NODE_NO_GPU);                                                             \
        if (code) return code;                                                                               \
    }                                                                                                        \
    const struct node *node = node_current()

/* MIG, in mig.c: the answers of calls that accept both kinds of handle. */
int mig_text(const struct target *at, bool uuid, char *out, unsigned int length);
int mig_memory(const struct target *at, uint64_t *total, uint64_t *used);
bool mig_by_uuid(const char *uuid, handle_t *handle, int *gpu);

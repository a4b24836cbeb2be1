/* The gate every call goes through, the handles that stand for things, and start and shutdown.
 *
 * Guarantees
 * - Every exported function is counted, can be made to hang and to answer any code.
 * - Nothing busy-waits: a hung call sleeps on a futex in the shared node.
 */
#define _GNU_SOURCE
#include <string.h>

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
    if (at.kind > GPU_INSTANCE || at.gpu >= (int)number(node->config.gpus))
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

bool is_initialised(void) { return __atomic_load_n(&initialised, __ATOMIC_ACQUIRE) != 0; }

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

void sleep_while_hanging(struct node *node, int function, int gpu) {
    bool reported = false;
    for (;;) {
        uint32_t seen = __atomic_load_n(&node->wake, __ATOMIC_ACQUIRE);
        if (!hanging(node, function, gpu)) return;
        if (!reported) {
            reported = true;
            __atomic_fetch_add(&node->hangs_entered, 1, __ATOMIC_RELAXED);
            node_wake(&node->activity);
        }
        node_sleep(&node->wake, seen, UINT64_MAX);
    }
}

int answer_code(const struct node *node, int function, int gpu) {
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

static void pass(struct node *node, int function, int gpu) {
    __atomic_fetch_add(&node->calls[function][gpu < 0 ? NODE_GPUS : gpu], 1, __ATOMIC_RELAXED);
    device_ask(gpu);
    sleep_while_hanging(node, function, gpu);
}

int gate(int function, int gpu) {
    struct node *node = node_current();
    if (!node || !is_initialised()) return RC_UNINITIALIZED;
    pass(node, function, gpu);
    return answer_code(node, function, gpu);
}

/* --- start and shutdown ---------------------------------------------------------------------------------- */

static int initialise(int function) {
    struct node *node = node_current();
    if (!node || !is_initialised()) node = node_attach();
    if (!node) return RC_DRIVER_NOT_LOADED;
    pass(node, function, NODE_NO_GPU);
    int code = answer_code(node, function, NODE_NO_GPU);
    if (code) return code;
    device_open(NODE_NO_GPU);
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

/* A driver that is gone cannot keep a process from letting go of it; a forced answer can. */
API int nvmlShutdown(void) {
    struct node *node = node_current();
    if (!node || !is_initialised()) return RC_UNINITIALIZED;
    pass(node, FN_nvmlShutdown, NODE_NO_GPU);
    int code = forced(node, FN_nvmlShutdown, NODE_NO_GPU);
    if (code > RC_SUCCESS + 1) return code - 1;
    unsigned int before = __atomic_load_n(&initialised, __ATOMIC_ACQUIRE);
    do {
        if (!before) return RC_UNINITIALIZED;
    } while (!__atomic_compare_exchange_n(&initialised, &before, before - 1, false, __ATOMIC_ACQ_REL,
                                          __ATOMIC_ACQUIRE));
    if (before == 1) {
        free_event_sets();
        device_close_all();
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
        "The operating system has blocked the request", "Driver/library version mismatch",
        "In use by another client",
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

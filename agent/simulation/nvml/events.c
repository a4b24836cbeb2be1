/* Event sets: their listeners, and waiting for events; and the one set of the node's own events.
 *
 * Guarantees
 * - Every set gets every event it registered for exactly once, whatever other sets and processes do.
 * - A set that falls more than NODE_EVENTS behind loses the oldest; what is lost is counted in the node.
 * - A wait sleeps on a futex in the shared node, and ends when the driver goes or this process shuts down.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>

#include "client.h"

enum { EVENT_SETS = 64 };

struct event_set {
    bool used;
    pthread_mutex_t reading;
    uint64_t next; /* sequence of the next event to read */
    uint64_t types[NODE_GPUS], since[NODE_GPUS];
};

static struct event_set event_sets[EVENT_SETS] = {
    [0 ... EVENT_SETS - 1] = {.reading = PTHREAD_MUTEX_INITIALIZER}};
static pthread_mutex_t making_sets = PTHREAD_MUTEX_INITIALIZER;

/* Of the system, there is one set, and it can be registered once in a process: as a real client reports it. */
static struct {
    bool used, registered;
    uint64_t next, types;
} system_set;

static struct event_set *event_set(handle_t handle) {
    for (int i = 0; i < EVENT_SETS; i++)
        if (handle == &event_sets[i] && __atomic_load_n(&event_sets[i].used, __ATOMIC_ACQUIRE)) return handle;
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

void free_event_sets(void) {
    __atomic_store_n(&system_set.used, false, __ATOMIC_RELEASE);
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
    if (!set->types[at.gpu])
        set->since[at.gpu] = __atomic_load_n(&node_current()->event_head, __ATOMIC_ACQUIRE);
    set->types[at.gpu] |= types;
    pthread_mutex_unlock(&set->reading);
    return RC_SUCCESS;
}

/* An event of a device that cannot be identified belongs to every set that listens to that type. */
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
    /* The writer of event n + NODE_EVENTS starts on the entry of n before it moves the head. */
    return __atomic_load_n(&node->event_head, __ATOMIC_RELAXED) - sequence < NODE_EVENTS;
}

static void mark_returned(struct node *node, uint64_t sequence) {
    struct node_event *entry = &node->events[sequence % NODE_EVENTS];
    uint64_t never = 0;
    __atomic_compare_exchange_n(&entry->returned_ns, &never, node_now_ns(), false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    __atomic_fetch_add(&entry->deliveries, 1, __ATOMIC_RELAXED);
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
    int code = gate(function, NODE_NO_GPU);
    if (code) return code;
    struct node *node = node_current();
    bool in_time = true;
    for (;;) {
        uint32_t seen = __atomic_load_n(&node->wake, __ATOMIC_ACQUIRE);
        sleep_while_hanging(node, function, NODE_NO_GPU); /* a wait under way hangs with the driver */
        code = is_initialised() ? answer_code(node, function, NODE_NO_GPU) : RC_UNINITIALIZED;
        if (code) return code;
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

/* --- events of the system ------------------------------------------------------------------------------ */

#define ENTER_SYSTEM(name, type)                                                                             \
    ENTER_NODE(name);                                                                                        \
    if (!number(node->config.system_events)) return RC_NOT_SUPPORTED;                                        \
    REQUIRE(request);                                                                                        \
    if (request->version != ABI_VERSION(type, 1)) return RC_ARGUMENT_VERSION_MISMATCH

#define REQUIRE_SYSTEM_SET REQUIRE(request->set == &system_set && system_set.used)

API int nvmlSystemEventSetCreate(abi_system_set_t *request) {
    ENTER_SYSTEM(nvmlSystemEventSetCreate, abi_system_set_t);
    if (__atomic_exchange_n(&system_set.used, true, __ATOMIC_ACQ_REL)) return RC_INSUFFICIENT_RESOURCES;
    system_set.types = 0;
    request->set = &system_set;
    return RC_SUCCESS;
}

API int nvmlSystemRegisterEvents(abi_system_register_t *request) {
    ENTER_SYSTEM(nvmlSystemRegisterEvents, abi_system_register_t);
    REQUIRE_SYSTEM_SET;
    if (__atomic_exchange_n(&system_set.registered, true, __ATOMIC_ACQ_REL)) return RC_UNKNOWN;
    system_set.next = __atomic_load_n(&node->rebind_head, __ATOMIC_ACQUIRE);
    system_set.types = request->eventTypes;
    return RC_SUCCESS;
}

API int nvmlSystemEventSetWait(abi_system_wait_t *request) {
    ENTER_SYSTEM(nvmlSystemEventSetWait, abi_system_wait_t);
    REQUIRE_SYSTEM_SET;
    uint64_t head = __atomic_load_n(&node->rebind_head, __ATOMIC_ACQUIRE);
    if (head - system_set.next > NODE_REBINDS) system_set.next = head - NODE_REBINDS;
    request->numEvent = 0;
    /* No client waits here: it reads between two waits for XIDs. */
    for (; system_set.next < head && request->numEvent < request->dataSize; system_set.next++) {
        const struct node_rebind *rebind = &node->rebinds[system_set.next % NODE_REBINDS];
        if (!(rebind->type & system_set.types)) continue;
        request->data[request->numEvent++] = (abi_system_event_t){rebind->type, (unsigned int)rebind->gpu};
    }
    return request->numEvent ? RC_SUCCESS : RC_TIMEOUT;
}

API int nvmlSystemEventSetFree(abi_system_set_t *request) {
    ENTER_SYSTEM(nvmlSystemEventSetFree, abi_system_set_t);
    REQUIRE_SYSTEM_SET;
    __atomic_store_n(&system_set.used, false, __ATOMIC_RELEASE);
    return RC_SUCCESS;
}

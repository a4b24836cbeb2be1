/* Controlling the simulated node: what control.py calls through ctypes.
 *
 * Fields are set by name, so that the layout stays in node.h. A change is made on a private copy between
 * gpusim_begin and gpusim_commit and appears to clients at once or not at all. Functions answer 0 or NULL and
 * set errno when they fail. A control handle belongs to one thread at a time; the caller sees to it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "node.h"

#define API __attribute__((visibility("default")))

struct control {
    int fd;
    struct node *node;
    char path[PATH_MAX], draft[PATH_MAX]; /* draft: empty once published */
    bool changing;
    int scope; /* of the change under way: a GPU's position, or NODE_NO_GPU for the node */
    union {
        struct node_config node;
        struct gpu_config gpu;
    } stage;
};

struct field {
    const char *name;
    size_t offset, size; /* size: of one text, 0 for a number */
    unsigned int count;
};

#define NODE_TEXT(name, size, count) {#name, offsetof(struct node_config, name), size, count},
#define NODE_NUMBER(name, count) {#name, offsetof(struct node_config, name), 0, count},
#define GPU_TEXT(name, size, count) {#name, offsetof(struct gpu_config, name), size, count},
#define GPU_NUMBER(name, count) {#name, offsetof(struct gpu_config, name), 0, count},
static const struct field node_fields[] = {NODE_TEXT_FIELDS(NODE_TEXT) NODE_NUMBER_FIELDS(NODE_NUMBER){0}};
static const struct field gpu_fields[] = {GPU_TEXT_FIELDS(GPU_TEXT) GPU_NUMBER_FIELDS(GPU_NUMBER){0}};

static const struct field *field(int scope, const char *name, unsigned int index, bool text) {
    for (const struct field *at = scope == NODE_NO_GPU ? node_fields : gpu_fields; at->name; at++)
        if (strcmp(at->name, name) == 0 && (at->size != 0) == text && index < at->count) return at;
    errno = ENOENT;
    return NULL;
}

static bool known_scope(int scope) {
    if (scope == NODE_NO_GPU || (scope >= 0 && scope < NODE_GPUS)) return true;
    errno = ERANGE;
    return false;
}

static void *staged(struct control *control) {
    return control->scope == NODE_NO_GPU ? (void *)&control->stage.node : (void *)&control->stage.gpu;
}

static void *live(struct control *control, int scope) {
    return scope == NODE_NO_GPU ? (void *)&control->node->config : (void *)&control->node->gpus[scope];
}

static size_t extent(int scope) {
    return scope == NODE_NO_GPU ? sizeof(struct node_config) : sizeof(struct gpu_config);
}

static bool hold_file(int fd) {
    while (flock(fd, LOCK_EX) != 0)
        if (errno != EINTR) return false;
    return true;
}

/* --- opening and closing ------------------------------------------------------------------------------- */

API struct control *gpusim_open(const char *path) {
    struct control *control = calloc(1, sizeof *control);
    if (!control) return NULL;
    control->node = node_map(path, &control->fd);
    if (control->node) return control;
    int why = errno;
    free(control);
    errno = why;
    return NULL;
}

static bool write_header(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) return false;
    struct node *node = MAP_FAILED;
    if (ftruncate(fd, sizeof *node) == 0)
        node = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int why = errno;
    close(fd);
    errno = why;
    if (node == MAP_FAILED) return false;
    node->magic = NODE_MAGIC;
    node->layout = NODE_LAYOUT;
    node->size = sizeof *node;
    node->fingerprint = node_fingerprint();
    munmap(node, sizeof *node);
    return true;
}

/* A new node, which no client can see before gpusim_publish. */
API struct control *gpusim_create(const char *path) {
    char draft[PATH_MAX];
    if (snprintf(draft, sizeof draft, "%s.%d", path, (int)getpid()) >= (int)sizeof draft) {
        errno = ENAMETOOLONG;
        return NULL;
    }
    if (!write_header(draft)) return NULL;
    struct control *control = gpusim_open(draft);
    if (!control) {
        unlink(draft);
        return NULL;
    }
    snprintf(control->path, sizeof control->path, "%s", path);
    snprintf(control->draft, sizeof control->draft, "%s", draft);
    return control;
}

API int gpusim_publish(struct control *control) {
    if (!control->draft[0] || rename(control->draft, control->path) != 0) return 0;
    control->draft[0] = '\0';
    return 1;
}

API void gpusim_close(struct control *control) {
    if (control->draft[0]) unlink(control->draft);
    munmap(control->node, sizeof *control->node);
    close(control->fd); /* releases the lock, too */
    free(control);
}

/* --- the configuration --------------------------------------------------------------------------------- */

API int gpusim_begin(struct control *control, int scope) {
    if (!known_scope(scope) || !hold_file(control->fd)) return 0;
    control->scope = scope;
    control->changing = true;
    memcpy(staged(control), live(control, scope), extent(scope));
    return 1;
}

API void gpusim_commit(struct control *control) {
    struct node *node = control->node;
    uint32_t revision = __atomic_load_n(&node->revision, __ATOMIC_RELAXED) | 1; /* odd already: one died here */
    __atomic_store_n(&node->revision, revision, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(live(control, control->scope), staged(control), extent(control->scope));
    __atomic_store_n(&node->revision, revision + 1, __ATOMIC_RELEASE);
    control->changing = false;
    flock(control->fd, LOCK_UN);
    node_wake(&node->wake);
}

API void gpusim_abandon(struct control *control) {
    control->changing = false;
    flock(control->fd, LOCK_UN);
}

API int gpusim_set_number(struct control *control, const char *name, unsigned int index, uint64_t value) {
    const struct field *at = field(control->scope, name, index, false);
    if (!control->changing || !at) return 0;
    ((uint64_t *)((char *)staged(control) + at->offset))[index] = value;
    return 1;
}

API int gpusim_set_text(struct control *control, const char *name, unsigned int index, const char *value) {
    const struct field *at = field(control->scope, name, index, true);
    if (!control->changing || !at) return 0;
    if (strlen(value) >= at->size) {
        errno = E2BIG;
        return 0;
    }
    char *entry = (char *)staged(control) + at->offset + index * at->size;
    memset(entry, 0, at->size);
    memcpy(entry, value, strlen(value));
    return 1;
}

static const char *readable(struct control *control, int scope) {
    return control->changing && scope == control->scope ? staged(control) : live(control, scope);
}

API int gpusim_get_number(struct control *control, int scope, const char *name, unsigned int index,
                          uint64_t *value) {
    const struct field *at = known_scope(scope) ? field(scope, name, index, false) : NULL;
    if (!at) return 0;
    *value = number((const uint64_t *)(readable(control, scope) + at->offset) + index);
    return 1;
}

API int gpusim_get_text(struct control *control, int scope, const char *name, unsigned int index, char *value,
                        size_t size) {
    const struct field *at = known_scope(scope) ? field(scope, name, index, true) : NULL;
    if (!at) return 0;
    struct node_read read = {0};
    do {
        node_read_begin(control->node, &read);
        snprintf(value, size, "%s", readable(control, scope) + at->offset + index * at->size);
    } while (node_read_again(control->node, &read));
    return 1;
}

/* How many there are of a field, 0 for an unknown one: the bounds of lists. */
API unsigned int gpusim_count(int scope, const char *name) {
    for (const struct field *at = scope == NODE_NO_GPU ? node_fields : gpu_fields; at->name; at++)
        if (strcmp(at->name, name) == 0) return at->count;
    return 0;
}

/* --- forced answers and counts ------------------------------------------------------------------------- */

/* `nvmlDeviceGetMemoryInfo` means its versions, too; with a version it means that one alone. */
static bool means(const char *named, const char *function) {
    size_t length = strlen(named);
    if (strncmp(named, function, length) != 0) return false;
    const char *rest = function + length;
    return *rest == '\0' || (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '0' && rest[2] <= '9');
}

/* `named` NULL is every function, scope NODE_NO_GPU every GPU; forced as in node.h. */
API int gpusim_force(struct control *control, const char *named, int scope, int forced) {
    if (!known_scope(scope)) return 0;
    int column = scope == NODE_NO_GPU ? NODE_GPUS : scope;
    int hits = 0;
    for (int fn = 0; fn < FUNCTIONS; fn++)
        if (named && means(named, node_functions[fn])) {
            __atomic_store_n(&control->node->forced[fn][column], forced, __ATOMIC_RELAXED);
            hits++;
        }
    if (!named) {
        __atomic_store_n(&control->node->forced[FUNCTIONS][column], forced, __ATOMIC_RELAXED);
        hits++;
    }
    node_wake(&control->node->wake);
    if (!hits) errno = ENOENT;
    return hits;
}

/* Takes back every forced answer of every function, on every GPU. */
API void gpusim_unforce_all(struct control *control) {
    for (int fn = 0; fn <= FUNCTIONS; fn++)
        for (int column = 0; column <= NODE_GPUS; column++)
            __atomic_store_n(&control->node->forced[fn][column], 0, __ATOMIC_RELAXED);
    node_wake(&control->node->wake);
}

/* How often clients called a function, for one GPU or (NODE_NO_GPU) in all; -1 for an unknown name. */
API int64_t gpusim_calls(struct control *control, const char *named, int scope) {
    int64_t sum = 0;
    int hits = 0;
    if (!known_scope(scope)) return -1;
    for (int fn = 0; fn < FUNCTIONS; fn++) {
        if (!means(named, node_functions[fn])) continue;
        hits++;
        for (int column = 0; column <= NODE_GPUS; column++)
            if (scope == NODE_NO_GPU || column == scope)
                sum += (int64_t)number(&control->node->calls[fn][column]);
    }
    return hits ? sum : -1;
}

API int64_t gpusim_counter(struct control *control, const char *name) {
    const struct node *node = control->node;
    if (strcmp(name, "inits") == 0) return (int64_t)number(&node->inits);
    if (strcmp(name, "shutdowns") == 0) return (int64_t)number(&node->shutdowns);
    if (strcmp(name, "hangs_entered") == 0) return (int64_t)number(&node->hangs_entered);
    if (strcmp(name, "events_lost") == 0) return (int64_t)number(&node->events_lost);
    return -1;
}

API uint32_t gpusim_activity(struct control *control) {
    return __atomic_load_n(&control->node->activity, __ATOMIC_ACQUIRE);
}

API int gpusim_wait_activity(struct control *control, uint32_t seen, uint64_t deadline_ns) {
    return node_sleep(&control->node->activity, seen, deadline_ns);
}

/* --- events --------------------------------------------------------------------------------------------- */

/* The event's sequence number, or -1. */
API int64_t gpusim_push_event(struct control *control, int gpu, uint64_t type, uint64_t data, uint32_t gi,
                              uint32_t ci) {
    if (gpu != NODE_UNREADABLE_GPU && (gpu == NODE_NO_GPU || !known_scope(gpu))) return -1;
    if (!hold_file(control->fd)) return -1;
    struct node *node = control->node;
    uint64_t sequence = number(&node->event_head);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    node->events[sequence % NODE_EVENTS] = (struct node_event){
        .sequence = sequence, .gpu = gpu, .gi = gi, .ci = ci, .type = type, .data = data,
        .pushed_ns = node_now_ns()};
    __atomic_store_n(&node->event_head, sequence + 1, __ATOMIC_RELEASE);
    flock(control->fd, LOCK_UN);
    node_wake(&node->wake);
    return (int64_t)sequence;
}

/* A GPU was bound to its driver, or unbound; its configuration does not change. */
API int gpusim_push_rebind(struct control *control, int gpu, int bound) {
    if (gpu == NODE_NO_GPU || !known_scope(gpu) || !hold_file(control->fd)) return 0;
    struct node *node = control->node;
    const struct gpu_config *at = &node->gpus[gpu];
    uint64_t sequence = number(&node->rebind_head);
    node->rebinds[sequence % NODE_REBINDS] = (struct node_rebind){
        bound ? ABI_GPU_BOUND : ABI_GPU_UNBOUND,
        number(at->pci_domain) << 16 | number(at->pci_bus) << 8 | number(at->pci_device)};
    __atomic_store_n(&node->rebind_head, sequence + 1, __ATOMIC_RELEASE);
    flock(control->fd, LOCK_UN);
    return 1;
}

/* Of one of the last NODE_EVENTS events: pushed_ns, returned_ns, deliveries. */
API int gpusim_event_times(struct control *control, uint64_t sequence, uint64_t times[3]) {
    const struct node_event *event = &control->node->events[sequence % NODE_EVENTS];
    times[0] = number(&event->pushed_ns);
    times[1] = number(&event->returned_ns);
    times[2] = number(&event->deliveries);
    if (sequence < number(&control->node->event_head) && number(&event->sequence) == sequence) return 1;
    errno = ENOENT;
    return 0;
}

/* Attaching to the simulated node, and sleeping until it changes. */
#define _GNU_SOURCE
#include "node.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A controller copies a few kilobytes under an odd revision; a reader that still sees it odd after this many
 * turns returns what is there, since the controller must have been killed in between. */
enum { READ_TRIES = 10000 };

#define NAME_OF(name) #name,
const char *const node_functions[FUNCTIONS] = {ANSWERED_FUNCTIONS(NAME_OF) UNANSWERED_FUNCTIONS(NAME_OF)};

static struct node *attached;
static dev_t attached_device;
static ino_t attached_inode;
static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;

struct node *node_current(void) { return __atomic_load_n(&attached, __ATOMIC_ACQUIRE); }

uint64_t node_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#define TEXT_NAME(name, size, count) #name ";"
#define NUMBER_NAME(name, count) #name ";"
static const char field_names[] = NODE_TEXT_FIELDS(TEXT_NAME) NODE_NUMBER_FIELDS(NUMBER_NAME)
    GPU_TEXT_FIELDS(TEXT_NAME) GPU_NUMBER_FIELDS(NUMBER_NAME);

static uint64_t mix(uint64_t hash, const char *text) { /* FNV-1a */
    for (;; text++) {
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
        if (!*text) return hash;
    }
}

uint64_t node_fingerprint(void) {
    uint64_t hash = mix(0xcbf29ce484222325u, field_names);
    for (int fn = 0; fn < FUNCTIONS; fn++) hash = mix(hash, node_functions[fn]);
    return hash;
}

static bool same_layout(const struct node *node) {
    return node->magic == NODE_MAGIC && node->layout == NODE_LAYOUT && node->size == sizeof *node &&
           node->fingerprint == node_fingerprint();
}

struct node *node_map(const char *path, int *descriptor) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    struct stat about;
    struct node *node = MAP_FAILED;
    errno = EINVAL;
    if (fstat(fd, &about) == 0 && about.st_size == (off_t)sizeof *node)
        node = mmap(NULL, sizeof *node, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (node != MAP_FAILED && !same_layout(node)) {
        munmap(node, sizeof *node);
        node = MAP_FAILED;
        errno = EINVAL;
    }
    int why = errno;
    if (node != MAP_FAILED && descriptor)
        *descriptor = fd;
    else
        close(fd); /* a client keeps no descriptor open on the node */
    errno = why;
    return node == MAP_FAILED ? NULL : node;
}

static int directory_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (int)(slash - path) + 1 : 0;
}

static const char *named_state(void) {
    const char *named = getenv("GPU_AGENT_SIM_STATE");
    return named && *named ? named : NULL;
}

/* The directory of the state file that is named, else the one above the library as it was loaded, so that
 * a node directory needs no settings: <node>/lib/libnvidia-ml.so.1, even if that is a symbolic link. */
bool node_path(const char *name, char *path, size_t size) {
    const char *named = named_state();
    if (named) return snprintf(path, size, "%.*s%s", directory_length(named), named, name) < (int)size;
    Dl_info library;
    if (!dladdr((void *)node_attach, &library) || !library.dli_fname) return false;
    const char *loaded = library.dli_fname;
    return snprintf(path, size, "%.*s../%s", directory_length(loaded), loaded, name) < (int)size;
}

static bool state_path(char *path, size_t size) {
    const char *named = named_state();
    if (named) return snprintf(path, size, "%s", named) < (int)size;
    return node_path("nvml.state", path, size);
}

struct node *node_attach(void) {
    char path[PATH_MAX];
    struct stat about;
    if (!state_path(path, sizeof path) || stat(path, &about) != 0) return NULL;
    pthread_mutex_lock(&attaching);
    struct node *node = attached;
    if (!node || about.st_dev != attached_device || about.st_ino != attached_inode) {
        /* The old mapping stays: a thread may be asleep in it, and a node is replaced rarely. */
        node = node_map(path, NULL);
        if (node) {
            attached_device = about.st_dev;
            attached_inode = about.st_ino;
            __atomic_store_n(&attached, node, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&attaching);
    return node;
}

void node_read_begin(const struct node *node, struct node_read *read) {
    read->revision = __atomic_load_n(&node->revision, __ATOMIC_ACQUIRE);
}

bool node_read_again(const struct node *node, struct node_read *read) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    bool torn = (read->revision & 1) || read->revision != __atomic_load_n(&node->revision, __ATOMIC_RELAXED);
    if (!torn || ++read->tries > READ_TRIES) return false;
    sched_yield();
    return true;
}

bool node_sleep(uint32_t *word, uint32_t seen, uint64_t deadline_ns) {
    struct timespec until = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    long outcome = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen,
                           deadline_ns == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
    return outcome == 0 || errno != ETIMEDOUT;
}

void node_wake(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The device nodes a client keeps open: one of the driver, one of each GPU that it uses.
 *
 * Guarantees
 * - As with the real library, nvidiactl is opened by the first init, a GPU's node when its handle is first
 *   asked for, and the last shutdown closes them all, whatever the driver answers.
 * - A node that is missing or cannot be opened is no trouble: a simulation needs no doubles of devices.
 * - A node on a FUSE file system is read before each call on it, so that its server can hold the
 *   caller in the kernel.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "client.h"

struct device_node {
    pthread_mutex_t opening; /* its own, because an open that hangs must hold up no other GPU */
    int fd;                  /* -1: closed */
    bool asked;              /* whether each call reads it */
};

static struct device_node device_nodes[NODE_GPUS + 1] = {
    [0 ... NODE_GPUS] = {.opening = PTHREAD_MUTEX_INITIALIZER, .fd = -1}};

static struct device_node *node_of(int gpu) { return &device_nodes[gpu < 0 ? NODE_GPUS : gpu]; }

static bool on_fuse(int fd) {
    struct statfs about;
    return fstatfs(fd, &about) == 0 && about.f_type == FUSE_SUPER_MAGIC;
}

void device_open(int gpu) {
    struct device_node *device = node_of(gpu);
    char name[32], path[PATH_MAX];
    if (gpu < 0)
        snprintf(name, sizeof name, "dev/nvidiactl");
    else
        snprintf(name, sizeof name, "dev/nvidia%u", (unsigned int)number(gpu_config(gpu)->minor));
    if (__atomic_load_n(&device->fd, __ATOMIC_ACQUIRE) >= 0 || !node_path(name, path, sizeof path)) return;
    pthread_mutex_lock(&device->opening);
    if (device->fd < 0) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        device->asked = fd >= 0 && on_fuse(fd);
        __atomic_store_n(&device->fd, fd, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&device->opening);
}

static void ask(struct device_node *device) {
    int fd = __atomic_load_n(&device->fd, __ATOMIC_ACQUIRE);
    char byte;
    if (fd >= 0 && device->asked && pread(fd, &byte, sizeof byte, 0) < 0) return; /* the call returned: enough */
}

void device_ask(int gpu) {
    ask(node_of(NODE_NO_GPU));
    if (gpu >= 0) ask(node_of(gpu));
}

void device_close_all(void) {
    for (int i = 0; i <= NODE_GPUS; i++) {
        pthread_mutex_lock(&device_nodes[i].opening);
        int fd = device_nodes[i].fd;
        __atomic_store_n(&device_nodes[i].fd, -1, __ATOMIC_RELEASE);
        if (fd >= 0) close(fd);
        pthread_mutex_unlock(&device_nodes[i].opening);
    }
}

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Who uses the GPUs: live objects and counters in maps, rare lifecycle events on a ring.
 *
 * One source, two loaders. bcc compiles it on the node, with -DGPU_PROBE_BCC and the offsets of kernel structs
 * as -DOFFSET_struct_field (from the running kernel's BTF); without those it takes them from the headers.
 * clang compiles it once for libbpf, which relocates the offsets. Maps and OFFSET() are all that differs.
 *
 * The maps are the truth. An event that found no room on the ring is counted and costs latency only. */
#ifdef GPU_PROBE_BCC
#include <uapi/linux/ptrace.h>
#else
typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u32 u32;
typedef __u64 u64;
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
};
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#endif
#include "gpu_probe.h"

#define INLINE static inline __attribute__((always_inline))

/* ---- maps ---- */

#define MINORS 256
#define MAX_OBJECTS 65536
#define MAX_CALLS 16384 /* LRU lists are per CPU: room for many CPUs */
#ifndef MAX_PROCESSES
#define MAX_PROCESSES 65536
#endif
#ifndef MAX_TRACED
#define MAX_TRACED 1 /* only a probe that traces has calls in it */
#endif
#ifndef RING_PAGES
#define RING_PAGES 256
#endif

#ifdef GPU_PROBE_BCC

BPF_TABLE("hash", struct gpu_object_key, struct gpu_object, objects, MAX_OBJECTS);
BPF_TABLE("lru_hash", u32, struct gpu_process, processes, MAX_PROCESSES);
BPF_TABLE("lru_hash", u64, struct gpu_call, calls, MAX_CALLS);
BPF_TABLE("hash", u64, struct gpu_traced_call, traced, MAX_TRACED);
BPF_TABLE("array", u32, struct gpu_config, config, 1);
BPF_TABLE("array", u32, u32, devices, MINORS);
BPF_TABLE("array", u32, struct gpu_check, checks, MINORS);
BPF_TABLE("percpu_array", u32, struct gpu_statistics, statistics, 1);
BPF_RINGBUF_OUTPUT(events, RING_PAGES);
/* bcc rewrites calls of its maps where they are written, so not in a macro. */
INLINE struct gpu_object *object_find(struct gpu_object_key *key) { return objects.lookup(key); }
INLINE int object_put(struct gpu_object_key *key, struct gpu_object *value) { return objects.update(key, value); }
INLINE void object_remove(struct gpu_object_key *key) { objects.delete(key); }
INLINE struct gpu_process *process_find(u32 *tgid) { return processes.lookup(tgid); }
INLINE int process_put(u32 *tgid, struct gpu_process *value) { return processes.update(tgid, value); }
INLINE int process_insert(u32 *tgid, struct gpu_process *value) { return processes.insert(tgid, value); }
INLINE struct gpu_call *call_find(u64 *thread) { return calls.lookup(thread); }
INLINE int call_put(u64 *thread, struct gpu_call *value) { return calls.update(thread, value); }
INLINE void call_remove(u64 *thread) { calls.delete(thread); }
INLINE struct gpu_traced_call *traced_find(u64 *thread) { return traced.lookup(thread); }
INLINE int traced_put(u64 *thread, struct gpu_traced_call *value) { return traced.update(thread, value); }
INLINE void traced_remove(u64 *thread) { traced.delete(thread); }
INLINE struct gpu_check *check_find(u32 *minor) { return checks.lookup(minor); }
INLINE int device_put(u32 *minor, u32 *ready) { return devices.update(minor, ready); }
INLINE struct gpu_config *config_find(u32 *zero) { return config.lookup(zero); }
INLINE struct gpu_statistics *statistics_find(u32 *zero) { return statistics.lookup(zero); }
INLINE struct gpu_event *event_reserve(void) { return events.ringbuf_reserve(sizeof(struct gpu_event)); }
INLINE void event_submit(struct gpu_event *e) { events.ringbuf_submit(e, 0); }
INLINE struct gpu_traced_call *traced_reserve(void)
{
	return events.ringbuf_reserve(sizeof(struct gpu_traced_call));
}
INLINE void traced_submit(struct gpu_traced_call *call) { events.ringbuf_submit(call, 0); }
#define PROGRAM(section, name) int name

#else

char LICENSE[] SEC("license") = "Dual BSD/GPL";
#define MAP(name, kind, entries, key_type, value_type) \
	struct { \
		__uint(type, BPF_MAP_TYPE_##kind); \
		__uint(max_entries, entries); \
		__type(key, key_type); \
		__type(value, value_type); \
	} name SEC(".maps")
MAP(objects, HASH, MAX_OBJECTS, struct gpu_object_key, struct gpu_object);
MAP(processes, LRU_HASH, MAX_PROCESSES, u32, struct gpu_process);
MAP(calls, LRU_HASH, MAX_CALLS, u64, struct gpu_call);
MAP(traced, HASH, MAX_TRACED, u64, struct gpu_traced_call);
MAP(config, ARRAY, 1, u32, struct gpu_config);
MAP(devices, ARRAY, MINORS, u32, u32);
MAP(checks, ARRAY, MINORS, u32, struct gpu_check);
MAP(statistics, PERCPU_ARRAY, 1, u32, struct gpu_statistics);
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, RING_PAGES * 4096);
} events SEC(".maps");
#define FIND(map, key) bpf_map_lookup_elem(&map, key)
#define PUT(map, key, value, flags) bpf_map_update_elem(&map, key, value, flags)
#define REMOVE(map, key) bpf_map_delete_elem(&map, key)
INLINE struct gpu_object *object_find(struct gpu_object_key *key) { return FIND(objects, key); }
INLINE int object_put(struct gpu_object_key *key, struct gpu_object *value)
{
	return PUT(objects, key, value, BPF_ANY);
}
INLINE void object_remove(struct gpu_object_key *key) { REMOVE(objects, key); }
INLINE struct gpu_process *process_find(u32 *tgid) { return FIND(processes, tgid); }
INLINE int process_put(u32 *tgid, struct gpu_process *value) { return PUT(processes, tgid, value, BPF_ANY); }
INLINE int process_insert(u32 *tgid, struct gpu_process *value)
{
	return PUT(processes, tgid, value, BPF_NOEXIST);
}
INLINE struct gpu_call *call_find(u64 *thread) { return FIND(calls, thread); }
INLINE int call_put(u64 *thread, struct gpu_call *value) { return PUT(calls, thread, value, BPF_ANY); }
INLINE void call_remove(u64 *thread) { REMOVE(calls, thread); }
INLINE struct gpu_traced_call *traced_find(u64 *thread) { return FIND(traced, thread); }
INLINE int traced_put(u64 *thread, struct gpu_traced_call *value)
{
	return PUT(traced, thread, value, BPF_ANY);
}
INLINE void traced_remove(u64 *thread) { REMOVE(traced, thread); }
INLINE struct gpu_check *check_find(u32 *minor) { return FIND(checks, minor); }
INLINE int device_put(u32 *minor, u32 *ready) { return PUT(devices, minor, ready, BPF_ANY); }
INLINE struct gpu_config *config_find(u32 *zero) { return FIND(config, zero); }
INLINE struct gpu_statistics *statistics_find(u32 *zero) { return FIND(statistics, zero); }
INLINE struct gpu_event *event_reserve(void)
{
	return bpf_ringbuf_reserve(&events, sizeof(struct gpu_event), 0);
}
INLINE void event_submit(struct gpu_event *e) { bpf_ringbuf_submit(e, 0); }
INLINE struct gpu_traced_call *traced_reserve(void)
{
	return bpf_ringbuf_reserve(&events, sizeof(struct gpu_traced_call), 0);
}
INLINE void traced_submit(struct gpu_traced_call *call) { bpf_ringbuf_submit(call, 0); }
#define PROGRAM(section, name) SEC(section) int name

#endif

/* ---- offsets of kernel structs ---- */

#if !defined(GPU_PROBE_BCC)

struct super_block { u32 s_dev; };
struct inode { u32 i_rdev; unsigned long i_ino; struct super_block *i_sb; };
struct file { struct inode *f_inode; };
struct fdtable { u32 max_fds; struct file **fd; };
struct files_struct { struct fdtable *fdt; };
struct signal_struct { struct { int counter; } live; };
struct kernfs_node { u64 id; };
struct cgroup { struct kernfs_node *kn; };
struct css_set { struct cgroup *dfl_cgrp; };
struct task_struct {
	int pid, tgid;
	u64 start_boottime;
	struct task_struct *group_leader;
	struct files_struct *files;
	struct signal_struct *signal;
	struct css_set *cgroups;
};
#define OFFSET(type, field) bpf_core_field_offset(struct type, field)

#elif defined(OFFSET_file_f_inode)

#define OFFSET(type, field) OFFSET_##type##_##field

#else

#include <linux/cgroup-defs.h>
#include <linux/fdtable.h>
#include <linux/fs.h>
#include <linux/kernfs.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>
#define OFFSET(type, field) offsetof(struct type, field)

#endif

/* ---- reading the kernel ---- */

INLINE u64 kernel_u64(u64 address)
{
	u64 value = 0;
	bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
	return value;
}

INLINE u32 kernel_u32(u64 address)
{
	u32 value = 0;
	bpf_probe_read_kernel(&value, sizeof(value), (void *)address);
	return value;
}

#define POINTER(address, type, field) kernel_u64((address) + OFFSET(type, field))
#define WORD(address, type, field) kernel_u32((address) + OFFSET(type, field))

INLINE u64 this_task(void)
{
	return (u64)bpf_get_current_task();
}

INLINE u32 current_tgid(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

INLINE u64 start_of(u64 task)
{
	return POINTER(POINTER(task, task_struct, group_leader), task_struct, start_boottime);
}

/* The open file of a descriptor; no table of ours, so inherited and received descriptors are seen too. */
INLINE u64 file_of(u32 fd)
{
	u64 table = POINTER(POINTER(this_task(), task_struct, files), files_struct, fdt);

	if (fd >= WORD(table, fdtable, max_fds))
		return 0;
	return kernel_u64(POINTER(table, fdtable, fd) + 8ull * fd);
}

INLINE struct gpu_config *configured(void)
{
	u32 zero = 0;
	return config_find(&zero);
}

INLINE struct gpu_statistics *counted(void)
{
	u32 zero = 0;
	return statistics_find(&zero);
}

#define COUNT(member) \
	do { \
		struct gpu_statistics *counters = counted(); \
		if (counters) \
			counters->member++; \
	} while (0)
/* Several threads of a process may count at once. */
#define ADD(row, member) \
	do { \
		if (row) \
			__sync_fetch_and_add(&(row)->member, 1); \
	} while (0)

INLINE u32 device_of(u64 file, struct gpu_config *cfg)
{
	u64 inode = POINTER(file, file, f_inode);
	u32 device = WORD(inode, inode, i_rdev);

	if (cfg->test_filesystem && !device &&
	    WORD(POINTER(inode, inode, i_sb), super_block, s_dev) == cfg->test_filesystem)
		device = WORD(inode, inode, i_ino);
	return device;
}

#define MAJOR(device) ((device) >> 20)
#define MINOR(device) ((device) & 0xfffff)

INLINE int is_ours(u32 device, struct gpu_config *cfg)
{
	u32 major = MAJOR(device);

	return major && (major == cfg->nvidia_major || major == cfg->uvm_major || major == cfg->caps_major);
}

/* ---- processes ---- */

INLINE struct gpu_process *known_process(void)
{
	u32 tgid = current_tgid();
	return process_find(&tgid);
}

/* The row of the current process, made if there is none. */
INLINE struct gpu_process *process(void)
{
	u32 tgid = current_tgid();
	struct gpu_process *row = process_find(&tgid);
	struct gpu_process fresh;

	if (row && !row->exited_ns)
		return row;
	__builtin_memset(&fresh, 0, sizeof(fresh));
	fresh.cgroup_id = bpf_get_current_cgroup_id();
	fresh.start_ns = start_of(this_task());
	fresh.first_ns = fresh.last_ns = bpf_ktime_get_ns();
	if (row)
		process_put(&tgid, &fresh);
	else if (!process_insert(&tgid, &fresh))
		COUNT(processes_added);
	return process_find(&tgid);
}

/* ---- events ---- */

INLINE struct gpu_event *event(u32 kind, enum gpu_program program)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_event *e = event_reserve();

	if (!e) {
		COUNT(reserve_failed[program]);
		return 0;
	}
	COUNT(events);
	e->at_ns = bpf_ktime_get_ns();
	e->cgroup_id = bpf_get_current_cgroup_id();
	e->file = 0;
	e->tgid = thread >> 32;
	e->pid = (u32)thread;
	e->device = 0;
	e->fd = -1;
	e->kind = kind;
	e->rm_class = 0;
	e->client = e->parent = e->handle = e->detail = 0;
	return e;
}

INLINE void tell_file(u32 kind, enum gpu_program program, u64 file, u32 device, int fd)
{
	struct gpu_event *e = event(kind, program);

	if (!e)
		return;
	e->file = file;
	e->device = device;
	e->fd = fd;
	event_submit(e);
}

INLINE void tell_process(u32 kind, u32 detail)
{
	struct gpu_event *e = event(kind, GPU_PROGRAM_PROCESS);

	if (!e)
		return;
	e->detail = detail;
	event_submit(e);
}

INLINE void tell_object(u32 kind, struct gpu_call *call, struct gpu_object_key *key, u32 rm_class, u32 parent,
			u32 detail)
{
	struct gpu_event *e = event(kind, GPU_PROGRAM_IOCTL);

	if (!e)
		return;
	e->file = call->file;
	e->device = call->device;
	e->fd = call->fd;
	e->rm_class = rm_class;
	e->client = key->client;
	e->parent = parent;
	e->handle = key->handle;
	e->detail = detail;
	event_submit(e);
}

/* ---- the driver's calls: layouts are the same from driver 515 to 595, except where a comment says otherwise ---- */

#define NUMBER(command) ((command) & 0xff)
#define SIZE(command) (((command) >> 16) & 0x3fff)

enum {
	UVM_REGISTER_GPU_VASPACE = 25,
	UVM_UNREGISTER_GPU_VASPACE = 26,
	RM_FREE = 0x29,
	RM_ALLOC = 0x2b,
	RM_DUP_OBJECT = 0x34,
	REGISTER_FD = 201,
	CHECK_VERSION_STR = 210,
	XFER_CMD = 211,
	NUMA_INFO = 215,
};
enum { CLASS_ROOT = 0x0000, CLASS_ROOT_NON_PRIV = 0x0001, CLASS_ROOT_CLIENT = 0x0041, CLASS_DEVICE = 0x0080 };
enum { CLASS_VASPACE = 0x90f1, CLASS_CONTEXT_SHARE = 0x9067, CLASS_CHANNEL_GROUP = 0xa06c };
enum { CONTROL_MINOR = 255, FIRST_MINOR_NOT_A_GPU = 248, NO_GPU = 0xffffffff };
/* Words of the parameter blocks: NVOS21/NVOS64 (alloc), NVOS00 (free), NVOS55 (dup), of uvm_ioctl.h. */
enum { ALLOC_ROOT, ALLOC_PARENT, ALLOC_NEW, ALLOC_CLASS, ALLOC_PARAMS };
enum { FREE_ROOT, FREE_PARENT, FREE_OLD, FREE_STATUS };
enum { DUP_CLIENT, DUP_PARENT, DUP_NEW, DUP_SOURCE_CLIENT, DUP_SOURCE, DUP_FLAGS, DUP_STATUS };
enum { VASPACE_UUID, UNREGISTER_STATUS = 4, VASPACE_CLIENT = 5, VASPACE_SPACE, VASPACE_STATUS };
#define BLOCK_WORDS 12 /* the largest of them: NVOS64 */

/* A handful of compares decides for every ioctl of the machine. The driver ignores the command's type. */
INLINE int may_be_of_interest(u32 command)
{
	switch (NUMBER(command)) {
	case RM_ALLOC:
	case RM_FREE:
	case RM_DUP_OBJECT:
	case REGISTER_FD:
	case CHECK_VERSION_STR:
	case NUMA_INFO:
	case XFER_CMD:
	case UVM_REGISTER_GPU_VASPACE:
	case UVM_UNREGISTER_GPU_VASPACE:
		return 1;
	}
	return 0;
}

INLINE int is_uvm(u32 number)
{
	return number == UVM_REGISTER_GPU_VASPACE || number == UVM_UNREGISTER_GPU_VASPACE;
}

INLINE int is_check(u32 number)
{
	return number == CHECK_VERSION_STR || number == NUMA_INFO;
}

INLINE int is_root(u32 rm_class)
{
	return rm_class == CLASS_ROOT || rm_class == CLASS_ROOT_NON_PRIV || rm_class == CLASS_ROOT_CLIENT;
}

/* What a context is found by, and what says on which GPU it is. */
INLINE int is_tracked(u32 rm_class, struct gpu_config *cfg)
{
	return is_root(rm_class) || rm_class == CLASS_DEVICE || rm_class == CLASS_VASPACE ||
	       rm_class == CLASS_CONTEXT_SHARE || rm_class == CLASS_CHANNEL_GROUP ||
	       rm_class == cfg->context_class;
}

/* Only the agent's own checks count: whoever else calls these says nothing of what the agent waits for. */
INLINE int check_entered(struct gpu_call *call, struct gpu_config *cfg)
{
	u32 minor = MINOR(call->device);
	struct gpu_check *check;

	if (current_tgid() != cfg->agent_tgid || MAJOR(call->device) != cfg->nvidia_major)
		return 0;
	if (call->number == CHECK_VERSION_STR ? minor != CONTROL_MINOR : minor >= FIRST_MINOR_NOT_A_GPU)
		return 0;
	check = check_find(&minor);
	if (!check)
		return 0;
	check->entered_ns = call->entered_ns;
	__sync_fetch_and_add(&check->calls, 1);
	return 1;
}

INLINE void check_returned(struct gpu_call *call, long result, struct gpu_config *cfg)
{
	/* Whether the driver answers is asked, not what: it has reasons of its own to refuse. */
	u32 minor = MINOR(call->device), ready;
	struct gpu_check *check = check_find(&minor);
	u64 now = bpf_ktime_get_ns();

	if (!check)
		return;
	check->result = result;
	check->returned_ns = now;
	ready = now - call->entered_ns <= cfg->answer_within_ns;
	device_put(&minor, &ready);
}

/* Of a thread. Kretprobes follow twice as many calls at once as there may be CPUs, at least ten: when more wait in
 * the driver, the return of one is not seen, and its row is found by the thread's next call, or its end. */
INLINE void begin_call(struct gpu_call *call)
{
	u64 thread = bpf_get_current_pid_tgid();

	if (call_find(&thread))
		COUNT(unreturned);
	call_put(&thread, call);
}

INLINE int entered(u64 file, u32 device, int fd, u32 command, u64 argument, int uvm, struct gpu_config *cfg)
{
	struct gpu_call call;

	__builtin_memset(&call, 0, sizeof(call));
	call.file = file;
	call.device = device;
	call.fd = fd;
	call.entered_ns = bpf_ktime_get_ns();
	call.argument = argument;
	call.number = NUMBER(command);
	call.size = SIZE(command);
	if (uvm) {
		if (!is_uvm(command))
			return 0;
		call.size = command == UVM_REGISTER_GPU_VASPACE ? 32 : 20;
	} else if (call.number == XFER_CMD) {
		/* Another command inside: {u32 command number, u32 size, u64 parameters}. */
		struct { u32 number, size; u64 argument; } inner = {};

		if (bpf_probe_read_user(&inner, sizeof(inner), (void *)argument))
			return 0;
		call.number = NUMBER(inner.number);
		call.size = inner.size;
		call.argument = inner.argument;
	}
	if (!may_be_of_interest(call.number) || (!uvm && is_uvm(call.number)))
		return 0;
	if (is_check(call.number) && !check_entered(&call, cfg))
		return 0;
	begin_call(&call);
	return 0;
}

/* A client answers to its own open file alone. The driver refuses others, but its answer is in memory of who calls,
 * who can write there that it did not. Clients older than the probe have no row. */
INLINE int is_of_another(u32 client, u64 file)
{
	struct gpu_object_key key = {.client = client, .handle = client};
	struct gpu_object *root = object_find(&key);

	return root && root->file != file;
}

INLINE void allocated(struct gpu_call *call, u32 *block, struct gpu_process *row, struct gpu_config *cfg)
{
	struct gpu_object_key key;
	struct gpu_object object;
	u32 rm_class = block[ALLOC_CLASS], status, gpu = NO_GPU;

	if (call->size == 48)
		status = block[10];
	else if (call->size == 40) /* drivers up to 530 */
		status = block[9];
	else if (call->size == 32)
		status = cfg->short_alloc_status == 24 ? block[6] : block[7];
	else
		return;
	ADD(row, allocs);
	if (status) {
		ADD(row, errors);
		return;
	}
	if (!is_tracked(rm_class, cfg))
		return;
	if (!is_root(rm_class) && is_of_another(block[ALLOC_ROOT], call->file)) {
		ADD(row, errors);
		return;
	}
	if (rm_class == CLASS_DEVICE) {
		u64 params = (u64)block[ALLOC_PARAMS + 1] << 32 | block[ALLOC_PARAMS];

		/* NV0080_ALLOC_PARAMETERS begins with the device's instance; without it, it is instance 0. */
		gpu = 0;
		if (params && bpf_probe_read_user(&gpu, sizeof(gpu), (void *)params))
			gpu = NO_GPU;
	}
	key.client = is_root(rm_class) ? block[ALLOC_NEW] : block[ALLOC_ROOT];
	key.handle = block[ALLOC_NEW];
	__builtin_memset(&object, 0, sizeof(object));
	object.at_ns = bpf_ktime_get_ns();
	object.cgroup_id = bpf_get_current_cgroup_id();
	object.file = call->file;
	object.start_ns = start_of(this_task());
	object.tgid = current_tgid();
	object.rm_class = rm_class;
	object.parent = block[ALLOC_PARENT];
	object.gpu = gpu;
	if (object_put(&key, &object))
		COUNT(objects_full);
	if (rm_class == cfg->context_class)
		ADD(row, contexts_allocated);
	tell_object(GPU_ALLOC, call, &key, rm_class, object.parent, gpu);
}

/* Children and dependants go with what is freed; which those are, user space knows. */
INLINE void freed(struct gpu_call *call, u32 *block, struct gpu_process *row, struct gpu_config *cfg)
{
	struct gpu_object_key key;
	struct gpu_object *object;
	u32 rm_class, parent;

	ADD(row, frees);
	if (block[FREE_STATUS]) {
		ADD(row, errors);
		return;
	}
	key.client = block[FREE_ROOT];
	key.handle = block[FREE_OLD];
	object = object_find(&key);
	if (!object)
		return;
	if (object->file != call->file) {
		ADD(row, errors);
		return;
	}
	rm_class = object->rm_class;
	parent = object->parent;
	object_remove(&key);
	if (rm_class == cfg->context_class)
		ADD(row, contexts_freed);
	tell_object(GPU_FREE, call, &key, rm_class, parent, 0);
}

/* The copy lives on its own. */
INLINE void duplicated(struct gpu_call *call, u32 *block, struct gpu_process *row)
{
	struct gpu_object_key source, key;
	struct gpu_object *found;
	struct gpu_object copy;

	if (block[DUP_STATUS] || is_of_another(block[DUP_CLIENT], call->file)) {
		ADD(row, errors);
		return;
	}
	source.client = block[DUP_SOURCE_CLIENT];
	source.handle = block[DUP_SOURCE];
	found = object_find(&source);
	if (!found)
		return;
	copy = *found;
	copy.at_ns = bpf_ktime_get_ns();
	copy.cgroup_id = bpf_get_current_cgroup_id();
	copy.file = call->file;
	copy.start_ns = start_of(this_task());
	copy.tgid = current_tgid();
	copy.parent = block[DUP_PARENT];
	key.client = block[DUP_CLIENT];
	key.handle = block[DUP_NEW];
	if (object_put(&key, &copy))
		COUNT(objects_full);
	tell_object(GPU_DUP, call, &key, copy.rm_class, copy.parent, source.client);
}

/* Says of which GPU a client's address space is: in parent and detail the halves of its UUID, one upon the other. */
INLINE void registered_with_uvm(struct gpu_call *call, u32 *block)
{
	struct gpu_object_key key = {};
	u32 status = block[UNREGISTER_STATUS];

	if (call->number == UVM_REGISTER_GPU_VASPACE) {
		status = block[VASPACE_STATUS];
		key.client = block[VASPACE_CLIENT];
		key.handle = block[VASPACE_SPACE];
	}
	if (!status)
		tell_object(GPU_UVM, call, &key, call->number, block[VASPACE_UUID] ^ block[VASPACE_UUID + 2],
			    block[VASPACE_UUID + 1] ^ block[VASPACE_UUID + 3]);
}

INLINE void registered_fd(struct gpu_call *call, u32 *block)
{
	struct gpu_object_key none = {};

	tell_object(GPU_REGISTER_FD, call, &none, 0, 0, block[0]);
}

/* The ioctl says 0 even where the resource manager refused; its answer is in the block, so only now. */
INLINE int returned(long result)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_call *found = call_find(&thread);
	struct gpu_config *cfg = configured();
	struct gpu_process *row;
	struct gpu_call call;
	u32 block[BLOCK_WORDS];

	if (!found || !cfg)
		return 0;
	call = *found;
	call_remove(&thread);
	if (is_check(call.number)) {
		check_returned(&call, result, cfg);
		return 0;
	}
	COUNT(calls);
	row = process();
	if (row) {
		ADD(row, calls);
		row->last_ns = bpf_ktime_get_ns();
	}
	if (result && !cfg->any_return) {
		ADD(row, errors);
		return 0;
	}
	__builtin_memset(block, 0, sizeof(block));
	if (call.size > sizeof(block))
		return 0;
	if (bpf_probe_read_user(block, call.size, (void *)call.argument)) {
		COUNT(unreadable);
		return 0;
	}
	if (is_uvm(call.number))
		registered_with_uvm(&call, block);
	else if (call.number == RM_ALLOC)
		allocated(&call, block, row, cfg);
	else if (call.number == RM_FREE && call.size == 16)
		freed(&call, block, row, cfg);
	else if (call.number == RM_DUP_OBJECT && call.size == 28)
		duplicated(&call, block, row);
	else if (call.number == REGISTER_FD && call.size == 4)
		registered_fd(&call, block);
	return 0;
}

/* ---- tier "syscalls": for kernels without kprobes, and for device doubles ---- */

struct enter_context { u64 common; long number; unsigned long arguments[6]; };
struct exit_context { u64 common; long number; long result; };

PROGRAM("tp/syscalls/sys_enter_ioctl", enter_ioctl)(struct enter_context *ctx)
{
	u32 fd = (u32)ctx->arguments[0], command = (u32)ctx->arguments[1], device;
	struct gpu_config *cfg;
	u64 file;

	if (!may_be_of_interest(command))
		return 0;
	cfg = configured();
	file = file_of(fd);
	if (!file || !cfg)
		return 0;
	device = device_of(file, cfg);
	if (!is_ours(device, cfg))
		return 0;
	return entered(file, device, (int)fd, command, ctx->arguments[2], MAJOR(device) == cfg->uvm_major, cfg);
}

PROGRAM("tp/syscalls/sys_exit_ioctl", exit_ioctl)(struct exit_context *ctx)
{
	return returned(ctx->result);
}

INLINE int opened(long fd)
{
	struct gpu_config *cfg;
	u32 device;
	u64 file;

	if (fd < 0)
		return 0;
	cfg = configured();
	file = file_of((u32)fd);
	if (!file || !cfg)
		return 0;
	device = device_of(file, cfg);
	if (!is_ours(device, cfg))
		return 0;
	struct gpu_process *row = process();
	ADD(row, opens);
	tell_file(GPU_OPEN, GPU_PROGRAM_OPEN, file, device, (int)fd);
	return 0;
}

PROGRAM("tp/syscalls/sys_exit_open", exit_open)(struct exit_context *ctx)
{
	return opened(ctx->result);
}

PROGRAM("tp/syscalls/sys_exit_openat", exit_openat)(struct exit_context *ctx)
{
	return opened(ctx->result);
}

PROGRAM("tp/syscalls/sys_exit_openat2", exit_openat2)(struct exit_context *ctx)
{
	return opened(ctx->result);
}

PROGRAM("tp/syscalls/sys_enter_close", enter_close)(struct enter_context *ctx)
{
	/* A process that never touched the devices costs one lookup. */
	struct gpu_process *row = known_process();
	struct gpu_config *cfg;
	u32 device;
	u64 file;

	if (!row)
		return 0;
	cfg = configured();
	file = file_of((u32)ctx->arguments[0]);
	if (!file || !cfg)
		return 0;
	device = device_of(file, cfg);
	if (!is_ours(device, cfg))
		return 0;
	ADD(row, closes);
	tell_file(GPU_CLOSE, GPU_PROGRAM_CLOSE, file, device, (int)ctx->arguments[0]);
	return 0;
}

/* These may close descriptors of a process that is known; user space looks which. */
INLINE int moved(u32 reason)
{
	if (known_process())
		tell_process(GPU_RESCAN, reason);
	return 0;
}

PROGRAM("tp/syscalls/sys_exit_close_range", exit_close_range)(struct exit_context *ctx)
{
	return moved(GPU_RESCAN_CLOSE_RANGE);
}

PROGRAM("tp/syscalls/sys_exit_dup2", exit_dup2)(struct exit_context *ctx)
{
	return moved(GPU_RESCAN_DUP2);
}

PROGRAM("tp/syscalls/sys_exit_dup3", exit_dup3)(struct exit_context *ctx)
{
	return moved(GPU_RESCAN_DUP3);
}

/* ---- tier "driver": its entry points. Nothing else pays, and the end of the open file itself is seen ---- */

#ifdef GPU_PROBE_BCC
#define FIRST(ctx) PT_REGS_PARM1(ctx)
#define SECOND(ctx) PT_REGS_PARM2(ctx)
#define THIRD(ctx) PT_REGS_PARM3(ctx)
#define RESULT(ctx) PT_REGS_RC(ctx)
#else
struct pt_regs { unsigned long di, si, dx, ax; } __attribute__((preserve_access_index)); /* x86-64 */
#define FIRST(ctx) ((ctx)->di)
#define SECOND(ctx) ((ctx)->si)
#define THIRD(ctx) ((ctx)->dx)
#define RESULT(ctx) ((ctx)->ax)
#endif

INLINE int driver_entered(u64 file, u32 command, u64 argument, int uvm)
{
	struct gpu_config *cfg = configured();

	if (!cfg || !may_be_of_interest(command))
		return 0;
	return entered(file, device_of(file, cfg), -1, command, argument, uvm, cfg);
}

PROGRAM("kprobe/nvidia_unlocked_ioctl", driver_ioctl)(struct pt_regs *ctx)
{
	return driver_entered(FIRST(ctx), (u32)SECOND(ctx), THIRD(ctx), 0);
}

PROGRAM("kretprobe/nvidia_unlocked_ioctl", driver_ioctl_return)(struct pt_regs *ctx)
{
	return returned((long)RESULT(ctx));
}

PROGRAM("kprobe/uvm_unlocked_ioctl_entry", uvm_ioctl)(struct pt_regs *ctx)
{
	return driver_entered(FIRST(ctx), (u32)SECOND(ctx), THIRD(ctx), 1);
}

PROGRAM("kretprobe/uvm_unlocked_ioctl_entry", uvm_ioctl_return)(struct pt_regs *ctx)
{
	return returned((long)RESULT(ctx));
}

/* nvidia_open(inode, file); an open that fails has no close. */
PROGRAM("kprobe/nvidia_open", driver_open)(struct pt_regs *ctx)
{
	struct gpu_config *cfg = configured();
	struct gpu_call call;

	if (!cfg)
		return 0;
	__builtin_memset(&call, 0, sizeof(call));
	call.file = SECOND(ctx);
	call.device = device_of(call.file, cfg);
	begin_call(&call);
	return 0;
}

PROGRAM("kretprobe/nvidia_open", driver_open_return)(struct pt_regs *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_call *call = call_find(&thread);
	struct gpu_process *row;
	u64 file;
	u32 device;

	if (!call)
		return 0;
	file = call->file;
	device = call->device;
	call_remove(&thread);
	if ((int)RESULT(ctx))
		return 0;
	row = process();
	ADD(row, opens);
	tell_file(GPU_OPEN, GPU_PROGRAM_OPEN, file, device, -1);
	return 0;
}

/* nvidia_close(inode, file): whoever held it last, dup, fork, messages and mappings included. */
PROGRAM("kprobe/nvidia_close", driver_close)(struct pt_regs *ctx)
{
	struct gpu_config *cfg = configured();
	struct gpu_process *row = known_process();

	if (!cfg)
		return 0;
	ADD(row, closes);
	tell_file(GPU_RELEASE, GPU_PROGRAM_CLOSE, SECOND(ctx), device_of(SECOND(ctx), cfg), -1);
	return 0;
}

/* ---- both tiers: processes ---- */

struct raw_context { u64 arguments[3]; };

/* (parent, child); a thread is no process. */
PROGRAM("raw_tp/sched_process_fork", process_fork)(struct raw_context *ctx)
{
	u64 child = ctx->arguments[1];
	u32 tgid;

	if (!known_process())
		return 0;
	tgid = WORD(child, task_struct, tgid);
	if (WORD(child, task_struct, pid) == tgid)
		tell_process(GPU_FORK, tgid);
	return 0;
}

PROGRAM("raw_tp/sched_process_exec", process_exec)(struct raw_context *ctx)
{
	return moved(GPU_RESCAN_EXEC);
}

PROGRAM("raw_tp/sched_process_exit", process_exit)(struct raw_context *ctx)
{
	struct gpu_process *row = known_process();
	u64 thread = bpf_get_current_pid_tgid();

	if (!row)
		return 0;
	/* A thread may be killed between entry and return. */
	if (call_find(&thread)) {
		COUNT(unreturned);
		call_remove(&thread);
	}
	if (WORD(POINTER(this_task(), task_struct, signal), signal_struct, live))
		return 0;
	row->exited_ns = bpf_ktime_get_ns();
	tell_process(GPU_EXIT, 0);
	return 0;
}

/* ---- every call of one process; loaded only to trace it, and then without the programs above ---- */

INLINE struct gpu_config *tracing(void)
{
	struct gpu_config *cfg = configured();

	return cfg && cfg->trace_tgid == current_tgid() ? cfg : 0;
}

INLINE void read_block(struct gpu_traced_call *call, int uvm)
{
	/* The commands of unified memory do not tell how long their parameters are. */
	u64 bytes = uvm ? sizeof(call->block) : call->size;
	long failed;

	if (bytes >= sizeof(call->block)) {
		bytes = sizeof(call->block);
		failed = bpf_probe_read_user(call->block, sizeof(call->block), (void *)call->argument);
	} else {
		/* For the verifier, which does not see what a compiler has made of the comparison. */
		asm volatile("" : "+r"(bytes));
		bytes &= sizeof(call->block) - 1;
		failed = bpf_probe_read_user(call->block, bytes, (void *)call->argument);
	}
	if (failed)
		bytes = 0;
	call->block_bytes = bytes;
}

INLINE int traced_entered(u32 device, int fd, u32 command, u64 argument, int uvm)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_traced_call call;

	__builtin_memset(&call, 0, sizeof(call));
	call.entered_ns = bpf_ktime_get_ns();
	call.tgid = thread >> 32;
	call.pid = (u32)thread;
	call.device = device;
	call.fd = fd;
	call.argument = argument;
	call.number = uvm ? command : NUMBER(command);
	call.size = uvm ? 0 : SIZE(command);
	if (!uvm && call.number == XFER_CMD) {
		struct { u32 number, size; u64 argument; } inner = {};

		if (!bpf_probe_read_user(&inner, sizeof(inner), (void *)argument)) {
			call.number = NUMBER(inner.number);
			call.size = inner.size;
			call.argument = inner.argument;
		}
	}
	read_block(&call, uvm);
	if (traced_put(&thread, &call))
		COUNT(reserve_failed[GPU_PROGRAM_IOCTL]);
	return 0;
}

INLINE int traced_returned(long result, int uvm)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_traced_call *told, *found;
	struct gpu_traced_call call;

	if (!tracing())
		return 0;
	found = traced_find(&thread);
	if (!found)
		return 0;
	call = *found;
	traced_remove(&thread);
	/* 0 stands for a call that has not returned. */
	call.took_ns = (bpf_ktime_get_ns() - call.entered_ns) | 1;
	call.result = result;
	read_block(&call, uvm);
	told = traced_reserve();
	if (!told) {
		COUNT(reserve_failed[GPU_PROGRAM_IOCTL]);
		return 0;
	}
	COUNT(events);
	*told = call;
	traced_submit(told);
	return 0;
}

INLINE int is_uvm_device(u32 device)
{
	struct gpu_config *cfg = configured();

	return cfg && cfg->uvm_major && MAJOR(device) == cfg->uvm_major;
}

/* FIONBIO, FIONCLEX, FIOCLEX, FIOASYNC: of any file, so the driver is not called. */
INLINE int is_of_any_file(u32 command)
{
	return command == 0x5421 || command == 0x5450 || command == 0x5451 || command == 0x5452;
}

PROGRAM("tp/syscalls/sys_enter_ioctl", trace_enter_ioctl)(struct enter_context *ctx)
{
	struct gpu_config *cfg = tracing();
	u32 fd = (u32)ctx->arguments[0], device;
	u64 file;

	if (!cfg || is_of_any_file((u32)ctx->arguments[1]))
		return 0;
	file = file_of(fd);
	if (!file)
		return 0;
	device = device_of(file, cfg);
	if (!is_ours(device, cfg))
		return 0;
	return traced_entered(device, (int)fd, (u32)ctx->arguments[1], ctx->arguments[2], is_uvm_device(device));
}

PROGRAM("tp/syscalls/sys_exit_ioctl", trace_exit_ioctl)(struct exit_context *ctx)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct gpu_traced_call *call = traced_find(&thread);

	return call ? traced_returned(ctx->result, is_uvm_device(call->device)) : 0;
}

INLINE int trace_driver_entered(u64 file, u32 command, u64 argument, int uvm)
{
	struct gpu_config *cfg = tracing();

	return cfg ? traced_entered(device_of(file, cfg), -1, command, argument, uvm) : 0;
}

PROGRAM("kprobe/nvidia_unlocked_ioctl", trace_driver_ioctl)(struct pt_regs *ctx)
{
	return trace_driver_entered(FIRST(ctx), (u32)SECOND(ctx), THIRD(ctx), 0);
}

PROGRAM("kretprobe/nvidia_unlocked_ioctl", trace_driver_ioctl_return)(struct pt_regs *ctx)
{
	return traced_returned((long)RESULT(ctx), 0);
}

PROGRAM("kprobe/uvm_unlocked_ioctl_entry", trace_uvm_ioctl)(struct pt_regs *ctx)
{
	return trace_driver_entered(FIRST(ctx), (u32)SECOND(ctx), THIRD(ctx), 1);
}

PROGRAM("kretprobe/uvm_unlocked_ioctl_entry", trace_uvm_ioctl_return)(struct pt_regs *ctx)
{
	return traced_returned((long)RESULT(ctx), 1);
}

/* ---- who holds what: an iterator over every file of every task, run by reading its descriptor ---- */

struct seq_file;
struct iterator_meta { struct seq_file *seq; u64 session, sequence; };
struct iterator_context {
	struct iterator_meta *meta;
	u64 task;
	u32 fd, reserved;
	u64 file;
};

PROGRAM("iter/task_file", bpf_iter__task_file)(struct iterator_context *ctx)
{
	struct gpu_config *cfg = configured();
	u64 task = ctx->task, file = ctx->file;
	struct gpu_held held;

	if (!cfg || !task || !file)
		return 0;
	__builtin_memset(&held, 0, sizeof(held));
	held.device = device_of(file, cfg);
	if (!is_ours(held.device, cfg))
		return 0;
	held.file = file;
	held.table = POINTER(task, task_struct, files);
	held.cgroup_id = POINTER(POINTER(POINTER(POINTER(task, task_struct, cgroups), css_set, dfl_cgrp), cgroup, kn),
				 kernfs_node, id);
	held.start_ns = start_of(task);
	held.tgid = WORD(task, task_struct, tgid);
	held.fd = ctx->fd;
	bpf_seq_write(ctx->meta->seq, &held, sizeof(held));
	return 0;
}

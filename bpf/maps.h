/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps, and one function for each use of them: how a map is named is where bcc and libbpf differ most. */

#define MINORS 256
#define MAX_OBJECTS 65536
#define MAX_OBJECTS_EACH 16384 /* of one process, and of one cgroup: neither can take the room of all others */
#define MAX_OPENINGS 32768
#define MAX_CGROUPS 4096
#define MAX_FORGOTTEN 16384
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

enum { RING_UNREAD, RING_BYTES }; /* BPF_RB_AVAIL_DATA, BPF_RB_RING_SIZE of linux/bpf.h */

#ifdef GPU_PROBE_BCC

BPF_TABLE("hash", struct gpu_object_key, struct gpu_object, objects, MAX_OBJECTS);
BPF_TABLE("lru_hash", u32, struct gpu_process, processes, MAX_PROCESSES);
BPF_TABLE("lru_hash", u64, struct gpu_call, calls, MAX_CALLS);
BPF_TABLE("hash", u64, struct gpu_traced_call, traced, MAX_TRACED);
BPF_TABLE("lru_hash", u64, struct gpu_forgotten, forgotten, MAX_FORGOTTEN);
BPF_TABLE("lru_hash", u64, struct gpu_cgroup, cgroups, MAX_CGROUPS);
BPF_TABLE("lru_hash", u64, u64, openings, MAX_OPENINGS);
BPF_TABLE("array", u32, struct gpu_config, config, 1);
BPF_TABLE("array", u32, u32, devices, MINORS);
BPF_TABLE("array", u32, struct gpu_check, checks, MINORS);
BPF_TABLE("percpu_array", u32, struct gpu_statistics, statistics, 1);
BPF_RINGBUF_OUTPUT(events, RING_PAGES);
/* bcc rewrites calls of its maps where they are written, so not in a macro. */
INLINE struct gpu_object *object_find(struct gpu_object_key *key) { return objects.lookup(key); }
INLINE int object_put(struct gpu_object_key *key, struct gpu_object *value) { return objects.update(key, value); }
INLINE int object_remove(struct gpu_object_key *key) { return objects.delete(key); }
INLINE struct gpu_process *process_find(u32 *tgid) { return processes.lookup(tgid); }
INLINE int process_put(u32 *tgid, struct gpu_process *value) { return processes.update(tgid, value); }
INLINE int process_insert(u32 *tgid, struct gpu_process *value) { return processes.insert(tgid, value); }
INLINE struct gpu_forgotten *forgotten_find(u64 *of) { return forgotten.lookup(of); }
INLINE struct gpu_cgroup *cgroup_find(u64 *id) { return cgroups.lookup(id); }
INLINE int cgroup_insert(u64 *id, struct gpu_cgroup *value) { return cgroups.insert(id, value); }
INLINE void opening_put(u64 *file, u64 *at_ns) { openings.update(file, at_ns); }
INLINE void opening_remove(u64 *file) { openings.delete(file); }
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
/* bcc cannot make this call: with it the ring is never known to fill. */
INLINE u64 ring_state(int which) { return which == RING_BYTES; }
INLINE struct gpu_traced_call *traced_reserve(void)
{
	return events.ringbuf_reserve(sizeof(struct gpu_traced_call));
}
INLINE void traced_submit(struct gpu_traced_call *call) { events.ringbuf_submit(call, 0); }
#else

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
MAP(forgotten, LRU_HASH, MAX_FORGOTTEN, u64, struct gpu_forgotten);
MAP(cgroups, LRU_HASH, MAX_CGROUPS, u64, struct gpu_cgroup);
MAP(openings, LRU_HASH, MAX_OPENINGS, u64, u64); /* when each open file was opened */
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
INLINE int object_remove(struct gpu_object_key *key) { return REMOVE(objects, key); }
INLINE struct gpu_process *process_find(u32 *tgid) { return FIND(processes, tgid); }
INLINE int process_put(u32 *tgid, struct gpu_process *value) { return PUT(processes, tgid, value, BPF_ANY); }
INLINE int process_insert(u32 *tgid, struct gpu_process *value)
{
	return PUT(processes, tgid, value, BPF_NOEXIST);
}
INLINE struct gpu_forgotten *forgotten_find(u64 *of) { return FIND(forgotten, of); }
INLINE struct gpu_cgroup *cgroup_find(u64 *id) { return FIND(cgroups, id); }
INLINE int cgroup_insert(u64 *id, struct gpu_cgroup *value) { return PUT(cgroups, id, value, BPF_NOEXIST); }
INLINE void opening_put(u64 *file, u64 *at_ns) { PUT(openings, file, at_ns, BPF_ANY); }
INLINE void opening_remove(u64 *file) { REMOVE(openings, file); }
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
INLINE u64 ring_state(int which) { return bpf_ringbuf_query(&events, which); }
INLINE struct gpu_traced_call *traced_reserve(void)
{
	return bpf_ringbuf_reserve(&events, sizeof(struct gpu_traced_call), 0);
}
INLINE void traced_submit(struct gpu_traced_call *call) { bpf_ringbuf_submit(call, 0); }

#endif

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

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The row of the process that calls, and what is told of it on the ring. */

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
	row = process_find(&tgid);
	if (!row)
		COUNT(processes_full);
	return row;
}

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

/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The row of the calling process, and the events that are sent of it on the ring. */

/* Events of one process in a window of 134 ms: 11,000 a second. User space reads the effect of further ones
 * from the maps, and the ring has room for the others. */
#define MAX_SENT 1536
/* The same while the ring is half full, as five such processes fill it: the events of a program that makes a context;
 * and while a quarter of it is left, which is for processes that send next to nothing. */
#define MAX_SENT_CROWDED 128
#define MAX_SENT_FULL 8
#define WINDOW(ns) ((u32)((ns) >> 27))

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

INLINE u32 send_limit(void)
{
	u64 bytes = ring_state(RING_BYTES), quarters;

	/* Without room for what one may send there is nothing to share. */
	if (bytes < MAX_SENT * sizeof(struct gpu_event))
		return MAX_SENT;
	quarters = 4 * ring_state(RING_UNREAD) / bytes;
	return quarters >= 3 ? MAX_SENT_FULL : quarters >= 2 ? MAX_SENT_CROWDED : MAX_SENT;
}

/* Whether a process has room on the ring for another event. */
INLINE int may_send(struct gpu_process *row)
{
	u32 window = WINDOW(bpf_ktime_get_ns());

	if (!row)
		return 1;
	if (row->window != window) {
		row->window = window;
		row->sent = 0;
	}
	if (row->sent >= MAX_SENT_FULL && row->sent >= send_limit()) {
		ADD(row, unsent);
		COUNT(unsent);
		return 0;
	}
	ADD(row, sent);
	return 1;
}

/* Whether to send an event that a scan resolves: once until user space starts the next scan. */
INLINE int is_news(struct gpu_process *row, u32 mark)
{
	struct gpu_config *cfg = configured();

	if (!cfg)
		return 0;
	if (row->scan != cfg->scan) {
		row->scan = cfg->scan;
		row->marks = 0;
	}
	if (row->marks & mark)
		return 0;
	row->marks |= mark;
	return 1;
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

INLINE void send_file(u32 kind, enum gpu_program program, struct gpu_process *row, u64 file, u32 device, int fd,
		      u32 detail)
{
	struct gpu_event *e = may_send(row) ? event(kind, program) : 0;

	if (!e)
		return;
	e->detail = detail;
	e->file = file;
	e->device = device;
	e->fd = fd;
	event_submit(e);
}

INLINE void send_process(u32 kind, u32 detail)
{
	struct gpu_event *e = event(kind, GPU_PROGRAM_PROCESS);

	if (!e)
		return;
	e->detail = detail;
	event_submit(e);
}

INLINE void send_object(u32 kind, struct gpu_call *call, struct gpu_process *row, struct gpu_object_key *key,
			u32 rm_class, u32 parent, u32 detail)
{
	struct gpu_event *e = may_send(row) ? event(kind, GPU_PROGRAM_IOCTL) : 0;

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

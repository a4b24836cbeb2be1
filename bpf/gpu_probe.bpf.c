// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Which processes use the GPUs: live objects and counters in maps, rare lifecycle events on a ring.
 *
 * One source, two loaders. bcc compiles it on the node, with -DGPU_PROBE_BCC and the offsets of kernel structs
 * as -DOFFSET_struct_field (from the running kernel's BTF); without those it takes them from the headers.
 * clang compiles it once for libbpf, which relocates the offsets. bcc rewrites calls of maps in one text only, so
 * its loader puts the headers where they are included; none of them includes another.
 *
 * The maps are the truth. An event that found no room on the ring is counted and costs latency only. */
#include "loaders.h"
#include "gpu_probe.h"
#include "maps.h"
#include "kernel.h"
#include "events.h"
#include "driver.h"
#include "readiness.h"
#include "objects.h"
#include "calls.h"

/* ---- tier "syscalls": for kernels without kprobes, and for device doubles ---- */

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
	file_begins(file, device, row, cfg);
	send_file(GPU_OPEN, GPU_PROGRAM_OPEN, row, file, device, (int)fd, 0);
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
	if (is_last_reference(file)) {
		file_ends(file);
		send_file(GPU_CLOSE, GPU_PROGRAM_CLOSE, row, file, device, (int)ctx->arguments[0], GPU_LAST);
	} else if (is_news(row, GPU_MARK_CLOSE)) {
		send_file(GPU_CLOSE, GPU_PROGRAM_CLOSE, row, file, device, (int)ctx->arguments[0], 0);
	}
	return 0;
}

/* These may close descriptors of a known process; user space scans which. */
INLINE int moved(u32 reason)
{
	struct gpu_process *row = known_process();

	if (row && is_news(row, GPU_MARK_RESCAN))
		send_process(GPU_RESCAN, reason);
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
	struct gpu_config *cfg = configured();
	struct gpu_process *row;
	u64 file;
	u32 device;

	if (!call || !cfg)
		return 0;
	file = call->file;
	device = call->device;
	call_remove(&thread);
	if ((int)RESULT(ctx))
		return 0;
	row = process();
	ADD(row, opens);
	file_begins(file, device, row, cfg);
	send_file(GPU_OPEN, GPU_PROGRAM_OPEN, row, file, device, -1, 0);
	return 0;
}

/* nvidia_close(inode, file): the last reference is gone, including dup, fork, messages and mappings. */
PROGRAM("kprobe/nvidia_close", driver_close)(struct pt_regs *ctx)
{
	struct gpu_config *cfg = configured();
	struct gpu_process *row = known_process();

	if (!cfg)
		return 0;
	ADD(row, closes);
	file_ends(SECOND(ctx));
	send_file(GPU_RELEASE, GPU_PROGRAM_CLOSE, row, SECOND(ctx), device_of(SECOND(ctx), cfg), -1, 0);
	return 0;
}

/* ---- both tiers: processes ---- */

/* (parent, child); a thread is no process. */
PROGRAM("raw_tp/sched_process_fork", process_fork)(struct raw_context *ctx)
{
	u64 child = ctx->arguments[1];
	struct gpu_process *row = known_process();
	u32 tgid;

	if (!row)
		return 0;
	tgid = WORD(child, task_struct, tgid);
	if (WORD(child, task_struct, pid) == tgid && is_news(row, GPU_MARK_FORK))
		send_process(GPU_FORK, tgid);
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
	send_process(GPU_EXIT, 0);
	return 0;
}

/* ---- holders: an iterator over every file of every task, run by reading its descriptor ---- */

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

#include "trace.h"

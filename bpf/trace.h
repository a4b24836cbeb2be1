/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Every call of one process; loaded only to trace it, and then without the programs of gpu_probe.bpf.c. */

INLINE struct gpu_config *tracing(void)
{
	struct gpu_config *cfg = configured();

	return cfg && cfg->trace_tgid == current_tgid() ? cfg : 0;
}

INLINE void read_block(struct gpu_traced_call *call, int uvm)
{
	/* The commands of unified memory do not contain the size of their parameters. */
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
	struct gpu_traced_call *record, *found;
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
	record = traced_reserve();
	if (!record) {
		COUNT(reserve_failed[GPU_PROGRAM_IOCTL]);
		return 0;
	}
	COUNT(events);
	*record = call;
	traced_submit(record);
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

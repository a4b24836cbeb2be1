/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A call of the driver from its entry to its return; both tiers end up here. */

/* Of a thread. Kretprobes follow so many calls at once (agent/probe/returns.py): when more wait in the driver, the
 * return of one is missed, and the thread's next call, or its exit, finds the row. */
INLINE void begin_call(struct gpu_call *call)
{
	u64 thread = bpf_get_current_pid_tgid();

	if (call_find(&thread))
		COUNT(unreturned);
	if (call_put(&thread, call))
		COUNT(unreturned);
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

		if (bpf_probe_read_user(&inner, sizeof(inner), (void *)argument)) {
			COUNT(unreadable);
			return 0;
		}
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

/* Sends the GPU of a client's address space: in parent and detail the halves of its UUID, one xor the other. Like the
 * driver, only for a caller that names the open file of that client. */
INLINE void registered_with_uvm(struct gpu_call *call, u32 *block, struct gpu_process *row)
{
	struct gpu_object_key key = {};
	struct gpu_object *space;
	u32 status = block[UNREGISTER_STATUS], low, high;

	if (call->number == UVM_REGISTER_GPU_VASPACE) {
		status = block[VASPACE_STATUS];
		key.client = block[VASPACE_CLIENT];
		key.handle = block[VASPACE_SPACE];
		if (!status && is_of_another(key.client, file_of(block[VASPACE_CONTROL]))) {
			ADD(row, errors);
			return;
		}
	}
	if (status)
		return;
	low = block[VASPACE_UUID] ^ block[VASPACE_UUID + 2];
	high = block[VASPACE_UUID + 1] ^ block[VASPACE_UUID + 3];
	space = object_find(&key);
	/* Only its own process may register it. */
	if (space && space->tgid == current_tgid())
		space->uvm = (u64)high << 32 | low;
	send_object(GPU_UVM, call, row, &key, call->number, low, high);
}

/* The ioctl returns 0 even where the resource manager failed; its status is in the block, so it is read here. */
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
		registered_with_uvm(&call, block, row);
	else if (call.number == RM_ALLOC)
		allocated(&call, block, row, cfg);
	else if (call.number == RM_FREE && call.size == 16)
		freed(&call, block, row, cfg);
	else if (call.number == RM_DUP_OBJECT && call.size == 28)
		duplicated(&call, block, row);
	else if (call.number == REGISTER_FD && call.size == 4)
		registered_fd(&call, block, row);
	return 0;
}

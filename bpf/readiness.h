/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whether the driver answers the agent's own harmless calls. */

/* Only the agent's own checks count: the calls of other processes do not show whether those return. */
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
	/* Only whether the driver answers counts, not its result: it may have reasons of its own to fail. */
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

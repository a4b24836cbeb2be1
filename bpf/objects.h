/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The live objects of the resource manager: made, freed, copied; and which open file keeps which nvidiactl. */

/* Seen by user space, which knows starts to the clock tick alone. */
#define TICK(start_ns) ((start_ns) / 10000000)

INLINE int is_full(struct gpu_process *row)
{
	struct gpu_forgotten *taken_out;
	u64 tgid = current_tgid();
	long long rows;

	if (!row || row->objects < MAX_OBJECTS_EACH)
		return 0;
	rows = row->objects;
	taken_out = forgotten_find(&tgid);
	if (taken_out && TICK(taken_out->start_ns) == TICK(row->start_ns))
		rows -= taken_out->objects;
	return rows >= MAX_OBJECTS_EACH;
}

/* Everybody is in the root, where there are no cgroups of version 2. */
#define ROOT_CGROUP 1

INLINE struct gpu_cgroup *cgroup_of(u64 id)
{
	struct gpu_cgroup none = {};
	struct gpu_cgroup *found = cgroup_find(&id);

	if (found || id <= ROOT_CGROUP)
		return found;
	cgroup_insert(&id, &none);
	return cgroup_find(&id);
}

/* A pod has as much as a process: to fork makes it no more. */
INLINE int is_share_full(struct gpu_cgroup *group, u64 id)
{
	struct gpu_forgotten *taken_out;
	u64 name = id | GPU_OF_CGROUP;
	long long rows;

	if (!group || group->objects < MAX_OBJECTS_EACH)
		return 0;
	rows = group->objects;
	taken_out = forgotten_find(&name);
	if (taken_out)
		rows -= taken_out->objects;
	return rows >= MAX_OBJECTS_EACH;
}

struct whose { u64 start_ns, cgroup_id; u32 tgid; };

INLINE struct whose whose(struct gpu_object *object)
{
	return (struct whose){object->start_ns, object->cgroup_id, object->tgid};
}

INLINE void one_less(struct whose *of)
{
	struct gpu_process *owner = process_find(&of->tgid);
	struct gpu_cgroup *group = cgroup_find(&of->cgroup_id);

	if (owner && TICK(owner->start_ns) == TICK(of->start_ns))
		__sync_fetch_and_add(&owner->objects, -1);
	if (group)
		__sync_fetch_and_add(&group->objects, -1);
}

/* Adds an object, unless its process or pod has too many: none may take the room of all others. */
INLINE int kept(struct gpu_object_key *key, struct gpu_object *object, struct gpu_process *row)
{
	struct gpu_cgroup *group = cgroup_of(object->cgroup_id);
	struct gpu_object *before;
	struct whose of = {};

	if (is_full(row) || is_share_full(group, object->cgroup_id)) {
		ADD(row, rejected);
		COUNT(rejected);
		return 0;
	}
	/* An object freed with its parent stays until user space deletes it; programs reuse handles at once. */
	before = object_find(key);
	if (before)
		of = whose(before);
	if (object_put(key, object)) {
		COUNT(objects_full);
		return 0;
	}
	ADD(row, objects);
	ADD(group, objects);
	if (of.tgid)
		one_less(&of);
	return 1;
}

/* A client belongs to one open file. The driver rejects calls through others, but its status is in the caller's
 * memory, and the caller can forge it. Clients older than the probe have no row. */
INLINE int is_of_another(u32 client, u64 file)
{
	struct gpu_object_key key = {.client = client, .handle = client};
	struct gpu_object *root = object_find(&key);

	return root && root->file != file;
}

/* Nor does the driver give a number twice. The row of a process that exited only waits to be deleted. */
INLINE int is_taken(struct gpu_object_key *key, u64 file)
{
	struct gpu_object *found = object_find(key);
	struct gpu_process *owner;
	u32 tgid;

	if (!found || found->file == file)
		return 0;
	tgid = found->tgid;
	owner = process_find(&tgid);
	return owner && !owner->exited_ns && TICK(owner->start_ns) == TICK(found->start_ns);
}

/* Which of two processes with the same claim is forging is unknown. The first is kept, and the other is marked as
 * incomplete: an honest one must not vanish because a forger guessed its number. */
INLINE int is_forged(struct gpu_object_key *key, u64 file, struct gpu_process *row)
{
	if (!is_taken(key, file) && (key->client == key->handle || !is_of_another(key->client, file)))
		return 0;
	ADD(row, errors);
	ADD(row, rejected);
	COUNT(rejected);
	return 1;
}

INLINE void describe(struct gpu_object *object, struct gpu_call *call)
{
	object->at_ns = bpf_ktime_get_ns();
	object->cgroup_id = bpf_get_current_cgroup_id();
	object->file = call->file;
	object->start_ns = start_of(this_task());
	object->tgid = current_tgid();
}

/* NV0080_ALLOC_PARAMETERS begins with the device's instance; without it, it is instance 0. */
INLINE u32 device_instance(u32 *block)
{
	u64 params = (u64)block[ALLOC_PARAMS + 1] << 32 | block[ALLOC_PARAMS];
	u32 instance = 0;

	if (params && bpf_probe_read_user(&instance, sizeof(instance), (void *)params)) {
		COUNT(unreadable);
		return NO_GPU;
	}
	return instance;
}

INLINE void allocated(struct gpu_call *call, u32 *block, struct gpu_process *row, struct gpu_config *cfg)
{
	struct gpu_object_key key;
	struct gpu_object object;
	u32 rm_class = block[ALLOC_CLASS], status;

	if (call->size == 48)
		status = block[10];
	else if (call->size == 40) /* drivers up to 530 */
		status = is_before(525, cfg) ? block[8] : block[9];
	else if (call->size == 32)
		status = is_before(535, cfg) ? block[6] : block[7];
	else
		return;
	ADD(row, allocs);
	if (status) {
		ADD(row, errors);
		return;
	}
	if (!is_tracked(rm_class, cfg))
		return;
	key.client = is_root(rm_class) ? block[ALLOC_NEW] : block[ALLOC_ROOT];
	key.handle = block[ALLOC_NEW];
	if (is_forged(&key, call->file, row))
		return;
	if (rm_class == cfg->context_class)
		ADD(row, contexts_allocated);
	__builtin_memset(&object, 0, sizeof(object));
	describe(&object, call);
	object.rm_class = rm_class;
	object.parent = block[ALLOC_PARENT];
	object.gpu = rm_class == CLASS_DEVICE ? device_instance(block) : NO_GPU;
	if (kept(&key, &object, row))
		send_object(GPU_ALLOC, call, row, &key, rm_class, object.parent, object.gpu);
}

/* Children and dependants are freed with their parent; user space determines which those are. */
INLINE void freed(struct gpu_call *call, u32 *block, struct gpu_process *row, struct gpu_config *cfg)
{
	struct gpu_object_key key;
	struct gpu_object *object;
	u32 rm_class, parent;
	struct whose of;

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
	of = whose(object);
	if (!object_remove(&key))
		one_less(&of);
	if (rm_class == cfg->context_class)
		ADD(row, contexts_freed);
	send_object(GPU_FREE, call, row, &key, rm_class, parent, 0);
}

/* The copy lives on its own. */
INLINE void duplicated(struct gpu_call *call, u32 *block, struct gpu_process *row)
{
	struct gpu_object_key source, key;
	struct gpu_object *found;
	struct gpu_object copy;

	key.client = block[DUP_CLIENT];
	key.handle = block[DUP_NEW];
	if (block[DUP_STATUS]) {
		ADD(row, errors);
		return;
	}
	if (is_forged(&key, call->file, row))
		return;
	source.client = block[DUP_SOURCE_CLIENT];
	source.handle = block[DUP_SOURCE];
	found = object_find(&source);
	if (!found)
		return;
	copy = *found;
	describe(&copy, call);
	copy.parent = block[DUP_PARENT];
	if (kept(&key, &copy, row))
		send_object(GPU_DUP, call, row, &key, copy.rm_class, copy.parent, source.client);
}

INLINE struct gpu_object_key key_of_file(u64 file)
{
	return (struct gpu_object_key){.client = (u32)file, .handle = file >> 32};
}

/* The driver refers to the nvidiactl until this file ends, whatever is closed. */
INLINE void registered_fd(struct gpu_call *call, u32 *block, struct gpu_process *row)
{
	struct gpu_object_key key = key_of_file(call->file);
	u64 control = file_of(block[0]);
	struct gpu_object object;

	__builtin_memset(&object, 0, sizeof(object));
	describe(&object, call);
	object.rm_class = GPU_REGISTRATION;
	object.parent = (u32)control;
	object.gpu = control >> 32;
	if (control && kept(&key, &object, row))
		send_object(GPU_REGISTER_FD, call, row, &key, object.rm_class, object.parent, object.gpu);
}

/* An open file that begins, or ends, is registered to nothing. */
INLINE void registered_no_more(u64 file)
{
	struct gpu_object_key key = key_of_file(file);
	struct gpu_object *found = object_find(&key);
	struct whose of;

	if (!found || found->rm_class != GPU_REGISTRATION)
		return;
	of = whose(found);
	if (!object_remove(&key))
		one_less(&of);
}

INLINE void file_begins(u64 file, u32 device, struct gpu_process *row, struct gpu_config *cfg)
{
	u64 now = bpf_ktime_get_ns();
	u32 minor = MINOR(device);

	registered_no_more(file);
	opening_put(&file, &now);
	if (row && MAJOR(device) == cfg->nvidia_major && minor < 64)
		row->minors |= 1ull << minor;
}

INLINE void file_ends(u64 file)
{
	registered_no_more(file);
	opening_remove(&file);
}

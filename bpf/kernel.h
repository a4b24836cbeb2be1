/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is read of the kernel: its structs by offset, the open file of a descriptor, the device of a file. */

#if !defined(GPU_PROBE_BCC)

struct super_block { u32 s_dev; };
struct inode { u32 i_rdev; unsigned long i_ino; struct super_block *i_sb; };
struct references { long count; };
struct file { struct inode *f_inode; struct references f_count; };
struct file___since_6_13 { struct references f_ref; };
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
#include <linux/version.h>
#define OFFSET(type, field) offsetof(struct type, field)

#endif

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

/* The open file of a descriptor, from the kernel's own table, so inherited and received descriptors count too. */
INLINE u64 file_of(u32 fd)
{
	u64 table = POINTER(POINTER(this_task(), task_struct, files), files_struct, fdt);

	if (fd >= WORD(table, fdtable, max_fds))
		return 0;
	return kernel_u64(POINTER(table, fdtable, fd) + 8ull * fd);
}

/* Whether an open file ends with the descriptor that is about to be closed: nothing else refers to it, such as a copy
 * of the descriptor, a message, a mapping or a call under way. Since Linux 6.13 one reference is counted as 0. */
INLINE int is_last_reference(u64 file)
{
#if !defined(GPU_PROBE_BCC)
	if (bpf_core_field_exists(struct file___since_6_13, f_ref))
		return !kernel_u64(file + bpf_core_field_offset(struct file___since_6_13, f_ref));
	if (bpf_core_field_exists(struct file, f_count))
		return POINTER(file, file, f_count) == 1;
#elif defined(OFFSET_file_f_ref)
	return !POINTER(file, file, f_ref);
#elif defined(OFFSET_file_f_count) || (!defined(OFFSET_file_f_inode) && LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0))
	return POINTER(file, file, f_count) == 1;
#endif
	return 0;
}

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

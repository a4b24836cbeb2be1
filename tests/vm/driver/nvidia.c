// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A double of nvidia.ko: its device numbers, its entry points by name, a miniature of its resource manager,
 * and books of its own on what that granted, by which a probe can be checked.
 *
 * A client belongs to one open file and ends with it; a nvidiaN that was registered to a nvidiactl keeps that
 * file open; freeing an object frees what is below it; freeing an unknown handle is no error; a copy lives on
 * its own. Commands that would change nothing here are taken and answered with success.
 *
 * /proc/driver/nvidia/books has one record a line. Written to it, "anew" makes the counts begin anew, "hold"
 * lets every call wait in the driver, "release" lets them go on.
 * Sources for numbers, layouts and rules: open-gpu-kernel-modules, nv.c, escape.c, nvos.h, rs_server.c. */
#include <linux/cdev.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/kprobes.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/proc_fs.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include <linux/wait.h>
#include "driver.h"

/* An older branch: its files are nv-frontend's, and answers are elsewhere. */
#ifdef DRIVER_FRONTEND
#define DRIVER_VERSION "520.56.06"
#define NAME "nvidia-frontend"
enum { LONG_ALLOC = 40, LONG_STATUS = 8, SHORT_STATUS = 6 };
#else
#define DRIVER_VERSION "570.148.08"
#define NAME "nvidia"
enum { LONG_ALLOC = 48, LONG_STATUS = 10, SHORT_STATUS = 7 };
#endif
/* A branch to come, whose entry point is unknown. */
#ifdef DRIVER_UNKNOWN
#define nvidia_unlocked_ioctl nvidia_ioctl_of_the_future
#endif

enum { MAJOR_NUMBER = 195, CONTROL_MINOR = 255, MINORS = 256, GPUS = 3 };
enum {
	RM_ALLOC_MEMORY = 0x27, RM_FREE = 0x29, RM_CONTROL = 0x2a, RM_ALLOC = 0x2b, RM_DUP_OBJECT = 0x34,
	REGISTER_FD = 201, CHECK_VERSION_STR = 210, NUMA_INFO = 215,
};
enum { CLASS_ROOT_CLIENT = 0x41, CLASS_DEVICE = 0x80, CLASS_CONTEXT_SHARE = 0x9067 };
enum {
	OK = 0, INSERT_DUPLICATE_NAME = 0x19, INSUFFICIENT_RESOURCES = 0x1a, INVALID_ADDRESS = 0x1e,
	INVALID_CLIENT = 0x23, INVALID_DEVICE = 0x26, INVALID_OBJECT_PARENT = 0x36, OBJECT_NOT_FOUND = 0x57,
};
enum { MAX_OBJECTS = 65536, MAX_PROCESSES = 4096, MAX_COMMAND_BYTES = 16384 };
enum { NO_INSTANCE = -1 };

struct nvidia_file {
	struct file *control; /* the nvidiactl that a nvidiaN was registered to */
	bool is_control;
};

struct client {
	struct list_head all, objects;
	struct nvidia_file *owner;
	u32 handle;
	pid_t pid;
};

struct object {
	struct list_head all;
	u32 handle, parent, class;
	int instance;
};

struct process {
	struct list_head all;
	pid_t pid;
	unsigned long opens, uvm_opens, allocs, frees, contexts_allocated;
};

static DEFINE_MUTEX(lock); /* over all of these */
static LIST_HEAD(clients);
static LIST_HEAD(processes);
static unsigned int objects_live, processes_known;
static unsigned long contexts_allocated, contexts_freed, rejected;
static DECLARE_WAIT_QUEUE_HEAD(released);
static atomic_t waiting = ATOMIC_INIT(0);
static bool held;
static u32 next_client = 0xc1d00001, next_object = 0xcaf00000;

/* ---- books ---- */

static struct process *process(void)
{
	struct process *each;

	list_for_each_entry(each, &processes, all)
		if (each->pid == current->tgid)
			return each;
	if (processes_known >= MAX_PROCESSES)
		return NULL;
	each = kzalloc(sizeof(*each), GFP_KERNEL);
	if (!each)
		return NULL;
	each->pid = current->tgid;
	list_add(&each->all, &processes);
	processes_known++;
	return each;
}

#define COUNT(member) \
	do { \
		struct process *row = process(); \
		if (row) \
			row->member++; \
	} while (0)

void nvidia_double_uvm_opened(void)
{
	mutex_lock(&lock);
	COUNT(uvm_opens);
	mutex_unlock(&lock);
}
EXPORT_SYMBOL(nvidia_double_uvm_opened);

static void begin_anew(void)
{
	struct process *each, *next;

	list_for_each_entry_safe(each, next, &processes, all) {
		list_del(&each->all);
		kfree(each);
	}
	processes_known = 0;
	contexts_allocated = contexts_freed = rejected = 0;
}

/* ---- the resource manager ---- */

static struct client *client_of(u32 handle)
{
	struct client *each;

	list_for_each_entry(each, &clients, all)
		if (each->handle == handle)
			return each;
	return NULL;
}

static struct object *object_of(struct client *client, u32 handle)
{
	struct object *each;

	list_for_each_entry(each, &client->objects, all)
		if (each->handle == handle)
			return each;
	return NULL;
}

static int instance_of(struct client *client, u32 handle)
{
	struct object *found = object_of(client, handle);

	while (found && found->class != CLASS_DEVICE)
		found = object_of(client, found->parent);
	return found ? found->instance : NO_INSTANCE;
}

static void forget(struct object *object)
{
	contexts_freed += object->class == CLASS_CONTEXT_SHARE;
	objects_live--;
	list_del(&object->all);
	kfree(object);
}

/* An object, and what is below it: the list of what ends grows at its tail while it is walked. */
static void end_object(struct client *client, struct object *first)
{
	struct object *each, *other, *next;
	LIST_HEAD(doomed);

	list_move(&first->all, &doomed);
	list_for_each_entry(each, &doomed, all)
		list_for_each_entry_safe(other, next, &client->objects, all)
			if (other->parent == each->handle)
				list_move_tail(&other->all, &doomed);
	list_for_each_entry_safe(each, next, &doomed, all)
		forget(each);
}

static void end_client(struct client *client)
{
	struct object *each, *next;

	list_for_each_entry_safe(each, next, &client->objects, all)
		forget(each);
	list_del(&client->all);
	kfree(client);
}

static u32 add_client(struct nvidia_file *owner, u32 *handle)
{
	struct client *made = kzalloc(sizeof(*made), GFP_KERNEL);

	if (!made)
		return INSUFFICIENT_RESOURCES;
	made->owner = owner;
	made->handle = *handle = next_client++;
	made->pid = current->tgid;
	INIT_LIST_HEAD(&made->objects);
	list_add(&made->all, &clients);
	return OK;
}

static u32 add_object(struct nvidia_file *owner, u32 in, u32 parent, u32 *handle, u32 class, int instance)
{
	struct client *client = client_of(in);
	struct object *made;

	if (!client || client->owner != owner)
		return INVALID_CLIENT;
	if (parent != in && !object_of(client, parent))
		return INVALID_OBJECT_PARENT;
	if (*handle == in || object_of(client, *handle))
		return INSERT_DUPLICATE_NAME;
	made = objects_live < MAX_OBJECTS ? kzalloc(sizeof(*made), GFP_KERNEL) : NULL;
	if (!made)
		return INSUFFICIENT_RESOURCES;
	if (!*handle)
		*handle = next_object++;
	made->handle = *handle;
	made->parent = parent;
	made->class = class;
	made->instance = instance;
	list_add(&made->all, &client->objects);
	objects_live++;
	contexts_allocated += class == CLASS_CONTEXT_SHARE;
	return OK;
}

static u32 counted(u32 status)
{
	rejected += status != OK;
	return status;
}

/* NVOS21 and NVOS64: root, parent, new object, class, address of parameters. */
static u32 allocate(struct nvidia_file *owner, u32 *block)
{
	u32 class = block[3], instance = 0, status;
	u64 parameters = (u64)block[5] << 32 | block[4];

	if (class <= 1 || class == CLASS_ROOT_CLIENT) {
		status = add_client(owner, &block[2]);
	} else if (class == CLASS_DEVICE && parameters && get_user(instance, (u32 __user *)parameters)) {
		status = INVALID_ADDRESS;
	} else if (instance >= GPUS) {
		status = INVALID_DEVICE;
	} else {
		status = add_object(owner, block[0], block[1], &block[2], class, instance);
	}
	if (status == OK) {
		COUNT(allocs);
		if (class == CLASS_CONTEXT_SHARE)
			COUNT(contexts_allocated);
	}
	return counted(status);
}

/* NVOS00: root, parent, object, status. */
static u32 free_object(struct nvidia_file *owner, u32 *block)
{
	struct client *client = client_of(block[0]);
	struct object *object;

	if (!client || client->owner != owner)
		return counted(INVALID_CLIENT);
	COUNT(frees);
	object = object_of(client, block[2]);
	if (block[2] == block[0])
		end_client(client);
	else if (object)
		end_object(client, object);
	return OK;
}

/* NVOS55: client, parent, new object, source client, source object, flags, status. */
static u32 duplicate(struct nvidia_file *owner, u32 *block)
{
	struct client *source = client_of(block[3]);
	struct object *object = source ? object_of(source, block[4]) : NULL;

	if (!object)
		return counted(source ? OBJECT_NOT_FOUND : INVALID_CLIENT);
	return counted(add_object(owner, block[0], block[1], &block[2], object->class, object->instance));
}

/* ---- entry points: a probe finds them by name ---- */

static const struct file_operations operations;

static long register_fd(struct nvidia_file *mine, u32 *block)
{
	struct file *control = fget(block[0]);
	struct nvidia_file *found = control && control->f_op == &operations ? control->private_data : NULL;

	if (!found || !found->is_control || found == mine || mine->control) {
		if (control)
			fput(control);
		return -EINVAL;
	}
	mine->control = control;
	return 0;
}

static long command(struct nvidia_file *mine, u32 number, u32 size, u32 *block)
{
	struct nvidia_file *owner = mine->control ? mine->control->private_data : mine;

	if (number == REGISTER_FD && size == 4)
		return register_fd(mine, block);
	if (number == RM_ALLOC && size == LONG_ALLOC)
		block[LONG_STATUS] = allocate(owner, block);
	else if (number == RM_ALLOC && size == 32)
		block[SHORT_STATUS] = allocate(owner, block);
	else if (number == RM_FREE && size == 16)
		block[3] = free_object(owner, block);
	else if (number == RM_DUP_OBJECT && size == 28)
		block[6] = duplicate(owner, block);
	else if (number == RM_CONTROL && size == 32)
		block[7] = counted(client_of(block[0]) ? OK : INVALID_CLIENT);
	else if (number == RM_ALLOC_MEMORY && size == 56)
		block[10] = counted(client_of(block[0]) ? OK : INVALID_CLIENT);
	else if (number == RM_ALLOC || number == RM_FREE || number == RM_DUP_OBJECT ||
		 (number == NUMA_INFO && mine->is_control) || (number == CHECK_VERSION_STR && !mine->is_control))
		return -EINVAL;
	return 0;
}

#ifdef DRIVER_FRONTEND
static noinline long nvidia_ioctl(struct inode *inode, struct file *file, unsigned int word, unsigned long argument)
#else
static noinline long nvidia_unlocked_ioctl(struct file *file, unsigned int word, unsigned long argument)
#endif
{
	u32 size = _IOC_SIZE(word), *block;
	long result = -EFAULT;

	block = size <= MAX_COMMAND_BYTES ? kzalloc(max(size, 64u), GFP_KERNEL) : NULL;
	if (!block)
		return -EINVAL;
	atomic_inc(&waiting);
	wait_event(released, !READ_ONCE(held));
	atomic_dec(&waiting);
	if (!copy_from_user(block, (void __user *)argument, size)) {
		mutex_lock(&lock);
		result = command(file->private_data, _IOC_NR(word), size, block);
		mutex_unlock(&lock);
		if (!result && copy_to_user((void __user *)argument, block, size))
			result = -EFAULT;
	}
	kfree(block);
	return result;
}

static noinline int nvidia_open(struct inode *inode, struct file *file)
{
	struct nvidia_file *made;

	if (iminor(inode) >= GPUS && iminor(inode) != CONTROL_MINOR)
		return -ENODEV;
	made = kzalloc(sizeof(*made), GFP_KERNEL);
	if (!made)
		return -ENOMEM;
	made->is_control = iminor(inode) == CONTROL_MINOR;
	file->private_data = made;
	mutex_lock(&lock);
	COUNT(opens);
	mutex_unlock(&lock);
	return 0;
}

static noinline int nvidia_close(struct inode *inode, struct file *file)
{
	struct nvidia_file *mine = file->private_data;
	struct client *each, *next;

	mutex_lock(&lock);
	list_for_each_entry_safe(each, next, &clients, all)
		if (each->owner == mine)
			end_client(each);
	mutex_unlock(&lock);
	if (mine->control)
		fput(mine->control);
	kfree(mine);
	return 0;
}

#ifdef DRIVER_NOKPROBE
NOKPROBE_SYMBOL(nvidia_unlocked_ioctl);
#endif

#ifdef DRIVER_FRONTEND
static noinline long nvidia_frontend_unlocked_ioctl(struct file *file, unsigned int word, unsigned long argument)
{
	return nvidia_ioctl(file_inode(file), file, word, argument);
}

static noinline int nvidia_frontend_open(struct inode *inode, struct file *file)
{
	return nvidia_open(inode, file);
}

static noinline int nvidia_frontend_close(struct inode *inode, struct file *file)
{
	return nvidia_close(inode, file);
}
#endif

static const struct file_operations operations = {
	.owner = THIS_MODULE,
#ifdef DRIVER_FRONTEND
	.open = nvidia_frontend_open,
	.release = nvidia_frontend_close,
	.unlocked_ioctl = nvidia_frontend_unlocked_ioctl,
#else
	.open = nvidia_open,
	.release = nvidia_close,
	.unlocked_ioctl = nvidia_unlocked_ioctl,
#endif
};

/* ---- /proc/driver/nvidia ---- */

static int show_version(struct seq_file *to, void *unused)
{
	seq_puts(to, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " DRIVER_VERSION "  (a double for tests)\n");
	return 0;
}

static void show_client(struct seq_file *to, struct client *client)
{
	struct object *each;
	unsigned int objects = 1; /* the client itself */

	list_for_each_entry(each, &client->objects, all) {
		objects++;
		if (each->class == CLASS_CONTEXT_SHARE)
			seq_printf(to, "context %u %u %d %d\n", client->handle, each->handle, client->pid,
				   instance_of(client, each->handle));
	}
	seq_printf(to, "client %u %d %u\n", client->handle, client->pid, objects);
}

static int show_books(struct seq_file *to, void *unused)
{
	struct client *client;
	struct process *each;

	mutex_lock(&lock);
	list_for_each_entry(client, &clients, all)
		show_client(to, client);
	list_for_each_entry(each, &processes, all)
		seq_printf(to, "process %d %lu %lu %lu %lu %lu\n", each->pid, each->opens, each->uvm_opens,
			   each->allocs, each->frees, each->contexts_allocated);
	seq_printf(to, "counts %lu %lu %lu\n", contexts_allocated, contexts_freed, rejected);
	seq_printf(to, "waiting %d\n", atomic_read(&waiting));
	mutex_unlock(&lock);
	return 0;
}

static int open_books(struct inode *inode, struct file *file)
{
	return single_open(file, show_books, NULL);
}

static ssize_t write_books(struct file *file, const char __user *data, size_t size, loff_t *at)
{
	char order[16] = {};

	if (size >= sizeof(order) || copy_from_user(order, data, size))
		return -EINVAL;
	if (sysfs_streq(order, "anew")) {
		mutex_lock(&lock);
		begin_anew();
		mutex_unlock(&lock);
	} else if (sysfs_streq(order, "hold")) {
		WRITE_ONCE(held, true);
	} else if (sysfs_streq(order, "release")) {
		WRITE_ONCE(held, false);
		wake_up_all(&released);
	} else {
		return -EINVAL;
	}
	return size;
}

static const struct proc_ops books = {
	.proc_open = open_books,
	.proc_read = seq_read,
	.proc_lseek = seq_lseek,
	.proc_write = write_books,
	.proc_release = single_release,
};

/* ---- the module ---- */

static struct cdev device;

static int __init begin(void)
{
	struct proc_dir_entry *folder;
	int error = register_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS, NAME);

	if (error)
		return error;
	folder = proc_mkdir("driver/nvidia", NULL);
	if (!folder || !proc_create_single("version", 0444, folder, show_version) ||
	    !proc_create("books", 0600, folder, &books)) {
		error = -ENOMEM;
		goto undo;
	}
	cdev_init(&device, &operations);
	device.owner = THIS_MODULE;
	error = cdev_add(&device, MKDEV(MAJOR_NUMBER, 0), MINORS);
	if (!error)
		return 0;
undo:
	remove_proc_subtree("driver/nvidia", NULL);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS);
	return error;
}

/* No file is open any more: an open one keeps the module. */
static void __exit end(void)
{
	cdev_del(&device);
	remove_proc_subtree("driver/nvidia", NULL);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS);
	begin_anew();
}

module_init(begin);
module_exit(end);
MODULE_DESCRIPTION("A double of NVIDIA's kernel driver, for tests");
MODULE_LICENSE("Dual BSD/GPL");

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A double of nvidia-uvm.ko: a device number that the kernel gives out, its entry point by name, and success for
 * every command. Commands are plain numbers, so the status is written where each command's struct has it.
 * Sources: open-gpu-kernel-modules, uvm.c, uvm_ioctl.h, uvm_linux_ioctl.h. */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/uaccess.h>
#include "driver.h"

enum { MINORS = 2 };

static int status_at(unsigned int command)
{
	switch (command) {
	case 0x30000001: /* INITIALIZE */
		return 8;
	case 25: /* REGISTER_GPU_VASPACE */
		return 28;
	case 26: /* UNREGISTER_GPU_VASPACE */
	case 38: /* UNREGISTER_GPU */
		return 16;
	case 27: /* REGISTER_CHANNEL */
		return 48;
	case 28: /* UNREGISTER_CHANNEL, of drivers before 590 */
		return 24;
	case 37: /* REGISTER_GPU */
		return 36;
	case 75: /* MM_INITIALIZE */
		return 4;
	}
	return -1;
}

static noinline long uvm_unlocked_ioctl_entry(struct file *file, unsigned int command, unsigned long argument)
{
	int at = status_at(command);

	return at >= 0 && put_user(0u, (u32 __user *)(argument + at)) ? -EFAULT : 0;
}

static noinline int uvm_open(struct inode *inode, struct file *file)
{
	nvidia_double_uvm_opened();
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = uvm_open,
	.unlocked_ioctl = uvm_unlocked_ioctl_entry,
};

static dev_t number;
static struct cdev device;

static int __init begin(void)
{
	int error = alloc_chrdev_region(&number, 0, MINORS, "nvidia-uvm");

	if (error)
		return error;
	cdev_init(&device, &operations);
	device.owner = THIS_MODULE;
	error = cdev_add(&device, number, MINORS);
	if (error)
		unregister_chrdev_region(number, MINORS);
	return error;
}

static void __exit end(void)
{
	cdev_del(&device);
	unregister_chrdev_region(number, MINORS);
}

module_init(begin);
module_exit(end);
MODULE_DESCRIPTION("A double of NVIDIA's unified memory driver, for tests");
MODULE_LICENSE("Dual BSD/GPL");

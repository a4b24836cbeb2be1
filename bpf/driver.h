/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The driver's calls: numbers, classes, parameter blocks. Layouts are the same from driver 515 to 595, except where
 * a comment states otherwise. */

#define NUMBER(command) ((command) & 0xff)
#define SIZE(command) (((command) >> 16) & 0x3fff)

enum {
	UVM_REGISTER_GPU_VASPACE = 25,
	UVM_UNREGISTER_GPU_VASPACE = 26,
	RM_FREE = 0x29,
	RM_ALLOC = 0x2b,
	RM_DUP_OBJECT = 0x34,
	REGISTER_FD = 201,
	CHECK_VERSION_STR = 210,
	XFER_CMD = 211,
	NUMA_INFO = 215,
};
enum { CLASS_ROOT = 0x0000, CLASS_ROOT_NON_PRIV = 0x0001, CLASS_ROOT_CLIENT = 0x0041, CLASS_DEVICE = 0x0080 };
enum { CLASS_VASPACE = 0x90f1, CLASS_CONTEXT_SHARE = 0x9067, CLASS_CHANNEL_GROUP = 0xa06c };
enum { CONTROL_MINOR = 255, FIRST_MINOR_NOT_A_GPU = 248, NO_GPU = 0xffffffff };
/* Words of the parameter blocks: NVOS21/NVOS64 (alloc), NVOS00 (free), NVOS55 (dup), of uvm_ioctl.h. */
enum { ALLOC_ROOT, ALLOC_PARENT, ALLOC_NEW, ALLOC_CLASS, ALLOC_PARAMS };
enum { FREE_ROOT, FREE_PARENT, FREE_OLD, FREE_STATUS };
enum { DUP_CLIENT, DUP_PARENT, DUP_NEW, DUP_SOURCE_CLIENT, DUP_SOURCE, DUP_FLAGS, DUP_STATUS };
enum { VASPACE_UUID, UNREGISTER_STATUS = 4, VASPACE_CONTROL = 4, VASPACE_CLIENT = 5, VASPACE_SPACE, VASPACE_STATUS };
#define BLOCK_WORDS 12 /* the largest of them: NVOS64 */

/* A handful of compares decides for every ioctl of the machine. The driver ignores the command's type. */
INLINE int may_be_of_interest(u32 command)
{
	switch (NUMBER(command)) {
	case RM_ALLOC:
	case RM_FREE:
	case RM_DUP_OBJECT:
	case REGISTER_FD:
	case CHECK_VERSION_STR:
	case NUMA_INFO:
	case XFER_CMD:
	case UVM_REGISTER_GPU_VASPACE:
	case UVM_UNREGISTER_GPU_VASPACE:
		return 1;
	}
	return 0;
}

INLINE int is_uvm(u32 number)
{
	return number == UVM_REGISTER_GPU_VASPACE || number == UVM_UNREGISTER_GPU_VASPACE;
}

INLINE int is_check(u32 number)
{
	return number == CHECK_VERSION_STR || number == NUMA_INFO;
}

INLINE int is_before(u32 branch, struct gpu_config *cfg)
{
	return cfg->driver_branch && cfg->driver_branch < branch;
}

INLINE int is_root(u32 rm_class)
{
	return rm_class == CLASS_ROOT || rm_class == CLASS_ROOT_NON_PRIV || rm_class == CLASS_ROOT_CLIENT;
}

/* The classes that identify a context and its GPU. */
INLINE int is_tracked(u32 rm_class, struct gpu_config *cfg)
{
	return is_root(rm_class) || rm_class == CLASS_DEVICE || rm_class == CLASS_VASPACE ||
	       rm_class == CLASS_CONTEXT_SHARE || rm_class == CLASS_CHANNEL_GROUP ||
	       rm_class == cfg->context_class;
}

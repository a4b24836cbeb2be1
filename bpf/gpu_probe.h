/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The layout that the probe and agent/probe/layout.py share. Sizes are asserted here; member offsets are
 * compared with the Python formats by tests/probe/test_layout.py, through the object's BTF. */
#ifndef GPU_PROBE_H
#define GPU_PROBE_H

enum gpu_event_kind {
	GPU_OPEN = 1,
	GPU_CLOSE,       /* a descriptor was closed; detail: GPU_LAST if the file ends with it, 0 if it may live on */
	GPU_ALLOC,
	GPU_FREE,
	GPU_DUP,         /* an object was copied into another client */
	GPU_EXIT,        /* the last thread of a process began to exit; its files are still open */
	GPU_FORK,
	GPU_RESCAN,      /* descriptors may have moved in a way that is not followed */
	GPU_UVM,         /* a client's address space was registered with unified memory for a GPU */
	GPU_REGISTER_FD,
	GPU_RELEASE,     /* the open file ended (tier driver only) */
};

/* In gpu_event.detail of GPU_CLOSE. */
enum { GPU_LAST = 1 };

/* The class of a row of ``objects`` that is no object of the driver's: a GPU's open file that was registered to an
 * open nvidiactl, which lives as long as that file. Its key is the file's address, lower half first; parent and gpu
 * are the halves of the address of the nvidiactl. */
enum { GPU_REGISTRATION = 0xfffffffe };

/* The reason for a rescan; in gpu_event.detail. */
enum gpu_rescan_reason { GPU_RESCAN_CLOSE_RANGE = 1, GPU_RESCAN_DUP2, GPU_RESCAN_DUP3, GPU_RESCAN_EXEC };

/* Events that a process sends once between two scans, however often they happen; bits of gpu_process.marks. */
enum gpu_mark { GPU_MARK_CLOSE = 1, GPU_MARK_FORK = 2, GPU_MARK_RESCAN = 4 };

/* The program that failed to reserve room on the ring; index of gpu_statistics.reserve_failed. */
enum gpu_program { GPU_PROGRAM_IOCTL, GPU_PROGRAM_OPEN, GPU_PROGRAM_CLOSE, GPU_PROGRAM_PROCESS, GPU_PROGRAMS };

/* One size for every event, so that a batch is one array. */
struct gpu_event {
	unsigned long long at_ns;      /* CLOCK_MONOTONIC */
	unsigned long long cgroup_id;
	unsigned long long file;       /* address of the open file: its identity */
	unsigned int tgid, pid;
	unsigned int device;           /* kernel dev_t: major << 20 | minor */
	int fd;
	unsigned int kind;             /* enum gpu_event_kind */
	unsigned int rm_class;         /* RM class, or UVM command */
	unsigned int client, parent, handle, detail;
};

/* A client belongs to one open file and its handle is unique on the node; an object's is so in its client. */
struct gpu_object_key {
	unsigned int client, handle;
};

struct gpu_object {
	unsigned long long at_ns, cgroup_id, file;
	unsigned long long start_ns;   /* when the process that allocated it began, CLOCK_BOOTTIME */
	unsigned long long uvm;        /* of an address space: the GPU it was registered for, as in GPU_UVM; 0: none */
	unsigned int tgid, rm_class, parent, gpu;
};

/* What one process did; keyed by its tgid. */
struct gpu_process {
	unsigned long long cgroup_id, start_ns;
	unsigned long long first_ns, last_ns;
	unsigned long long exited_ns;  /* 0 while it lives; a later process with the same pid starts a new row */
	unsigned long long calls, opens, closes, allocs, frees, contexts_allocated, contexts_freed, errors;
	unsigned long long rejected;   /* objects that were not kept: too many, or those of another */
	unsigned long long minors;     /* the GPUs that it opened, a bit for each; without those from 64 on */
	unsigned long long unsent;     /* events that were not sent because the process had used its share of the ring */
	unsigned int window, sent;     /* events on the ring in this window of time */
	unsigned int scan, marks;      /* events sent since user space started that scan: enum gpu_mark */
	long long objects;             /* those kept, less those it freed; less gpu_forgotten there are so many now */
};

/* The same of all processes of a cgroup; keyed by its id. */
struct gpu_cgroup {
	long long objects;
};

/* Objects of a process or a cgroup that user space deleted; keyed by tgid, or by GPU_OF_CGROUP and the cgroup's id.
 * Written by user space alone. */
struct gpu_forgotten {
	unsigned long long start_ns;   /* of the process, to the clock tick */
	long long objects;
};
#define GPU_OF_CGROUP (1ull << 63)

/* A call between entry and return; keyed by thread. */
struct gpu_call {
	unsigned long long argument, file, entered_ns;
	unsigned int number, size;     /* _IOC_NR and size of the driver's command, or the UVM command and 0 */
	unsigned int device;
	int fd;
};

/* Written by user space at any time. */
struct gpu_config {
	unsigned int nvidia_major, uvm_major, caps_major; /* 0: not known */
	unsigned int context_class;    /* the RM class of which a CUDA context has exactly one */
	unsigned int driver_branch;    /* such as 570; 0: not known */
	unsigned int agent_tgid;       /* whose calls are checks of readiness */
	unsigned int test_filesystem;  /* device doubles: st_dev of files whose inode number is their dev_t */
	unsigned int any_return;       /* device doubles: an ioctl that failed counts as one that worked */
	unsigned long long answer_within_ns; /* a check that takes longer does not set ready */
	unsigned int trace_tgid;       /* the process whose every call is sent, by programs that only do that */
	unsigned int scan;             /* how many scans user space has started */
};

/* The last readiness check of one device; indexed by minor. */
struct gpu_check {
	unsigned long long entered_ns, returned_ns; /* in flight while entered is later than returned */
	unsigned long long calls;
	long long result;
};

/* One for each CPU. */
struct gpu_statistics {
	unsigned long long events, calls;
	unsigned long long unreadable;      /* parameter blocks that could not be read */
	unsigned long long objects_full;    /* objects that found no room */
	unsigned long long rejected;        /* objects that were not kept: too many, or those of another */
	unsigned long long unsent;          /* events of processes that had used their share of the ring */
	unsigned long long processes_full;  /* times that a process found no room */
	unsigned long long processes_added; /* rows put into the table of processes */
	unsigned long long unreturned;      /* calls not seen to return, or without room till then */
	unsigned long long reserve_failed[GPU_PROGRAMS];
};

/* One descriptor, as the iterator over every task's files writes it. */
struct gpu_held {
	unsigned long long file, table; /* addresses of the open file and of the descriptor table */
	unsigned long long cgroup_id, start_ns;
	unsigned int tgid, fd, device, reserved;
};

#define GPU_TRACED_WORDS 16

/* Any call of one process: sent when it returned, and in a map until then. Keyed by thread. */
struct gpu_traced_call {
	unsigned long long entered_ns, took_ns, argument;
	unsigned int tgid, pid;
	unsigned int device;
	int fd;                        /* -1: not known (tier driver) */
	unsigned int number, size;     /* as in gpu_call, but every UVM command, whole */
	int result;
	unsigned int block_bytes;      /* how much of the parameters could be read */
	unsigned int block[GPU_TRACED_WORDS]; /* how they begin */
};

_Static_assert(sizeof(struct gpu_event) == 64, "layout.py: EVENT");
_Static_assert(sizeof(struct gpu_object_key) == 8, "layout.py: OBJECT_KEY");
_Static_assert(sizeof(struct gpu_object) == 56, "layout.py: OBJECT");
_Static_assert(sizeof(struct gpu_process) == 152, "layout.py: PROCESS");
_Static_assert(sizeof(struct gpu_cgroup) == 8, "layout.py: CGROUP");
_Static_assert(sizeof(struct gpu_forgotten) == 16, "layout.py: FORGOTTEN");
_Static_assert(sizeof(struct gpu_call) == 40, "nothing else reads it");
_Static_assert(sizeof(struct gpu_config) == 48, "layout.py: CONFIG");
_Static_assert(sizeof(struct gpu_check) == 32, "layout.py: CHECK");
_Static_assert(sizeof(struct gpu_statistics) == 104, "layout.py: STATISTICS");
_Static_assert(sizeof(struct gpu_held) == 48, "layout.py: HELD");
_Static_assert(sizeof(struct gpu_traced_call) == 120, "layout.py: TRACED");

#endif

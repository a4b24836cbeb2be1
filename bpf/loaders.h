/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What differs between bcc and libbpf, but for maps: types, helpers, how a program is declared, what it is given. */

#ifdef GPU_PROBE_BCC

#include <uapi/linux/ptrace.h>
#define PROGRAM(section, name) int name
#define FIRST(ctx) PT_REGS_PARM1(ctx)
#define SECOND(ctx) PT_REGS_PARM2(ctx)
#define THIRD(ctx) PT_REGS_PARM3(ctx)
#define RESULT(ctx) PT_REGS_RC(ctx)

#else

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u32 u32;
typedef __u64 u64;
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_ANY = 0,
	BPF_NOEXIST = 1,
};
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";
#define PROGRAM(section, name) SEC(section) int name
struct pt_regs { unsigned long di, si, dx, ax; } __attribute__((preserve_access_index)); /* x86-64 */
#define FIRST(ctx) ((ctx)->di)
#define SECOND(ctx) ((ctx)->si)
#define THIRD(ctx) ((ctx)->dx)
#define RESULT(ctx) ((ctx)->ax)

#endif

#define INLINE static inline __attribute__((always_inline))

struct enter_context { u64 common; long number; unsigned long arguments[6]; };
struct exit_context { u64 common; long number; long result; };
struct raw_context { u64 arguments[3]; };

struct seq_file;
struct iterator_meta { struct seq_file *seq; u64 session, sequence; };
struct iterator_context {
	struct iterator_meta *meta;
	u64 task;
	u32 fd, reserved;
	u64 file;
};

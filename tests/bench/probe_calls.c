/* What tests/bench/probe_*.py cannot do in Python: system calls in a loop, processes that hold files.
 *
 *   measure ROUNDS FILE NODE     ns of each kind of call: one line each, "kind ns"
 *   send PER_S SECONDS NODE      makes contexts on a device double at a rate; prints how many
 *   hold PROCESSES FILES NODE... so many processes, each with so many open files of each node; prints "ready" and
 *                                ends them at the end of standard input */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* _IOWR('F', number, size); the double rejects them, the probe is set to count that as success. */
#define COMMAND(number, size) (3u << 30 | (size) << 16 | 0x46u << 8 | (number))
#define UNRELATED 0x5401u /* TCGETS */

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec at;

	clock_gettime(clock, &at);
	return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static int opened(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0) {
		perror(path);
		exit(1);
	}
	return fd;
}

/* NVOS64 for a context below a channel group, NVOS00 for its end. */
static uint32_t allocation[12] = {0xc1d00001, 2, 3, 0x9067}, end[4] = {0xc1d00001, 2, 3};
static uint32_t unknown[4] = {0xc1d00001, 2, 0x7fffffff};

static void allocate(int node)
{
	ioctl(node, COMMAND(0x2b, 48), allocation);
}

static void free_again(int node)
{
	ioctl(node, COMMAND(0x29, 16), end);
}

#define BLOCKS 20

/* The best of some blocks, in CPU time: what others do on the machine meanwhile is not in it. */
#define MEASURE(kind, calls, code) \
	do { \
		double best = 1e18; \
		for (int block = 0; block < BLOCKS; block++) { \
			uint64_t began = clock_ns(CLOCK_PROCESS_CPUTIME_ID); \
			for (long round = 0; round < rounds; round++) { \
				code; \
			} \
			double each = (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - began) / rounds / (calls); \
			if (each < best) \
				best = each; \
		} \
		printf("%s %.2f\n", kind, best); \
	} while (0)

static int measure(long rounds, const char *path, const char *node_path)
{
	int file = opened(path), node = opened(node_path);

	MEASURE("getppid", 1, syscall(SYS_getppid));
	MEASURE("ioctl", 1, ioctl(file, UNRELATED, allocation));
	MEASURE("rm_ioctl", 1, ioctl(node, COMMAND(0x29, 16), unknown));
	MEASURE("context", 2, allocate(node); free_again(node));
	MEASURE("open_close_file", 1, close(opened(path)));
	MEASURE("open_close", 1, close(opened(node_path)));
	return 0;
}

static int send_events(long per_s, double seconds, const char *node_path)
{
	int node = opened(node_path);
	uint64_t began = clock_ns(CLOCK_MONOTONIC), ends = began + (uint64_t)(seconds * 1e9), at;
	long sent = 0;

	while ((at = clock_ns(CLOCK_MONOTONIC)) < ends)
		if (sent < (double)(at - began) * per_s / 1e9) {
			allocate(node);
			sent++;
		}
	printf("%ld\n", sent);
	return 0;
}

static int hold(int processes, int files, char **paths)
{
	struct rlimit most;
	char end_of_input;
	int ready[2];

	getrlimit(RLIMIT_NOFILE, &most);
	most.rlim_cur = most.rlim_max;
	setrlimit(RLIMIT_NOFILE, &most);
	if (pipe2(ready, O_CLOEXEC))
		return 1;
	for (int number = 0; number < processes; number++) {
		pid_t child = fork();

		if (child < 0) {
			perror("fork");
			return 1;
		}
		if (child)
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (char **path = paths; *path; path++)
			for (int opens = 0; opens < files; opens++)
				opened(*path);
		if (write(ready[1], "", 1) != 1)
			return 1;
		for (;;)
			pause();
	}
	close(ready[1]);
	for (int number = 0; number < processes; number++)
		if (read(ready[0], &end_of_input, 1) != 1)
			return 1;
	puts("ready");
	fflush(stdout);
	while (read(0, &end_of_input, 1) > 0)
		;
	return 0;
}

int main(int count, char **words)
{
	if (count == 5 && !strcmp(words[1], "measure"))
		return measure(atol(words[2]), words[3], words[4]);
	if (count == 5 && !strcmp(words[1], "send"))
		return send_events(atol(words[2]), atof(words[3]), words[4]);
	if (count >= 5 && !strcmp(words[1], "hold"))
		return hold(atoi(words[2]), atoi(words[3]), words + 4);
	fputs("usage: measure ROUNDS FILE NODE | send PER_S SECONDS NODE | hold PROCESSES FILES NODE...\n", stderr);
	return 2;
}

/* Crashes under a name of its caller's choice, so that the kernel's own line begins with it. */
#include <sys/prctl.h>
#include <sys/resource.h>

int main(int argc, char **argv)
{
    struct rlimit none = {0, 0};

    setrlimit(RLIMIT_CORE, &none);
    if (argc != 2 || prctl(PR_SET_NAME, argv[1]))
        return 2;
    *(volatile int *)0 = 0;
    return 3;
}

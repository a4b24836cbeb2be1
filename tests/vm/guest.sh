# Run by the guest as its process 1, which waits for whoever has lost its parent: makes the machine ready, has the
# scenarios played, switches off. The trace file system is not mounted, as on a node where nobody did that.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
busybox ip link set lo up
for minor in 0 1 2; do mknod "/dev/nvidia$minor" c 195 "$minor"; done
mknod /dev/nvidiactl c 195 255
stty -F /dev/ttyS1 raw -echo
cd "$VM_REPOSITORY" || exit
# shellcheck disable=SC2086 - several words
"$VM_PYTHON" -m tests.vm.guest "$VM_FOLDER" $VM_PLAYED >/dev/ttyS1 2>&1
echo "exit $?" >/dev/ttyS1
busybox poweroff -f

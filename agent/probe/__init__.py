"""The eBPF probe: who really uses each GPU, seen in the kernel.

Use it so::

    probe = await load(Request(loader="auto", tier="auto"))   # agent.probe.loading, agent.probe.request
    probe.ring.subscribe(loop, deliver)      # deliver(list[RmEvent]), at most Ring.BATCH at a time
    probe.read_objects()                     # list[RmObject]; also read_processes(), read_statistics()
    probe.scan()                             # Scan(held, unseen, source): who holds which open file
    probe.refresh()                          # device numbers and the driver's version, if they changed
    probe.reattach()                         # after the driver was loaded anew; once a poll
    probe.close()

``load`` raises ProbeLoadError, which has a code. Everything of ``Probe`` is synchronous and takes
microseconds to a few milliseconds; ``scan`` and a read of full maps belong in a daemon thread
(``agent.threads.in_daemon_thread``). ``Probe.watch(held)`` tells the kernel side of processes that hold files
without ever having opened one (inherited or received), so that their closes and exits are told too;
``forget_processes(ended)`` and ``forget_objects(gone)`` take rows out of the maps. Without a probe
``agent.probe.procfs.scan`` finds holders.

Test doubles: ``Request(doubles=Doubles(nvidia_major=1, any_return=True))`` takes ``mknod nvidia0 c 1 3``
for a GPU; ``Doubles(filesystem=os.stat(mount).st_dev)`` takes a regular file of that filesystem (FUSE) for
the character device whose kernel dev_t (``major << 20 | minor``) is the file's inode number.

Invariants: the agent imports neither bcc nor LLVM nor libbpf; those live in a one-shot process
(``loader``) that compiles, attaches, hands over descriptors and ends. Programs are compiled once.
"""

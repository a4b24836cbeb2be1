"""The eBPF probe: which processes really use each GPU, observed in the kernel.

Use it so::

    probe = await load(Request(loader="auto", tier="auto"))   # agent.probe.loading, agent.probe.request
    probe.ring.subscribe(loop, deliver)      # deliver(list[RmEvent]), at most Ring.BATCH at a time
    probe.read_objects()                     # list[RmObject]; also read_processes(), read_statistics()
    probe.scan()                             # Scan(held, unseen, source): which process holds which open file
    probe.refresh()                          # device numbers and the driver's version, if they changed
    probe.reattach()                         # after the driver was reloaded; once a poll
    probe.close()

``load`` raises ProbeLoadError, which has a code. All methods of ``Probe`` are synchronous and take
microseconds to a few milliseconds; ``scan`` and a read of full maps belong in a daemon thread
(``agent.threads.in_daemon_thread``). ``Probe.watch(held)`` adds rows for processes that hold files
without ever having opened one (inherited or received), so that the kernel sends their closes and exits, too;
``forget_processes(ended)`` and ``forget_objects(gone)`` delete rows from the maps. Without a probe
``agent.probe.procfs.scan`` finds holders.

Test doubles: with ``Request(doubles=Doubles(nvidia_major=1, any_return=True))`` a node that was made by
``mknod nvidia0 c 1 3`` counts as a GPU; with ``Doubles(filesystem=os.stat(mount).st_dev)`` a regular file of
that filesystem (FUSE) counts as the character device whose kernel dev_t (``major << 20 | minor``) is the
file's inode number.

Invariants: the agent imports neither bcc nor LLVM nor libbpf; those live in a one-shot process
(``loader``) that compiles, attaches, hands over descriptors and exits. Programs are compiled once.
"""

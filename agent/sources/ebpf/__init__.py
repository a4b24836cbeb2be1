"""The eBPF source: which processes use each GPU."""

"""Sinks: how the agent reports to kubelet, runtimes, systemd, disk and HTTP; none imports another."""

"""Prints, as JSON, what each import of the agent adds to the resident memory of a fresh interpreter.

Run as a program of its own, since what another import has brought already costs nothing more. The order is
the one in which the agent imports, so a shared part counts for the first that needs it.
"""

import os
import sys

STEPS = {
    "asyncio": ("asyncio", "logging"),
    "pynvml": ("pynvml",),
    "grpclib": ("grpclib.server", "grpclib.client"),
    "betterproto2": ("betterproto2",),
    "asyncinotify": ("asyncinotify",),
    "msgspec": ("msgspec",),
    "aiohttp": ("aiohttp.web",),
    "agent": (
        "agent.commands.run",
        "agent.app",
        "agent.sources.nvml.source",
        "agent.sources.kubelet",
        "agent.sinks.plugin.sink",
        "agent.sinks.statefile",
        "agent.sinks.http.sink",
    ),
}
"""Share to modules. The interpreter itself is the share ``python``."""


def main() -> None:
    """Import and print."""
    shares = {"python": rss_kib()}
    # As the agent does, which hides them while it imports aiohttp.
    os.environ |= {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
    for share, modules in STEPS.items():
        before = rss_kib()
        for module in modules:
            __import__(module)
        shares[share] = rss_kib() - before
    text = ", ".join(f'"{share}": {kib}' for share, kib in shares.items())
    sys.stdout.write(f"{{{text}}}\n")


def rss_kib() -> int:
    """Return VmRSS of proc(5)."""
    # No pathlib and no importlib: what this program imports for itself would be in the interpreter's share.
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()

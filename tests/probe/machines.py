"""Roots that show another machine than this one."""

from dataclasses import replace
from pathlib import Path

from agent.probe.kernel import Roots

RELEASE = "5.4.0-89-generic"
OTHER_RELEASE = "5.4.0-84-generic"
NEW_RELEASE = "6.1.0-50-amd64"

DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
234 nvidia-nvlink
507 nvidia-caps
509 nvidia-uvm

Block devices:
195 nvidia-uvm
"""


class Machine:
    """A directory each for proc, sys, modules and sources."""

    def __init__(self, root: Path, *, release: str = NEW_RELEASE) -> None:
        self.root = root
        self.write("proc/sys/kernel/osrelease", release + "\n")
        for name in ("sys", "modules", "sources"):
            (root / name).mkdir()
        self.roots = Roots(
            node_proc=f"{root}/proc",
            proc=f"{root}/proc",
            sys=f"{root}/sys",
            modules=f"{root}/modules",
            sources=f"{root}/sources",
        )

    @property
    def kernel_of_this_machine(self) -> Roots:
        """Everything of this machine's but its headers."""
        return replace(Roots(), modules=self.roots.modules, sources=self.roots.sources)

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def with_btf(self) -> None:
        self.write("sys/kernel/btf/vmlinux", "")

    def with_kprobes(self, *, pmu: int = 8) -> None:
        self.write("sys/bus/event_source/devices/kprobe/type", f"{pmu}\n")
        self.write("sys/bus/event_source/devices/kprobe/format/retprobe", "config:0\n")

    def with_driver(self, *symbols: str, version: str = "570.148.08") -> None:
        self.write("proc/devices", DEVICES)
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
        )
        lines = "".join(f"ffffffffc0de0000 t {symbol}\t[nvidia]\n" for symbol in symbols)
        self.write("proc/kallsyms", f"ffffffff81000000 T _text\n{lines}")

    def with_headers(self, path: str, *, common: bool = False) -> Path:
        """A tree of headers; with ``common``, Debian's pair of which each half lacks something."""
        tree = self.root / path
        self.write(f"{path}/include/generated/autoconf.h", "generated")
        self.write(f"{path}/arch/x86/include/generated/asm/x.h", "generated")
        shared = tree.with_name(tree.name.rpartition("-")[0] + "-common") if common else tree
        for name in ("include/linux/kconfig.h", "arch/x86/include/asm/page.h"):
            self.write(f"{(shared / name).relative_to(self.root)}", "common")
        return tree

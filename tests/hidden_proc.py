"""A /proc that shows its reader none of the processes of other users."""

from typing import Final

HIDDEN: Final = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 none /proc; exec "$@"', "sh")
"""Runs the command that follows with such a /proc; needs root, from which it hides nothing."""
DROP_ROOT: Final = """
import os
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
"""
"""For a Python program to run after its imports, since other users may not be allowed to read this Python."""

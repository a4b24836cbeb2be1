"""Where the command begins: an interrupt ends it without a traceback, from its first line on."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Not what is ignored, as by nohup. The imports below have nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Run the command that the arguments name; returns the exit code."""
    from agent.cli import main as command  # noqa: PLC0415 - after the line above

    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()

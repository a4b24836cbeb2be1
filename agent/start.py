"""Entry point of the command: an interrupt exits without a traceback from the first line on."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # An ignored signal stays ignored, as under nohup. The imports below have nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Run the command that the arguments name; returns the exit code."""
    from agent.cli import main as command  # noqa: PLC0415 - after the line above

    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()

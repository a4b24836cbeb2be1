"""The process beside its sources and sinks: start, shutdown, supervision, commands, events."""

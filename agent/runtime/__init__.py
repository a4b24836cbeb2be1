"""What one process is made of beside its sources and sinks: start, end, supervision, orders, records."""

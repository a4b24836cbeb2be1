"""The CDI sink: specifications of this node's devices for container runtimes."""

"""Sinks: what the agent tells the world; none of them knows another."""

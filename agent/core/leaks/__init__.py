"""Leaks: rules on the use of GPUs, and the findings they make."""

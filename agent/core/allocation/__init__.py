"""Allocation: what a container gets, which devices are preferred for it, and CDI specifications."""

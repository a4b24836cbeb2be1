"""The commands that are not about the simulated node, one module each.

Each has ``configure(parser)`` and ``main(args) -> exit code``; cli.py names them and imports only
the requested one.
"""

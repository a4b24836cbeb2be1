"""Processes that use simulated GPUs: the calls of a CUDA program, on the device files of the driver double.

``SimulatedProcess`` is one that executes commands, ``NodeProcesses`` are those of a simulated node.
"""

"""A double of the NVIDIA driver: device files that answer its ioctls, and the books of what it granted.

``DriverDouble`` is what the rest of the simulation uses; the process it starts is ``__main__``.
"""

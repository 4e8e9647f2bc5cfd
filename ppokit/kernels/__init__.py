"""Kernels: the same scans again, each for the place where it is the right one."""

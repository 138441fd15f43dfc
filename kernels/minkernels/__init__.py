"""Triton kernels, each beside a plain-torch oracle that says what it must compute.

Nothing here imports minengine, and Triton is imported only when a kernel is launched or compiled.
"""

"""The engine on a GPU, against what the device can do and against others that are at hand there.

Run ``python -m benchmarks.engine_gpu`` on a machine with one. Random weights of Llama-3.1-8B's shape are made on the
device, so nothing is downloaded. ``--device cpu --shape tiny`` runs the same code anywhere; its figures mean nothing.
Notes, and figures once there are some, are in benchmarks/engine_gpu.md.
"""

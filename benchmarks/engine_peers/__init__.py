"""The engine against other engines: the same weights, the same prompts, the same cores, in the same run.

Run ``python -m benchmarks.engine_peers [--environments DIRECTORY]``: every peer that is installed takes part, in this
interpreter or in one of DIRECTORY/*/bin/python. Or name them: ``--peer NAME[:FORM][@N,N]=PYTHON ...``, where PYTHON is
an interpreter that has that peer (and N,N the numbers of prompts at a time to measure it at, if not all); then nobody
else is measured, and only Penstock with ``--peer none``. Every engine is a process of its own, loaded once and stopped
while another one runs; rounds go from one to the next. What the machine can read and multiply is measured in the same
rounds.
Notes and figures are in benchmarks/engine_peers.md.
"""

"""One model computed by several processes: some share each matrix, others follow each other layer by layer.

Rank 0 is the worker: it plans, samples and speaks on the wire. It starts the other ranks (``python -m
worker.parallel``) and sends each of them every step's plan on a socket of its own, where they wait without computing;
in the middle of a step the ranks speak through torch.distributed, NCCL on CUDA and gloo on the CPU. Adapters are read
beside the steps, on a second socket. A rank that ends takes the others with it: what it held of the model and of every
sequence is gone, and the gateway starts the worker anew.
"""

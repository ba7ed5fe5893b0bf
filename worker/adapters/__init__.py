"""Adapters: small changes of one base model, many of them in one batch.

Owns their files, their memory and what they add to the decoder's products. Who may use which, and which there are to
be, is the gateway's business.
"""

from worker.adapters.adapter import Adapter
from worker.adapters.errors import AdapterError
from worker.adapters.files import read_adapter
from worker.adapters.native import NativeAdditions
from worker.adapters.step import TorchAdditions, groups_of

__all__ = ["Adapter", "AdapterError", "NativeAdditions", "TorchAdditions", "groups_of", "read_adapter"]

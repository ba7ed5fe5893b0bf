"""The transformer and its weights: one configured decoder, its loaders, and the door to every other family."""

from worker.models.architecture import Architecture
from worker.models.decoder import Decoder
from worker.models.encoders import Encoder, is_encoder, load_encoder, read_encoder, refuse_encoder
from worker.models.errors import ModelError
from worker.models.finite import not_finite
from worker.models.footprint import held_bytes
from worker.models.foreign import Facts, Foreign, is_native, load_foreign, read_facts, refuse_foreign
from worker.models.linear import Means, packs_bfloat16
from worker.models.link import Link
from worker.models.load import load_decoder, read_architecture
from worker.models.ops import NativeOps, Ops, RepeatableOps, TorchOps
from worker.models.place import path_of
from worker.models.pooled import pooling_of
from worker.models.shapes import SHAPES, random_decoder
from worker.models.shard import Layout, Shard
from worker.models.whole import Whole

__all__ = [
    "SHAPES",
    "Architecture",
    "Decoder",
    "Encoder",
    "Facts",
    "Foreign",
    "Layout",
    "Link",
    "Means",
    "ModelError",
    "NativeOps",
    "Ops",
    "RepeatableOps",
    "Shard",
    "TorchOps",
    "Whole",
    "held_bytes",
    "is_encoder",
    "is_native",
    "load_decoder",
    "load_encoder",
    "load_foreign",
    "not_finite",
    "packs_bfloat16",
    "path_of",
    "pooling_of",
    "random_decoder",
    "read_architecture",
    "read_encoder",
    "read_facts",
    "refuse_encoder",
    "refuse_foreign",
]

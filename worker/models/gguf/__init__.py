"""GGUF files: llama.cpp's container, read into the architecture and the stored forms of any other checkpoint."""

from worker.models.gguf.config import architecture_of_gguf
from worker.models.gguf.file import GgufFile
from worker.models.gguf.source import GgufSource

__all__ = ["GgufFile", "GgufSource", "architecture_of_gguf"]

"""A model in the box: where the demo checkpoint and its draft sibling lie, in the Hugging Face layout.

Importing this costs nothing: the corpus, the tokenizer and the training loop live in the modules beside it.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DRAFT_DIR = Path(__file__).parent / "draft"

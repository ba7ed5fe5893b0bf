"""GGUF files' tokenizers as they are read here, against llama.cpp's own: on how many texts do they differ?

    python -m benchmarks.gguf_tokenizers DIRECTORY --peer PYTHON [--base FILE --named NAME ...]

DIRECTORY: GGUF files; llama.cpp has some of published models that hold nothing but a vocabulary
(``models/ggml-vocab-*``, also in the source of llama-cpp-python), beside many of them texts (``.inp``) with their
tokens (``.out``). PYTHON: of an environment with ``llama-cpp-python==0.3.36``. FILE of them is also read as if its
words were cut by each NAME.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.text.gguf import described
from policies.gguf import GgufInvalid

NUM_TEXTS = 600
ROOT = Path(__file__).parents[1]
RANGES = (
    *((0x20, 0x7F),) * 6,
    *((0x00A0, 0x0250), (0x0300, 0x0340), (0x0370, 0x0600), (0x0900, 0x0A00), (0x2000, 0x2070), (0x3000, 0x3100)),
    *((0x4E00, 0x9FFF), (0xFF00, 0xFFEF), (0x1F300, 0x1F700), (0x01, 0x20)),
)
BETWEEN = (" ", "  ", "\n", " \n", "\r\n", "\t", "'s", "'T")
KEY = b"tokenizer.ggml.pre"
SEPARATOR = "\n__ggml_vocab_test__\n"
THEIRS = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=False) for text in json.load(sys.stdin)]))
"""


def texts(seed: int = 1) -> list[str]:
    """Lines of our own pages and code, and random characters."""
    chance = random.Random(seed)
    lines = [line for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("gateway/*.py")) for line in path.open() if line]
    found = [line.rstrip("\n") for line in chance.sample(lines, NUM_TEXTS // 3)]
    while len(found) < NUM_TEXTS:
        words = []
        for _ in range(chance.randrange(1, 12)):
            first, last = chance.choice(RANGES)
            words += [chr(chance.randrange(first, last)) for _ in range(chance.randrange(1, 6))]
            words += [chance.choice(BETWEEN)] if chance.random() < 0.4 else []
        found.append("".join(words))
    return found


def theirs(python: str, path: Path, asked: Sequence[str]) -> list[list[int]]:
    done = subprocess.run(
        [python, "-c", THEIRS, str(path)], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    told: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return told


def renamed(path: Path, name: str, to: Path) -> Path:
    """The same file with another name of the expression that cuts words; it must have no tensors."""
    data = path.read_bytes()
    at = data.index(KEY) + len(KEY) + 4  # a string: its length in eight bytes, then itself
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    to.write_bytes(data[:at] + struct.pack("<Q", len(name.encode())) + name.encode() + data[end:])
    return to


def compared(python: str, path: Path, asked: Sequence[str]) -> str:
    try:
        tokenizer = described(path).tokenizer
    except GgufInvalid as error:
        return f"refused: {error}"
    wrong = [tokenizer.encode(text).ids != own for text, own in zip(asked, theirs(python, path, asked), strict=True)]
    said = f"{sum(wrong)} of {len(asked)} differ"
    given = path.with_suffix(".gguf.inp")
    if given.exists():
        lines = path.with_suffix(".gguf.out").read_text().splitlines()
        pairs = [*zip(given.read_bytes().decode().split(SEPARATOR), lines, strict=False)]
        known = [
            tokenizer.encode(text, add_special_tokens=False).ids == [*map(int, ids.split())] for text, ids in pairs
        ]
        said += f", and {known.count(False)} of the {len(known)} that came with it"
    return said


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer", required=True, help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--base", help="of the files the one that is read by other names")
    parser.add_argument("--named", nargs="*", default=[])
    given = parser.parse_args(arguments)
    asked = texts()
    for path in sorted(given.directory.glob("*.gguf")):
        print(f"{path.stem}: {compared(given.peer, path, asked)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for name in given.named:
            path = renamed(given.directory / given.base, name, Path(directory) / "renamed.gguf")
            print(f"{given.base} as {name}: {compared(given.peer, path, asked)}", flush=True)


if __name__ == "__main__":
    main()

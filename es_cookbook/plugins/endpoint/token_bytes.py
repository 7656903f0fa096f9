"""The bytes that a token stands for, which may be a part of a character.

Decoded alone, half of a character is U+FFFD, and many tokenizers leave out a blank before a word.
So tokens are read from the vocabulary, where byte-level BPE writes each byte as a character of its
own (the alphabet of GPT-2), and SentencePiece writes blanks as U+2581 and single bytes as `<0xE4>`.
"""

import re
from collections.abc import Callable
from functools import cache

from es_cookbook.rl.types import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\u2581"


def bytes_reader(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Reads the bytes of this tokenizer's tokens."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    kind = b"" if decoder is None else decoder.__getstate__()
    added = tokenizer.added_tokens_decoder
    is_byte_level, is_sentencepiece = b"ByteLevel" in kind, _BLANK.encode() in kind

    def read(token: int) -> bytes:
        piece = tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and token not in added:
            if is_byte_level and all(character in _alphabet() for character in piece):
                return bytes(map(_alphabet().__getitem__, piece))
            if found := _BYTE.fullmatch(piece):
                return bytes.fromhex(found[1])
            if is_sentencepiece:
                return piece.replace(_BLANK, " ").encode()
        return str(tokenizer.decode([token])).encode()

    return read


@cache
def _alphabet() -> dict[str, int]:
    """Characters of byte-level BPE -> bytes: itself where one is printed, else the next above."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    above = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printed} | above

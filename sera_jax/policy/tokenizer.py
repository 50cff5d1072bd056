"""Tokenizers: Hugging Face directories, and small word-level ones for tiny policies.

Text is only ever encoded once, when it is first seen; what a policy sampled stays as the ids that it
sampled (see :mod:`sera_jax.policy.rendering`).
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_UNKNOWN = "<unk>"
_REPLACEMENT = "\ufffd"
_DIGITS = re.compile(r"[0-9]+")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used, or a text that it cannot hold; the message names it."""


class Tokenizer:
    """A ``tokenizers`` tokenizer with Qwen3's chat tokens.

    Args:
      backend: The tokenizer; it must hold ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>``.

    Raises:
      TokenizerError: A chat token is missing, or is not flagged special.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        # Control tokens are placed by the renderer alone: spelled out in a text they are plain text.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._is_words = isinstance(backend.model, models.WordPiece)
        ids = {name: backend.token_to_id(name) for name in (END_OF_TEXT, IM_START, IM_END)}
        missing = [name for name, token in ids.items() if token is None]
        if missing:
            raise TokenizerError(f"the tokenizer lacks {', '.join(missing)}")
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        plain = [name for name, token in ids.items() if token not in self._special]
        if plain:
            # Any text could spell them.
            raise TokenizerError(f"not flagged special in the tokenizer: {', '.join(plain)}")
        self.pad_id: int = ids[END_OF_TEXT]
        self.im_start: int = ids[IM_START]
        self.im_end: int = ids[IM_END]
        # Qwen3's generation config ends at either.
        self.stop_ids: tuple[int, ...] = (self.im_end, self.pad_id)
        # Elsewhere "<unk>" may be a word like any other, as it is in Qwen3's vocabulary.
        self._unknown = backend.token_to_id(_UNKNOWN) if self._is_words else None
        # A number is its beginning and then pieces of a digit each; every other word is one token.
        words = backend.get_vocab(with_added_tokens=False) if self._is_words else {}
        self._numbers = frozenset(i for word, i in words.items() if _DIGITS.fullmatch(word))
        self._pieces = frozenset(i for word, i in words.items() if word.startswith("##"))
        # Added tokens may lie behind a gap.
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added))

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Reads ``tokenizer.json`` of a Hugging Face directory.

        Raises:
          TokenizerError: The file is missing, damaged, or without the chat tokens.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"{path} does not exist")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing narrower.
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        return cls(backend)

    def save(self, directory: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        config = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

    def encode(self, text: str, strict: bool = False) -> list[int]:
        """Ids of a plain text; control tokens spelled in it stay text.

        Decoding gives the text back, except for what the tokenizer normalizes: Qwen3's composes
        characters (NFC), a word-level one knows only words and single spaces.

        Args:
          text: Any text.
          strict: Raise for a word outside a word-level vocabulary instead of using ``<unk>``.

        Raises:
          TokenizerError: ``strict`` and an unknown word, which the message names.
        """
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not self._is_words:
            return encoding.ids
        ids, unknown = self._whole_words(encoding)
        if strict and unknown is not None:
            low, high = unknown
            raise TokenizerError(f"{text[low:high]!r} is not in the vocabulary")
        return ids

    def _whole_words(self, encoding: tokenizers.Encoding) -> tuple[list[int], tuple[int, int] | None]:
        """Ids with ``<unk>`` for each unknown word, and the characters [start, end) of the first one.

        Pieces belong to numbers alone. Elsewhere the model takes them for the digits at the end of any
        word, and a ``##`` that a text spells would join the word before it when decoded.
        """
        if self._unknown not in encoding.ids and self._pieces.isdisjoint(encoding.ids):
            return encoding.ids, None
        ids: list[int] = []
        first: tuple[int, int] | None = None
        for _, group in itertools.groupby(
            zip(encoding.ids, encoding.offsets, encoding.word_ids, strict=True), key=lambda item: item[2]
        ):
            word = list(group)
            start = word[0][0]
            whole = start not in self._pieces and (len(word) == 1 or start in self._numbers)
            ids += [i for i, _, _ in word] if whole else [self._unknown]
            if first is None and (not whole or start == self._unknown):
                first = (word[0][1][0], word[-1][1][1])
        return ids, first

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of ids.

        Ids beyond the tokenizer, which a model with padded vocabulary rows can sample, have no text.
        With ``skip_special`` only tokens flagged special go: added marks such as ``<think>`` stay.
        """
        kept = [i for i in ids if 0 <= i < self.vocab_size and not (skip_special and i in self._special)]
        return self._backend.decode(kept, skip_special_tokens=False)

    def decoded_length(self, ids: Sequence[int]) -> int:
        """Characters of the decoded ids; a character that is cut at the end does not count."""
        text = self.decode(ids)
        if self._is_words or not text.endswith(_REPLACEMENT):
            return len(text)
        # Cut, or meant: a policy may write U+FFFD itself. The bytes tell.
        tokens = (self._backend.id_to_token(i) for i in ids if 0 <= i < self.vocab_size)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return len(decoder.decode(b"".join(map(_bytes, tokens))))

    def char_span_to_token_span(self, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
        """Tokens [low, high) that write the characters [start, end) of the decoded ids.

        With b(c) = the smallest number of tokens whose decoded prefix has at least c characters:
        low = max(0, b(start + 1) - 1), high = min(len, max(low + 1, b(end))). A token that straddles a
        boundary is included (SERA, arXiv 2610.04902, launch spans).
        """
        ids = list(ids)

        def boundary(characters: int) -> int:
            low, high = 0, len(ids)
            while low < high:
                middle = (low + high) // 2
                if self.decoded_length(ids[:middle]) >= characters:
                    high = middle
                else:
                    low = middle + 1
            return low

        low = max(0, boundary(start + 1) - 1)
        return low, min(len(ids), max(low + 1, boundary(end)))


def _byte_values() -> dict[str, int]:
    """Byte-level vocabularies spell printable bytes as themselves and the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_VALUES = _byte_values()


def _bytes(token: str | None) -> bytes:
    """The bytes that a token of a byte-level vocabulary writes."""
    if token is None:
        return b""
    values = [_BYTE_VALUES.get(character) for character in token]
    return token.encode() if None in values else bytes(values)


def word_tokenizer(words: Sequence[str], max_number: int = 99) -> Tokenizer:
    """A word-level tokenizer from an environment's own vocabulary.

    Words between spaces are one token each, and so are the integers 0 to ``max_number``; a larger
    integer, up to 100 digits, is spelled with ``##`` pieces of one digit, which decode without a gap.
    Each other word of a text is one ``<unk>``. Ids: ``<unk>``, the integers, the pieces, the words in the
    given order, then the chat tokens. Those are not part of the model's own vocabulary, so that no text
    can spell them.

    Raises:
      TokenizerError: A word twice, with a space, or one that is a number or a control token; or a
        ``max_number`` below 9, with which larger integers could not begin.
    """
    if max_number < 9:
        raise TokenizerError(f"max_number={max_number}: at least 9 is expected")
    specials = [END_OF_TEXT, IM_START, IM_END]
    numbers = [str(n) for n in range(max_number + 1)] + [f"##{digit}" for digit in range(10)]
    seen = {*specials, *numbers, _UNKNOWN}
    for word in words:
        if not word or word.split() != [word] or word.startswith("##"):
            raise TokenizerError(f"word {word!r}: words without spaces are expected")
        if word in seen or _DIGITS.fullmatch(word):
            raise TokenizerError(f"word {word!r} is there twice, or is a number or a control token")
        seen.add(word)
    vocabulary = {word: i for i, word in enumerate([_UNKNOWN, *numbers, *words])}
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token=_UNKNOWN, max_input_chars_per_word=100)
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(specials)
    return Tokenizer(backend)

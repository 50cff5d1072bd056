"""Chats as token ids, append-only.

A node's next prompt is its previous prompt, the ids that were sampled, and new context ids: nothing is
rendered or tokenized twice. Qwen3's stock template differs: it drops the thoughts of earlier turns and
may add an empty think block to the last one, so there a later prompt does not begin with an earlier
one. Here sampled thoughts stay where they were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sera_jax.policy.tokenizer import Tokenizer

Messages = Sequence[tuple[str, str]]


class Renderer(Protocol):
    """Turns messages into ids around sampled outputs."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        ...

    def start(self, messages: Messages) -> list[int]:
        """A whole first prompt, up to where the output begins."""
        ...

    def after_output(self, output_ids: Sequence[int], messages: Messages) -> list[int]:
        """The ids to append after sampled ids so that the next output can begin."""
        ...

    def reply_text(self, output_ids: Sequence[int]) -> str:
        """The text of an output without its end token."""
        ...


class _Base:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        return self._tokenizer.stop_ids

    def reply_text(self, output_ids: Sequence[int]) -> str:
        """The text of an output without its end token."""
        ids = list(output_ids)
        if ids and ids[-1] in self._tokenizer.stop_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(ids)


class ChatMLRenderer(_Base):
    """Qwen3's layout: ``<|im_start|>role``, newline, text, ``<|im_end|>``, newline for each message."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        self._newline = tokenizer.encode("\n")

    def _message(self, role: str, text: str) -> list[int]:
        t = self._tokenizer
        return [t.im_start, *t.encode(f"{role}\n{text}"), t.im_end, *self._newline]

    def _header(self) -> list[int]:
        return [self._tokenizer.im_start, *self._tokenizer.encode("assistant\n")]

    def start(self, messages: Messages) -> list[int]:
        """See :class:`Renderer`."""
        ids = [i for role, text in messages for i in self._message(role, text)]
        return ids + self._header()

    def after_output(self, output_ids: Sequence[int], messages: Messages) -> list[int]:
        """See :class:`Renderer`; an output that was cut is closed first."""
        ended = bool(output_ids) and output_ids[-1] in self.stop_ids
        close = self._newline if ended else [self._tokenizer.im_end, *self._newline]
        return [*close, *self.start(messages)]


class CompactRenderer(_Base):
    """For tiny word-level policies: two extra tokens a turn.

    Context words come bare, ``<|im_start|>`` opens the output, ``<|im_end|>`` ends it, and the next
    context follows at once. Roles are not marked: there is one voice to answer.
    """

    def start(self, messages: Messages) -> list[int]:
        """See :class:`Renderer`; a word that a policy made up becomes ``<unk>``."""
        ids = [i for _, text in messages for i in self._tokenizer.encode(text)]
        return [*ids, self._tokenizer.im_start]

    def after_output(self, output_ids: Sequence[int], messages: Messages) -> list[int]:
        """See :class:`Renderer`; an output that was cut is closed first."""
        ended = bool(output_ids) and output_ids[-1] in self.stop_ids
        return [*([] if ended else [self._tokenizer.im_end]), *self.start(messages)]

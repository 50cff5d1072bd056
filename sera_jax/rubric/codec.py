"""How rubrics and scores travel as text: JSON for language models, a compact grammar for tiny ones."""

from __future__ import annotations

from typing import Protocol

from sera_jax.rubric import compact, prompts, schema
from sera_jax.rubric.contexts import ScorerContext, WriterContext
from sera_jax.rubric.schema import ParsedScore
from sera_jax.types import Rubric


class RubricCodec(Protocol):
    """Messages out, rubrics and scores in."""

    def writer_messages(self, context: WriterContext) -> list[tuple[str, str]]:
        """What the writer reads, as (role, text)."""
        ...

    def parse_rubric(self, text: str) -> Rubric:
        """A normalised rubric; raises :class:`~sera_jax.rubric.schema.RubricError`."""
        ...

    def scorer_messages(self, context: ScorerContext) -> list[tuple[str, str]]:
        """What the scorer reads, as (role, text)."""
        ...

    def parse_score(self, text: str, rubric: Rubric) -> ParsedScore:
        """Gate and criterion scores; raises :class:`~sera_jax.rubric.schema.ScoreError`."""
        ...


class JsonCodec:
    """See :mod:`sera_jax.rubric.schema` and :mod:`sera_jax.rubric.prompts`."""

    writer_messages = staticmethod(prompts.writer_messages)
    parse_rubric = staticmethod(schema.parse_rubric)
    scorer_messages = staticmethod(prompts.scorer_messages)
    parse_score = staticmethod(schema.parse_score)


class CompactCodec:
    """See :mod:`sera_jax.rubric.compact`."""

    writer_messages = staticmethod(compact.writer_messages)
    parse_rubric = staticmethod(compact.parse_rubric)
    scorer_messages = staticmethod(compact.scorer_messages)
    parse_score = staticmethod(compact.parse_score)

"""The ledger: what labels and completions cost, from the first step on (the paper's Table 2)."""

from __future__ import annotations

import collections
from collections.abc import Mapping

_FIELDS = ("calls", "tokens_in", "tokens_out")


class Ledger:
    """Counts calls and tokens by source, stage and purpose; adding is the only change.

    Sources are ``verifier`` (program labels), ``judge`` (model labels) and ``policy`` (completions of
    the policy itself).
    """

    def __init__(self):
        self._counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()

    def add(
        self,
        source: str,
        *,
        stage: str,
        purpose: str,
        calls: int = 1,
        tokens_in: int = 0,
        tokens_out: int = 0,
    ) -> None:
        """Books one or more calls.

        Raises:
          ValueError: A negative number; the message names the field.
        """
        for name, value in zip(_FIELDS, (calls, tokens_in, tokens_out), strict=True):
            if value < 0:
                raise ValueError(f"{name}={value}: a ledger only grows")
            if value:
                self._counts[source, str(stage), str(purpose), name] += value

    def total(self, source: str, field: str = "calls", purpose: str | None = None) -> int:
        """Sum over stages, and over purposes unless one is named."""
        return sum(
            count
            for (s, _, p, f), count in self._counts.items()
            if s == source and f == field and purpose in (None, p)
        )

    def totals(self) -> dict[str, int]:
        """Flat totals ``source/purpose/field`` over stages, for metrics."""
        result: collections.Counter[str] = collections.Counter()
        for (source, _, purpose, field), count in self._counts.items():
            result[f"{source}/{purpose}/{field}"] += count
        return dict(sorted(result.items()))

    def to_dict(self) -> dict[str, int]:
        """Plain data, keys ``source/stage/purpose/field``."""
        return {"/".join(key): count for key, count in sorted(self._counts.items())}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Ledger:
        """Inverse of :meth:`to_dict`.

        Raises:
          ValueError: A key or count that no ledger wrote.
        """
        ledger = cls()
        for key, count in data.items():
            parts = tuple(key.split("/"))
            if len(parts) != 4 or parts[3] not in _FIELDS or count < 0:
                raise ValueError(f"ledger: {key!r}: {count!r} is not SOURCE/STAGE/PURPOSE/FIELD: COUNT")
            ledger._counts[parts] += int(count)
        return ledger

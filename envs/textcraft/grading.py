"""Compact evidence and criteria: how they are written, and the program's grade of one by the other.

Evidence is ``net 2 x ; made 2 x 1 y ; turns 3 ; said done ;``: net increments of the node's targets
since it was launched (never below 0), what its subtree crafted, turns used, and what it said at its
end. Criteria are ``have 2 x``, ``made x``, ``turns 4`` and ``said done``. The program's grades serve
for demonstrations and for measuring how often a policy's own scorer is right; training never sees them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"[0-9]{1,8}")


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Parsed evidence; items that are not named count 0."""

    net: Mapping[str, int]
    made: Mapping[str, int]
    turns: int
    said: str

    def text(self) -> str:
        """The compact form."""
        parts = [f"net {_pairs(self.net)}", f"made {_pairs(self.made) or 'none'}", f"turns {self.turns}"]
        return " ; ".join([*parts, f"said {self.said} ;"])


def _pairs(counts: Mapping[str, int]) -> str:
    return " ".join(f"{count} {item}" for item, count in counts.items())


def read_number(word: str) -> int | None:
    """A non-negative integer of at most eight ASCII digits; None for any other word.

    What a policy writes may be any string: other scripts have digits too, and ``int`` raises on very long
    ones. Eight digits are far beyond any inventory and keep the products of a craft within int32.
    """
    return int(word) if _NUMBER.fullmatch(word) else None


def parse_evidence(text: str) -> Evidence:
    """Inverse of :meth:`Evidence.text`.

    Raises:
      ValueError: Not evidence.
    """
    fields: dict[str, list[str]] = {}
    for part in text.split(";"):
        if words := part.split():
            fields[words[0]] = words[1:]
    try:
        return Evidence(
            net=_counts(fields["net"]),
            made={} if fields["made"] == ["none"] else _counts(fields["made"]),
            turns=int(fields["turns"][0]),
            said=fields["said"][0],
        )
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"not evidence: {text!r}") from error


def _counts(words: list[str]) -> dict[str, int]:
    if len(words) % 2:
        raise ValueError("pairs of a count and an item are expected")
    return {item: int(count) for count, item in zip(words[::2], words[1::2], strict=True)}


def grade(criterion: str, evidence: Evidence | str) -> float | None:
    """1.0 where the evidence meets a criterion, 0.0 where it does not, None for an unknown criterion."""
    if isinstance(evidence, str):
        evidence = parse_evidence(evidence)
    match criterion.split():
        case ["have", count, item] if (units := read_number(count)) is not None:
            return float(evidence.net.get(item, 0) >= units)
        case ["made", item]:
            return float(evidence.made.get(item, 0) > 0)
        case ["turns", most] if (limit := read_number(most)) is not None:
            return float(evidence.turns <= limit)
        case ["said", word]:
            return float(evidence.said == word)
    return None

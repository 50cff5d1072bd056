"""The protocol that every rollout engine obeys.

Token in, token out: an engine takes token ids and a key and returns token ids, their log-probs under
the distribution they were drawn from, why it stopped, and the version of the weights that made them.
Nothing here knows text, except a server's own transport.

Training samples with temperature only. Top-p and top-k change the distribution without changing the
log-probs that engines report, so they do not exist in :class:`SamplingParams`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sera_jax.types import Completion


class EngineError(RuntimeError):
    """A request or an update that the engine refuses; the message names the field and the value."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion.

    Attributes:
      max_tokens: Most tokens to sample, at least 1.
      temperature: 0 is greedy; log-probs are then those of the temperature-1 softmax.
      stop_ids: Sampling any of these ends the completion; the id is part of the output.
    """

    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to sample.

    Attributes:
      ids: The whole prompt as token ids; for a session, its earlier prompt and outputs verbatim first.
      params: See :class:`SamplingParams`.
      key: uint32 [2] raw key data; the completion is a function of (weights, ids, params, key) alone.
      session: Names a sequence that will be continued, so that the engine may keep its cache. The
        engine may drop the cache at any time; it then computes the prompt again.
      fork_of: Session whose cache shares a prefix with this prompt.
    """

    ids: tuple[int, ...]
    params: SamplingParams
    key: np.ndarray
    session: str | None = None
    fork_of: str | None = None


@runtime_checkable
class Engine(Protocol):
    """What the agent loop and the training loop need of an engine."""

    @property
    def version(self) -> int:
        """Version of the weights now served."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Samples one completion; concurrent calls are batched."""
        ...

    async def end_session(self, session: str) -> None:
        """Tells that a session will not be continued."""
        ...

    async def update_weights(self, params: Any, version: int) -> None:
        """Serves ``params`` from now on; no later token comes from old weights or a stale cache."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters since start: tokens prefilled, saved and sampled, requests, seconds."""
        ...


def derive_key(*parts: object) -> np.ndarray:
    """Raw key data, uint32 [2], from any path of names and numbers.

    The path (seed, version, task, tree, node, turn, purpose) names one completion, so that each can be
    replayed alone and none depends on what else was sampled before it.
    """
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32).copy()

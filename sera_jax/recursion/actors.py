"""Who writes the completions of a tree: the policy behind an engine, or a script.

Everything that a tree needs written, its nodes' turns, rubrics and scores, goes through one
:class:`Actor`. A scripted actor therefore runs through the same agent loop, prompts, token records and
parsers as the policy: its trees are demonstrations and tests of everything above it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from envs.base import NodeView, World
from sera_jax.rollout.engine import Engine, EngineError, Request, SamplingParams, derive_key
from sera_jax.rubric.contexts import ScorerContext, WriterContext
from sera_jax.types import Completion, Purpose


@dataclasses.dataclass(frozen=True)
class Call:
    """One completion that a tree needs.

    Attributes:
      purpose: What it is for.
      ids: The whole prompt.
      params: How to sample.
      path: Names the completion uniquely within a run; the sampling key derives from it.
      session: Set for a node's turns, which continue one sequence.
      view, world, observation: For ``execute``: the node, its world and the last observation.
      writer: For ``rubric``: what the writer may know.
      scorer: For ``score``: what the scorer may know.
    """

    purpose: Purpose
    ids: tuple[int, ...]
    params: SamplingParams
    path: tuple[object, ...]
    session: str | None = None
    view: NodeView | None = None
    world: World | None = None
    observation: str = ""
    writer: WriterContext | None = None
    scorer: ScorerContext | None = None


class Actor(Protocol):
    """Writes completions."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    async def complete(self, call: Call) -> Completion:
        """Writes one completion; raises what the engine raises."""
        ...

    async def end_session(self, session: str) -> None:
        """Tells that a node will take no further turn."""
        ...


class PolicyActor:
    """The policy behind a rollout engine."""

    def __init__(self, engine: Engine, seed: int):
        self._engine = engine
        self._seed = seed

    @property
    def context_length(self) -> int:
        """See :class:`Actor`."""
        return self._engine.context_length

    async def complete(self, call: Call) -> Completion:
        """See :class:`Actor`; the key is a function of the run's seed and the call's path alone.

        The path begins with the version of the weights; a completion of other weights is refused.
        """
        key = derive_key(self._seed, *call.path)
        completion = await self._engine.generate(
            Request(ids=call.ids, params=call.params, key=key, session=call.session)
        )
        if completion.version != call.path[0]:
            raise EngineError(
                f"a completion of version {completion.version} came where version {call.path[0]} is sampled"
            )
        return completion

    async def end_session(self, session: str) -> None:
        """See :class:`Actor`."""
        await self._engine.end_session(session)


class ScriptedActor:
    """A program in the policy's place.

    Args:
      write: From a call to the text that the policy would have written.
      encode: From text to token ids.
      end_id: The end token that closes each output.
      context_length: Most tokens of prompt and output together.
    """

    def __init__(
        self,
        write: Callable[[Call], str],
        encode: Callable[[str], list[int]],
        end_id: int,
        context_length: int,
    ):
        self._write = write
        self._encode = encode
        self._end_id = end_id
        self._context_length = context_length

    @property
    def context_length(self) -> int:
        """See :class:`Actor`."""
        return self._context_length

    async def complete(self, call: Call) -> Completion:
        """See :class:`Actor`; log-probs are 0 because nothing was sampled."""
        ids = (*self._encode(self._write(call)), self._end_id)
        room = self._context_length - len(call.ids)
        limit = min(call.params.max_tokens, room)
        stop = "stop" if len(ids) <= limit else ("length" if limit < room else "context")
        return Completion(ids=ids[:limit], logprobs=(0.0,) * min(len(ids), limit), stop=stop, version=0)

    async def end_session(self, session: str) -> None:
        """See :class:`Actor`; nothing to release."""

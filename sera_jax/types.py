"""The vocabulary of the project as records.

A *task* is a root problem with a verifier. A *tree* is one recursive rollout of a task; a *node* is one
agent in it; a *turn* is one policy output and its observation. A *launch* is a delegation that a parent
writes; an *event* is all launches of one turn of one node. In the rubric stage a launch may be run B
times from cloned states: each run is a *branch*, the B of them a *group*. A *rubric* is weighted
*criteria* with a *gate*; a *score* in [0, 1] is what a rubric gives a child; a *label* is a verified
success. A *stage* says which ability an optimizer step trains; the *version*, the number of completed
updates, is the only clock.

Shape letters, used as suffixes in algorithm code: P tasks, K trees a task, N node slots, B branches,
C criteria, T tokens, R rows, D depth levels, V vocabulary, S samples.

Records are host-side Python objects; arrays appear only in :class:`Sample` and below it.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from envs.base import Goal, Task

__all__ = [
    "Completion",
    "Criterion",
    "Failure",
    "Goal",
    "Launch",
    "Node",
    "Purpose",
    "Role",
    "Rubric",
    "RubricRecord",
    "Sample",
    "ScoreRecord",
    "Stage",
    "StopReason",
    "Task",
    "Tree",
    "Turn",
]


class Stage(enum.StrEnum):
    """What one optimizer step trains."""

    EXECUTION = "execution"
    DELEGATION = "delegation"
    RUBRIC = "rubric"


class Role(enum.IntEnum):
    """The role of one token. LAUNCH is the part of EXECUTE that writes a launch."""

    PAD = 0
    CONTEXT = 1  # prompts and observations
    EXECUTE = 2
    LAUNCH = 3
    RUBRIC = 4
    SCORE = 5


class StopReason(enum.StrEnum):
    """Why a node ended."""

    FINISHED = "finished"  # it issued finish
    TURNS = "turns"  # its turn budget is spent
    CONTEXT = "context"  # the next prompt would not fit the context
    LOOP = "loop"  # it repeated itself and was stopped
    ERROR = "error"  # an exception; the message is in Node.error
    DEADLINE = "deadline"  # the tree's deadline passed
    CANCELLED = "cancelled"  # its tree was given up


class Purpose(enum.StrEnum):
    """What a completion is for; also the unit in which tokens are accounted."""

    EXECUTE = "execute"
    RUBRIC = "rubric"
    SCORE = "score"


class Failure(enum.StrEnum):
    """Why a rubric, a score or a label is missing. A missing one is never counted as 0."""

    RUBRIC_PARSE = "rubric_parse"
    SCORE_PARSE = "score_parse"
    CONTEXT = "context"  # the prompt did not fit
    TRUNCATED = "truncated"  # the output hit its token limit
    REQUEST = "request"  # the engine or the judge failed
    NO_RUBRIC = "no_rubric"  # nothing to score with


@dataclasses.dataclass(frozen=True)
class Completion:
    """One output of a policy.

    Attributes:
      ids: Sampled token ids, the stop token included when one was sampled.
      logprobs: Log-probability of each id under the temperature-scaled softmax it was drawn from.
      stop: ``stop`` (a stop token), ``length`` (the token limit) or ``context`` (no room for output).
      version: Version of the weights that produced every token of it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: str
    version: int


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One weighted criterion; weights of a rubric sum to 1."""

    name: str
    weight: float
    description: str
    score_0: str = ""
    score_full: str = ""


@dataclasses.dataclass(frozen=True)
class Rubric:
    """A frozen standard for one launch, written before its child runs."""

    criteria: tuple[Criterion, ...]
    gate: str
    failure_conditions: tuple[str, ...] = ()
    procedure: str = ""


@dataclasses.dataclass
class RubricRecord:
    """A rubric with the tokens that wrote it.

    ``hash`` is set once, at launch, before the child's first token. ``rubric`` is None when ``failure``
    says why there is none.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion | None
    rubric: Rubric | None
    hash: str | None
    failure: Failure | None = None
    text: str = ""


@dataclasses.dataclass
class ScoreRecord:
    """A child's score under the rubric whose hash it names.

    ``value`` is gate x sum of weight x criterion score, in [0, 1]; None when ``failure`` says why.
    ``gated`` is True when the child did not finish: then the value is 0 and no scorer was asked.
    """

    rubric_hash: str | None
    value: float | None
    gate: bool | None = None
    criteria: tuple[float, ...] = ()
    failure: Failure | None = None
    gated: bool = False
    prompt_ids: tuple[int, ...] = ()
    completion: Completion | None = None
    text: str = ""


@dataclasses.dataclass
class Turn:
    """One policy output of a node and the observation that answered it.

    ``start`` and ``end`` delimit the output in the node's token lists; ``launch_spans`` are token spans
    in the same coordinates. ``version`` is that of the weights that wrote it, as the engine echoed it.
    ``outcome`` is the environment's typed code by name.
    """

    index: int
    start: int
    end: int
    reply: str
    stop: str
    outcome: str = ""
    observation: str = ""
    launch_spans: tuple[tuple[int, int], ...] = ()
    launches: list[int] = dataclasses.field(default_factory=list)
    version: int = 0


@dataclasses.dataclass
class Launch:
    """A delegation: ids of the nodes that ran it (one, or B branches) and its frozen rubric."""

    id: int
    parent: int
    turn: int
    goal: Goal
    children: list[int] = dataclasses.field(default_factory=list)
    rubric: RubricRecord | None = None
    is_group: bool = False
    refused: str = ""


@dataclasses.dataclass
class Node:
    """One agent of a tree, with its append-only token record.

    ``token_ids``, ``roles`` and ``logprobs`` have equal length; the log-prob of a CONTEXT token is 0.
    ``success`` is the program verifier's label, None where nobody asked it.
    """

    id: int
    parent: int | None
    depth: int
    goal: Goal
    launch: int | None = None
    branch: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    roles: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    stop: StopReason | None = None
    finish_message: str = ""
    error: str = ""
    success: bool | None = None
    score: ScoreRecord | None = None
    evidence: str = ""


@dataclasses.dataclass
class Tree:
    """One recursive rollout of a task; ``nodes[0]`` is the root."""

    task: Task
    index: int
    version: int
    stage: Stage
    nodes: list[Node] = dataclasses.field(default_factory=list)
    launches: list[Launch] = dataclasses.field(default_factory=list)
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def root(self) -> Node:
        """The root node."""
        return self.nodes[0]

    @property
    def success(self) -> bool:
        """Verified success of the root; a root without a label did not succeed."""
        return bool(self.nodes and self.nodes[0].success)


@dataclasses.dataclass
class Sample:
    """One token sequence for the learner.

    Attributes:
      token_ids: int32 [T].
      roles: uint8 [T], see :class:`Role`.
      mask: bool [T], True where the token is trained. Position t is trained as a *target*: its
        log-prob is that of token t given tokens before it, so ``mask[0]`` is always False.
      advantage: float32 [T], 0 where not masked. Depth weights are already in it.
      logprobs: float32 [T], the sampler's log-prob, 0 where the sampler did not write the token.
      depth: Depth label used by the depth weights.
      starts_trajectory: True on the first sample of a trajectory, see the depth weights.
      temperature: Temperature the tokens were sampled with.
      source: Where it comes from, for reports: (tree index, node or launch id).
    """

    token_ids: np.ndarray
    roles: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray
    logprobs: np.ndarray
    depth: int = 0
    starts_trajectory: bool = True
    temperature: float = 1.0
    source: tuple[int, int] = (-1, -1)

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

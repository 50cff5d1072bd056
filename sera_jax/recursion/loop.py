"""The agent loop: one task becomes one tree.

A tree advances in ticks. In a tick, every node that needs a turn and every launch that needs a rubric
asks the actor at once; the answers are applied in node order. So a tree is a function of its task, its
path of keys and the weights, whatever else the engine has in its batch, and different trees never wait
for one another.

    ready nodes, unwritten rubrics --actor--> completions     (one batch)
    completion -> reply -> environment turn -> observation | launch | finish
    launch -> rubric written and frozen -> child nodes open -> first token next tick
    last child of a turn ends -> the parent's turn goes on with their reports
    after the last tick: scores, by frozen rubrics, of children that finished

Nothing that a policy writes raises: a bad reply is an observation, a bad rubric or score a counted
failure. An exception in the engine ends its node, not the tree.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from envs.base import Environment, NodeView, TurnGenerator, TurnOutcome, World
from sera_jax.labels.ledger import Ledger
from sera_jax.policy.rendering import Renderer
from sera_jax.policy.tokenizer import Tokenizer
from sera_jax.recursion.actors import Actor, Call
from sera_jax.recursion.counterfactual import ForkBudget
from sera_jax.rollout.engine import SamplingParams
from sera_jax.rubric.codec import RubricCodec
from sera_jax.rubric.contexts import ScorerContext, WriterContext
from sera_jax.rubric.schema import RubricError, ScoreError, rubric_hash
from sera_jax.rubric.score import score_value
from sera_jax.types import (
    Completion,
    Failure,
    Goal,
    Launch,
    Node,
    Purpose,
    Role,
    RubricRecord,
    ScoreRecord,
    Stage,
    StopReason,
    Task,
    Tree,
    Turn,
)


class PromptTooLongError(RuntimeError):
    """A rubric or score prompt that leaves no room for an answer; nobody is asked."""


_UNFINISHED = (StopReason.ERROR, StopReason.DEADLINE, StopReason.CANCELLED)


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """What a tree is sampled for, and its limits.

    Attributes:
      stage: Recorded in the tree.
      max_turns, max_depth, max_tokens, temperature: Limits of every node.
      rubrics: ``"none"``, ``"launches"`` (one a launch) or ``"groups"`` (one a group of branches).
      branches, budget: See :class:`~sera_jax.recursion.counterfactual.ForkBudget`; 0: no groups.
      sequential: Run the launches of one turn one after another, each from the state that the last
        one left, instead of side by side in the shared world.
      writer_tokens, scorer_tokens, writer_temperature: Sampling of rubrics; scores are greedy.
      deadline_seconds: Wall-clock limit of the tree; None for none.
    """

    stage: Stage
    max_turns: int
    max_depth: int
    max_tokens: int
    temperature: float = 1.0
    rubrics: str = "none"
    branches: int = 0
    budget: int = 0
    sequential: bool = False
    writer_tokens: int = 1024
    scorer_tokens: int = 1024
    writer_temperature: float = 1.0
    deadline_seconds: float | None = None


@dataclasses.dataclass
class Toolbox:
    """What turning replies into trees needs besides the actor: one set for a whole run."""

    environment: Environment
    tokenizer: Tokenizer
    renderer: Renderer
    codec: RubricCodec
    ledger: Ledger


@dataclasses.dataclass
class _Run:
    """A live node: its record, what it sees, and the turn that waits for children."""

    node: Node
    view: NodeView
    world: World
    messages: list[tuple[str, str]]
    ready: bool = True
    generator: TurnGenerator | None = None
    launches: list[Launch] = dataclasses.field(default_factory=list)
    reports: list[str | None] = dataclasses.field(default_factory=list)
    observation: str = ""


class TreeRunner:
    """Samples one tree; make one for each."""

    def __init__(self, tools: Toolbox, actor: Actor, spec: TreeSpec):
        self._tools = tools
        self._env = tools.environment
        self._actor = actor
        self._spec = spec
        self._budget = ForkBudget(branches=spec.branches, limit=spec.budget)
        self._runs: list[_Run] = []
        self._to_write: list[tuple[Launch, _Run, WriterContext]] = []
        self._ended_sessions: list[str] = []
        self._snapshots: dict[int, dict] = {}
        self._counters: collections.Counter[str] = collections.Counter()

    async def run(self, task: Task, index: int, version: int) -> Tree:
        """Samples tree number ``index`` of ``task`` with the weights of ``version``."""
        self._tree = Tree(task=task, index=index, version=version, stage=self._spec.stage)
        self._path = (version, str(self._spec.stage), task.id, index)
        self._open(task.goal, self._env.reset(task), parent=None, launch=None, branch=0)
        try:
            async with asyncio.timeout(self._spec.deadline_seconds):
                while any(run.node.stop is None for run in self._runs):
                    await self._tick()
                await self._score_children()
        except TimeoutError:
            self._give_up(StopReason.DEADLINE)
        except Exception as error:  # a fault in here or in the environment costs this tree, not the run
            self._give_up(StopReason.ERROR)
            self._tree.error = f"fault: {type(error).__name__}: {error}"
        for session in self._ended_sessions:
            await self._actor.end_session(session)
        root = self._tree.root
        if root.stop in _UNFINISHED and not self._tree.error:
            self._tree.error = f"{root.stop}: {root.error}"
        self._count("worlds", self._budget.created)
        self._tree.counters = dict(self._counters)
        return self._tree

    def _give_up(self, stop: StopReason) -> None:
        """Ends what is live and marks scores that will not come, so that both are counted by cause."""
        for run in self._runs:
            if run.node.stop is None:
                run.node.stop = stop
                self._count(f"stop/{stop}")
                self._ended_sessions.append(self._session(run.node))
        for node, record in self._to_score():
            if node.score is None:
                lost = ScoreRecord(record.hash, None, failure=Failure.REQUEST)
                node.score = self._unasked_score(node, record) or lost
                if node.score.failure:
                    self._count(f"score_failed/{node.score.failure}")

    # --- ticks ---------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """One batch of completions, applied in order: rubrics first, then nodes."""
        writing, self._to_write = self._to_write, []
        ready = [run for run in self._runs if run.ready]
        if not writing and not ready:
            raise RuntimeError("a tree has live nodes, but none can go on")
        calls = [self._rubric_call(launch, context) for launch, _, context in writing]
        calls += [self._turn_call(run) for run in ready]
        answers = await asyncio.gather(*map(self._complete, calls), return_exceptions=True)
        for (launch, run, _), call, answer in zip(writing, calls, answers, strict=False):
            self._freeze_rubric(launch, run, call, answer)
        for run, answer in zip(ready, answers[len(writing) :], strict=True):
            run.ready = False
            if isinstance(answer, BaseException):
                self._end(run, StopReason.ERROR, error=f"{type(answer).__name__}: {answer}")
            else:
                self._apply(run, answer)
        for session in self._ended_sessions:
            await self._actor.end_session(session)
        self._ended_sessions.clear()

    async def _complete(self, call: Call) -> Completion:
        room = self._actor.context_length - len(call.ids)
        if room < 1:
            raise PromptTooLongError(f"a {call.purpose} prompt of {len(call.ids)} tokens")
        return await self._actor.complete(call)

    def _turn_call(self, run: _Run) -> Call:
        node = run.node
        return Call(
            purpose=Purpose.EXECUTE,
            ids=tuple(node.token_ids),
            params=SamplingParams(
                max_tokens=self._spec.max_tokens,
                temperature=self._spec.temperature,
                stop_ids=self._tools.renderer.stop_ids,
            ),
            path=(*self._path, node.id, len(node.turns), "execute"),
            session=self._session(node),
            view=run.view,
            world=run.world,
            observation=run.observation,
        )

    def _apply(self, run: _Run, completion: Completion) -> None:
        """Records a turn's output and plays it until it ends or waits for children."""
        node, tools = run.node, self._tools
        self._account(Purpose.EXECUTE, len(node.token_ids), completion)
        start = len(node.token_ids)
        self._extend(node, completion.ids, Role.EXECUTE, completion.logprobs)
        reply = tools.renderer.reply_text(completion.ids)
        turn = Turn(
            len(node.turns), start, len(node.token_ids), reply, completion.stop, version=completion.version
        )
        node.turns.append(turn)
        run.messages.append(("assistant", reply))
        run.view.turn += 1
        if completion.stop == "context":
            self._end(run, StopReason.CONTEXT)
            return
        spans = [
            tools.tokenizer.char_span_to_token_span(completion.ids, low, high)
            for low, high in self._env.launch_spans(reply)
        ]
        turn.launch_spans = tuple((start + low, start + high) for low, high in spans)
        for low, high in turn.launch_spans:
            node.roles[low:high] = [int(Role.LAUNCH)] * (high - low)
        run.generator = self._env.turn(run.view, run.world, reply)
        self._advance(run, None)

    def _advance(self, run: _Run, reports: Sequence[str] | None) -> None:
        """Runs the turn's generator on to its next launch or its end."""
        assert run.generator is not None
        try:
            request = run.generator.send(reports)
        except StopIteration as stop:
            self._finish_turn(run, stop.value)
            return
        except Exception as error:  # a fault of the environment must not take the tree with it
            self._end(run, StopReason.ERROR, error=f"{type(error).__name__}: {error}")
            return
        if not request.goals:  # nothing to wait for
            self._advance(run, [])
            return
        run.launches = [self._new_launch(run, goal) for goal in request.goals]
        run.reports = [None] * len(run.launches)
        for launch in run.launches[:1] if self._spec.sequential else run.launches:
            self._begin(launch, run)

    def _finish_turn(self, run: _Run, outcome: TurnOutcome) -> None:
        node, turn = run.node, run.node.turns[-1]
        turn.outcome, turn.observation = outcome.code, outcome.observation
        run.generator = None
        self._count(f"outcome/{outcome.code}")
        if outcome.finished:
            self._end(run, StopReason.FINISHED, message=outcome.message)
        elif outcome.code == "loop":
            self._end(run, StopReason.LOOP)
        elif run.view.turn >= run.view.max_turns:
            self._end(run, StopReason.TURNS)
        else:
            output = node.token_ids[turn.start : turn.end]
            message = ("user", outcome.observation)
            self._extend(node, self._tools.renderer.after_output(output, [message]), Role.CONTEXT)
            run.messages.append(message)
            run.observation = outcome.observation
            if len(node.token_ids) >= self._actor.context_length:
                self._end(run, StopReason.CONTEXT)
            else:
                run.ready = True

    # --- nodes ---------------------------------------------------------------------------------

    def _open(
        self, goal: Goal, world: World, parent: _Run | None, launch: Launch | None, branch: int
    ) -> None:
        depth = 0 if parent is None else parent.node.depth + 1
        view = self._env.open(world, goal, depth, self._spec.max_depth, self._spec.max_turns)
        messages = list(self._env.prompt(view, world))
        node = Node(
            id=len(self._tree.nodes),
            parent=None if parent is None else parent.node.id,
            depth=depth,
            goal=goal,
            launch=None if launch is None else launch.id,
            branch=branch,
        )
        self._extend(node, self._tools.renderer.start(messages), Role.CONTEXT)
        self._tree.nodes.append(node)
        run = _Run(node, view, world, messages)
        self._runs.append(run)
        if launch is not None:
            launch.children.append(node.id)
        if len(node.token_ids) >= self._actor.context_length:
            self._end(run, StopReason.CONTEXT)

    def _end(self, run: _Run, stop: StopReason, message: str = "", error: str = "") -> None:
        node = run.node
        run.ready, run.generator = False, None
        node.stop, node.finish_message, node.error = stop, message, error
        self._count(f"stop/{stop}")
        if stop not in _UNFINISHED:
            # A node that did not finish has failed by rule; only a finished one costs a verifier call.
            node.success = False
            if stop == StopReason.FINISHED:
                node.success = self._env.verify(run.view, run.world, message)
                self._tools.ledger.add(
                    "verifier", stage=self._spec.stage, purpose=self._label_purpose(node)
                )
        node.evidence = self._env.evidence(run.view, run.world, str(stop), message)
        self._snapshots[node.id] = dict(self._env.snapshot(run.view, run.world))
        self._ended_sessions.append(self._session(node))
        if node.launch is not None:
            self._child_ended(self._tree.launches[node.launch])

    def _child_ended(self, launch: Launch) -> None:
        children = [self._runs[i] for i in launch.children]
        expected = self._spec.branches if launch.is_group else 1
        if len(children) < expected or any(run.node.stop is None for run in children):
            return
        parent, first = self._runs[launch.parent], children[0]
        if parent.node.stop is not None:
            return
        if launch.is_group:
            parent.world.state = first.world.state  # branch 0 is the one that happened
        report = self._env.child_report(
            parent.view, first.view, first.node.finish_message, str(first.node.stop)
        )
        slot = parent.launches.index(launch)
        parent.reports[slot] = report
        if all(text is not None for text in parent.reports):
            self._advance(parent, [text or "" for text in parent.reports])
        elif self._spec.sequential:
            self._begin(parent.launches[slot + 1], parent)

    # --- launches ------------------------------------------------------------------------------

    def _new_launch(self, run: _Run, goal: Goal) -> Launch:
        turn = run.node.turns[-1]
        launch = Launch(id=len(self._tree.launches), parent=run.node.id, turn=turn.index, goal=goal)
        turn.launches.append(launch.id)
        self._tree.launches.append(launch)
        return launch

    def _begin(self, launch: Launch, run: _Run) -> None:
        """Starts a launch: its rubric first where one is due, else its child."""
        launch.is_group = self._spec.rubrics == "groups" and self._budget.reserve()
        if launch.is_group or self._spec.rubrics == "launches":
            # Everything that the writer may know exists now, before the child's first token.
            self._to_write.append((launch, run, self._writer_context(launch, run)))
        else:
            self._open(launch.goal, run.world, run, launch, branch=0)

    def _writer_context(self, launch: Launch, run: _Run) -> WriterContext:
        return WriterContext(
            parent_goal=run.node.goal.text,
            parent_depth=run.node.depth,
            child_depth=run.node.depth + 1,
            parent_turn=launch.turn,
            history=tuple(run.messages[:-1]),
            parent_reply=run.node.turns[-1].reply,
            snapshot=self._env.snapshot(run.view, run.world),
            goal=launch.goal,
            tools=self._env.tools,
            max_turns=self._spec.max_turns,
        )

    def _rubric_call(self, launch: Launch, context: WriterContext) -> Call:
        prompt = self._tools.renderer.start(self._tools.codec.writer_messages(context))
        return Call(
            purpose=Purpose.RUBRIC,
            ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=self._spec.writer_tokens,
                temperature=self._spec.writer_temperature,
                stop_ids=self._tools.renderer.stop_ids,
            ),
            path=(*self._path, launch.id, "rubric"),
            writer=context,
        )

    def _freeze_rubric(
        self, launch: Launch, run: _Run, call: Call, answer: Completion | BaseException
    ) -> None:
        """Parses and hashes the rubric, then opens the launch's child or branches."""
        record = RubricRecord(prompt_ids=call.ids, completion=None, rubric=None, hash=None)
        if isinstance(answer, BaseException):
            record.failure, record.text = _failure_of(answer), f"{type(answer).__name__}: {answer}"
        else:
            self._account(Purpose.RUBRIC, len(call.ids), answer)
            record.completion = answer
            record.text = self._tools.renderer.reply_text(answer.ids)
            if answer.stop != "stop":
                record.failure = Failure.TRUNCATED if answer.stop == "length" else Failure.CONTEXT
            else:
                try:
                    record.rubric = self._tools.codec.parse_rubric(record.text)
                    record.hash = rubric_hash(record.rubric)
                except RubricError as error:
                    record.failure = error.failure
        launch.rubric = record
        if record.failure:
            self._count(f"rubric_failed/{record.failure}")
            if launch.is_group:  # without a rubric there is nothing to rank: run the launch once
                launch.is_group = False
                self._budget.release()
        if run.node.stop is not None:
            return
        for branch in range(self._spec.branches if launch.is_group else 1):
            world = run.world.clone() if launch.is_group else run.world
            self._open(launch.goal, world, run, launch, branch)

    # --- scores --------------------------------------------------------------------------------

    async def _score_children(self) -> None:
        """Scores every child whose launch has a rubric; the gate comes first, then the scorer."""
        asked: list[tuple[Node, RubricRecord, Call]] = []
        for node, record in self._to_score():
            node.score = self._unasked_score(node, record)
            if node.score is None:
                asked.append((node, record, self._score_call(node, record)))
        answers = await asyncio.gather(
            *(self._complete(call) for _, _, call in asked), return_exceptions=True
        )
        for (node, rubric, call), answer in zip(asked, answers, strict=True):
            node.score = self._parse_score(rubric, call, answer)
        for node in self._tree.nodes:
            if node.score is not None and node.score.failure:
                self._count(f"score_failed/{node.score.failure}")

    def _to_score(self) -> list[tuple[Node, RubricRecord]]:
        """Children whose launch has a rubric that is meant for scores."""
        return [
            (self._tree.nodes[child], launch.rubric)
            for launch in self._tree.launches
            if launch.rubric is not None and (self._spec.rubrics != "groups" or launch.is_group)
            for child in launch.children
        ]

    def _unasked_score(self, node: Node, record: RubricRecord) -> ScoreRecord | None:
        if record.rubric is None:
            return ScoreRecord(None, None, failure=Failure.NO_RUBRIC)
        if node.stop in _UNFINISHED:
            return ScoreRecord(record.hash, None, failure=Failure.REQUEST)
        if node.stop != StopReason.FINISHED:
            return ScoreRecord(record.hash, 0.0, gate=False, gated=True)
        return None

    def _score_call(self, node: Node, record: RubricRecord) -> Call:
        assert record.rubric is not None
        context = ScorerContext(
            rubric=record.rubric,
            goal=node.goal,
            evidence=node.evidence,
            steps=tuple(
                {"step": t.index, "reply": t.reply, "observation": t.observation} for t in node.turns
            ),
            stop=str(node.stop),
            finish_message=node.finish_message,
            snapshot=self._snapshots[node.id],
        )
        prompt = self._tools.renderer.start(self._tools.codec.scorer_messages(context))
        return Call(
            purpose=Purpose.SCORE,
            ids=tuple(prompt),
            params=SamplingParams(
                max_tokens=self._spec.scorer_tokens,
                temperature=0.0,
                stop_ids=self._tools.renderer.stop_ids,
            ),
            path=(*self._path, node.id, "score"),
            scorer=context,
        )

    def _parse_score(
        self, record: RubricRecord, call: Call, answer: Completion | BaseException
    ) -> ScoreRecord:
        score = ScoreRecord(record.hash, None, prompt_ids=call.ids)
        if isinstance(answer, BaseException):
            score.failure, score.text = _failure_of(answer), f"{type(answer).__name__}: {answer}"
            return score
        assert record.rubric is not None
        self._account(Purpose.SCORE, len(call.ids), answer)
        score.completion = answer
        score.text = self._tools.renderer.reply_text(answer.ids)
        if answer.stop != "stop":
            score.failure = Failure.TRUNCATED if answer.stop == "length" else Failure.CONTEXT
            return score
        try:
            parsed = self._tools.codec.parse_score(score.text, record.rubric)
        except ScoreError as error:
            score.failure = error.failure
            return score
        score.gate, score.criteria = parsed.gate, parsed.criteria
        score.value = score_value(record.rubric, parsed)
        return score

    # --- bookkeeping ---------------------------------------------------------------------------

    def _label_purpose(self, node: Node) -> str:
        """Root and branch labels train the policy; others are labels only under a program reward."""
        if node.parent is None:
            return "root"
        launch = self._tree.launches[node.launch] if node.launch is not None else None
        return "branch" if launch is not None and launch.is_group else "child"

    def _session(self, node: Node) -> str:
        return "/".join(map(str, (*self._path, node.id)))

    def _account(self, purpose: Purpose, prompt: int, completion: Completion) -> None:
        self._tools.ledger.add(
            "policy",
            stage=self._spec.stage,
            purpose=purpose,
            tokens_in=prompt,
            tokens_out=len(completion.ids),
        )

    def _count(self, name: str, amount: int = 1) -> None:
        self._counters[name] += amount

    @staticmethod
    def _extend(
        node: Node, ids: Sequence[int], role: Role, logprobs: Sequence[float] | None = None
    ) -> None:
        node.token_ids.extend(ids)
        node.roles.extend([int(role)] * len(ids))
        node.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))


def _failure_of(error: BaseException) -> Failure:
    return Failure.CONTEXT if isinstance(error, PromptTooLongError) else Failure.REQUEST

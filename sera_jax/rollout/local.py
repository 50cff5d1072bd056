"""The rollout engine inside this process: continuous batching over cache slots.

    generate() --pending--> driver: settle -> admit -> prefill -> decode a chunk -> resolve --> generate()

A *slot* is one sequence's place in the key/value cache. A session keeps its slot between its turns, so
that a turn computes only what is new; when no slot is free, the session that was idle longest loses its
slot and computes its prompt again if it ever goes on. The driver is an asyncio task that lives while
there is work. Before each step it lets the other coroutines run until no new request comes, so that
requests made together are batched together; nothing depends on the clock.

A completion is a function of (weights, ids, params, key): token i is drawn with ``fold_in(key, i)``, and
what else is in the batch changes log-probs by rounding only (about 1e-6 in float32). All V logits can be
sampled, also of ids that a tokenizer leaves unused; the learner's softmax has the same support.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import heapq
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from sera_jax.policy import qwen3
from sera_jax.rollout import programs
from sera_jax.rollout.engine import EngineError, Request
from sera_jax.types import Completion

# Passes of the event loop without a new request after which a batch is complete. Between a finished
# completion and its node's next request lie about five: the awaiting task, its gather, the tree.
_SETTLE_PASSES = 8
_LEAST_ROWS, _LEAST_WIDTH, _LEAST_REACH, _LEAST_STOPS = 8, 16, 64, 4
_LEAST_TEMPERATURE = 1e-4  # below it, logits / temperature can overflow

_prefill = jax.jit(programs.prefill, static_argnames=("cfg", "reach"), donate_argnames=("cache",))
_decode = jax.jit(programs.decode, static_argnames=("cfg", "reach", "steps"), donate_argnames=("cache",))
_copy_slots = jax.jit(programs.copy_slots, donate_argnames=("cache",))
# Outputs of a program are buffers of their own: the learner may donate its weights to its next update.
_serve = jax.jit(qwen3.serving_params, static_argnames="cfg")


@dataclasses.dataclass(eq=False)
class _Job:
    """One request on its way."""

    request: Request
    ids: tuple[int, ...]
    key: np.ndarray
    stops: tuple[int, ...]
    limit: int  # most tokens to sample
    limited_by: str  # the stop reason at that limit
    future: asyncio.Future[Completion]
    slot: _Slot | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    @property
    def stop(self) -> str:
        """Why it ended; empty while it goes on."""
        if self.tokens and self.tokens[-1] in self.stops:
            return "stop"
        return self.limited_by if len(self.tokens) >= self.limit else ""


@dataclasses.dataclass(eq=False)
class _Slot:
    """One sequence's place in the cache; ``ids`` are the tokens whose keys and values it holds."""

    index: int
    session: str | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    job: _Job | None = None


class LocalEngine:
    """Implements :class:`~sera_jax.rollout.engine.Engine` with a policy in this process.

    Args:
      params: Weights, see :func:`~sera_jax.policy.qwen3.parameter_table`. They are copied.
      cfg: Sizes of the policy.
      slots: Sequences whose caches are held at once; also the most that decode together. Idle sessions
        beyond it cost another prefill, not a failure.
      context_length: Most tokens of prompt and output together.
      version: Version of ``params``.
      decode_chunk: Tokens that are decoded between two looks at new requests.
      prefill_chunk: Most new prompt tokens of a row in one call; longer prompts take several.
      prefill_tokens: Most prompt tokens in one call, padding included; it bounds temporary memory.
    """

    def __init__(
        self,
        params: qwen3.Params,
        cfg: qwen3.Qwen3Config,
        *,
        slots: int,
        context_length: int,
        version: int = 0,
        decode_chunk: int = 8,
        prefill_chunk: int = 256,
        prefill_tokens: int = 16384,
    ):
        settings = {
            "slots": slots,
            "decode_chunk": decode_chunk,
            "prefill_chunk": prefill_chunk,
            "prefill_tokens": prefill_tokens,
        }
        for name, value in settings.items():
            if value < 1:
                raise EngineError(f"{name}={value}: at least 1 is expected")
        if context_length < 2:
            raise EngineError(f"context_length={context_length}: at least 2, a prompt and an output token")
        self._cfg = cfg
        self._context_length = context_length
        self._decode_chunk = decode_chunk
        self._prefill_chunk = prefill_chunk
        self._prefill_tokens = prefill_tokens
        self._slot_count = slots
        self._pending: list[_Job] = []
        self._running: list[_Job] = []
        self._session_jobs: dict[str, _Job] = {}  # requests of sessions, pending or running
        self._arrivals = 0
        self._driver: asyncio.Task[None] | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._shapes: set[tuple[Any, ...]] = set()
        self._seconds = 0.0
        self._check_params(params)
        self._params = _serve(params, cfg)
        self._version = int(version)
        self._reset_cache()

    # --- the protocol --------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        return self._version

    @property
    def context_length(self) -> int:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        return self._context_length

    async def generate(self, request: Request) -> Completion:
        """Samples one completion.

        A completion ends by ``stop`` at a stop id, else by ``context`` when the context is full, else by
        ``length`` at ``max_tokens``.

        Raises:
          EngineError: The request is refused, see the message; or its log-probs are not finite.
        """
        job = self._job(request)
        self._pending.append(job)
        if request.session is not None:
            self._session_jobs[request.session] = job
        self._arrivals += 1
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await job.future

    async def end_session(self, session: str) -> None:
        """Frees the slot of a session; an unknown or evicted one is no error."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = None
            if slot.job is None:
                self._free(slot)

    async def update_weights(self, params: qwen3.Params, version: int) -> None:
        """Serves a copy of ``params`` and drops every cached session.

        Raises:
          EngineError: Requests are in flight; the version goes back, or stays while weights change;
            or the parameters do not have the policy's structure. The old weights are then kept.
        """
        self._reap()
        flying = len(self._pending) + len(self._running)
        if flying:
            raise EngineError(f"update_weights(version={version}): {flying} requests are in flight")
        if version < self._version:
            raise EngineError(f"version={version}: the engine already serves {self._version}")
        self._check_params(params)
        served = _serve(params, self._cfg)
        if version == self._version and not _identical(served, self._params):
            raise EngineError(f"version={version}: already served, with other weights")
        self._params, self._version = served, int(version)
        self._reset_cache()

    def metrics(self) -> dict[str, float]:
        """Counters since the engine was made.

        ``requests`` finished; ``prefill_tokens`` computed and ``prefill_tokens_saved`` by caches;
        ``sampled_tokens``; ``decode_steps`` and ``decode_rows`` computed in them, padding included;
        ``occupancy``: mean share of slots that yield a token in a decode step; ``row_use``: share of
        decoded rows that yield one; ``evictions``; ``programs``: shapes compiled for; ``seconds``
        inside engine steps, compilation included.
        """
        counts = {
            name: float(self._counts[name])
            for name in (
                "requests",
                "prefill_tokens",
                "prefill_tokens_saved",
                "sampled_tokens",
                "decode_steps",
                "decode_rows",
                "evictions",
            )
        }
        decoded = self._counts["decoded_tokens"]
        return {
            **counts,
            "occupancy": decoded / max(1, self._counts["decode_steps"] * self._slot_count),
            "row_use": decoded / max(1, self._counts["decode_rows"]),
            "programs": float(len(self._shapes)),
            "seconds": self._seconds,
        }

    # --- requests ------------------------------------------------------------------------------

    def _job(self, request: Request) -> _Job:
        """Checks a request; the message of a refusal names the field, its value and what is allowed."""
        ids, params, vocab = tuple(request.ids), request.params, self._cfg.vocab_size
        room = self._context_length - len(ids)
        if not ids:
            raise EngineError("ids=(): an empty prompt; at least 1 token is expected")
        if room < 1:
            raise EngineError(
                f"ids: a prompt of {len(ids)} tokens; at most {self._context_length - 1} are expected in "
                f"context_length={self._context_length}"
            )
        for name, values in (("ids", ids), ("stop_ids", params.stop_ids)):
            if values and not 0 <= min(values) <= max(values) < vocab:
                wrong = next(value for value in values if not 0 <= value < vocab)
                raise EngineError(f"{name}: {wrong} is outside the vocabulary, 0 to {vocab - 1}")
        if params.max_tokens < 1:
            raise EngineError(f"max_tokens={params.max_tokens}: at least 1 is expected")
        temperature = params.temperature
        if temperature != 0 and not _LEAST_TEMPERATURE <= temperature < math.inf:
            raise EngineError(
                f"temperature={temperature}: 0 (greedy) or a finite number from {_LEAST_TEMPERATURE} on "
                "is expected"
            )
        key = np.asarray(request.key)
        if key.shape != (2,) or key.dtype != np.uint32:
            raise EngineError(f"key: {key.dtype} {list(key.shape)}; raw key data uint32 [2] is expected")
        other = self._session_jobs.get(request.session) if request.session is not None else None
        if other is not None and not other.future.done():
            raise EngineError(f"session={request.session!r}: its last request is still in flight")
        return _Job(
            request=request,
            ids=ids,
            key=key,
            stops=params.stop_ids,
            limit=min(params.max_tokens, room),
            limited_by="length" if params.max_tokens < room else "context",
            future=asyncio.get_running_loop().create_future(),
        )

    def _check_params(self, params: qwen3.Params) -> None:
        expected, structure = jax.tree_util.tree_flatten_with_path(qwen3.abstract(self._cfg))
        if jax.tree.structure(params) != structure:
            raise EngineError(f"params: {jax.tree.structure(params)}; {structure} is expected")
        for (path, info), value in zip(expected, jax.tree.leaves(params), strict=True):
            if value.shape != info.shape or value.dtype != info.dtype:
                raise EngineError(
                    f"params{jax.tree_util.keystr(path)}: {value.dtype} {list(value.shape)}; "
                    f"{info.dtype} {list(info.shape)} is expected"
                )

    # --- the driver ----------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Takes steps while there is work."""
        try:
            while True:
                await self._settle()
                self._reap()
                if not self._pending and not self._running:
                    return
                self._step()
        except asyncio.CancelledError as error:
            self._fail(error)  # between two steps, so that what is cached stays right
            raise
        except BaseException as error:
            self._fail(error)
            self._reset_cache()  # it may have been donated to the call that failed
            if not isinstance(error, Exception):
                raise

    async def _settle(self) -> None:
        """Lets the other coroutines run until no request has come for some passes."""
        passes, seen = 0, self._arrivals
        while passes < _SETTLE_PASSES:
            await asyncio.sleep(0)
            passes = passes + 1 if self._arrivals == seen else 0
            seen = self._arrivals

    def _step(self) -> None:
        """Admits what waits, computes its prompts, decodes one chunk of everything that runs."""
        start = time.perf_counter()
        admitted = self._admit()
        if admitted:
            self._running += admitted
            self._compute_prompts(admitted)
            self._resolve()
        if self._running:
            self._decode()
            self._resolve()
        self._seconds += time.perf_counter() - start

    def _reap(self) -> None:
        """Drops requests that their callers gave up."""
        for job in self._pending + self._running:
            if job.future.done():
                self._release(job)
        self._pending = [job for job in self._pending if not job.future.done()]
        self._running = [job for job in self._running if not job.future.done()]

    def _resolve(self) -> None:
        """Answers the requests that ended."""
        for job in self._running:
            if not job.stop:
                continue
            self._counts["requests"] += 1
            self._counts["sampled_tokens"] += len(job.tokens)
            if all(map(math.isfinite, job.logprobs)):
                job.future.set_result(
                    Completion(tuple(job.tokens), tuple(job.logprobs), job.stop, self._version)
                )
            else:
                job.future.set_exception(
                    EngineError(f"log-probs of version {self._version} are not finite: broken weights")
                )
            self._release(job)
        self._running = [job for job in self._running if not job.future.done()]

    def _fail(self, error: BaseException) -> None:
        """Fails everything in flight."""
        for job in self._pending + self._running:
            if not job.future.done():
                failure = EngineError(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                job.future.set_exception(failure)
                job.future.exception()  # retrieved: its caller may be gone
        self._reap()

    # --- slots ---------------------------------------------------------------------------------

    def _reset_cache(self) -> None:
        """Empties all slots. The next slots are handed out in the same order as at the start."""
        self._cache = qwen3.make_cache(self._cfg, self._slot_count, self._context_length)
        self._slots = [_Slot(i) for i in range(self._slot_count)]
        self._free_slots = list(range(self._slot_count))  # a heap
        self._sessions: collections.OrderedDict[str, _Slot] = collections.OrderedDict()  # oldest first
        self._session_jobs.clear()

    def _free(self, slot: _Slot) -> None:
        slot.session, slot.ids = None, []
        heapq.heappush(self._free_slots, slot.index)

    def _release(self, job: _Job) -> None:
        """Takes a request off its slot; a session keeps the slot and what is cached there."""
        slot, job.slot = job.slot, None
        if slot is not None:
            slot.job = None
            if slot.session is None:
                self._free(slot)
            else:
                self._sessions.move_to_end(slot.session)
        if job.request.session is not None and self._session_jobs.get(job.request.session) is job:
            del self._session_jobs[job.request.session]

    def _vacant_slot(self) -> _Slot | None:
        """A free slot, or that of the session that was idle longest."""
        if self._free_slots:
            return self._slots[heapq.heappop(self._free_slots)]
        for session, slot in self._sessions.items():
            if slot.job is None:
                del self._sessions[session]
                self._counts["evictions"] += 1
                slot.session, slot.ids = None, []
                return slot
        return None

    def _admit(self) -> list[_Job]:
        """Seats pending requests, in order of arrival."""
        seated: list[_Job] = []
        waiting: list[_Job] = []
        origin: dict[int, int] = {}  # slots to fill by a copy, and the slot that each copies
        # Sessions that have a slot come first: else an earlier request could evict one of them.
        for job in self._pending:
            slot = self._sessions.get(job.request.session) if job.request.session is not None else None
            if slot is None:
                waiting.append(job)
                continue
            shared = _common_prefix(slot.ids, job.ids)
            self._seat(job, slot, shared)
            seated.append(job)
        self._pending = []
        for job in waiting:
            parent = self._sessions.get(job.request.fork_of) if job.request.fork_of is not None else None
            shared = _common_prefix(parent.ids, job.ids) if parent is not None else 0
            slot = self._vacant_slot()
            if slot is None:
                self._pending.append(job)
                continue
            if parent is not None and shared and slot is not parent:
                # A parent seated just now is not copied yet itself: what it will hold is at its origin.
                origin[slot.index] = origin.get(parent.index, parent.index)
            if job.request.session is not None:
                slot.session = job.request.session
                self._sessions[slot.session] = slot
            slot.ids = list(job.ids[:shared])
            self._seat(job, slot, shared)
            seated.append(job)
        if origin:
            self._copy(origin)
        return seated

    def _seat(self, job: _Job, slot: _Slot, shared: int) -> None:
        # The last prompt token is always computed: its hidden state predicts the first output.
        shared = min(shared, len(job.ids) - 1)
        del slot.ids[shared:]
        slot.job, job.slot = job, slot
        self._counts["prefill_tokens_saved"] += shared

    # --- device work ---------------------------------------------------------------------------

    def _copy(self, origin: Mapping[int, int]) -> None:
        """Copies slots to slots, all at once: a source may itself be overwritten."""
        A = _bucket(len(origin), _LEAST_ROWS)
        source_A, target_A = np.zeros(A, np.int32), np.full(A, self._slot_count, np.int32)
        target_A[: len(origin)], source_A[: len(origin)] = list(origin), list(origin.values())
        self._shapes.add(("copy", A))
        self._cache = _copy_slots(cache=self._cache, source_A=source_A, target_A=target_A)

    def _compute_prompts(self, jobs: Sequence[_Job]) -> None:
        """Caches what is new of each prompt and samples each first token."""
        while jobs:
            groups: dict[int, list[_Job]] = collections.defaultdict(list)
            for job in jobs:
                new = len(job.ids) - len(job.slot.ids)
                groups[_bucket(min(new, self._prefill_chunk), _LEAST_WIDTH)].append(job)
            for C, group in sorted(groups.items()):
                most = max(1, self._prefill_tokens // C)
                for low in range(0, len(group), most):
                    self._compute_prompts_of_width(group[low : low + most], C)
            jobs = [job for job in jobs if not job.tokens]

    def _compute_prompts_of_width(self, jobs: Sequence[_Job], C: int) -> None:
        A = _bucket(len(jobs), _LEAST_ROWS)
        ids_AxC, length_A = np.zeros((A, C), np.int32), np.zeros(A, np.int32)
        for row, job in enumerate(jobs):
            start = len(job.slot.ids)
            piece = job.ids[start : start + min(C, self._prefill_chunk)]
            ids_AxC[row, : len(piece)] = piece
            length_A[row] = len(piece)
        rows = self._rows(jobs, A)
        reach = self._reach(rows.start + length_A)
        self._shapes.add(("prefill", A, C, reach))
        self._cache, token_A, logprob_A = _prefill(
            self._params, self._cfg, self._cache, rows, ids_AxC, length_A, reach=reach
        )
        token_A, logprob_A = jax.device_get((token_A, logprob_A))
        self._counts["prefill_tokens"] += int(length_A.sum())
        for row, job in enumerate(jobs):
            job.slot.ids += ids_AxC[row, : length_A[row]].tolist()
            if len(job.slot.ids) == len(job.ids):
                job.tokens.append(int(token_A[row]))
                job.logprobs.append(float(logprob_A[row]))

    def _decode(self) -> None:
        """Decodes one chunk of every running request."""
        jobs, steps = self._running, self._decode_chunk
        A = _bucket(len(jobs), _LEAST_ROWS)
        E = _bucket(max(len(job.stops) for job in jobs), _LEAST_STOPS)
        rows = self._rows(jobs, A)
        state = programs.DecodeRows(
            token=np.zeros(A, np.int32),
            index=np.zeros(A, np.int32),
            left=np.zeros(A, np.int32),
            stop=np.full((A, E), -1, np.int32),
        )
        for row, job in enumerate(jobs):
            state.token[row] = job.tokens[-1]
            state.index[row] = len(job.tokens)
            state.left[row] = job.limit - len(job.tokens)
            state.stop[row, : len(job.stops)] = job.stops
        reach = self._reach(rows.start + np.minimum(state.left, steps))
        self._shapes.add(("decode", A, E, reach))
        self._cache, *out = _decode(
            self._params, self._cfg, self._cache, rows, state, steps=steps, reach=reach
        )
        tokens_AxN, logprobs_AxN, count_A, taken = jax.device_get(out)
        self._counts["decode_steps"] += int(taken)
        self._counts["decode_rows"] += int(taken) * A
        self._counts["decoded_tokens"] += int(count_A.sum())
        for row, (job, count) in enumerate(zip(jobs, count_A.tolist(), strict=False)):
            new = tokens_AxN[row, :count].tolist()
            # The last token is sampled, but its keys and values are not cached yet.
            job.slot.ids += [job.tokens[-1], *new[:-1]]
            job.tokens += new
            job.logprobs += logprobs_AxN[row, :count].tolist()

    def _rows(self, jobs: Sequence[_Job], A: int) -> programs.Rows:
        rows = programs.Rows(
            slot=np.zeros(A, np.int32),
            start=np.zeros(A, np.int32),
            temperature=np.zeros(A, np.float32),
            key=np.zeros((A, 2), np.uint32),
        )
        for row, job in enumerate(jobs):
            rows.slot[row] = job.slot.index
            rows.start[row] = len(job.slot.ids)
            rows.temperature[row] = job.request.params.temperature
            rows.key[row] = job.key
        return rows

    def _reach(self, ends_A: np.ndarray) -> int:
        return min(_bucket(int(ends_A.max()), _LEAST_REACH), self._context_length)


def _bucket(size: int, least: int) -> int:
    """The next power of two, at least ``least``: few shapes, so few compilations."""
    return max(least, 1 << (size - 1).bit_length())


def _common_prefix(cached: Sequence[int], ids: Sequence[int]) -> int:
    """Length of the common prefix."""
    most = min(len(cached), len(ids))
    if list(cached[:most]) == list(ids[:most]):
        return most
    return next(i for i in range(most) if cached[i] != ids[i])


def _identical(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)

"""The embedded engine: continuous batching over fixed slots, under jit, in this process.

Each slot holds one sequence's keys and values. A driver coroutine repeats: let callers run until no
new request comes, admit requests to slots, prefill what their slots do not hold yet, decode a few
tokens for all live slots, hand out what is finished. A request joins and leaves without waiting for
others. A session keeps its slot between turns, so that its next turn prefills only what is new; an
idle session's slot is taken when another request needs one, which costs a transparent prefill.

Work is done on a compact copy of the live slots, in row and length buckets, so that few requests do
not pay for all slots and few programs are compiled. Nothing looks at a clock: the same requests in the
same order give the same batches. A completion is a function of (weights, ids, params, key): its t-th
token is drawn with the key folded with t.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sera_jax.policy import qwen3
from sera_jax.policy.qwen3 import KVCache, Qwen3Config
from sera_jax.rollout.engine import EngineError, Request
from sera_jax.types import Completion

_PASSES = 3  # turns of the event loop without a new request before a batch is closed
_MAX_STOPS = 4


@dataclasses.dataclass
class _Job:
    """One request on its way."""

    request: Request
    future: asyncio.Future
    limit: int  # most tokens to sample
    limited_by: str  # what that limit is: "length" or "context"
    slot: int = -1
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    pending: int | None = None  # sampled, but its keys and values are not in the cache yet


@dataclasses.dataclass
class _Slot:
    """What a slot's cache holds, and whose it is."""

    ids: list[int] = dataclasses.field(default_factory=list)
    session: str | None = None
    busy: bool = False
    used: int = 0  # for least-recently-used eviction


class LocalEngine:
    """See the module docstring and :class:`sera_jax.rollout.engine.Engine`.

    Args:
      params: Weights.
      cfg: The policy.
      slots: Sequences held at once; the cache takes
        2 x layers x slots x context_length x kv heads x head size numbers.
      context_length: Most tokens of prompt and output together.
      version: Version of ``params``.
      decode_chunk: Tokens decoded between two looks at new requests.

    Raises:
      EngineError: A size below 1, or a context of fewer than 2 tokens.
    """

    def __init__(
        self,
        params: Any,
        cfg: Qwen3Config,
        *,
        slots: int = 64,
        context_length: int = 1024,
        version: int = 0,
        decode_chunk: int = 8,
    ):
        for name, value, least in (
            ("slots", slots, 1),
            ("context_length", context_length, 2),
            ("decode_chunk", decode_chunk, 1),
        ):
            if value < least:
                raise EngineError(f"{name}={value}: at least {least} is expected")
        self._cfg = cfg
        self._context_length = context_length
        self._decode_chunk = decode_chunk
        self._num_slots = slots
        self._version = version
        self._params = self._serve(params)
        self._waiting: collections.deque[_Job] = collections.deque()
        self._live: list[_Job] = []
        self._driver: asyncio.Task | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds = 0.0
        self._reset_slots()
        self._buckets = _buckets(slots)

    def _serve(self, params: Any) -> Any:
        """Weights laid out for serving; a copy, since the learner donates its own."""
        return _serving_program(self._cfg)(jax.tree.map(jnp.array, params))

    def _reset_slots(self) -> None:
        """Forgets every sequence; the cache's numbers stay, but nothing points at them."""
        self._slots = [_Slot() for _ in range(self._num_slots)]
        self._sessions: dict[str, int] = {}
        self._clock = 0
        self._cache = qwen3.make_cache(self._cfg, self._num_slots, self._context_length)

    @property
    def version(self) -> int:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        return self._version

    @property
    def context_length(self) -> int:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        return self._context_length

    # --- requests ------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        """See :class:`~sera_jax.rollout.engine.Engine`.

        Raises:
          EngineError: A request that cannot be served; the message names the field and the value.
        """
        self._check(request)
        room = self._context_length - len(request.ids)
        limited_by = "length" if request.params.max_tokens <= room else "context"
        job = _Job(
            request,
            asyncio.get_running_loop().create_future(),
            limit=min(request.params.max_tokens, room),
            limited_by=limited_by,
        )
        self._waiting.append(job)
        self._counts["requests"] += 1
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await job.future

    def _check(self, request: Request) -> None:
        params, ids = request.params, request.ids
        if not ids:
            raise EngineError("ids: an empty prompt has nothing to continue")
        if len(ids) >= self._context_length:
            raise EngineError(
                f"ids: a prompt of {len(ids)} tokens leaves no room in "
                f"context_length={self._context_length}"
            )
        if min(ids) < 0 or max(ids) >= self._cfg.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._cfg.vocab_size)
            raise EngineError(f"ids: token {bad} is outside the vocabulary of {self._cfg.vocab_size}")
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise EngineError(f"temperature={params.temperature}: a finite number, 0 or more, is expected")
        if params.max_tokens < 1:
            raise EngineError(f"max_tokens={params.max_tokens}: at least 1 is expected")
        if len(params.stop_ids) > _MAX_STOPS:
            raise EngineError(f"stop_ids: at most {_MAX_STOPS} are expected, got {len(params.stop_ids)}")
        key = np.asarray(request.key)
        if key.shape != (2,) or key.dtype != np.uint32:
            raise EngineError(f"key: uint32 [2] is expected, got {key.dtype} {list(key.shape)}")

    async def end_session(self, session: str) -> None:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._slots[slot].session = None
            if not self._slots[slot].busy:
                self._slots[slot].ids = []

    async def update_weights(self, params: Any, version: int) -> None:
        """See :class:`~sera_jax.rollout.engine.Engine`; every cached sequence is dropped.

        Raises:
          EngineError: Requests are running, or the version does not rise.
        """
        if self._live or self._waiting:
            raise EngineError(
                f"update_weights: {len(self._live) + len(self._waiting)} requests are running; their "
                "tokens would come from two versions"
            )
        if version <= self._version:
            raise EngineError(
                f"version={version}: more than the served version {self._version} is expected"
            )
        self._params = self._serve(params)
        self._version = version
        self._reset_slots()

    def metrics(self) -> dict[str, float]:
        """See :class:`~sera_jax.rollout.engine.Engine`."""
        counts = {name: float(value) for name, value in sorted(self._counts.items())}
        steps = max(counts.get("decode_rows", 0.0), 1.0)
        return {
            **counts,
            "occupancy": counts.get("decode_live_rows", 0.0) / steps,
            "seconds": self._seconds,
        }

    # --- the driver ----------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Serves until there is nothing left to do."""
        try:
            while True:
                await self._settle()
                if not self._waiting and not self._live:
                    return
                start = time.perf_counter()
                self._admit()
                self._decode()
                self._seconds += time.perf_counter() - start
        except Exception as error:  # whoever waits must hear of it
            for job in (*self._live, *self._waiting):
                if not job.future.done():
                    job.future.set_exception(EngineError(f"the engine failed: {error!r}"))
            self._live.clear()
            self._waiting.clear()
            self._reset_slots()

    async def _settle(self) -> None:
        """Lets callers run until none of them adds a request any more."""
        quiet = 0
        while quiet < _PASSES:
            before = self._counts["requests"]
            await asyncio.sleep(0)
            quiet = 0 if self._counts["requests"] != before else quiet + 1
        # Callers that gave up take no slot.
        for job in [job for job in self._live if job.future.cancelled()]:
            self._release(job)
            self._counts["cancelled"] += 1
        self._waiting = collections.deque(job for job in self._waiting if not job.future.cancelled())

    def _admit(self) -> None:
        """Gives waiting requests their slots and computes the prompts that are not cached."""
        admitted = []
        while self._waiting:
            slot = self._find_slot(self._waiting[0].request)
            if slot is None:
                break
            job = self._waiting.popleft()
            job.slot = slot
            self._slots[slot].busy = True
            admitted.append(job)
        by_length: dict[int, list[tuple[_Job, list[int], int]]] = collections.defaultdict(list)
        for job in admitted:
            slot, ids = self._slots[job.slot], list(job.request.ids)
            # The last prompt token is always computed: its hidden state gives the first logits.
            shared = _common_prefix(slot.ids, ids[:-1])
            self._counts["prefill_saved"] += shared
            self._counts["prefill_tokens"] += len(ids) - shared
            slot.ids = ids[:-1]
            job.pending = ids[-1]
            if new := ids[shared:-1]:
                by_length[_length_bucket(len(new))].append((job, new, shared))
            self._live.append(job)
        for length, jobs in sorted(by_length.items()):
            self._prefill(jobs, length)

    def _find_slot(self, request: Request) -> int | None:
        session = request.session
        if session is not None and session in self._sessions:
            slot = self._sessions[session]
            if self._slots[slot].busy:
                raise EngineError(f"session {session!r} has a request running; its turns are sequential")
        else:
            free = [i for i, slot in enumerate(self._slots) if not slot.busy and slot.session is None]
            idle = [i for i, slot in enumerate(self._slots) if not slot.busy and slot.session is not None]
            if free:
                slot = free[0]
            elif idle:
                slot = min(idle, key=lambda i: self._slots[i].used)
                del self._sessions[self._slots[slot].session]
                self._counts["evictions"] += 1
            else:
                return None
            self._slots[slot].ids, self._slots[slot].session = [], session
            if session is not None:
                self._sessions[session] = slot
        self._clock += 1
        self._slots[slot].used = self._clock
        return slot

    def _prefill(self, jobs: list[tuple[_Job, list[int], int]], length: int) -> None:
        for first in range(0, len(jobs), self._buckets[-1]):
            part = jobs[first : first + self._buckets[-1]]
            rows = next(b for b in self._buckets if b >= len(part))
            tokens = np.zeros((rows, length), np.int32)
            start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
            slots = np.full(rows, self._num_slots, np.int32)  # out of range: gathers 0, scatters nothing
            for r, (job, new, shared) in enumerate(part):
                tokens[r, : len(new)] = new
                start[r], count[r], slots[r] = shared, len(new), job.slot
            self._cache = _prefill_program(self._cfg)(
                self._params, self._cache, tokens, start, count, slots
            )

    def _decode(self) -> None:
        """One chunk of tokens for every live request; what is finished is handed out."""
        live = self._live
        if not live:
            return
        rows = next((b for b in self._buckets if b >= len(live)), self._buckets[-1])
        slots = np.full(rows, self._num_slots, np.int32)
        token, position = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        drawn, room = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        temperature, key = np.ones(rows, np.float32), np.zeros((rows, 2), np.uint32)
        stops = np.full((rows, _MAX_STOPS), -1, np.int32)
        for r, job in enumerate(live):
            params = job.request.params
            slots[r], token[r], position[r] = job.slot, job.pending, len(self._slots[job.slot].ids)
            drawn[r], room[r] = len(job.ids), job.limit - len(job.ids)
            temperature[r], key[r] = params.temperature, job.request.key
            stops[r, : len(params.stop_ids)] = params.stop_ids
        self._cache, ids, logprobs, counts = _decode_program(self._cfg, self._decode_chunk)(
            self._params,
            self._cache,
            slots,
            token,
            position,
            drawn,
            room,
            temperature,
            key,
            stops,
        )
        ids, logprobs, counts = np.asarray(ids), np.asarray(logprobs), np.asarray(counts)
        self._counts["decode_chunks"] += 1
        self._counts["decode_rows"] += rows
        self._counts["decode_live_rows"] += len(live)
        for r, job in enumerate(list(live)):
            new = ids[r, : counts[r]].tolist()
            job.logprobs += logprobs[r, : counts[r]].tolist()
            job.ids += new
            slot = self._slots[job.slot]
            # Each new token was preceded by feeding the one before it; the last is not fed yet.
            slot.ids += [job.pending, *new[:-1]]
            job.pending = new[-1]
            self._counts["sampled_tokens"] += len(new)
            stopped = job.ids[-1] in job.request.params.stop_ids
            if stopped or len(job.ids) >= job.limit:
                self._finish(job, "stop" if stopped else job.limited_by)

    def _finish(self, job: _Job, stop: str) -> None:
        self._release(job)
        if not job.future.done():
            job.future.set_result(
                Completion(tuple(job.ids), tuple(job.logprobs), stop=stop, version=self._version)
            )

    def _release(self, job: _Job) -> None:
        self._live.remove(job)
        slot = self._slots[job.slot]
        slot.busy = False
        if slot.session is None:
            slot.ids = []


# --- programs: compiled once a policy and bucket ---------------------------------------------------


@functools.cache
def _serving_program(cfg: Qwen3Config) -> Any:
    return jax.jit(lambda params: qwen3.serving_params(params, cfg))


@functools.cache
def _prefill_program(cfg: Qwen3Config) -> Any:
    def run(params, cache, tokens, start, count, slots):
        part = _take(cache, slots)
        _, part = qwen3.extend(params, cfg, part, tokens, start, count)
        return _put(cache, part, slots)

    return jax.jit(run, donate_argnums=(1,))


@functools.cache
def _decode_program(cfg: Qwen3Config, chunk: int) -> Any:
    def run(params, cache, slots, token, position, drawn, room, temperature, key, stops):
        rows = token.shape[0]
        head = qwen3.head(params, cfg)

        def cond(carry):
            step, _, _, _, live, *_ = carry
            return (step < chunk) & live.any()

        def body(carry):
            step, part, token, position, live, ids, logprobs, counts = carry
            # A row that is done keeps writing its last token beyond its end, where nobody reads.
            hidden, part = qwen3.extend(params, cfg, part, token[:, None], position, live.astype(jnp.int32))
            logits = jax.lax.dot_general(
                hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            new, logprob = _sample(logits, temperature, key, drawn + step)
            ids = ids.at[:, step].set(jnp.where(live, new, 0))
            logprobs = logprobs.at[:, step].set(jnp.where(live, logprob, 0.0))
            counts = counts + live
            token = jnp.where(live, new, token)
            position = position + live
            stopped = (new[:, None] == stops).any(axis=1)
            live = live & ~stopped & (counts < room)
            return step + 1, part, token, position, live, ids, logprobs, counts

        carry = (
            0,
            _take(cache, slots),
            token,
            position,
            room > 0,
            jnp.zeros((rows, chunk), jnp.int32),
            jnp.zeros((rows, chunk), jnp.float32),
            jnp.zeros(rows, jnp.int32),
        )
        _, part, _, _, _, ids, logprobs, counts = jax.lax.while_loop(cond, body, carry)
        return _put(cache, part, slots), ids, logprobs, counts

    return jax.jit(run, donate_argnums=(1,))


def _sample(logits, temperature, key, number):
    """One token a row by Gumbel-max under its own key; log-probs of the scaled softmax, float32."""
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]

    def noise(key, number):
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), number)
        return jax.random.gumbel(folded, scaled.shape[1:], jnp.float32)

    gumbel = jnp.where(greedy[:, None], 0.0, jax.vmap(noise)(key, number))
    token = jnp.argmax(scaled + gumbel, axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=-1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, axis=-1)


def _take(cache: KVCache, slots) -> KVCache:
    """The slots' sequences; out-of-range slots read zeros. The slot axis is the fourth from the end."""
    return jax.tree.map(lambda x: x.at[..., slots, :, :, :].get(mode="fill", fill_value=0), cache)


def _put(cache: KVCache, part: KVCache, slots) -> KVCache:
    return jax.tree.map(lambda x, y: x.at[..., slots, :, :, :].set(y, mode="drop"), cache, part)


def _buckets(slots: int) -> list[int]:
    """Row counts that programs are compiled for: a quarter, a half and all of the slots, and 4."""
    return sorted({min(4, slots), max(1, slots // 4), max(1, slots // 2), slots})


def _length_bucket(length: int) -> int:
    """4, 16, 32, 64, ...: prefill lengths that programs are compiled for."""
    for bucket in (4, 16):
        if length <= bucket:
            return bucket
    return 1 << (length - 1).bit_length()


def _common_prefix(a: list[int], b: list[int]) -> int:
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])

"""The local engine: what a completion depends on, caches, weights, limits, refusals."""

import asyncio
import dataclasses
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sera_jax.policy import qwen3
from sera_jax.rollout import local, programs
from sera_jax.rollout.engine import Engine, EngineError, Request, SamplingParams, derive_key
from sera_jax.rollout.local import LocalEngine

VOCAB = 29
CFG = qwen3.tiny(
    VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)
CONTEXT = 64


def random_params(seed=0):
    """Weights large enough that distributions are far from uniform."""
    draw = np.random.default_rng(seed)
    table = qwen3.parameter_table(CFG)
    mean = jax.tree.map(lambda info: info.initializer == "ones", table, is_leaf=qwen3.is_info)
    noisy = lambda one, x: jnp.asarray(one + 0.25 * draw.normal(size=x.shape), x.dtype)
    return jax.tree.map(noisy, mean, qwen3.abstract(CFG))


PARAMS = random_params()


def make_engine(params=PARAMS, cfg=CFG, **changes):
    settings = {"slots": 8, "context_length": CONTEXT, "decode_chunk": 4}
    return LocalEngine(params, cfg, **{**settings, **changes})


def prompt(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def request(ids=None, *, max_tokens=10, temperature=1.0, stop_ids=(), seed=0, session=None, fork_of=None):
    return Request(
        ids=prompt(7) if ids is None else tuple(ids),
        params=SamplingParams(max_tokens, temperature, tuple(stop_ids)),
        key=derive_key("test", seed),
        session=session,
        fork_of=fork_of,
    )


def generate(engine, *requests):
    """Completions of requests that are made at the same time."""

    async def all_of_them():
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(all_of_them())


def assert_same(a, b):
    """The same tokens, and log-probs up to rounding."""
    assert (a.ids, a.stop, a.version) == (b.ids, b.stop, b.version)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@jax.jit
def full_logits(params, ids):
    """Logits [T, V] by the learner's forward."""
    ids = ids[None]
    hidden = qwen3.forward(params, CFG, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    return hidden[0] @ qwen3.head(params, CFG).T


def learner_logits(ids, params=PARAMS):
    """The same, padded behind so that it compiles once."""
    return full_logits(params, jnp.zeros(CONTEXT, jnp.int32).at[: len(ids)].set(jnp.array(ids)))[: len(ids)]


# --- sampling ------------------------------------------------------------------------------------


def test_sample_logprobs_literal():
    # logits (2, 1, 0). T=1: log(e^2 / (e^2 + e + 1)) = -0.4076. T=0.5 doubles them: -0.1429.
    # T=0: the argmax, with its log-prob under the plain softmax, -0.4076.
    temperature = np.array([1.0, 0.5, 0.0], np.float32)
    logits = jnp.tile(jnp.array([[2.0, 1.0, 0.0]]), (3, 1))
    expected = {1.0: [-0.4076, -1.4076, -2.4076], 0.5: [-0.1429, -2.1429, -4.1429], 0.0: [-0.4076] * 3}
    keys = np.stack([derive_key(i) for i in range(3)])
    token, logprob = jax.jit(programs.sample)(logits, temperature, keys, jnp.arange(3))
    assert token[2] == 0
    for row, t in enumerate(temperature.tolist()):
        assert logprob[row] == pytest.approx(expected[t][token[row]], abs=1e-4)
    # Under vmap over a leading axis, and again without jit: the same draws.
    twice = lambda x: jnp.stack([jnp.asarray(x)] * 2)
    mapped, _ = jax.vmap(programs.sample)(*map(twice, (logits, temperature, keys, jnp.arange(3))))
    np.testing.assert_array_equal(mapped, twice(token))


def test_sample_frequencies_follow_the_softmax():
    # Softmax of (2, 1, 0): 0.6652, 0.2447, 0.0900. With 4,000 draws 4 standard errors are at most 0.030.
    logits = jnp.tile(jnp.array([[2.0, 1.0, 0.0]]), (4000, 1))
    keys = np.tile(derive_key("frequencies")[None], (4000, 1))
    token, _ = jax.jit(programs.sample)(logits, jnp.ones(4000), keys, jnp.arange(4000))
    frequency = np.bincount(token, minlength=3) / 4000
    np.testing.assert_allclose(frequency, [0.6652, 0.2447, 0.0900], atol=0.03)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_logprobs_equal_the_learners(temperature):
    completion = generate(make_engine(), request(max_tokens=30, temperature=temperature))[0]
    assert len(completion.ids) == len(completion.logprobs) == 30
    ids = prompt(7) + completion.ids
    scaled = learner_logits(ids) / (temperature or 1.0)
    expected = jax.nn.log_softmax(scaled, axis=-1)[np.arange(6, 36), np.array(completion.ids)]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_token_i_is_drawn_with_the_ith_fold_of_the_key():
    # 14 tokens over four chunks, so that both the first token's index and the chunks' count.
    (completion,) = generate(make_engine(), request(max_tokens=14, temperature=0.8, seed=5))
    key = jax.random.wrap_key_data(derive_key("test", 5))
    logits = learner_logits(prompt(7) + completion.ids)[6:-1] / 0.8
    noise = [jax.random.gumbel(jax.random.fold_in(key, i), (VOCAB,)) for i in range(14)]
    assert completion.ids == tuple(np.argmax(logits + jnp.stack(noise), axis=-1).tolist())


def test_greedy_is_the_argmax_whatever_the_key():
    a, b = generate(
        make_engine(), request(temperature=0.0, seed=1), request(temperature=0.0, seed=2, max_tokens=9)
    )
    assert a.ids[:9] == b.ids
    logits = learner_logits(prompt(7) + a.ids)
    assert a.ids == tuple(np.argmax(logits[6:16], axis=-1).tolist())


def test_bfloat16_and_scanned_layers():
    cfg = dataclasses.replace(CFG, dtype=jnp.bfloat16, unroll=1)
    engine = make_engine(cfg=cfg)
    first, _ = generate(engine, request(session="a"), request(seed=1))
    more = request(prompt(7) + first.ids + prompt(3, 5), temperature=0.0, session="a")
    (second,) = generate(engine, more)
    assert engine.metrics()["prefill_tokens_saved"] == 16  # 7 + 10 - 1: the last output is not cached
    scaled = learner_logits(more.ids + second.ids)
    expected = jax.nn.log_softmax(scaled, axis=-1)[np.arange(19, 29), np.array(second.ids)]
    np.testing.assert_allclose(second.logprobs, expected, atol=0.3)


# --- neighbours ----------------------------------------------------------------------------------


def test_neighbours_change_nothing():
    mine = request(max_tokens=16, temperature=0.8, seed=42)
    (alone,) = generate(make_engine(), mine)
    other = lambda i: request(prompt(1 + 5 * i, i), max_tokens=1 + 4 * i, seed=i, temperature=0.3 * i)
    engine = make_engine()
    assert_same(generate(engine, mine, other(3))[0], alone)
    assert_same(generate(engine, *map(other, range(7)), mine)[7], alone)
    assert_same(generate(engine, other(9), other(2), other(1), mine)[3], alone)


def test_short_and_long_prompts_side_by_side():
    # Widths 16 and 64, reaches 64: the padding behind the short one is not seen.
    short, long = request(prompt(2, 1), temperature=0.0), request(prompt(37, 2), temperature=0.0)
    together = generate(make_engine(), short, long)
    for both, one in zip(together, (short, long), strict=True):
        assert_same(both, generate(make_engine(), one)[0])


def test_more_requests_than_slots_all_finish():
    requests = [request(prompt(1 + i, i), max_tokens=1 + i % 5, seed=i) for i in range(20)]
    few, many = generate(make_engine(slots=3), *requests), generate(make_engine(slots=20), *requests)
    for a, b in zip(few, many, strict=True):
        assert_same(a, b)


def test_a_new_request_joins_a_running_batch():
    engine, finished = make_engine(), []

    async def one(name, tokens, after):
        for _ in range(after):
            await asyncio.sleep(0)
        await engine.generate(request(max_tokens=tokens, seed=tokens))
        finished.append(name)

    async def both():
        await asyncio.gather(one("long", 40, 0), one("short", 2, 12))

    asyncio.run(both())
    assert finished == ["short", "long"]
    # 39 decoded tokens in chunks of 4 take 39 steps; the short one rode along for one of them.
    assert engine.metrics()["decode_steps"] == 39


def test_the_same_schedule_gives_the_same_batches():
    def run():
        engine = make_engine(slots=4)

        async def session(i):
            ids = prompt(4 + i, i)
            out = []
            for turn in range(3):
                answer = await engine.generate(
                    request(ids, max_tokens=2 + (i * turn) % 5, session=str(i), seed=(i, turn))
                )
                out.append(answer)
                ids += answer.ids + prompt(2, turn)
            return out

        async def all_of_them():
            return await asyncio.gather(*map(session, range(7)))

        metrics = lambda: {name: value for name, value in engine.metrics().items() if name != "seconds"}
        return asyncio.run(all_of_them()), metrics()

    assert run() == run()  # bitwise, log-probs included


# --- how completions end -------------------------------------------------------------------------


def test_stop_ids_end_a_completion_and_are_part_of_it():
    (free,) = generate(make_engine(), request(max_tokens=20))
    assert free.stop == "length" and len(free.ids) == 20
    stop = free.ids[6]
    first = free.ids.index(stop)
    (stopped,) = generate(make_engine(), request(max_tokens=20, stop_ids=(stop, 3, 4, 5, 6)[:1]))
    assert (stopped.ids, stopped.stop) == (free.ids[: first + 1], "stop")
    # A stop id as the very first token ends it before anything is decoded; one at the limit is a stop.
    engine = make_engine()
    (at_once,) = generate(engine, request(max_tokens=20, stop_ids=(free.ids[0],)))
    assert (at_once.ids, at_once.stop) == (free.ids[:1], "stop")
    assert engine.metrics()["decode_steps"] == 0
    (at_limit,) = generate(engine, request(max_tokens=first + 1, stop_ids=(stop,)))
    assert (at_limit.ids, at_limit.stop) == (free.ids[: first + 1], "stop")


@pytest.mark.parametrize(
    ("length", "max_tokens", "count", "stop"),
    [
        (60, 3, 3, "length"),  # one place stays free
        (60, 4, 4, "context"),  # 60 + 4 = 64: the context is full, whatever max_tokens says
        (60, 50, 4, "context"),
        (63, 50, 1, "context"),
        (1, 100, 63, "context"),
    ],
)
def test_context_and_length(length, max_tokens, count, stop):
    (completion,) = generate(make_engine(), request(prompt(length), max_tokens=max_tokens))
    assert (len(completion.ids), completion.stop) == (count, stop)


# --- sessions ------------------------------------------------------------------------------------


async def play(engine, name):
    """A session of three turns, of 9, 5 and 5 prompt tokens and 6 output tokens each."""
    ids, out = prompt(9, name), []
    for turn in range(3):
        answer = await engine.generate(request(ids, max_tokens=6, session=str(name), seed=(name, turn)))
        out.append(answer)
        ids += answer.ids + prompt(5, (name, turn))
    return out


def test_sessions_compute_only_what_is_new():
    engine, plain = make_engine(), make_engine()
    out = asyncio.run(play(engine, 1))
    # Turn 1: 9 new. Turns 2 and 3: the last output, which is not cached, and 5 new tokens: 6 each.
    assert engine.metrics()["prefill_tokens"] == 9 + 6 + 6
    # Turn 2 finds 9 + 5 cached, turn 3 finds 9 + 6 + 5 + 5.
    assert engine.metrics()["prefill_tokens_saved"] == 14 + 25
    assert engine.metrics()["requests"] == 3
    assert engine.metrics()["sampled_tokens"] == 18
    # The same prompts without a session.
    ids = prompt(9, 1)
    for turn, answer in enumerate(out):
        assert_same(answer, generate(plain, request(ids, max_tokens=6, seed=(1, turn)))[0])
        ids += answer.ids + prompt(5, (1, turn))
    assert plain.metrics()["prefill_tokens_saved"] == 0


def test_a_session_that_does_not_continue_its_cache_is_computed_again():
    engine = make_engine()
    generate(engine, request(prompt(12), session="a"))
    changed = (*prompt(12)[:5], (prompt(12)[5] + 1) % VOCAB, *prompt(12)[6:])
    (actual,) = generate(engine, request(changed, session="a", seed=3))
    assert engine.metrics()["prefill_tokens_saved"] == 5
    assert_same(actual, generate(make_engine(), request(changed, seed=3))[0])
    # And the same prompt once more: all but its last token, whose hidden state is needed, is there.
    (again,) = generate(engine, request(changed, session="a", seed=3))
    assert_same(again, actual)
    assert engine.metrics()["prefill_tokens_saved"] == 5 + 11


def test_eviction_is_transparent():
    def rounds(engine):
        """Six sessions in lockstep: more than two slots can remember from round to round."""
        ids, out = [prompt(9, i) for i in range(6)], []
        for turn in range(3):
            requests = [request(ids[i], max_tokens=6, session=str(i), seed=(i, turn)) for i in range(6)]
            out.append(generate(engine, *requests))
            ids = [ids[i] + out[-1][i].ids + prompt(5, (i, turn)) for i in range(6)]
        return out

    few, many = make_engine(slots=2), make_engine(slots=8)
    for a, b in zip(rounds(few), rounds(many), strict=True):
        for turn_a, turn_b in zip(a, b, strict=True):
            assert_same(turn_a, turn_b)
    # Each round: the 2 sessions that hold the slots go on, then 4 take a slot of another.
    assert few.metrics()["evictions"] == 4 + 4 + 4
    assert many.metrics()["evictions"] == 0
    # Prompts of 9, 20 and 31 tokens; 9, 6 and 6 of them new.
    assert many.metrics()["prefill_tokens"] == 6 * (9 + 6 + 6)
    assert few.metrics()["prefill_tokens"] == 6 * 9 + 2 * 6 + 4 * 20 + 2 * 6 + 4 * 31


def test_sessions_that_hold_a_slot_go_first():
    engine = make_engine(slots=2)

    async def all_of_them():
        return await asyncio.gather(*(play(engine, i) for i in range(6)))

    asyncio.run(all_of_them())
    # No turn was computed twice, although three times as many sessions as slots were under way.
    assert engine.metrics()["prefill_tokens"] == 6 * (9 + 6 + 6)


def test_the_session_that_was_idle_longest_is_evicted():
    engine = make_engine(slots=2)
    for name, seed in (("a", 1), ("b", 2), ("a", 1), ("c", 3)):  # c takes the place of b
        generate(engine, request(prompt(9, seed), session=name))
    saved = engine.metrics()["prefill_tokens_saved"]
    generate(engine, request(prompt(9, 1), session="a"))
    assert engine.metrics()["prefill_tokens_saved"] == saved + 8
    generate(engine, request(prompt(9, 2), session="b"))
    assert engine.metrics()["prefill_tokens_saved"] == saved + 8
    assert engine.metrics()["evictions"] == 2


def test_an_ended_session_frees_its_slot():
    engine = make_engine(slots=1)
    generate(engine, request(session="a"))
    asyncio.run(engine.end_session("a"))
    asyncio.run(engine.end_session("never seen"))
    generate(engine, request(session="b"))
    assert engine.metrics()["evictions"] == 0


def test_long_prompts_are_computed_in_pieces():
    engine = make_engine(prefill_chunk=20, prefill_tokens=40)
    requests = [request(prompt(50 + i, i), max_tokens=5, seed=i) for i in range(3)]
    for piecewise, r in zip(generate(engine, *requests), requests, strict=True):
        assert_same(piecewise, generate(make_engine(), r)[0])
    assert engine.metrics()["prefill_tokens"] == 50 + 51 + 52


def test_forks_copy_what_they_share():
    engine = make_engine(slots=3)
    generate(engine, request(prompt(20), session="parent", max_tokens=2))
    child = request((*prompt(15), 1, 2, 3), session="child", fork_of="parent", seed=1)
    # In the same round a fork of the fork, whose parent holds nothing yet but will.
    grandchild = request((*prompt(15), 1, 4), session="grandchild", fork_of="child", seed=2)
    answers = generate(engine, child, grandchild)
    assert prompt(20)[15] != 1
    assert engine.metrics()["prefill_tokens_saved"] == 15 + 15
    for answer, r in zip(answers, (child, grandchild), strict=True):
        assert_same(answer, generate(make_engine(), dataclasses.replace(r, fork_of=None))[0])
    # Both kept their slots, and so did the parent.
    generate(engine, request(prompt(20), session="parent"))
    assert engine.metrics()["prefill_tokens_saved"] == 30 + 19
    assert engine.metrics()["evictions"] == 0


@st.composite
def schedules(draw):
    """Sessions of turns: (new prompt tokens, max_tokens, temperature, passes to wait) each."""
    turn = st.tuples(
        st.integers(1, 9), st.integers(1, 7), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 20)
    )
    return draw(st.lists(st.lists(turn, min_size=1, max_size=3), min_size=1, max_size=6))


@pytest.fixture(scope="module")
def plain():
    return make_engine(slots=1)


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(schedule=schedules(), slots=st.integers(1, 4))
def test_any_schedule_gives_what_each_request_alone_gives(plain, schedule, slots):
    engine = make_engine(slots=slots)
    made = []

    async def session(i, turns):
        ids = ()
        for t, (new, tokens, temperature, passes) in enumerate(turns):
            for _ in range(passes):
                await asyncio.sleep(0)
            ids += prompt(new, (i, t))
            r = request(
                ids, max_tokens=tokens, temperature=temperature, stop_ids=(5,), session=f"{i}", seed=(i, t)
            )
            answer = await engine.generate(r)
            made.append((r, answer))
            ids += answer.ids
        await engine.end_session(f"{i}")

    async def all_of_them():
        await asyncio.gather(*(session(i, turns) for i, turns in enumerate(schedule)))

    asyncio.run(all_of_them())
    assert len(made) == sum(map(len, schedule))
    for r, answer in made:
        assert_same(answer, generate(plain, dataclasses.replace(r, session=None))[0])


# --- weights -------------------------------------------------------------------------------------


def test_new_weights_are_served_with_their_version_and_no_old_cache():
    engine, other = make_engine(version=4), random_params(1)
    (old,) = generate(engine, request(session="a", temperature=0.0))
    asyncio.run(engine.update_weights(other, 5))
    assert (old.version, engine.version) == (4, 5)
    ids = prompt(7) + old.ids + prompt(3, 1)
    (new,) = generate(engine, request(ids, session="a", temperature=0.0))
    assert engine.metrics()["prefill_tokens_saved"] == 0
    assert_same(new, generate(make_engine(other, version=5), request(ids, temperature=0.0))[0])
    assert new.ids != generate(make_engine(), request(ids, temperature=0.0))[0].ids


def test_one_changed_weight_moves_logprobs():
    engine = make_engine()
    (before,) = generate(engine, request(temperature=0.0))
    changed = jax.tree.map(jnp.copy, PARAMS)
    changed["layers"]["v"] = changed["layers"]["v"].at[1, 0, 0].add(0.5)
    asyncio.run(engine.update_weights(changed, 1))
    (after,) = generate(engine, request(temperature=0.0))
    assert np.abs(np.subtract(before.logprobs[0], after.logprobs[0])) > 1e-4


def test_the_engine_holds_copies():
    # A learner donates its weights to the next update: their buffers die.
    params = jax.tree.map(jnp.copy, PARAMS)
    engine = make_engine(params)
    jax.tree.map(lambda x: x.delete(), params)
    params = jax.tree.map(jnp.copy, PARAMS)
    asyncio.run(engine.update_weights(params, 1))
    jax.tree.map(lambda x: x.delete(), params)
    (completion,) = generate(engine, request())
    assert completion.ids == generate(make_engine(), request())[0].ids


def test_weight_updates_are_refused():
    engine = make_engine(version=3)
    with pytest.raises(EngineError, match="version=2: the engine already serves 3"):
        asyncio.run(engine.update_weights(PARAMS, 2))
    with pytest.raises(EngineError, match="version=3: already served, with other weights"):
        asyncio.run(engine.update_weights(random_params(1), 3))
    asyncio.run(engine.update_weights(PARAMS, 3))  # nothing new is no error
    with pytest.raises(EngineError, match=r"params\['norm'\]: float32 \[31\]; float32 \[32\] is expected"):
        asyncio.run(engine.update_weights({**PARAMS, "norm": jnp.ones(31)}, 4))
    with pytest.raises(EngineError, match="params: PyTreeDef"):
        asyncio.run(engine.update_weights({"embed": PARAMS["embed"]}, 4))

    async def while_one_runs():
        running = asyncio.create_task(engine.generate(request(max_tokens=30)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=r"update_weights\(version=4\): 1 requests are in flight"):
            await engine.update_weights(random_params(1), 4)
        return await running

    assert asyncio.run(while_one_runs()).version == 3
    assert engine.version == 3


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ()}, r"ids=\(\): an empty prompt"),
        (
            {"ids": prompt(CONTEXT)},
            "ids: a prompt of 64 tokens; at most 63 are expected in context_length=64",
        ),
        ({"ids": (3, VOCAB)}, "ids: 29 is outside the vocabulary, 0 to 28"),
        ({"ids": (-1, 3)}, "ids: -1 is outside the vocabulary"),
        ({"stop_ids": (99,)}, "stop_ids: 99 is outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens=0: at least 1 is expected"),
        ({"temperature": -0.5}, r"temperature=-0.5: 0 \(greedy\) or a finite number"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1e-6}, "temperature=1e-06"),
    ],
)
def test_bad_requests_are_refused_alone(changes, message):
    engine = make_engine()

    async def both():
        bad, good = engine.generate(request(**changes)), engine.generate(request())
        return await asyncio.gather(bad, good, return_exceptions=True)

    refusal, completion = asyncio.run(both())
    assert isinstance(refusal, EngineError)
    with pytest.raises(EngineError, match=message):
        raise refusal
    assert len(completion.ids) == 10


@pytest.mark.parametrize("key", [np.zeros(3, np.uint32), np.zeros(2, np.int32), np.uint32(1)])
def test_bad_keys_are_refused(key):
    with pytest.raises(EngineError, match=r"key: u?int32 \[\d?\]; raw key data uint32 \[2\] is expected"):
        generate(make_engine(), dataclasses.replace(request(), key=key))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 0}, "slots=0: at least 1"),
        ({"decode_chunk": 0}, "decode_chunk=0: at least 1"),
        ({"context_length": 1}, "context_length=1: at least 2"),
        ({"params": {"embed": PARAMS["embed"]}}, "params: PyTreeDef"),
    ],
)
def test_bad_engines_are_refused(changes, message):
    with pytest.raises(EngineError, match=message):
        make_engine(**changes)


def test_a_session_has_one_request_at_a_time():
    engine = make_engine()

    async def twice():
        first, second = request(session="a"), request(session="a", seed=1)
        return await asyncio.gather(engine.generate(first), engine.generate(second), return_exceptions=True)

    completion, refusal = asyncio.run(twice())
    assert len(completion.ids) == 10
    assert "session='a': its last request is still in flight" in str(refusal)


def test_given_up_requests_make_room():
    engine = make_engine(slots=1)

    async def run():
        running = asyncio.create_task(engine.generate(request(max_tokens=50, session="a")))
        waiting = asyncio.create_task(engine.generate(request(max_tokens=50, session="b")))
        last = asyncio.create_task(engine.generate(request(seed=7)))
        for _ in range(12):
            await asyncio.sleep(0)
        running.cancel(), waiting.cancel()
        await engine.end_session("a")
        return await last

    assert_same(asyncio.run(run()), generate(make_engine(), request(seed=7))[0])
    assert engine.metrics()["requests"] == 1
    assert engine.metrics()["decode_steps"] < 49
    # Nothing is in flight any more.
    generate(engine, request(session="a"), request(session="b"))
    asyncio.run(engine.update_weights(PARAMS, 1))


def test_a_failing_step_fails_what_is_in_flight_and_nothing_later(monkeypatch):
    engine = make_engine()
    generate(engine, request(session="kept"))

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(local, "_decode", broken)

        async def two():
            both = (engine.generate(request()), engine.generate(request(session="kept")))
            return await asyncio.gather(*both, return_exceptions=True)

        for failure in asyncio.run(two()):
            assert isinstance(failure, EngineError)
            assert str(failure) == "RuntimeError: out of memory"
    assert_same(generate(engine, request(session="kept"))[0], generate(make_engine(), request())[0])


def test_a_cancelled_loop_leaves_the_engine_usable():
    engine = make_engine()
    generate(engine, request(prompt(9), session="kept", max_tokens=2))

    async def leave():
        task = asyncio.create_task(engine.generate(request(max_tokens=50, session="left")))
        for _ in range(12):
            await asyncio.sleep(0)
        return task

    task = asyncio.run(leave())  # ends its loop with a request on its way
    assert task.cancelled()
    asyncio.run(engine.update_weights(PARAMS, 0))  # nothing is in flight
    engine = make_engine()
    generate(engine, request(prompt(9), session="kept", max_tokens=2))
    asyncio.run(leave())
    assert_same(generate(engine, request(session="left"))[0], generate(make_engine(), request())[0])
    saved = engine.metrics()["prefill_tokens_saved"]
    generate(engine, request(prompt(9), session="kept"))
    assert engine.metrics()["prefill_tokens_saved"] == saved + 8


def test_broken_weights_fail_requests_and_leave_no_trace():
    broken = {**PARAMS, "norm": PARAMS["norm"].at[3].set(jnp.inf)}
    with jax.debug_nans(False):
        engine = make_engine(broken)
        with pytest.raises(EngineError, match="log-probs of version 0 are not finite: broken weights"):
            generate(engine, request(session="a", max_tokens=3))
        # The cache may hold anything now; masked positions would still multiply it by 0.
        asyncio.run(engine.update_weights(PARAMS, 1))
        assert not any(np.asarray(x).any() for x in jax.tree.leaves(engine._cache))
        (completion,) = generate(engine, request(max_tokens=3))
    assert completion.version == 1 and np.isfinite(completion.logprobs).all()


def test_metrics_and_protocol():
    engine = make_engine()
    assert isinstance(engine, Engine)
    assert engine.context_length == CONTEXT
    generate(engine, request(max_tokens=5), request(max_tokens=3, seed=1))
    metrics = engine.metrics()
    # First tokens come from the prompts; then 4 + 2 tokens in 4 steps of 8 rows (the least) and 8 slots.
    assert metrics["sampled_tokens"] == 8
    assert (metrics["decode_steps"], metrics["decode_rows"]) == (4, 32)
    assert metrics["occupancy"] == metrics["row_use"] == 6 / 32
    assert metrics["programs"] == 2
    assert metrics["seconds"] > 0

"""The embedded engine's batcher: agreement with the trainer, determinism, scheduling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_jax.inference.batcher import Batcher, Finished, Request
from telescope_jax.inference.decoding import sample
from telescope_jax.interfaces import EngineError, PromptTooLong
from telescope_jax.types import Completion, StopReason, VersionSpan
from tests.inference.engine_rig import (
    CONTEXT,
    DECODER,
    DECODING,
    EOS,
    ON_DEVICE_0,
    SLOTS,
    WIDTH,
    V,
    batcher,
    bits,
    complete,
    drain,
    prompt,
    request,
    trainer_logprobs,
    weights,
)

# Agreement


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("length", [1, WIDTH, WIDTH + 1, 2 * WIDTH + 3])
def test_log_probs_agree_with_the_trainers_packed_forward(temperature: float, length: int):
    """VL-01, VL-10: at the sampling temperature, for prompts of every prefill width."""
    tokens = prompt(length, length)
    asked = [request(tokens, seed=s, temperature=temperature) for s in range(4)]
    for answer in complete(batcher(), *asked):
        whole = [*tokens, *answer.tokens]
        expected = trainer_logprobs(0, whole, temperature or 1.0)[length:]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4, rtol=0)
        assert len(answer.tokens) == len(answer.logprobs) > 0


def test_greedy_takes_the_likeliest_token():
    (answer,) = complete(batcher(), request(prompt(3), temperature=0.0, max_tokens=4))
    whole = prompt(3)
    for token in answer.tokens:
        scores = []
        for other in range(V):
            scores.append(trainer_logprobs(0, [*whole, other], 1.0)[-1])
        assert token == int(np.argmax(scores))
        whole.append(int(token))


@pytest.mark.parametrize("vocabulary", [8, 600], ids=["one block", "three blocks"])
def test_samples_follow_the_distribution_that_is_reported(vocabulary: int):
    """Pearson's chi-square over 20,000 draws of eight tokens; its 99.99th percentile at 7 degrees
    of freedom is 29.9."""
    likely = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], np.float32)
    places = np.linspace(0, vocabulary - 1, 8).astype(int)
    logits = np.full(vocabulary, -40.0, np.float32)
    logits[places] = likely
    temperature, draws = 0.7, 20_000
    rows = jnp.broadcast_to(jnp.asarray(logits)[None], (draws, vocabulary))
    seeds = jnp.stack([jnp.zeros(draws, jnp.uint32), jnp.arange(draws, dtype=jnp.uint32)], axis=1)
    position = jnp.full(draws, 3, jnp.int32)
    tokens, scores = sample(rows, seeds, position, jnp.full(draws, temperature))
    exact = np.exp(logits.astype(np.float64) / temperature)
    exact /= exact.sum()
    counts = np.bincount(np.asarray(tokens), minlength=vocabulary)[places]
    assert counts.sum() == draws  # none of a probability of e^-55
    assert ((counts - draws * exact[places]) ** 2 / (draws * exact[places])).sum() < 29.9
    np.testing.assert_allclose(scores, np.log(exact)[np.asarray(tokens)], atol=1e-5)


def test_blocks_share_their_probability_evenly_among_equal_tokens():
    """Flat logits over three blocks, the last one short: a block is as likely as it has tokens."""
    draws, vocabulary = 20_000, 600
    seeds = jnp.stack([jnp.zeros(draws, jnp.uint32), jnp.arange(draws, dtype=jnp.uint32)], axis=1)
    tokens, _ = sample(
        jnp.zeros((draws, vocabulary)), seeds, jnp.zeros(draws, jnp.int32), jnp.ones(draws)
    )
    counts = np.bincount(np.asarray(tokens), minlength=vocabulary)
    blocks = np.array([counts[:256].sum(), counts[256:512].sum(), counts[512:].sum()])
    exact = draws * np.array([256, 256, 88]) / vocabulary
    assert ((blocks - exact) ** 2 / exact).sum() < 18.4  # 99.99th percentile at 2 degrees
    # Mean and deviation of the statistic at 599 degrees of freedom: 599 and 34.6.
    expected = draws / vocabulary
    assert abs(((counts - expected) ** 2 / expected).sum() - 599) < 4 * 34.6


def test_temperature_0_takes_the_first_of_the_likeliest_tokens_of_all_blocks():
    logits = np.random.default_rng(0).normal(size=(64, 600)).astype(np.float32)
    logits[:3, [5, 300, 599]] = 9.0
    seeds = jnp.zeros((64, 2), jnp.uint32)
    tokens, scores = sample(
        jnp.asarray(logits), seeds, jnp.arange(64, dtype=jnp.int32), jnp.zeros(64)
    )
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    exact = logits.max(axis=1) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(scores, exact, atol=1e-5)


# Determinism


def test_a_request_gets_the_same_bits_alone_and_in_a_crowd():
    tokens = prompt(0)
    (alone,) = complete(batcher(), request(tokens, seed=7))
    crowd = [request(prompt(100 + i, 1 + i % 12), seed=i) for i in range(3 * SLOTS)]
    for place in (0, 5, len(crowd)):
        mine = request(tokens, seed=7)
        answers = complete(batcher(), *crowd[:place], mine, *crowd[place:])
        assert bits(answers[place]) == bits(alone)
        crowd = [dataclasses.replace(each, spans=[], slot=-1, over=False) for each in crowd]


def test_the_order_of_arrival_changes_no_answer():
    def asked() -> list[Request]:
        return [request(prompt(i, 3 + i % 9), seed=i, group=str(i // 2)) for i in range(11)]

    forward = complete(batcher(), *asked())
    backward = complete(batcher(), *reversed(asked()))[::-1]
    assert [bits(a) for a in forward] == [bits(b) for b in backward]


def test_cancelling_neighbours_changes_no_answer():
    (alone,) = complete(batcher(), request(prompt(1), seed=5, max_tokens=12))
    engine, mine = batcher(), request(prompt(1), seed=5, max_tokens=12)
    neighbours = [request(prompt(40 + i), seed=i, max_tokens=12) for i in range(SLOTS + 2)]
    for each in [*neighbours[:3], mine, *neighbours[3:]]:
        engine.submit(each)
    done = engine.step()
    for each in neighbours:
        engine.cancel(each)
    done += drain(engine)
    assert bits(dict(done)[mine]) == bits(alone)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_schedule_changes_an_answer_or_loses_a_request(data: st.DataObject):
    """Any interleaving of arrivals, steps and cancels: each request is answered once, with the
    bits it would get alone, or not at all if it was cancelled (VL: conservation)."""
    engine, left = batcher(), [(p, s) for p in range(4) for s in range(3)]
    running: dict[Request, tuple[int, int]] = {}
    answers: list[Finished] = []
    while left or running:
        action = data.draw(st.sampled_from(["submit", "step", "cancel"]))
        if action == "submit" and left:
            p, s = left.pop(data.draw(st.integers(0, len(left) - 1)))
            group = data.draw(st.sampled_from(["", "shared"]))
            priority = data.draw(st.integers(0, 1))
            new = request(prompt(p, 3 + 3 * p), seed=s, group=group, priority=priority)
            engine.submit(new)
            running[new] = (p, s)
        elif action == "cancel" and running:
            victim = data.draw(st.sampled_from(sorted(running, key=lambda r: running[r])))
            engine.cancel(victim)
            del running[victim]
        else:
            for finished in engine.step():
                running.pop(finished[0])  # KeyError: answered twice, or after a cancel
                answers.append(finished)
    assert not engine.busy
    assert engine.slots_busy == 0
    assert not engine._members
    for asked, answer in answers:
        (alone,) = complete(batcher(), request(asked.tokens.tolist(), seed=asked.sampling.seed))
        assert isinstance(answer, Completion)
        assert bits(answer) == bits(alone)


def test_rollouts_of_a_group_differ_by_their_seeds_alone():
    """VL-08: one seed for all members would give identical completions and no advantage."""
    seeds = [7, 8, 7 + 2**32, 7 + 2**63]
    asked = [request(prompt(2), seed=s, group="g", max_tokens=12) for s in seeds]
    first = [a.tokens.tolist() for a in complete(batcher(), *asked)]
    assert len({tuple(tokens) for tokens in first}) == len(seeds)
    again = [request(prompt(2), seed=s, group="g", max_tokens=12) for s in seeds]
    assert [a.tokens.tolist() for a in complete(batcher(), *again)] == first


def test_positions_draw_independent_noise():
    """Were the noise the same at every position, a flat policy would repeat one token."""
    engine = Batcher(DECODING, ON_DEVICE_0)
    engine.swap(jax.tree.map(jnp.zeros_like, weights(0)), version=0)
    (answer,) = complete(engine, request(prompt(0), seed=3, max_tokens=16))
    assert len(set(answer.tokens.tolist())) > len(answer.tokens) / 2
    np.testing.assert_allclose(answer.logprobs, -np.log(V), atol=1e-6)


# Groups and priorities


def test_a_group_prefills_its_prompt_once():
    engine = batcher()
    members = [request(prompt(0), seed=s, group="g") for s in range(2 * SLOTS)]
    shared = complete(engine, *members)
    assert engine.counters.prefilled == 1
    assert engine.counters.admitted == 2 * SLOTS
    apart = [request(prompt(0), seed=s) for s in range(2 * SLOTS)]
    assert [bits(a) for a in shared] == [bits(b) for b in complete(batcher(), *apart)]


def test_equal_group_names_with_different_prompts_share_nothing():
    engine = batcher()
    asked = [request(prompt(i), seed=1, group="g") for i in range(3)]
    answers = complete(engine, *asked)
    assert engine.counters.prefilled == 3
    for i, answer in enumerate(answers):
        assert bits(answer) == bits(complete(batcher(), request(prompt(i), seed=1))[0])


def test_prefilled_prompts_do_not_outlive_their_last_request():
    engine = batcher()
    asked = [request(prompt(i // 4), seed=i, group=str(i // 4)) for i in range(12)]
    for each in asked:
        engine.submit(each)
    engine.step()
    for each in asked:
        engine.cancel(each)
    assert engine._prefilled == {}
    assert not engine.busy


def test_lower_priority_numbers_run_first():
    engine = batcher()
    late = [request(prompt(i), seed=i, priority=1, max_tokens=1) for i in range(SLOTS)]
    urgent = [request(prompt(i), seed=i, priority=0, max_tokens=1) for i in range(SLOTS)]
    for each in [*late, *urgent]:
        engine.submit(each)
    order = [asked for asked, _ in drain(engine)]
    assert set(order[:SLOTS]) == set(urgent)


def test_a_call_ends_early_when_its_idle_slots_could_be_used():
    """Half of the slots idle after one step of three; then others wait for them, or nobody."""
    for waiting, expected in ((3, 2), (0, 4)):
        engine = batcher()
        short = [request(prompt(i), temperature=0.0, max_tokens=2) for i in range(SLOTS // 2)]
        long = [request(prompt(i), temperature=0.0, max_tokens=9) for i in range(SLOTS // 2)]
        for each in [*short, *long, *(request(prompt(i)) for i in range(waiting))]:
            engine.submit(each)
        assert {asked for asked, _ in engine.step()} == set(short)
        assert [span.end for each in long for span in each.spans] == [expected] * len(long)


# Weights in flight


def test_a_swap_splits_the_spans_where_it_happened():
    engine, mine = batcher(0), request(prompt(4), seed=2, max_tokens=8)
    engine.submit(mine)
    engine.step()  # admission samples one token, the call TOKENS_PER_CALL more
    engine.swap(weights(1), version=1)
    engine.step()
    engine.swap(weights(2), version=5)
    ((_, answer),) = drain(engine)
    assert isinstance(answer, Completion)
    assert answer.versions == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 7), VersionSpan(5, 7, 8))
    _check_in_flight(answer, [(0, 4), (1, 3), (2, 1)])


def _check_in_flight(answer: Completion, schedule: list[tuple[int, int]]) -> None:
    """The same tokens through the decoder by hand: old cache entries stay, new weights go on."""
    versions = [seed for seed, count in schedule for _ in range(count)]
    tokens = prompt(4)
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(tokens)] = tokens
    prefill, decode = jax.jit(DECODER.prefill), jax.jit(DECODER.decode)
    logits, cache = prefill(weights(versions[0]), padded, jnp.array([len(tokens)]))
    for index, (seed, token) in enumerate(zip(versions, answer.tokens, strict=True)):
        if index:
            before = jnp.asarray(answer.tokens[index - 1 : index])
            position = jnp.array([len(tokens) + index - 1])
            logits, cache = decode(weights(seed), before, position, cache)
        expected = jax.nn.log_softmax(logits[0])[token]
        np.testing.assert_allclose(answer.logprobs[index], expected, atol=1e-4)


def test_no_new_request_meets_a_prompt_that_other_weights_read():
    """VL-02: a group that spans an update; its later members are prefilled anew."""
    engine = batcher(0)
    members = [request(prompt(6), seed=s, group="g", max_tokens=12) for s in range(2 * SLOTS)]
    for each in members:
        engine.submit(each)
    done = engine.step()
    engine.swap(weights(1), version=1)
    done += drain(engine)
    late = [a for m, a in done if isinstance(a, Completion) and a.versions[0].version == 1]
    assert late
    for answer in late:
        expected = trainer_logprobs(1, [*prompt(6), *answer.tokens], 1.0)[5:]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert engine.counters.prefilled == 2


# Ends


def test_a_completion_says_why_it_ended():
    greedy = {"temperature": 0.0, "max_tokens": 30}
    (free,) = complete(batcher(), request(prompt(8, 20), **greedy))
    assert (free.stop, len(free.tokens)) == (StopReason.TOO_LONG, CONTEXT - 20)
    (cut,) = complete(batcher(), request(prompt(8, 20), temperature=0.0, max_tokens=2))
    assert (cut.stop, len(cut.tokens)) == (StopReason.LENGTH, 2)
    third = int(free.tokens[2])
    first = free.tokens.tolist().index(third)
    (stopped,) = complete(batcher(), request(prompt(8, 20), stop_token_ids=(third,), **greedy))
    assert stopped.stop is StopReason.STOP
    assert stopped.tokens.tolist() == free.tokens.tolist()[: first + 1]


def test_an_answer_that_is_only_the_end_token_has_one_token():
    """VL-12: it is graded and trained on its one token; zero tokens never leave the engine."""
    asked = [request(prompt(9), seed=s, max_tokens=3) for s in range(300)]
    answers = complete(batcher(), *asked)
    assert min(len(a.tokens) for a in answers) == 1
    ended = [a for a in answers if a.tokens[-1] == EOS]
    assert ended
    assert all(a.stop is StopReason.EOS for a in ended)
    assert all(EOS not in a.tokens[:-1] for a in answers)


def test_cancelling_frees_the_slot_for_the_next_call():
    """OR-25: the slot, not only the caller's memory of the request."""
    engine = batcher()
    first = [request(prompt(i), seed=i, temperature=0.0, max_tokens=18) for i in range(SLOTS)]
    waiting = request(prompt(50), max_tokens=1)
    for each in [*first, waiting]:
        engine.submit(each)
    engine.step()
    assert (engine.slots_busy, engine.waiting) == (SLOTS, 1)
    engine.cancel(first[2])
    engine.cancel(first[2])
    assert engine.counters.cancelled == 1
    assert waiting in dict(engine.step())
    assert engine.slots_busy == SLOTS - 1


@pytest.mark.parametrize(
    ("tokens", "sampling", "error", "says"),
    [
        (prompt(0, CONTEXT), {}, PromptTooLong, f"{CONTEXT} tokens leaves no room"),
        (prompt(0), {"top_p": 0.9}, NotImplementedError, "whole distribution"),
        (prompt(0), {"top_k": 5}, NotImplementedError, "whole distribution"),
        (prompt(0), {"temperature": -1.0}, ValueError, "temperature=-1.0"),
        (prompt(0), {"temperature": 1e-6}, ValueError, "at least 0.001"),
        (prompt(0), {"max_tokens": 0}, ValueError, "max_tokens=0"),
        (prompt(0), {"stop_token_ids": tuple(range(9))}, ValueError, "9 stop_token_ids"),
        ([], {}, ValueError, "empty prompt"),
        ([1, V], {}, ValueError, f"vocabulary of {V}"),
        ([-1], {}, ValueError, f"vocabulary of {V}"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(tokens, sampling, error, says):
    """VL-03: no negative max_tokens, no retry loop; the caller learns what to change."""
    with pytest.raises(error, match=says):
        request(tokens, **sampling)


def test_weights_that_are_not_finite_fail_requests_and_not_the_engine():
    """An absent log-prob is never a number: nobody gets NaN, and the next version finds the slots
    clean (a NaN left in a cache would come back through 0 · NaN)."""
    engine = batcher(0)
    for s in range(SLOTS + 3):
        engine.submit(request(prompt(s, WIDTH), temperature=0.0, max_tokens=16))
    answers = [answer for _, answer in engine.step()]
    assert answers == []
    engine.swap(jax.tree.map(lambda x: x * jnp.nan, weights(0)), version=1)
    answers = [answer for _, answer in drain(engine)]
    assert len(answers) == SLOTS + 3
    assert all(isinstance(a, EngineError) and "not finite" in str(a) for a in answers)
    engine.swap(weights(0), version=2)
    for s in range(SLOTS):
        (answer,) = complete(engine, request(prompt(s), seed=s))
        assert bits(answer) == bits(complete(batcher(), request(prompt(s), seed=s))[0])

"""Continuous batching: which request sits in which slot, and what each has got so far.

A Batcher belongs to one thread and never waits: `step` admits what fits, decodes one call, and
returns what finished. So a test can drive it by hand, and results depend on no timing.

Invariants:
- waiting requests are admitted by (priority, order of arrival);
- a prompt of one group is prefilled once for all its waiting members, and prompts further back in
  the queue fill the rows of a prefill that is due anyway;
- no prefilled prompt outlives the weights that read it: a new request never meets another version;
- a token's version is the version of the weights that the call which sampled it was given.
"""

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from telescope_jax.inference.decoding import (
    MAX_STOP_IDS,
    Admission,
    Decoding,
    Emitted,
    Prefilled,
    Slots,
)
from telescope_jax.interfaces import EngineError, PromptTooLong
from telescope_jax.types import Completion, Params, SamplingParams, StopReason, VersionSpan

NO_VERSION = -1
"""The version of an engine that has loaded none."""


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    tokens: int = 0  # sampled
    admitted: int = 0  # requests
    prefilled: int = 0  # prompts read; the rest of `admitted` shared one
    cancelled: int = 0
    failed: int = 0
    calls: int = 0  # of decode
    busy_slots: int = 0  # summed over those calls
    step_s: float = 0.0  # in step()
    device_s: float = 0.0  # of which in calls to the device, waits included

    def copy(self) -> "Counters":
        """These totals, as they are at this moment."""
        return replace(self)

    def minus(self, earlier: "Counters") -> "Counters":
        """What was added since `earlier`."""
        mine, theirs = asdict(self), asdict(earlier)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `eq=False`: a request is itself, whatever it asks for."""

    tokens: Int[np.ndarray, " P"]
    sampling: SamplingParams
    limit: int  # tokens that may be sampled: max_tokens, or what the context has room for
    prompt: object = None  # equal for requests that share a prefill
    slot: int = -1
    over: bool = False  # finished, failed or cancelled
    spans: list[VersionSpan] = field(default_factory=list)


Finished = tuple[Request, Completion | EngineError]
"""A request, and its completion or why there is none."""


def check_request(
    tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, *, context: int, vocab_size: int
) -> Request:
    """A request that an engine with room for `context` tokens can answer.

    Raises:
      PromptTooLong: no token fits behind the prompt.
      NotImplementedError: top_p or top_k cut the distribution.
      ValueError: an empty prompt, a token outside the vocabulary, or a setting out of range.
    """
    prompt = np.asarray(tokens, np.int32)
    if len(prompt) >= context:
        raise PromptTooLong(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise NotImplementedError(
            f"top_p={sampling.top_p}, top_k={sampling.top_k}: the embedded engine samples from the "
            "whole distribution; set them to 1.0 and 0, or use engine.kind=vllm"
        )
    if not len(prompt):
        raise ValueError("an empty prompt has nothing to condition on; start it with a bos token")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"prompt tokens {prompt.min()} to {prompt.max()} are not all in the vocabulary of "
            f"{vocab_size}"
        )
    # Below 1e-3 logits / temperature may overflow float32, and one request would fail the call.
    if sampling.max_tokens < 1 or not (sampling.temperature == 0 or sampling.temperature >= 1e-3):
        raise ValueError(
            f"max_tokens={sampling.max_tokens} must be at least 1, and "
            f"temperature={sampling.temperature} 0 (greedy) or at least 0.001"
        )
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"{len(sampling.stop_token_ids)} stop_token_ids; this engine takes {MAX_STOP_IDS}"
        )
    return Request(prompt, sampling, min(sampling.max_tokens, context - len(prompt)))


class Batcher:
    """The host side of one embedded engine; not thread-safe, and no coroutine."""

    def __init__(self, decoding: Decoding, sharding: jax.sharding.Sharding):
        self._decoding, self._sharding = decoding, sharding
        self._params: Params = None
        self.version = NO_VERSION
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, Request]] = []  # sorted; arrival numbers are unique
        self._members: Counter[object] = Counter()  # waiting requests of each prompt
        self._prefilled: dict[object, tuple[Prefilled, int]] = {}  # prompt -> rows, row
        self._running: list[Request | None] = [None] * decoding.slots
        self._free = list(range(decoding.slots))
        self._slots: Slots | None = None
        self._tokens = np.zeros((decoding.slots, decoding.context), np.int32)
        self._logprobs = np.zeros((decoding.slots, decoding.context), np.float32)
        self._count = np.zeros(decoding.slots, np.int64)
        self.counters = Counters()

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting) or self.slots_busy > 0

    @property
    def waiting(self) -> int:
        """Requests that no slot holds yet."""
        return len(self._waiting)

    @property
    def slots_busy(self) -> int:
        return self._decoding.slots - len(self._free)

    def submit(self, request: Request) -> None:
        """Puts a request in the queue.

        Raises:
          EngineError: there are no weights to answer it with.
        """
        if self.version == NO_VERSION:
            raise EngineError("the engine has no weights yet; load a version first")
        order = next(self._arrivals)
        group = request.sampling.group
        request.prompt = (group, request.tokens.tobytes()) if group else order
        bisect.insort(self._waiting, (request.sampling.priority, order, request))
        self._members[request.prompt] += 1

    def cancel(self, request: Request) -> None:
        """Forgets a request; its slot is free for the next `step`. Finished ones are no error."""
        if request.over:
            return
        request.over = True
        if request.slot >= 0:
            self._release(request)
            self.counters.cancelled += 1
            return
        for index, entry in enumerate(self._waiting):
            if entry[2] is request:
                del self._waiting[index]
                self._left_queue(request)
                self.counters.cancelled += 1
                return

    def swap(self, params: Params, version: int) -> None:
        """From the next token on, `params` write; running requests keep their cache.

        The first swap compiles everything, so that no request waits for the compiler.
        """
        first = self._params is None
        self._params, self.version = params, version
        self._prefilled.clear()
        if first:
            self._warm_up()

    def step(self) -> list[Finished]:
        """Admits, decodes one call, and returns the requests that are done.

        A failure of the device fails every request of this engine, and not the engine: the next
        request meets empty slots.
        """
        started = time.perf_counter()
        done: list[Finished] = []
        try:
            self._admit(done)
            if self.slots_busy:
                self._decode(done)
        except Exception as error:  # the device's errors have no base of their own
            done += self.fail_all(f"the engine failed: {error!r}")
        self.counters.step_s += time.perf_counter() - started
        return done

    def fail_all(self, reason: str) -> list[Finished]:
        """Gives up every request, and whatever the slots hold."""
        requests = [request for _, _, request in self._waiting]
        requests += [request for request in self._running if request is not None]
        self._waiting.clear()
        self._members.clear()
        self._prefilled.clear()
        self._running = [None] * self._decoding.slots
        self._free = list(range(self._decoding.slots))
        self._slots = None  # donated to a call that failed, or poisoned by its numbers
        self.counters.failed += len(requests)
        for request in requests:
            request.slot, request.over = -1, True
        return [(request, EngineError(reason)) for request in requests]

    def close(self) -> list[Finished]:
        """Gives up every request and the device memory."""
        self._params, self.version = None, NO_VERSION
        return self.fail_all("the engine was closed")

    def _admit(self, done: list[Finished]) -> None:
        while self._waiting and self._free:
            head = self._waiting[0][2]
            if head.prompt not in self._prefilled:
                self._prefill(self._decoding.width(len(head.tokens)))
            rows = self._prefilled[head.prompt][0]
            new = self._decoding.empty_admission()
            admitted = 0
            for _, _, request in self._waiting[: len(self._free)]:
                found = self._prefilled.get(request.prompt)
                if found is None or found[0] is not rows:
                    break  # the rest are rows of another prefill, and their turn is the next
                self._seat(request, found[1], new)
                admitted += 1
            left = self._waiting[:admitted]
            del self._waiting[:admitted]
            for _, _, request in left:
                self._left_queue(request)
            self.counters.admitted += admitted
            self._slots, emitted = self._on_device(
                self._decoding.admit, self._slots_or_new(), rows, new
            )
            self._harvest(emitted, done)

    def _seat(self, request: Request, row: int, new: Admission) -> None:
        """Gives a request a slot, and writes it into the admission."""
        slot = request.slot = self._free.pop()
        sampling = request.sampling
        seed = sampling.seed & (2**64 - 1)
        self._running[slot], self._count[slot] = request, 0
        new.source[slot], new.length[slot] = row, len(request.tokens)
        new.limit[slot], new.temperature[slot] = request.limit, sampling.temperature
        new.seed[slot] = seed >> 32, seed & (2**32 - 1)
        new.stops[slot, : len(sampling.stop_token_ids)] = sampling.stop_token_ids

    def _prefill(self, width: int) -> None:
        """Reads the prompt at the head of the queue, and those behind it that share its width."""
        room = self._decoding.rows(width)
        tokens, lengths = np.zeros((room, width), np.int32), np.ones(room, np.int32)
        # Prompts of requests far back are read ahead only while few such rows are kept.
        ahead = len(self._prefilled) < self._decoding.prefill_rows
        reach = len(self._waiting) if ahead else len(self._free)
        chosen: dict[object, int] = {}
        for _, _, request in self._waiting[:reach]:
            prompt, length = request.prompt, len(request.tokens)
            if prompt in chosen or prompt in self._prefilled:
                continue
            if self._decoding.width(length) != width:
                continue
            row = chosen[prompt] = len(chosen)
            tokens[row, :length], lengths[row] = request.tokens, length
            if len(chosen) == room:
                break
        rows = self._on_device(self._decoding.prefill, self._params, tokens, lengths)
        self._prefilled |= {prompt: (rows, row) for prompt, row in chosen.items()}
        self.counters.prefilled += len(chosen)

    def _decode(self, done: list[Finished]) -> None:
        wanted = np.array([request is not None for request in self._running])
        waiting = np.int32(len(self._waiting))
        self._slots, emitted = self._on_device(
            self._decoding.decode, self._params, self._slots_or_new(), wanted, waiting
        )
        self.counters.calls += 1
        self.counters.busy_slots += self.slots_busy
        self._harvest(emitted, done)

    def _harvest(self, emitted: Emitted, done: list[Finished]) -> None:
        """Books what a call sampled, and takes finished requests out of their slots."""
        tokens, logprobs, count, running = self._on_device(jax.device_get, emitted)
        step, slot = np.nonzero(np.arange(len(tokens))[:, None] < count[None, :])
        at = self._count[slot] + step
        self._tokens[slot, at], self._logprobs[slot, at] = tokens[step, slot], logprobs[step, slot]
        if not np.isfinite(logprobs[step, slot]).all():
            raise FloatingPointError(f"version {self.version} gives log-probs that are not finite")
        self.counters.tokens += len(slot)
        ends = self._count + count
        for slot in np.flatnonzero(count).tolist():
            request = self._running[slot]
            assert request is not None, f"slot {slot} sampled for nobody"
            _extend(request.spans, self.version, int(self._count[slot]), int(ends[slot]))
            if not running[slot]:
                done.append((request, self._completion(request, slot, int(ends[slot]))))
                self._release(request)
        self._count = ends

    def _on_device(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls the device; small computations run inside the call, others inside device_get."""
        started = time.perf_counter()
        result = call(*args)
        self.counters.device_s += time.perf_counter() - started
        return result

    def _completion(self, request: Request, slot: int, end: int) -> Completion:
        last = int(self._tokens[slot, end - 1])
        if last in self._decoding.eos_ids:
            stop = StopReason.EOS
        elif last in request.sampling.stop_token_ids:
            stop = StopReason.STOP
        elif end == request.sampling.max_tokens:
            stop = StopReason.LENGTH
        else:
            stop = StopReason.TOO_LONG
        return Completion(
            tokens=self._tokens[slot, :end].copy(),
            logprobs=self._logprobs[slot, :end].copy(),
            versions=tuple(request.spans),
            stop=stop,
        )

    def _release(self, request: Request) -> None:
        self._running[request.slot] = None
        self._free.append(request.slot)
        request.slot, request.over = -1, True

    def _left_queue(self, request: Request) -> None:
        """The prefilled prompt goes with the last request that waited for it."""
        self._members[request.prompt] -= 1
        if not self._members[request.prompt]:
            del self._members[request.prompt]
            self._prefilled.pop(request.prompt, None)

    def _slots_or_new(self) -> Slots:
        if self._slots is None:
            return jax.device_put(self._decoding.empty_slots(), self._sharding)
        return self._slots

    def _warm_up(self) -> None:
        width = self._decoding.width(1)
        room = self._decoding.rows(width)
        blank = np.zeros((room, width), np.int32), np.ones(room, np.int32)
        rows = self._decoding.prefill(self._params, *blank)
        nobody = self._decoding.empty_admission()
        slots, _ = self._decoding.admit(self._slots_or_new(), rows, nobody)
        slots, _ = self._decoding.decode(self._params, slots, nobody.source >= 0, np.int32(0))
        self._slots = jax.block_until_ready(slots)


def _extend(spans: list[VersionSpan], version: int, start: int, end: int) -> None:
    """Appends [start, end) of `version`, joined to the last span if that is its version too."""
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(end=end)
    else:
        spans.append(VersionSpan(version, start, end))

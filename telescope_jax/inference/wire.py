"""Messages between a trainer and its engine process: msgpack frames over a socket.

A frame is a 4-byte big-endian length and a msgpack list of messages; a message is a list whose
first item names it. All messages of one turn of the event loop travel in one frame, so that a
group costs one write and one read. No pickle: a frame can hold nothing but data.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgpack
import numpy as np

from telescope_jax.types import Completion, SamplingParams, StopReason, VersionSpan, WeightsRef

_LENGTH = struct.Struct(">I")


class Channel:
    """One end of the conversation."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._packer = msgpack.Packer()
        self._outbox: list[Any] = []
        self.ended = False  # the other end is gone

    def send(self, *message: Any) -> None:
        """Sends a message with all others of this turn of the event loop. Never blocks; what the
        other end will not read any more is lost, and `receive` tells of its death."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outbox.append(message)

    def flush(self) -> None:
        """Writes what `send` has gathered."""
        if self._outbox and not self._writer.is_closing():
            frame = self._packer.pack(self._outbox)
            self._writer.write(_LENGTH.pack(len(frame)) + frame)
        self._outbox = []

    async def receive(self) -> AsyncIterator[list[Any]]:
        """Messages as they come, until the other end is gone."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                frame = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                self.ended = True
                return
            for message in msgpack.unpackb(frame):
                yield message

    def close(self) -> None:
        """Tells the other end that this was all."""
        self.flush()
        self._writer.close()


def pack_request(tokens: Sequence[int], sampling: SamplingParams) -> list[Any]:
    """A request as msgpack can hold it."""
    return [
        np.asarray(tokens, np.int32).tobytes(),
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.stop_token_ids,
        sampling.seed & (2**64 - 1),
        sampling.group,
        sampling.priority,
    ]


def unpack_request(packed: list[Any]) -> tuple[np.ndarray, SamplingParams]:
    """The inverse of `pack_request`."""
    tokens, max_tokens, temperature, top_p, top_k, stops, seed, group, priority = packed
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_token_ids=tuple(stops),
        seed=seed,
        group=group,
        priority=priority,
    )
    return np.frombuffer(tokens, np.int32), sampling


def pack_completion(completion: Completion) -> list[Any]:
    """A completion as msgpack can hold it; log-probs keep their bits."""
    return [
        completion.tokens.astype(np.int32).tobytes(),
        completion.logprobs.astype(np.float32).tobytes(),
        [tuple(span) for span in completion.versions],
        completion.stop.value,
    ]


def unpack_completion(packed: list[Any]) -> Completion:
    """The inverse of `pack_completion`."""
    tokens, logprobs, spans, stop = packed
    return Completion(
        tokens=np.frombuffer(tokens, np.int32),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=tuple(VersionSpan(*span) for span in spans),
        stop=StopReason(stop),
    )


def pack_ref(ref: WeightsRef) -> list[Any]:
    """A reference to weights as msgpack can hold it."""
    return [ref.version, ref.path, ref.fingerprint]


def unpack_ref(packed: list[Any]) -> WeightsRef:
    """The inverse of `pack_ref`."""
    return WeightsRef(*packed)

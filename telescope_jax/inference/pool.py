"""A pool of servers as one engine: routing, deploys, and servers that come back.

Invariants:
- a server takes requests only with the version that the pool was asked for last, confirmed by its
  workers and, at its start, by a handshake with the trainer's log-probs;
- `version` is the lowest among the servers that take requests; one that is dead or coming back
  takes none;
- a server that dies is replaced while the others go on. What it was answering fails, each with its
  last log lines, and is asked again by whoever keeps the books: under the same uid;
- a server that cannot be replaced, or that disagrees with the trainer, ends the run (EngineLost).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from telescope_jax.inference.handshake import Handshake, HandshakeError
from telescope_jax.inference.member import NO_VERSION, Member
from telescope_jax.inference.routes import Routes
from telescope_jax.inference.vllm_server import WeightsRefused
from telescope_jax.interfaces import EngineError, EngineLost
from telescope_jax.types import Completion, SamplingParams, WeightsRef

log = logging.getLogger(__name__)

_REMEMBERED_VERSIONS = 2  # for the diagnosis of stale weights


class Pool:
    """An Engine over several servers."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        handshake: Handshake | None = None,
        max_restarts: int = 3,
        at_once: bool = False,
    ) -> None:
        """
        Args:
          handshake: None trusts the engine's log-probs.
          max_restarts: deaths of one server that are put up with.
          at_once: deploy to all servers at the same time, not to one after another.
        """
        self._members, self._handshake = list(members), handshake
        self._routes = Routes(self._members)
        self._max_restarts, self._at_once = max_restarts, at_once
        self._newest: WeightsRef | None = None
        self._older: list[WeightsRef] = []
        self._groups: dict[str, tuple[Member, int]] = {}  # group -> server, requests in flight
        self._watches: list[asyncio.Task[None]] = []
        self._lost: EngineLost | None = None
        self._changed = asyncio.Condition()
        self._counts: Counter[str] = Counter()
        self._handshake_error: float | None = None
        self._reported = time.monotonic()
        self._waiting = 0

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    @property
    def version(self) -> int:
        """The lowest version that a new request may meet; -1 before the first load."""
        oldest = self._routes.oldest_served
        if oldest is not None:
            return oldest
        return self._newest.version if self._newest else NO_VERSION

    async def start(self) -> None:
        """Starts every server. Raises EngineError if one does not come up; none is left then."""
        started = await asyncio.gather(
            *(member.start() for member in self._members), return_exceptions=True
        )
        if errors := [error for error in started if isinstance(error, BaseException)]:
            await self.close()
            raise errors[0]
        self._watches = [
            asyncio.create_task(self._keep(member), name=f"watch {member.name}")
            for member in self._members
        ]

    async def sample(self, tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """One completion; cancelling closes the request, and the server frees its blocks.

        Requests of one group go to one server, so that their prompt is prefilled once.

        Raises:
          PromptTooLong, NotImplementedError, ValueError: see VllmClient.generate.
          EngineError: the server failed or died meanwhile.
          EngineLost: a server will not come back.
        """
        member = await self._choose(sampling.group)
        process = member.process  # of this moment: it may be another one when the request fails
        member.in_flight += 1
        self._counts["requests"] += 1
        try:
            completion = await member.sample(tokens, sampling)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        except EngineError as error:
            self._counts["failed"] += 1
            # Idle, and therefore the least loaded, a dead server would draw every request.
            await member.check(process)
            if process is not None and not process.alive:
                raise EngineError(f"{member.name}: {process.death()}") from error
            raise
        finally:
            member.in_flight -= 1
            self._leave(sampling.group)
        self._counts["tokens"] += len(completion.tokens)
        return completion

    async def load(self, ref: WeightsRef) -> None:
        """Loads `ref` into every server, in flight; returns once all that live serve it.

        A server that dies of it comes back with the newest version while the others go on.

        Raises:
          WeightsRefused: the version is damaged, or fits another model; nothing was changed.
          EngineLost: no server is left, or its log-probs are not the trainer's.
        """
        if self._newest is not None and self._newest != ref:
            self._older = [self._newest, *self._older][:_REMEMBERED_VERSIONS]
        self._newest = ref
        awake = [member for member in self._members if member.ready]
        if self._at_once:
            await asyncio.gather(*(self._load(member, ref) for member in awake))
        else:
            for member in awake:
                await self._load(member, ref)
        # All died of it, or were dead already: somebody has to serve before the loop goes on.
        await self._until(lambda: any(m.serving and m.version >= ref.version for m in self.members))

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call, and the state of this moment."""
        now = time.monotonic()
        elapsed, self._reported = now - self._reported, now
        counts, self._counts = self._counts, Counter()
        names = ("tokens", "requests", "cancelled", "failed")
        values = {name: float(counts[name]) for name in names}
        values["tokens_per_s"] = counts["tokens"] / max(elapsed, 1e-9)
        values["waiting"] = float(self._waiting)
        values["restarts"] = float(sum(member.restarts for member in self._members))
        values["time_load"] = max(member.load_s for member in self._members)
        values["time_swap"] = max(member.swap_s for member in self._members)
        values["servers"] = float(sum(member.serving for member in self._members))
        if self._handshake_error is not None:
            values["handshake_error"] = self._handshake_error
        return values

    async def close(self) -> None:
        """Ends all servers that were started here."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(member.stop() for member in self._members))

    # Routing

    async def _choose(self, group: str) -> Member:
        def choice() -> Member | None:
            if group in self._groups and self._groups[group][0].takes_requests:
                return self._groups[group][0]
            return self._routes.least_loaded()

        if self._lost is not None or (member := choice()) is None:
            self._waiting += 1
            try:
                await self._until(lambda: choice() is not None)
            finally:
                self._waiting -= 1
            member = choice()
            assert member is not None
        if group:
            self._groups[group] = (member, self._groups.get(group, (member, 0))[1] + 1)
        return member

    def _leave(self, group: str) -> None:
        if group in self._groups:
            member, requests = self._groups[group]
            if requests > 1:
                self._groups[group] = (member, requests - 1)
            else:
                del self._groups[group]

    # Deploys

    async def _load(self, member: Member, ref: WeightsRef) -> None:
        """Loads `ref` into a server that may serve an older version meanwhile."""
        first, process = not member.serving, member.process
        try:
            async with member.loading:
                if member.version == ref.version and member.serving:
                    return  # it came back with it already
                await member.load(ref)
                if first:
                    await self._shake(member, ref)
                member.serving = True
        except (WeightsRefused, EngineLost):
            raise
        except (EngineError, ValueError) as error:
            log.warning("%s failed to load version %d: %s", member.name, ref.version, error)
            await self._end(member)
            return
        finally:
            await self._notify()
        if not first:
            try:
                await self._shake(member, ref)
            except EngineLost:
                raise
            except EngineError as error:
                log.warning("%s failed while its log-probs were compared: %s", member.name, error)
                if member.process is process:  # its watch may have brought another one already
                    await self._end(member)

    async def _shake(self, member: Member, ref: WeightsRef) -> None:
        if self._handshake is None:
            return
        ask = partial(member.sample, salt="handshake-")
        try:
            agreement = await self._handshake.check(ask, ref, older=self._older)
        except HandshakeError as error:
            raise HandshakeError(f"{member.name}: {error}") from error
        self._handshake_error = agreement.greatest

    # Deaths

    async def _keep(self, member: Member) -> None:
        """Replaces a server whenever it dies; ends with the pool, or when the server is lost."""
        while self._lost is None:
            last_words = await member.died()
            await self._notify()
            while not member.ready:
                member.restarts += 1
                if member.restarts > self._max_restarts:
                    await member.stop(kill=True)
                    self._lose(
                        EngineLost(
                            f"{member.name} died {member.restarts} times, more often than "
                            f"engine.max_restarts={self._max_restarts} allows; {last_words}"
                        )
                    )
                    break
                log.warning("restarting (%d): %s", member.restarts, last_words)
                try:
                    # The whole group: children of a dead process may still hold the memory.
                    await member.stop(kill=True)
                    await member.start()
                    await self._sync(member)
                except EngineLost as error:
                    self._lose(error)
                    break
                except Exception as error:
                    # What died with it says more than the connection that broke.
                    last_words = f"{error}; {member.last_words()}"
                    await self._end(member)
            await self._notify()

    async def _sync(self, member: Member) -> None:
        """Gives a new server the newest version, also when another one is published meanwhile."""
        while (ref := self._newest) is not None and not (
            member.serving and member.version == ref.version
        ):
            member.serving = False
            async with member.loading:
                try:
                    await member.load(ref)
                except WeightsRefused:
                    if self._newest is ref:
                        raise
                    continue  # pruned while it was read; there is a newer one
                await self._shake(member, ref)
                member.serving = self._newest is ref

    async def _end(self, member: Member) -> None:
        """Ends a server whose state is unknown; its watch brings another one."""
        member.give_up()
        if member.process is not None:
            await member.process.stop(kill=True)

    def _lose(self, error: EngineLost) -> None:
        log.error("%s", error)
        self._lost = error

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost is not None or holds())
        if self._lost is not None:
            raise self._lost

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

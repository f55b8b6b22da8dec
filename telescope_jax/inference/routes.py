"""Which server takes the next request, and the version it would meet, in O(log servers).

Members tell it of their changes, so that nobody looks at all of them for every request.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

from telescope_jax.inference.member import Member


class Routes:
    """The members of a pool by load and by version."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        self._place = {member: index for index, member in enumerate(self._members)}
        # (requests in flight, place). An entry holds while it is what its member is; a member that
        # changes is entered again, and what no longer holds is left out when it comes up.
        self._by_load: list[tuple[int, int]] = []
        self._served: list[int | None] = [None] * len(self._members)
        self._versions: Counter[int] = Counter()
        for member in self._members:
            member.tell = self._changed
            self._changed(member)

    @property
    def oldest_served(self) -> int | None:
        """The lowest version among the members that serve; None while none does."""
        return min(self._versions, default=None)  # a few: one, and two during a deploy

    def least_loaded(self) -> Member | None:
        """The member that takes requests and has the fewest; of several the first one."""
        while self._by_load:
            load, place = self._by_load[0]
            member = self._members[place]
            if member.takes_requests and member.in_flight == load:
                return member
            heapq.heappop(self._by_load)
        return None

    def _changed(self, member: Member) -> None:
        place = self._place[member]
        before, served = self._served[place], member.version if member.serving else None
        if before != served:
            self._served[place] = served
            if before is not None:
                self._versions[before] -= 1
                if not self._versions[before]:
                    del self._versions[before]
            if served is not None:
                self._versions[served] += 1
        if member.takes_requests:
            heapq.heappush(self._by_load, (member.in_flight, place))
        if len(self._by_load) > 4 * len(self._members) + 64:
            # Entries that no longer hold may stay below for ever.
            self._by_load = [
                (m.in_flight, i) for i, m in enumerate(self._members) if m.takes_requests
            ]
            heapq.heapify(self._by_load)

"""What it takes to have a unit full, or sharded: moves of its data, as actions."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.schedule.prefetch import Prefetch
from fullshard.schedule.records import UnitRecord
from fullshard.schedule.residency import Action, Reshard, Residency, Unshard, Wait


class Moves:
    """Moves units along the table of `residency.MOVES`, and says what is to be done for it."""

    def __init__(self, records: dict[int, UnitRecord], prefetch: Prefetch) -> None:
        self._records, self._prefetch = records, prefetch

    def gather(self, record: UnitRecord) -> list[Action]:
        """Start the gather of a sharded unit."""
        record.move(Residency.GATHERING)
        self._prefetch.stats.gathers += 1
        return [Unshard(record.number)]

    def finish_unshard(self, unit: int) -> list[Action]:
        """Finish the gather of a unit that is being gathered."""
        record = self._records[unit]
        if record.residency is not Residency.GATHERING:
            return []
        self._prefetch.note_used(unit)
        record.move(Residency.FULL)
        return [Wait(unit)]

    def free(self, record: UnitRecord, *, even_resident: bool = False) -> list[Action]:
        """Free a full unit, unless it is resident, or a graph of a backward needs it."""
        record.unsharded_by_user = False
        needed = record.resident_blocks > 0 or record.create_graph_run != -1
        if record.residency is not Residency.FULL or (needed and not even_resident):
            return []
        record.move(Residency.SHARDED)
        return [Reshard(record.number)]

    def ensure_unsharded(
        self,
        record: UnitRecord,
        expected: Sequence[int],
        explicit: Sequence[int] | None,
        *,
        stale: bool,
        in_backward: bool,
        itself: bool = True,
    ) -> list[Action]:
        """The unit is computed next; start what is `expected` behind it, or `explicit` by the caller: it arrives meanwhile.

        stale: the shards changed since the unit was gathered. itself: False if only the units behind it are needed.
        """
        unit = record.number
        actions: list[Action] = []
        if stale:
            actions += self.finish_unshard(unit)
            if record.residency is Residency.FULL:
                by_user = record.unsharded_by_user
                actions += self.free(record, even_resident=True)
                record.unsharded_by_user = by_user
        if itself and record.residency is Residency.SHARDED:
            self._prefetch.count_missed(in_backward=in_backward)
            actions += self.gather(record)
        actions += self.finish_unshard(unit)
        for other in self._prefetch.choose(record, expected, explicit, in_backward=in_backward):
            actions += self.gather(self._records[other])
        return actions

    # --- what callers ask for ---

    def unshard(self, unit: int, *, stale: bool = False) -> list[Action]:
        """The caller asks for the full parameters; started, not waited for."""
        record = self._records[unit]
        actions = self.finish_unshard(unit) + self.free(record, even_resident=True) if stale else []
        if record.residency is Residency.SHARDED:
            actions += self.gather(record)
        self._prefetch.note_used(unit)
        record.unsharded_by_user = True
        return actions

    def reshard(self, unit: int) -> list[Action]:
        """The caller gives the full parameters back."""
        record = self._records[unit]
        record.unsharded_by_user = False
        return self.finish_unshard(unit) + self.free(record, even_resident=True)


__all__ = ["Moves"]

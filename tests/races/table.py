"""Prints what each planted fault, and each order that is left out, is found by: `python tests/races/table.py`, a few minutes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from detector import Detector
from network import world
from planted import BEHIND_EXCEPTIONS, FAULTS, planted
from programs import NAMED, run
from test_planted import COVERED, orders

import fullshard


def finding(detector: Detector) -> str:
    """The first race, in one line."""
    race = next(iter(detector.races.values()), None)
    if race is None:
        return ""
    one, two = race.first, race.second
    return f"{one.op} on {one.timeline.name}, {two.op} on {two.timeline.name}: {race.label}"


def found_by(drops: object = None, raising: bool = False) -> str:
    for name, program in NAMED.items():
        for at in range(1, run(program, Detector()).queued + 1) if raising else range(3):
            detector = Detector(at, drops=drops, raise_at=at if raising else None)
            try:
                run(program, detector, tolerant=raising)
            except (AssertionError, fullshard.StateError) as error:
                return f"{name}: {error}" if not detector.races else f"{name}: {finding(detector)}"
            if detector.races:
                return f"{name}: {finding(detector)}"
    return "not found"


def main() -> None:
    with world():
        print("| planted | found by |\n|---|---|")
        for name, patches in FAULTS.items():
            with planted(patches):
                print(f"| {name} | {found_by()} |", flush=True)
        for name, patches in BEHIND_EXCEPTIONS.items():
            with planted(patches):
                print(f"| {name} | {found_by(raising=True)} |", flush=True)
        for key in orders():
            said = found_by(lambda site, kind, key=key: (site, kind) == key)
            print(f"| left out: {' '.join(key)} | {COVERED.get(key, said) if said == 'not found' else said} |", flush=True)


if __name__ == "__main__":
    main()

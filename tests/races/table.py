"""Prints what each planted fault, and each order that is left out, is found by: the detector, and the asynchronous device.

python tests/races/table.py        # half an hour, most of it for what the device does not show
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "device")]

import pytest  # noqa: E402
import simulated  # noqa: E402
import test_programs  # noqa: E402
from detector import Detector  # noqa: E402
from harness import pool  # noqa: E402
from network import world  # noqa: E402
from planted import BEHIND_EXCEPTIONS, FAULTS, planted  # noqa: E402
from programs import NAMED, run  # noqa: E402
from test_planted import COVERED, orders  # noqa: E402

import fullshard  # noqa: E402


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


def shown_by_device(names: list[str], order: tuple[str, str] | None = None, fault: str = "") -> str:
    """By the first of these programs, in ranks that are new."""
    if simulated.compiler() is None:
        return "not run"
    ranks, folder = pool(2, "sim"), tempfile.TemporaryDirectory()
    answer = f"{folder.name}/answer"
    try:
        ranks.run("test_programs", "row", {"names": names, "order": order, "fault": fault, "answer": answer}, 400.0)
        return Path(answer).read_text() or "not found"
    except pytest.fail.Exception as failed:
        raised = re.findall(r"^(\S+(?:Error|Exception)): (.*)$", str(failed), re.MULTILINE)
        return "raises {}: {:.120}".format(*raised[0]) if raised else "ranks do not come back"
    finally:
        folder.cleanup()
        if ranks.alive:
            ranks.close(stacks=False)


AS_ON_DEVICE = {
    "wait_stream": test_programs.EVENT,
    "wait_event": test_programs.EVENT,
    "work.wait": test_programs.MESSAGE,
    "synchronize": test_programs.HOST,
}


def main() -> None:
    with world():
        print("| planted | the detector | the device |\n|---|---|---|")
        for name, patches in (FAULTS | BEHIND_EXCEPTIONS).items():
            with planted(patches):
                found = found_by(raising=name in BEHIND_EXCEPTIONS)
            device = "nothing raises there" if name in BEHIND_EXCEPTIONS else shown_by_device(list(NAMED), fault=name)
            print(f"| {name} | {found} | {device} |", flush=True)
        for (site, kind), names in orders().items():
            found = found_by(lambda *one, key=(site, kind): one == key)
            found = COVERED.get((site, kind), found) if found == "not found" else found
            device = shown_by_device(names, (site, AS_ON_DEVICE[kind]))
            print(f"| left out: {site} {kind} | {found} | {device} |", flush=True)


if __name__ == "__main__":
    main()

"""What a step decides by values: by shapes and constants, by buffers, by the batch, both ways, or by what the user says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.foresight.values import MOST_TRACES

DIM = 16


class Asks(nn.Module):
    """Calls `forward_of(module, x, mask)`."""

    def __init__(self, forward_of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("turns", torch.arange(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.forward_of = forward_of

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.forward_of(self, x, mask).sum()


def flops(forward_of: Callable[[Any, Tensor, Tensor], Tensor], mask: Tensor | None = None, **options: Any) -> int:
    return explained(forward_of, mask, **options).flops


def explained(
    forward_of: Callable[[Any, Tensor, Tensor], Tensor], mask: Tensor | None = None, **options: Any
) -> fullshard.Explanation:
    batch = (torch.empty(4, DIM, device="meta"), torch.empty(4, dtype=torch.bool, device="meta") if mask is None else mask)
    return fullshard.explain(partial(Asks, forward_of), batch, world=2, **options)


def of_values(r: fullshard.Explanation) -> list[str]:
    """The notes, without that of layers that a branch leaves out."""
    return [note for note in r.notes if not note.startswith("no gradient reaches")]


def once(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.layer(x)


def twice(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.other(m.layer(x))


ONCE, TWICE = flops(once), flops(twice)


def of_positions(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0], device=x.device)[None]
    return twice(m, x, mask) if bool((positions.diff() == 1).all()) else once(m, x, mask)


def of_a_written_tensor(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    counts = torch.zeros(3, dtype=torch.long, device=x.device)
    counts.fill_(5).add_(1)
    six = counts[1]
    counts.mul_(mask.sum())  # nobody knows what it holds, and what its view does
    return twice(m, x, mask) if int(torch.full((2,), 3).sum()) == 6 and _unknown(six) else once(m, x, mask)


def of_an_alias(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    known = [torch.full((2,), 3, device=x.device) for _ in range(4)]
    known[0].data.mul_(mask.sum())
    known[1].view(2, 1)[0].copy_(mask[:1])
    torch._foreach_mul_([known[2]], [mask.sum()])
    return twice(m, x, mask) if [_unknown(one.sum()) for one in known] == [True, True, True, False] else once(m, x, mask)


def of_numbers(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    made = torch.tensor([1.0, 2.0], device=x.device), torch.as_tensor(data=[3, 4], device=x.device)
    return twice(m, x, mask) if float(made[0].sum()) == 3.0 and int(made[1].sum()) == 7 else once(m, x, mask)


def _unknown(tensor: Tensor) -> bool:
    try:
        int(tensor)
    except ValueError:
        return True
    return False


def of_a_buffer(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return twice(m, x, mask) if m.turns.tolist() == [0, 1, 2, 3] and m.turns.numpy()[2] == 2 else once(m, x, mask)


def of_rows_that_are_counted(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return m.layer(x[m.turns > 1]) + m.layer(x[torch.nonzero(m.turns < 2)[:, 0]])


def of_equal(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return once(m, x, mask) if torch.equal(m.turns, m.turns + 1) or torch.equal(m.turns, x) else twice(m, x, mask)


@pytest.mark.parametrize("forward_of", [of_positions, of_a_written_tensor, of_an_alias, of_numbers, of_a_buffer, of_equal])
def test_what_shapes_constants_and_buffers_decide_is_computed(forward_of: Callable[..., Tensor]) -> None:
    assert flops(forward_of) == TWICE


def test_rows_that_a_known_mask_chooses_are_counted() -> None:
    assert flops(of_rows_that_are_counted) == ONCE


def test_a_model_that_is_built_with_values_elsewhere_keeps_them() -> None:
    def build() -> nn.Module:
        with torch.device("cpu"):
            return Asks(of_a_buffer)

    batch = torch.empty(4, DIM, device="meta"), torch.empty(4, device="meta")
    assert fullshard.explain(build, batch, world=2).flops == TWICE


def test_a_buffer_that_each_step_writes_to_is_not_taken_for_what_it_was_built_with() -> None:
    def counts(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        first = bool(m.calls == 0)
        m.calls.add_(1)
        return twice(m, x, mask) if first else once(m, x, mask)

    with pytest.raises(ValueError, match=r"test_values.py:\d+ \(`first = bool\(m.calls == 0\)`\) depends on data"):
        flops(counts)


def test_where_both_answers_are_one_program_or_the_program_refuses_one_nothing_is_asked() -> None:
    seen = []

    def warns(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all():
            seen.append(1)  # a warning
        return once(m, x, mask)

    def refuses(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        if mask.any():
            raise ValueError("no masks")
        return once(m, x, mask)

    assert flops(warns) == ONCE and seen == [1], "it was traced once with each answer"
    assert flops(refuses) == ONCE
    assert not of_values(explained(warns))


def depends(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return once(m, x, mask) if mask.all() else twice(m, x, mask)


def test_two_programs_are_refused_by_line_and_choice_and_told_by_place_or_batch() -> None:
    with pytest.raises(ValueError) as refused:
        flops(depends)
    text = str(refused.value)
    place = text.split()[0]
    assert place.startswith("test_values.py:") and "if mask.all() else" in text and "\n" not in text
    assert f"explain(footprints={{'{place}': True}}) or False" in text and f"--footprint {place}=True" in text
    assert f"it takes {TWICE:.3g} flop in place of {ONCE:.3g}" in text
    assert flops(depends, footprints={place: True}) == ONCE
    assert flops(depends, footprints={f"unit/{place}": lambda tensor: False}) == TWICE
    for value, expected in ((True, ONCE), (False, TWICE)):
        r = explained(depends, torch.full((4,), value))
        assert r.flops == expected
        (note,) = of_values(r)
        assert f"{place} (" in note and f"is {value} by the values of this batch" in note
        assert f"note: {note}" in str(r)


def test_all_combinations_are_tried_and_a_place_that_only_one_of_them_reaches_is_found() -> None:
    def hidden(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.all() and not mask.any():
            return twice(m, x, mask)
        return once(m, x, mask)

    with pytest.raises(ValueError, match="depends on data, and the step depends on it"):
        flops(hidden)


def test_too_many_combinations_and_loops_that_end_by_data_are_refused() -> None:
    def many(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        text = " + ".join(f"\nbool(mask[{i}])" for i in range(6))
        exec(compile(f"({text})", "many.py", "eval"), {"mask": torch.stack([mask[0]] * 6)})
        return once(m, x, mask)

    def loops(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        while mask.any():
            x = x + 1
        return once(m, x, mask)

    with pytest.raises(ValueError, match=f"more than {MOST_TRACES} combinations"):
        flops(many)
    with pytest.raises(ValueError, match=r"read True 1000 times, and reads again: the end of its loop depends on data"):
        flops(loops)


@pytest.mark.parametrize(
    "asks, told",
    [
        (lambda m, x, mask: m.layer(x) * x.sum().item(), "reads a number that depends on data"),
        (lambda m, x, mask: m.layer(x) * len(x[:, 0].tolist()), "copies values to the host that depend on data"),
        (lambda m, x, mask: m.layer(x) * len(x[:, 0].float().numpy()), "copies values to the host that depend on data"),
    ],
)
def test_numbers_that_only_data_tell_are_refused_by_line_and_told_by_place(asks: Callable[..., Tensor], told: str) -> None:
    with pytest.raises(ValueError, match=rf"test_values.py:\d+ \(.*\) {told}") as refused:
        flops(asks)
    place = str(refused.value).split()[0]
    assert flops(asks, footprints={place: 3.0 if "number" in told else [1.0, 2.0, 3.0, 4.0]}) == ONCE
    batch = (torch.ones(4, DIM), torch.ones(4))
    r = fullshard.explain(partial(Asks, asks), batch, world=2)
    assert r.flops == ONCE and "by the values of this batch" in of_values(r)[0]


def test_a_footprint_that_nobody_asks_for_is_said_and_one_of_nothing_is_refused() -> None:
    r = explained(once, footprints={"aten::nonzero": fullshard.routed(0.5), "model.py:12": True})
    assert [note.split("'")[1] for note in of_values(r)] == ["aten::nonzero", "model.py:12"]
    for name in ("aten::nonzeros", "nonzero", "model.py"):
        with pytest.raises(ValueError, match=f"footprints expected the name of an operator, .*, got '{name}'"):
            flops(once, footprints={name: 3})

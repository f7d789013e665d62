"""Who owns what: the walk over modules, without a process group."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.core.module_tree import collect, roots_of


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.own = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(3))


def test_children_come_before_parents_in_registration_order() -> None:
    tree = Tree()
    found = collect([tree])
    assert found.modules == [tree.a, tree.b[0], tree.b[1], tree.b, tree]
    assert [c.name for c in found.refs] == ["a.weight", "a.bias", "b.0.weight", "b.0.bias", "b.1.weight", "b.1.bias", "own"]
    assert [name for name, _, _ in found.buffers] == ["b.0.running_mean", "b.0.running_var", "b.0.num_batches_tracked", "table"]


def test_units_inside_are_not_entered() -> None:
    tree = Tree()
    found = collect([tree], is_unit=lambda m: m is tree.b)
    assert [c.name for c in found.refs] == ["a.weight", "a.bias", "own"]
    assert tree.b not in found.modules


def test_a_root_is_entered_though_it_is_a_unit() -> None:
    tree = Tree()
    assert len(collect([tree], is_unit=lambda m: True).refs) == 1


def test_modules_under_replicate_are_not_entered() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tree = Tree()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        from torch.distributed._composable import replicate

        replicate(tree.b)
        found = collect([tree])
    finally:
        dist.destroy_process_group()
    assert [c.name for c in found.refs] == ["a.weight", "a.bias", "own"]


def test_shared_modules_parameters_and_buffers_come_once_with_every_slot() -> None:
    tree = Tree()
    tree.again = tree.a
    tree.tied = nn.Linear(2, 2, bias=False)
    tree.tied.weight = tree.a.weight
    tree.register_buffer("same", tree.table)
    found = collect([tree])
    assert found.modules.count(tree.a) == 1
    (ref,) = [c for c in found.refs if c.parameter is tree.a.weight]
    assert [(slot.module, slot.name) for slot in ref.slots] == [(tree.a, "weight"), (tree.tied, "weight")]
    assert sum(buffer is tree.table for _, _, buffer in found.buffers) == 1


def test_one_module_may_hold_a_parameter_under_two_names() -> None:
    layer = nn.Linear(2, 2)
    layer.also = layer.weight
    (ref, _) = collect([layer]).refs
    assert [slot.name for slot in ref.slots] == ["weight", "also"]


def test_ignored_parameters_and_modules_that_hold_nothing_else_are_left_out() -> None:
    tree = Tree()
    found = collect([tree], ignored=[*tree.a.parameters(), tree.own])
    assert tree.a not in found.modules and tree in found.modules
    assert [c.name for c in found.refs] == ["b.0.weight", "b.0.bias", "b.1.weight", "b.1.bias"]


def test_roots_inside_other_roots_are_dropped() -> None:
    tree = Tree()
    assert roots_of([tree.a, tree, tree.b, tree]) == [tree]
    assert roots_of([tree.b, tree.a]) == [tree.b, tree.a]

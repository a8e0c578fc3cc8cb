"""Broken cuts that write, draw or alias in another way, for each invariant of `ddpopt.proof.memory`."""

from collections.abc import Mapping
from functools import partial

from tests.unit.stitching import Ref, Row, Story, refs
from tests.unit.stories import (
    AS_STRIDED,
    VIEW_AS,
    WRITES,
    Mutant,
    read_and_written,
    reshaped_view,
    view_without_grad,
    written_buffer,
)


def swap_draws(told: Story) -> None:
    """The second draw is taken in segment 0, of a value that is there."""
    first, second = told.take(0, "drop0"), told.take(1, "drop1")
    told.pieces[0].rows.insert(2, second)
    told.edit(0, "drop1", args=(Ref("lin0"), *second.args[1:]))
    told.pieces[1].rows.insert(2, first)
    told.edit(1, "drop0", args=(Ref("lin1"), *first.args[1:]))
    told.edit(1, "lin1", args=refs("drop1 w1"))
    told.edit(1, "parts", args=(Ref("drop0"), 2))
    told.pieces[0].outputs = {"drop1": Ref("drop1"), "total": Ref("total")}
    told.pieces[1].inputs.pop("drop0")
    told.pieces[1].inputs["drop1"] = Ref("drop1")


def give_copy(told: Story, piece: int, name: str, method: str) -> None:
    """A segment gets a copy of a value."""
    told.pieces[piece].inputs[name] = Ref(f"copy_of_{name}")
    told.pieces[piece].before.append(Row(f"copy_of_{name}", method, refs(name), meta={}))


def write_back(told: Story, piece: int, value: str, copy: str) -> None:
    """What a copy holds goes back to a value."""
    told.pieces[piece].after.append(Row("back", "copy_", refs(f"{value} {copy}")))


def write_to_clone(told: Story) -> None:
    give_copy(told, 2, "buf", "clone")


def clone_too_early(told: Story) -> None:
    """The clone misses what segment 0 writes."""
    told.pieces[0].before.append(told.pieces[1].before.pop(0))


def write_back_to_another(told: Story) -> None:
    write_to_clone(told)
    write_back(told, 2, "x", "copy_of_buf")


def write_back_too_late(told: Story) -> None:
    give_copy(told, 0, "buf", "clone")
    write_back(told, 1, "buf", "copy_of_buf")


def pass_value_and_copy(told: Story) -> None:
    write_to_clone(told)
    write_back(told, 2, "buf", "copy_of_buf")
    told.pieces[2].inputs["beside"] = Ref("buf")
    told.meta["beside"] = told.meta["buf"]


def hand_on_view_of_clone(told: Story) -> None:
    give_copy(told, 0, "buf", "clone")
    write_back(told, 0, "buf", "copy_of_buf")
    told.pieces[0].outputs["view"] = Ref("view")


def hand_on_detached(told: Story) -> None:
    told.pieces[1].outputs["w0"] = Ref("w0")


def take_view_again(told: Story) -> None:
    told.pieces[0].outputs = {"lin0": Ref("lin0")}
    told.pieces[1].inputs = {"lin0": Ref("lin0"), "w": Ref("w")}
    told.pieces[1].rows.insert(0, Row("view", "view", (Ref("lin0"), 4, 4)))
    told.edit(1, "lin1", args=refs("view w"))


def reshape_behind_the_cut(told: Story) -> None:
    """The view is handed on as it is before the second segment transposes it."""
    told.pieces[1].rows.insert(0, told.take(0, "turned"))
    told.pieces[1].inputs = {"view": Ref("view"), "w": Ref("w")}
    told.pieces[0].outputs = {"view": Ref("view")}
    told.edit(1, "turned", args=refs("view"))


def hand_on_view_of_what_is_written(told: Story) -> None:
    """The view comes in next to its base, as it was before the write."""
    told.take(1, "view")
    told.pieces[0].outputs["view"] = told.pieces[1].inputs["view"] = Ref("view")


def hand_on_view(told: Story) -> None:
    """What was taken without gradient crosses the cut."""
    told.pieces[1].inputs["view"] = Ref("view")
    del told.pieces[1].rows[:3]


def hand_out_view(told: Story) -> None:
    told.result = (told.result[0], Ref("view"))


def hand_out_copy(told: Story) -> None:
    told.pieces[1].outputs["lin1"] = Ref("lin1")
    told.output = (told.output[0], Ref("lin1"))
    told.pieces[1].after[0] = Row("loose", "detach", refs("lin1"), meta={})


MUTANTS: Mapping[str, tuple[Mutant, ...]] = {
    "order": (
        Mutant("draws swapped", "runs after drop1", swap_draws),
    ),
    "aliases": tuple(
        Mutant(f"view handed on past a write by {notation}",
               "segment 1, input view: is one tensor with input buf, and write writes to it",
               hand_on_view_of_what_is_written, partial(written_buffer, notation))
        for notation in WRITES
    ),
    "descriptions": (
        Mutant("view handed on and then transposed in place",
               "segment 1, input view: is described as it is after turned", reshape_behind_the_cut,
               reshaped_view),
    ),
    "copies": (
        Mutant("clone written to", "segment 2, input buf: is a copy that is written to and not written back",
               write_to_clone),
        Mutant("clone written back for nothing",
               "segment 1, input buf: is a copy that is written back without",
               lambda told: write_back(told, 1, "buf", "kept")),
        Mutant("clone made too early",
               "segment 1, input buf: is a copy that was already made before segment 0", clone_too_early),
        Mutant("clone written back too late",
               "segment 1: buf.clone() is written back, but was no input of it",
               write_back_too_late),
        Mutant("clone and value side by side",
               "segment 2, input buf: is a copy that is written to, and another",
               pass_value_and_copy),
        Mutant("view of a clone handed on",
               "segment 0, input buf: is a copy of a storage that the segment returns",
               hand_on_view_of_clone),
        Mutant("gradient cut off", "segment 2, input w2: is detached, but lin2 sends gradient to it",
               lambda told: give_copy(told, 2, "w2", "detach")),
        Mutant("clone without the gaps of the value",
               "segment 0, input buf: is a copy that does not lie in memory as the value does",
               lambda told: give_copy(told, 0, "buf", "clone"), read_and_written),
        Mutant("clone that is looked into", "segment 0, input like: is a copy whose memory view looks at",
               lambda told: give_copy(told, 0, "like", "clone"), partial(read_and_written, AS_STRIDED)),
        Mutant("detached value handed on",
               "segment 1, input w0: is detached, but its return sends gradient to it",
               hand_on_detached),
    ),
    "severed views": (
        Mutant("view without gradient handed on",
               "segment 1, input view: is a view that was taken without gradient",
               hand_on_view, view_without_grad),
        Mutant("view without gradient handed out",
               "output: view is a view that was taken without gradient",
               hand_out_view, view_without_grad),
        Mutant("copy of a value with gradient handed out", "output: lin1.detach() is a copy",
               hand_out_copy, view_without_grad),
    ),
    "nodes": (
        Mutant("view taken again as it was before it was transposed",
               "node view is in segment 0 and again in segment 1", take_view_again, reshaped_view),
        Mutant("view taken again by a tensor that is written to",
               "node view is in segment 0 and again in segment 1",
               lambda told: told.pieces[1].rows.insert(0, VIEW_AS), partial(read_and_written, VIEW_AS)),
    ),
    "nothing added": (
        Mutant("clone written back to another", "the stitched module, node back", write_back_to_another),
    ),
}  # fmt: skip
"""The mutants that each invariant must reject, by its name."""

"""An observation as text: the buckets of the last backward, when each left, and what else was sent.

Invariant: the same events give the same text.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ddpopt.observation.events import Collective, Iteration
from ddpopt.terminal.tables import Column, mib, names, numbers, paragraph, table


def text_of(
    iterations: Sequence[Iteration],
    collectives: Sequence[Collective],
    elsewhere: Sequence[Collective],
    graphs: Sequence[str],
) -> str:
    """Lay out an observation.

    Args:
        iterations: the backwards that were synchronized.
        collectives: all collectives on the module's process group.
        elsewhere: those on others.
        graphs: the compile ids of Dynamo's graphs.

    Returns:
        Paragraphs and tables, the last without a newline.
    """
    return "\n\n".join([_buckets(iterations, graphs), *_others(collectives, elsewhere)])


def _buckets(iterations: Sequence[Iteration], graphs: Sequence[str]) -> str:
    """How many backwards and graphs there were, and the buckets of the last backward."""
    compiled = f"; Dynamo compiled {_counted(len(graphs), 'graph')}" if graphs else ""
    if not iterations:
        return paragraph(f"No backward was synchronized{compiled}.")
    were = "was" if len(iterations) == 1 else "were"
    times = _counted(len(iterations), "backward")
    head = paragraph(f"{times} {were} synchronized{compiled}; the buckets of the last:")
    last = iterations[-1]
    place = {event.bucket: number for number, event in enumerate(last.collectives, 1)}
    rows = [
        (each.index, place.get(each.index, "-"), mib(each.nbytes), each.dtype, names(each.params))
        for each in last.buckets
    ]
    columns = [*numbers("bucket", "sent as", "MiB"), Column("dtype"), Column("gradients")]
    return f"{head}\n{table(columns, rows)}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _others(collectives: Iterable[Collective], elsewhere: Iterable[Collective]) -> Iterator[str]:
    """What carried no bucket."""
    sent = [each for each in collectives if each.bucket is None]
    own = Counter((each.op, each.how, each.nbytes, each.dtype, "") for each in sent)
    other = Counter((each.op, each.how, each.nbytes, each.dtype, "another") for each in elsewhere)
    if not own and not other:
        return
    rows = [
        (f"{op} ({how})" if how else op, count, nbytes, dtype or "-", group)
        for (op, how, nbytes, dtype, group), count in (own + other).items()
    ]
    columns = [Column("collective"), *numbers("times", "bytes"), Column("dtype"), Column("group")]
    yield "other collectives, in the order in which they were first sent\n" + table(columns, rows)

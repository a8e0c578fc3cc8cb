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
    compiled = f"; Dynamo compiled {len(graphs)} graph{'s' * (len(graphs) != 1)}" if graphs else ""
    if not iterations:
        head = paragraph(f"No backward was synchronized{compiled}.")
    else:
        times = len(iterations)
        many = "1 backward was" if times == 1 else f"{times} backwards were"
        head = paragraph(f"{many} synchronized{compiled}; the buckets of the last:")
    return "\n\n".join([*_buckets(head, iterations), *_others(collectives, elsewhere)])


def _buckets(head: str, iterations: Sequence[Iteration]) -> Iterator[str]:
    if not iterations:
        yield head
        return
    last = iterations[-1]
    place = {event.bucket: number for number, event in enumerate(last.collectives, 1)}
    rows = [
        (each.index, place.get(each.index, "-"), mib(each.nbytes), each.dtype, names(each.params))
        for each in last.buckets
    ]
    columns = [*numbers("bucket", "sent as", "MiB"), Column("dtype"), Column("gradients")]
    yield f"{head}\n{table(columns, rows)}"


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

"""The order in which torch's bucket rule appends the buckets that are still open at its end.

One bucket for each (dtype, device) can be open then. torch walks a ``std::unordered_map`` of them, so their
order is that of a hash table: with two keys always the reverse of their first appearance; with three and more
some dtypes collide. The reducer waits for buckets in list order, so this order is part of the rule.

Invariant: the order is a function of the keys alone. It is libstdc++'s on every platform, which torch's Linux
wheels use; elsewhere torch itself may order three and more keys in another way.

Source: ``c10::get_hash`` (``c10/util/hash.h``), ``BucketKey`` (``torch/csrc/distributed/c10d/reducer.cpp``),
and the container's behaviour: a key goes in front of those in its slot, a new slot in front of everything.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

_MASK = 2**64 - 1

# The sizes through which the table grows when it is full.
_TABLE_SIZES = (13, 29, 59, 127, 257)

# c10::ScalarType, for the dtypes that a trainable parameter may have. They are part of torch's file formats.
SCALAR_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "float16": 5,
        "float32": 6,
        "float64": 7,
        "complex32": 8,
        "complex64": 9,
        "complex128": 10,
        "bfloat16": 15,
        "float8_e5m2": 23,
        "float8_e4m3fn": 24,
        "float8_e5m2fnuz": 25,
        "float8_e4m3fnuz": 26,
    }
)

# c10::DeviceType.
DEVICE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "cpu": 0,
        "cuda": 1,
        "xla": 9,
        "xpu": 12,
        "mps": 13,
        "meta": 14,
        "hpu": 15,
        "mtia": 19,
        "privateuseone": 20,
    }
)
_UNKNOWN = 127


def hash_table_order(keys: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Order (dtype, device) keys as torch walks its table of open buckets.

    Args:
        keys: distinct keys such as ``("float32", "cuda:0")``, in the order of their first appearance. A dtype
            or device that this module does not know gets a fixed place, which may not be torch's.

    Returns:
        The same keys in the order of torch's walk.

    Example:
        >>> hash_table_order([("float32", "cpu"), ("bfloat16", "cpu")])
        (('bfloat16', 'cpu'), ('float32', 'cpu'))
    """
    sizes = iter(_TABLE_SIZES)
    size = next(sizes)
    order: list[tuple[str, str]] = []
    for key in keys:
        if len(order) == size:
            size = next(sizes)
            order = _inserted_in_turn(order, size)
        _insert(order, key, size)
    return tuple(order)


def _inserted_in_turn(keys: Sequence[tuple[str, str]], size: int) -> list[tuple[str, str]]:
    order: list[tuple[str, str]] = []
    for key in keys:
        _insert(order, key, size)
    return order


def _insert(order: list[tuple[str, str]], key: tuple[str, str], size: int) -> None:
    slot = _hash(key) % size
    neighbours = (place for place, other in enumerate(order) if _hash(other) % size == slot)
    order.insert(next(neighbours, 0), key)


def _hash(key: tuple[str, str]) -> int:
    dtype, device = key
    device_type, _, device_index = device.partition(":")
    # An absent index is -1, packed as one unsigned byte.
    index = int(device_index) & 0xFF if device_index else 0xFF
    seed = DEVICE_TYPES.get(device_type, _UNKNOWN) << 16 | index
    mixed = SCALAR_TYPES.get(dtype, _UNKNOWN) + 0x9E3779B9 + (seed << 6) + (seed >> 2)
    return (seed ^ mixed) & _MASK

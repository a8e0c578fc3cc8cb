"""The order of buckets that are still open when the parameters end."""

from ddpopt.planning.bucket_order import hash_table_order


def keys(*dtypes: str, device: str = "cpu") -> list[tuple[str, str]]:
    return [(dtype, device) for dtype in dtypes]


def test_without_collisions_the_last_to_appear_comes_first() -> None:
    appeared = keys("float32", "bfloat16", "float16")
    assert hash_table_order(appeared) == tuple(reversed(appeared))


def test_a_key_goes_in_front_of_the_one_that_it_collides_with() -> None:
    order = hash_table_order(keys("complex128", "float32", "float8_e5m2"))
    assert order == tuple(keys("float32", "float8_e5m2", "complex128"))


def test_an_unknown_dtype_or_device_has_a_fixed_place() -> None:
    appeared = [("float32", "cpu"), ("posit16", "cpu"), ("float32", "abacus:3")]
    assert sorted(hash_table_order(appeared)) == sorted(appeared)
    assert hash_table_order(appeared) == hash_table_order(appeared)


def test_nothing_open_leaves_nothing_to_order() -> None:
    assert hash_table_order([]) == ()

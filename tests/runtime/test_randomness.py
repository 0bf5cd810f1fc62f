from autopar.runtime.randomness import random_key


def test_keys_are_signed_64_bit_and_reproducible() -> None:
    keys = [random_key(seed, step) for seed in range(40) for step in range(40)]
    assert len(set(keys)) == len(keys) and all(-(2**63) <= key < 2**63 for key in keys)
    assert min(keys) < 0 < max(keys)
    assert random_key(2**64 - 1, 5) == random_key(2**64 - 1, 5)


def test_neighbouring_seeds_and_steps_differ_in_half_of_the_bits() -> None:
    for other in ((8, 3), (7, 4), (3, 7), (6, 4)):
        counts = [((random_key(7 + i, 3) ^ random_key(other[0] + i, other[1])) % 2**64).bit_count() for i in range(200)]
        assert 30 < sum(counts) / len(counts) < 34
        assert min(counts) > 12

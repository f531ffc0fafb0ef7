"""Keyed random numbers: repeatable, uniform, independent (fault kinds 5, 13)."""

import numpy as np

from dspark_train.decoding.randomness import Randomness, keyed_uniforms, seed_array


def test_keyed_numbers_repeat_and_are_uniform():
    first, second = Randomness(7), Randomness(7)
    keys = [(p, purpose) for p in range(200) for purpose in ("propose", "accept", "resample")]
    numbers = [first.uniform(*key) for key in keys]
    assert numbers == [second.uniform(*key) for key in reversed(keys)][::-1]
    assert len(set(numbers)) == len(numbers)
    assert numbers != [Randomness(8).uniform(*key) for key in keys]
    many = np.sort(
        keyed_uniforms(seed_array([3] * 100_000), np.arange(100_000, dtype=np.uint64), "accept")
    )
    assert many[0] >= 0
    assert many[-1] < 1
    # Kolmogorov-Smirnov at 100000 draws: 0.0065 is exceeded with probability 4e-4
    assert np.abs(many - (np.arange(100_000) + 0.5) / 100_000).max() < 0.0065


def test_numbers_of_purposes_and_neighbours_are_uncorrelated():
    positions = np.arange(20_000, dtype=np.uint64)
    columns = [
        keyed_uniforms(seed_array([seed] * 20_000), positions + np.uint64(shift), purpose)
        for seed in (0, 1)
        for shift in (0, 1)
        for purpose in ("propose", "accept", "resample")
    ]
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 0.03


def test_rows_get_the_numbers_of_single_requests():
    seeds, positions = [0, 5, -1, 2**63 + 11], [0, 9, 100, 3]
    rows = keyed_uniforms(seed_array(seeds), np.array(positions, dtype=np.uint64), "resample")
    single = [Randomness(s).uniform(p, "resample") for s, p in zip(seeds, positions, strict=True)]
    assert rows.tolist() == single


def test_a_position_is_drafted_with_another_number_behind_every_anchor():
    numbers = [Randomness(3).proposing(p, a) for a in range(300) for p in range(a + 1, a + 8)]
    assert len(set(numbers)) == len(numbers)
    again = np.array(numbers).reshape(300, 7)
    # entry [a, k] and entry [a + 1, k - 1] are of one position
    assert abs(np.corrcoef(again[:-1, 1:].ravel(), again[1:, :-1].ravel())[0, 1]) < 0.08
    assert abs(again.mean() - 0.5) < 0.03


def test_without_a_seed_requests_differ():
    assert Randomness().uniform(0, "propose") != Randomness().uniform(0, "propose")

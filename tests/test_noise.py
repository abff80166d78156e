"""Claims about the noise of a difference (bench/noise.py): what its intervals cover, and what a difference
must be to be seen. Simulated tries are 0 and 1, by chances that seeds, runs and pages move."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import noise
from bench.noise import Gains

SD = {"seed": 0.02, "run": 0.015, "page": 0.06, "page of a seed": 0.05}
DIFFERENCE = 0.08


def rows(generator: torch.Generator, seeds: int, difference: float = DIFFERENCE, runs: int = 2,
         pages: int = 12, tries: int = 20, **other: float) -> tuple[list[dict], list[dict]]:
    """Two rows of the tables: one run of a seed, with chances near .4; and `runs`, with so much more."""
    sd = SD | other
    normal = lambda name, *shape: sd[name] * torch.randn(shape, generator=generator)
    before = 0.4 + 0.02 * torch.randn((seeds, 1, pages), generator=generator)
    after = (before + difference + normal("seed", seeds, 1, 1) + normal("page", 1, 1, pages)
             + normal("page of a seed", seeds, 1, pages) + normal("run", seeds, runs, 1))
    luck = torch.rand((seeds, 1, pages, tries), generator=generator)  # pairs the tries of a page

    def cells(chances: torch.Tensor) -> list[dict]:
        won = (luck < chances[..., None]).int().tolist()
        return [{"seed": seed, "run": run, "tries": {
                    f"page {page}": "".join(map(str, won[seed][run][page])) for page in range(pages)}}
                for seed, run in itertools.product(range(seeds), range(chances.shape[1]))]
    return cells(before), cells(after)


def width(gains: Gains) -> float:
    _, low, high = noise.drawn_again(gains, 2000)
    return high - low


def test_a_run_that_is_yet_to_be_made_is_not_drawn_twice():
    """Guards: noise of runs that is too small, as a seed's two runs are repeated beside another's three."""
    one = lambda seed, *digits: [{"seed": seed, "tries": {"a": some}} for some in digits]
    gains = noise.beside([*one(0, "00"), *one(1, "00")], [*one(0, "11", "01"), *one(1, "01", "11", "11")])
    assert gains.runs.flatten(1).tolist() == [[1.0, 0.5], [0.5, 1.0]]


def table(runs: torch.Tensor, error: float = 0.0) -> Gains:
    seeds, _, pages = runs.shape
    return Gains([*range(seeds)], [f"page {k}" for k in range(pages)], runs.double(),
                 torch.full((seeds, pages), error, dtype=torch.float64))

# ---- which tries stand beside which ------------------------------------------------------------------------

def cell(seed: int, run: int = 0, **tries: str) -> dict:
    return {"seed": seed, "run": run, "tries": {name.replace("_", "-"): tries[name] for name in tries}}


def test_rows_are_compared_try_by_try_and_the_two_table_pages_are_one():
    """Guards: a run compared with another seed, a failed page that counts as lost. On page a the second row's
    runs have .5 and 0 more of the tries that all could play; on the tables 1 and 0."""
    first = [cell(0, a="10-0", ask_table="00", read_table="00"), cell(3, a="1111")]
    second = [cell(0, 0, a="1110", ask_table="11", read_table="00"),
              cell(0, 1, a="00-0", ask_table="11", read_table="00"), cell(1, a="1111")]
    gains = noise.beside(first, second)
    assert (gains.seeds, gains.pages) == ([0], ["a", "table"])
    assert torch.allclose(gains.runs, torch.tensor([[[1 / 3, 0.5], [-1 / 3, 0.5]]], dtype=torch.float64))
    assert gains.without("table").pages == ["a"] and gains.without("table").runs.shape == (1, 2, 1)
    # Of a: the runs' means are (-.5, .5, 0), so a variance of 1/4, and 1/12 of their mean; the tables' are 0.
    assert torch.allclose(gains.errors, torch.tensor([[(1 / 12) ** 0.5, 0]], dtype=torch.float64))
    assert noise.beside(first, second[2:]) is None and noise.beside([], second) is None
    assert noise.beside([cell(0, a="--")], [cell(0, a="10")]) is None, "nobody could play"

# ---- intervals ---------------------------------------------------------------------------------------------

@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8), st.floats(-1, 1))
@settings(max_examples=30, deadline=None)
def test_an_interval_over_constant_cells_is_a_point(seeds, runs, pages, gain):
    """Guards against noise that nothing in the table shows."""
    for interval in (noise.drawn_again, noise.over_tries):
        assert interval(table(torch.full((seeds, runs, pages), gain))) == pytest.approx((gain,) * 3, abs=1e-6)


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 2, 1), (1, 1, 8), (4, 1, 8)])
@given(st.integers(0, 10**6), st.floats(2, 10))
@settings(max_examples=10, deadline=None)
def test_what_differs_more_from_seed_to_seed_or_page_to_page_has_a_wider_interval(shape, seed, factor):
    """Guards against a level that is not drawn: seeds, runs, pages, and pages of a seed."""
    generator = torch.Generator().manual_seed(seed)
    some = 0.01 * torch.randn((4, 2, 8), generator=generator)
    more = torch.randn(shape, generator=generator) * torch.ones(4, 2, 8)
    assert width(table(some)) < width(table(some + more)) < width(table(some + factor * more))
    assert width(table(some)) < width(table(some, error=0.05)), "tries"


def test_what_a_page_gains_on_every_seed_does_not_average_out_with_more_seeds():
    """Guards: pages drawn anew for each seed: six seeds that move the same pages alike say no more than
    one."""
    by_page = 0.1 * torch.randn((1, 1, 12), generator=torch.Generator().manual_seed(0))
    assert width(table(by_page.repeat(6, 2, 1))) == pytest.approx(width(table(by_page)), rel=0.1)


def covered(seeds: int, tables: int = 200, **sd: float) -> tuple[float, float]:
    """How often each interval holds the true difference: (with all noise, over tries alone)."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(tables):
        gains = noise.beside(*rows(generator, seeds, **sd))
        found.append([low <= DIFFERENCE <= high for _, low, high in
                      (noise.drawn_again(gains, 1000), noise.over_tries(gains))])
    return tuple(torch.tensor(found).double().mean(0).tolist())


def test_the_interval_with_all_noise_covers_a_known_difference():
    """Guards against an interval that says 95 % and means 60: which is what tries alone do."""
    all_noise, tries = covered(6)
    assert 0.92 <= all_noise <= 0.99 and tries < 0.8, (all_noise, tries)
    few, _ = covered(3)
    assert 0.9 <= few <= 0.99, few
    seeds_alone, _ = covered(3, seed=0.1)
    assert 0.75 <= seeds_alone <= 0.93, f"{seeds_alone}: noise.drawn_again says 88 %"

# ---- how large a difference must be ------------------------------------------------------------------------

def noise_in(runs: int, tables: int = 4) -> dict[str, float]:
    """{what: standard deviation} by large tables."""
    generator = torch.Generator().manual_seed(2)
    found = [noise.noise_of(noise.beside(*rows(generator, 60, runs=runs, pages=40))) for _ in range(tables)]
    return {name: (sum(one[name] for one in found) / tables) ** 0.5 for name in found[0]}


def test_the_noise_of_large_tables_is_found_again():
    """Guards: a component that holds another's noise as well. A difference of two tries with chances of some
    .4 and .48, which share their luck, is 1 in some 8 % and else 0; of 20, a standard deviation of 6
    points."""
    found = noise_in(runs=3)
    assert found.pop("tries") == pytest.approx(0.062, rel=0.1)
    assert found == pytest.approx(SD, rel=0.2)
    one = noise_in(runs=1)
    assert one["run"] == 0 and one["seed"] == pytest.approx(0.025, rel=0.2), "a seed's only run is in it"


@pytest.mark.parametrize("seeds", [3, 6])
def test_a_difference_that_large_is_seen_four_times_in_five(seeds):
    """Guards: experiments that could not have shown what they looked for. The noise is of a large table;
    fresh ones are made with the difference that it gives."""
    generator = torch.Generator().manual_seed(3)
    large = noise.noise_of(noise.beside(*rows(generator, 60, pages=40)))
    difference = noise.to_be_seen(large, seeds, 2, 12)
    lows = [noise.drawn_again(noise.beside(*rows(generator, seeds, difference)), 1000)[1] for _ in range(200)]
    assert 0.7 <= sum(low > 0 for low in lows) / len(lows) <= 0.9
    assert difference > noise.to_be_seen(large, 12, 2, 12) > 0

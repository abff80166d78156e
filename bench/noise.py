"""How sure a difference between two rows of the tables is, where what dreams or acts has several runs.

Noise comes from four sides: the seed (which demonstrations, and all that is made of them), the run (other
dice on the same SFT agent and world model), the pages that happen to be looked at, and the tries on each. An
interval over tries alone says what other tries would have changed, and nothing of the rest.

Shapes: S seeds, R runs of a seed, P pages.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# Two questions about one page of HTML (read-table.html): what helps one helps the other.
TABLE_PAGES = ("ask-table", "read-table")


class Gains(NamedTuple):
    """Second minus first on the seeds and pages that both have, as shares. The two table pages are one."""

    seeds: list[int]
    pages: list[str]
    runs: torch.Tensor
    """(S, R, P): of each run."""
    errors: torch.Tensor
    """(S, P): standard error of the runs' mean, over tries."""

    def without(self, page: str) -> "Gains":
        left = [k for k, other in enumerate(self.pages) if other != page]
        return Gains(self.seeds, [self.pages[k] for k in left], self.runs[..., left], self.errors[:, left])


def beside(first: Sequence[dict], second: Sequence[dict]) -> Gains | None:
    """Two rows try by try: run r beside run r, a row's only run beside each of the other's. A try whose page
    failed in any of them is left out. None where they have no seed or no page in common."""
    runs = [defaultdict(list), defaultdict(list)]  # of each row {seed: tries of each run}
    for cells, of_row in zip((first, second), runs):
        for cell in cells:
            of_row[cell["seed"]].append(cell["tries"])
    seeds = sorted(runs[0].keys() & runs[1].keys())
    if not seeds:
        return None
    # Of each seed as many runs as the one with the fewest has: a run that is repeated would be drawn as two.
    sizes = [min(len(of_row[seed]) for seed in seeds) for of_row in runs]
    count = min((size for size in sizes if size > 1), default=1)
    sizes = [min(size, count) for size in sizes]

    def of_task(seed: int, task: str) -> torch.Tensor:  # (R, tries)
        judged = [[*map(float, digits)]
                  for digits in zip(*(tries[task] for of_row, size in zip(runs, sizes)
                                       for tries in of_row[seed][:size]))
                  if "-" not in digits]
        a, b = torch.tensor(judged, dtype=torch.float64).reshape(-1, sum(sizes)).T.split(sizes)
        return b.repeat(count // len(b), 1) - a.repeat(count // len(a), 1)

    tasks = sorted(set.intersection(*(set(tries) for of_row in runs for seed in seeds
                                      for tries in of_row[seed])))
    tried = {task: [of_task(seed, task) for seed in seeds] for task in tasks}
    tried = {task: found for task, found in tried.items() if all(tries.numel() for tries in found)}
    pages: dict[str, list[str]] = defaultdict(list)
    for task in tried:
        pages["table" if task in TABLE_PAGES else task].append(task)
    if not pages:
        return None

    def over(page: str, what: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:  # (S, ...)
        return torch.stack([sum(what(tried[task][k]) for task in pages[page]) for k in range(len(seeds))])

    gained = [over(page, lambda tries: tries.mean(1)) / len(pages[page]) for page in pages]  # (S, R) each
    variance = lambda tries: tries.mean(0).var(correction=0) / max(1, tries.shape[1] - 1)  # of a mean
    errors = [over(page, variance).sqrt() / len(pages[page]) for page in pages]  # (S,) each
    return Gains(seeds, list(pages), torch.stack(gained, 2), torch.stack(errors, 1))


def drawn_again(gains: Gains, draws: int = 10_000) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % interval that has all noise in it: seeds are drawn, runs within each,
    pages, and tries within each page of a seed.

    All seeds have the same pages, so a draw has the same pages for all of its seeds (the pigeonhole
    bootstrap: Owen, arXiv 0712.1111). Drawn anew for each seed, what a page gains on every seed would seem to
    average out with more seeds. The sum over a draw's tries is drawn as a normal number, of the variance that
    drawing each would give.

    Few seeds say little about how seeds differ. Simulated (1,000 tables of 23 pages, standard deviations of 6
    points between pages and of 5 between pages of a seed and between tries): where seeds differ by 2 points
    it covers the truth in 95, 95 and 96 % of tables of 2, 3 and 6 seeds; by 5 points in 81, 88 and 92 %; by
    10 in 72, 79 and 88 %. A t interval over seeds is the one to believe there.
    """
    generator, (seeds, runs, pages) = torch.Generator().manual_seed(0), gains.runs.shape
    s = torch.randint(seeds, (draws, seeds, 1, 1), generator=generator)
    r = torch.randint(runs, (draws, seeds, runs, 1), generator=generator)
    p = torch.randint(pages, (draws, 1, 1, pages), generator=generator)
    tries = gains.errors[s, p].square().sum((1, 2, 3)).sqrt() / (seeds * pages)  # (draws,): their sd
    means = gains.runs[s, r, p].mean((1, 2, 3))  # (draws,)
    means += tries * torch.randn(draws, generator=generator, dtype=torch.float64)
    return float(gains.runs.mean()), float(means.quantile(0.025)), float(means.quantile(0.975))


def over_tries(gains: Gains) -> tuple[float, float, float]:
    """(mean, low, high) with a 95 % interval over tries alone: these seeds, runs and pages, other tries."""
    middle, half = float(gains.runs.mean()), 1.96 * float(gains.errors.norm()) / gains.errors.numel()
    return middle, middle - half, middle + half


def noise_of(gains: Gains) -> dict[str, float]:
    """Variances that make up a difference: {"seed", "run", "page", "page of a seed", "tries"}, the last of a
    page of a seed. At least two seeds and two pages.

    By the method of moments for a balanced table of seeds by pages with runs within seeds: each mean square
    less what the levels below put into it, at least 0 (Searle, Casella and McCulloch, Variance Components,
    1992, chapter 4). What runs do to single pages is in "page of a seed".
    """
    seeds, runs, pages = gains.runs.shape
    cells = gains.runs.mean(1)  # (S, P)
    by_seed, by_page = cells.mean(1), cells.mean(0)
    rest = cells - by_seed[:, None] - by_page + cells.mean()
    both = float(rest.square().sum()) / ((seeds - 1) * (pages - 1))
    run = 0.0
    if runs > 1:
        of_run = gains.runs.mean(2)  # (S, R)
        within = gains.runs - of_run[..., None] - cells[:, None] + by_seed[:, None, None]
        run = float(of_run.var(1).mean()
                    - within.square().sum() / (seeds * (runs - 1) * (pages - 1)) / pages)
    tries = float(gains.errors.square().mean())
    found = {"seed": float(by_seed.var()) - both / pages - max(0.0, run) / runs, "run": run,
             "page": float(by_page.var()) - both / seeds, "page of a seed": both - tries, "tries": tries}
    return {name: max(0.0, variance) for name, variance in found.items()}


def to_be_seen(noise: dict[str, float], seeds: int, runs: int, pages: int, tables: int = 400) -> float:
    """The difference of which four tables in five say that it is more than 0: the interval of drawn_again()
    leaves 0 out. So it is the minimum detectable effect at a power of 80 % (Bloom, Evaluation Review 19(5),
    1995), found by simulation: `tables` tables of normal noise with these variances, of a difference of 0,
    and how far below 0 their intervals begin."""
    generator, sd = torch.Generator().manual_seed(0), {name: math.sqrt(noise[name]) for name in noise}

    def normal(name: str, *shape: int) -> torch.Tensor:
        return sd[name] * torch.randn(shape, generator=generator, dtype=torch.float64)

    lows = []
    for _ in range(tables):
        gains = (normal("seed", seeds, 1, 1) + normal("run", seeds, runs, 1) + normal("page", 1, 1, pages)
                 + normal("page of a seed", seeds, 1, pages) + normal("tries", seeds, 1, pages))
        errors = torch.full((seeds, pages), sd["tries"], dtype=torch.float64)
        lows.append(drawn_again(Gains([], [], gains, errors), draws=300)[1])
    return float(-torch.tensor(lows).quantile(0.2))

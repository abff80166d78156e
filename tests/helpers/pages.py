"""A browser's pages in tests: starts, actions as text, ids by their words."""

from data import Start, parse_action


def start(task, seed=7, prefix=()):
    return Start(task=task, seed=seed, prefix=tuple(prefix), goal="", url="", page="", previous=())


def act(web, *texts):
    """One action a page, as text; None idles."""
    return web.step([text and parse_action(text) for text in texts])


def bid(page, words):
    """The id of the first line that contains `words`."""
    line = next(line for line in page.split("\n") if words in line and "[" in line)
    return line.split("[")[1].split("]")[0]
